"""Transformer-S, the autoregressive baseline: 282.0M parameters (paper, table 1; published BrierLM 6.05 after 250k steps).

    python -m calm_jax.main --config=configs/ar_s.py \\
        --config.tokenizer.path=tokenizer.model --config.data.train_files='pile/*.jsonl' \\
        --config.data.validation_files=wikitext.jsonl
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.variant(common.get_config(), "head=softmax")
    config.lm.model.hidden_size = 768
    config.lm.model.intermediate_size = 2048
    config.lm.model.num_layers = 12
    # As many tokens a step as CALM's recipes, in shorter sequences.
    config.lm.data.block_tokens = 2048
    config.lm.training.batch_size = 1024
    return config
