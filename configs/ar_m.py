"""Transformer-M, the autoregressive baseline: 465M parameters (paper, table 1; published BrierLM 7.07 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=ar  # once
python -m calm_jax.main --config=configs/ar_m.py
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.variant(common.get_config(), "head=softmax")
    common.published_text(config, "ar")
    # As many tokens per step as CALM's recipes, in shorter sequences.
    config.lm.data.block_tokens = 2048
    config.lm.training.batch_size = 1024
    return config
