"""CALM-L: 735.3M parameters (paper, table 1; published BrierLM 6.58 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=autoencoder,lm  # once
python -m calm_jax.main --config=configs/calm_l.py
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    common.published_text(config, "lm")
    config.lm.model.hidden_size = 1536
    config.lm.model.intermediate_size = 4096
    return common.variant(config, arguments)
