"""CALM-XL: 1.830B parameters (paper, table 1; published BrierLM 8.53 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=autoencoder,lm  # once
python -m calm_jax.main --config=configs/calm_xl.py
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    common.published_text(config, "lm")
    config.lm.model.hidden_size = 2560
    config.lm.model.intermediate_size = 6880
    return common.variant(config, arguments)
