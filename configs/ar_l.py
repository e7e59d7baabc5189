"""Transformer-L, the autoregressive baseline: 847.0M parameters (849M in the paper's table 1; published BrierLM 8.98 after 250k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=ar  # once
python -m calm_jax.main --config=configs/ar_l.py
"""

from ml_collections import ConfigDict

from configs import ar_m


def get_config() -> ConfigDict:
    config = ar_m.get_config()
    config.lm.model.hidden_size = 1536
    config.lm.model.intermediate_size = 4096
    return config
