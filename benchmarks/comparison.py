"""Arms of the comparison of K = 1, 2, 4, 8 with the baseline at equal training FLOPs (docs/comparison.md).

    python -m benchmarks.learning --arms=benchmarks/comparison.py[:FLOPS] --folder=DIR --seeds=0,1,2

FLOPS is the training budget of stage 2, the same for each arm. Stage 1 is trained before it, once for each K.
"""

import operator

from benchmarks.arms import PAPERS_LOSS, config_of, step_flops
from calm_jax.models.heads.energy import EnergyHeadConfig
from configs import quickstart

# Steps of stage 1: longer chunks need more.
_AUTOENCODER_STEPS = {4: 2250, 8: 2250, 2: 900, 1: 400}
_FOUR = quickstart.get_config("k=4")
# The keys whose values depend on K in the quickstart, with those for K = 4.
AS_FOUR = [
    f"--config.{key}={operator.attrgetter(key)(_FOUR)}"
    for key in (
        "tokenizer.vocab_size",
        "autoencoder.random_chunks",
        "lm.token_prior_weight",
        "lm.optimizer.learning_rate",
        "lm.training.batch_size",
    )
]
# The same for keys of the energy head.
ENERGY_AS_FOUR = [f"--config.lm.head.decoded_brier_weight={_FOUR.lm.head.decoded_brier_weight}"]
_COMMON = [
    *AS_FOUR,
    # An eighth of the quickstart's validation text, as scoring K = 1 and the baseline takes long.
    "--config.data.holdout_every=160",
    "--config.eval.part_blocks=12",
    "--config.autoencoder.min_accuracy=0.9",
]
# Shares of the steps of stage 2, about those of configs/quickstart.py:k=4: the warm-up, and where the decoded Brier loss begins.
_WARMUP, _DELAY = 0.04, 0.24


def _language_model(variant: str, budget: float, *more: str) -> list[str]:
    of_head = [] if "head=" in variant else ENERGY_AS_FOUR
    words = [f"--config=configs/quickstart.py:{variant}", *_COMMON, *of_head, *more]
    config = config_of(words)
    steps = max(1, round(budget / step_flops(config, "lm")))
    words.append(f"--config.lm.training.num_steps={steps}")
    words.append(f"--config.lm.training.eval_every={max(1, steps // 4)}")
    words.append(f"--config.lm.optimizer.warmup_steps={round(_WARMUP * steps)}")
    if isinstance(config.lm.head, EnergyHeadConfig) and config.lm.head.decoded_brier_weight:
        words.append(f"--config.lm.head.decoded_brier_delay={round(_DELAY * steps)}")
    return words


def get_arms(budget: str = "6e12") -> dict[str, list[str]]:
    """The flags of each arm; `budget`: FLOPs of stage 2."""
    each = float(budget)
    arms = {"baseline": _language_model("head=softmax", each)}
    for K, steps in _AUTOENCODER_STEPS.items():
        arms[f"k{K}-autoencoder"] = [
            f"--config=configs/quickstart.py:k={K}",
            *_COMMON,
            "--config.stage=autoencoder",
            f"--config.autoencoder.training.num_steps={steps}",
        ]
        shared = f"--config.autoencoder.checkpoint={{k{K}-autoencoder}}"
        arms[f"k{K}"] = _language_model(f"k={K}", each, shared)
        if K == 4:
            arms["k4-as-published"] = _language_model(f"k={K}", each, shared, *PAPERS_LOSS)
    return arms
