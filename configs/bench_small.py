"""The standard small config of the benchmarks, for a laptop's CPU; it is not trained to any result.

python -m benchmarks --config=configs/bench_small.py

The sizes are those at which the published PyTorch code is timed beside this one.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    config.compute_dtype = "float32"
    config.tokenizer.kind = "sentencepiece"
    config.tokenizer.vocab_size = 4096

    model = config.autoencoder.model
    model.latent_size = 64
    model.hidden_size = 256
    model.intermediate_size = 640
    config.autoencoder.data.block_tokens = 512
    config.autoencoder.training.batch_size = 8

    model = config.lm.model
    model.hidden_size = 256
    model.intermediate_size = 688
    model.num_layers = 6
    model.num_heads = 8
    model.num_kv_heads = 8
    config.lm.head.num_blocks = 4
    config.lm.data.block_tokens = 512
    config.lm.training.batch_size = 4
    return common.variant(config, arguments)
