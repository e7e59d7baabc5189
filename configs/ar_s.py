"""Transformer-S, the autoregressive baseline: 282.0M parameters (paper, table 1; published BrierLM 6.05 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=ar  # once
python -m calm_jax.main --config=configs/ar_s.py
"""

from ml_collections import ConfigDict

from configs import ar_m


def get_config() -> ConfigDict:
    config = ar_m.get_config()
    config.lm.model.hidden_size = 768
    config.lm.model.intermediate_size = 2048
    config.lm.model.num_layers = 12
    return config
