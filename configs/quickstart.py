"""Trains both stages on a laptop's CPU in minutes, on the source code of Python's standard library.

python -m calm_jax.main --config=configs/quickstart.py
"""

from ml_collections import ConfigDict

from calm_jax.parallel.cpu import has_amx
from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    # A CPU with AMX trains faster in bfloat16, with the same score (docs/benchmarks.md); other CPUs do not.
    config.compute_dtype = "bfloat16" if has_amx() else "float32"

    # Two tokens: a model this small writes more words with such chunks than with four (docs/single_spaces.md).
    config.chunk_size = 2
    config.tokenizer.kind = "sentencepiece"
    config.tokenizer.vocab_size = 4096

    # So that any text is reconstructed, not only Python code (docs/single_spaces.md).
    config.autoencoder.random_chunks = 0.25
    model = config.autoencoder.model
    model.latent_size = 64
    model.hidden_size = 128
    model.intermediate_size = 320
    # A fifteenth of the paper's rate, so that an autoencoder this small converges in minutes.
    model.dropout = 0.01
    # Twice the paper's: latents lie further apart, and rare tokens and other texts are reconstructed, too (docs/single_spaces.md).
    model.kl_weight = 2e-3
    config.autoencoder.data.block_tokens = 64
    config.autoencoder.data.front_fill = "random"
    optimizer = config.autoencoder.optimizer
    optimizer.learning_rate = 4e-3
    optimizer.warmup_steps = 100
    optimizer.schedule = "cosine"
    optimizer.weight_decay = 0.0
    training = config.autoencoder.training
    training.num_steps = 1000
    training.batch_size = 16
    training.log_every = 100
    training.checkpoint_every = 500

    model = config.lm.model
    model.hidden_size = 256
    model.intermediate_size = 688
    model.num_layers = 4
    model.num_heads = 4
    model.num_kv_heads = 4
    # Not the paper's choice, the energy head: with two tokens in a chunk a model this small has a higher score and writes better text
    # with the flow head, in as much time. Other chunks: docs/comparison.md.
    common.variant(config, "head=flow")
    config.lm.head.num_blocks = 2
    # A loss that is not in the paper. Its weight is so large that it alone trains the backbone, for which the gradient of the head's
    # loss is noise (docs/single_spaces.md).
    config.lm.token_loss_weight = 20.0
    config.lm.data.block_tokens = 512
    config.lm.data.append_eos = True
    config.lm.data.align_documents_to_chunks = True
    config.lm.data.front_fill = "random"
    optimizer = config.lm.optimizer
    optimizer.learning_rate = 1e-3
    optimizer.warmup_steps = 50
    optimizer.schedule = "cosine"
    training = config.lm.training
    training.num_steps = 1250
    training.batch_size = 1
    training.log_every = 50
    training.checkpoint_every = 125

    config.eval.part_blocks = 32
    config.eval.context_tokens = 256
    config.eval.block_tokens = 512
    config.sample.prompts = ("def", "import", "class", "    def __init__(self,")
    config = common.variant(config, arguments)
    if config.chunk_size > 2:
        _set_longer_chunks(config)
    head = config.lm.head
    if head.name in ("energy", "flow"):
        # Draws between two likely chunks then decode to likely tokens, not to rare ones: the model writes more words, and has a
        # higher score. With the energy head a weight of 3 would give still more words, but fewer different ones, and a lower score
        # (docs/experiments.md).
        config.lm.token_prior_weight = 2.0
        if config.chunk_size <= 2:
            # More than with the diffusion head, whose steps cost more, and than the baseline.
            config.lm.training.num_steps = 2050
    if head.name == "energy":
        # Fewer samples than in the paper (8 and 100): more steps in the same time improve a model this small more. With longer chunks
        # the target is the posterior's mean: in so many latent dimensions the posterior's noise hides what differs between chunks
        # (docs/training.md).
        head.num_samples = 4
        head.num_target_samples = 16 if config.chunk_size <= 2 else 0
    if head.name == "flow":
        # A step then takes as long as the energy head's, and a draw four passes through the head's network and not 20; the paper's 8
        # and 10 are no better in a model this small (docs/experiments.md).
        head.num_samples, head.num_steps = 4, 2
    if config.chunk_size > 2 or head.name == "diffusion":
        # Lower temperatures take many draws. With K = 4 most chunks would still not be drawn exactly (docs/benchmarks.md), and with
        # the diffusion head each draw takes 100 passes through the head's network.
        config.sample.temperature = 1.0
    # In the middle and at the end.
    for training in (config.autoencoder.training, config.lm.training):
        training.eval_every = training.num_steps // 2
    return config


def _set_longer_chunks(config: ConfigDict) -> None:
    """K > 2: an autoencoder that is twice as wide and trained for longer, with K > 4 for twice as long again; stage 2 has two blocks a
    step, a lower rate and a longer warm-up."""
    stage = config.autoencoder
    stage.model.hidden_size, stage.model.intermediate_size = 256, 640
    stage.optimizer.learning_rate = 3e-3
    stage.training.num_steps = 1250 if config.chunk_size <= 4 else 2500
    stage = config.lm
    stage.training.num_steps = 1850
    stage.optimizer.learning_rate = 6e-4
    stage.optimizer.warmup_steps = 300
    stage.training.batch_size = 2
