"""CALM-M: 371.7M parameters (paper, table 1; published BrierLM 5.72 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=autoencoder,lm  # once
python -m calm_jax.main --config=configs/calm_m.py
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    common.published_text(config, "lm")
    return common.variant(config, arguments)
