"""CALM-M: 371.7M parameters (paper, table 1; published BrierLM 5.72 after 250k steps).

    python -m calm_jax.main --config=configs/calm_m.py \\
        --config.tokenizer.path=tokenizer.model --config.data.train_files='pile/*.jsonl' \\
        --config.data.validation_files=wikitext.jsonl
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    return common.variant(common.get_config(), arguments)
