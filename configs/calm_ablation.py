"""The model of the paper's ablations: 12 layers of width 768 (published BrierLM 4.70 after 50k steps).

launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl --parts=autoencoder,lm  # once
python -m calm_jax.main --config=configs/calm_ablation.py
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arguments: str = "") -> ConfigDict:
    config = common.get_config()
    common.published_text(config, "lm")
    config.lm.model.hidden_size = 768
    config.lm.model.intermediate_size = 2048
    config.lm.model.num_layers = 12
    config.lm.head.num_blocks = 3
    config.lm.training.num_steps = 50_000
    return common.variant(config, arguments)
