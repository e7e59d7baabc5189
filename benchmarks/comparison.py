"""Arms of the comparison of K = 1, 2, 4, 8 with the baseline at equal training FLOPs (docs/comparison.md).

    python -m benchmarks.learning --arms=benchmarks/comparison.py[:FLOPS] --folder=DIR --seeds=0,1,2

FLOPS is the training budget of stage 2, the same for each arm. Stage 1 is trained before it, once for each K.
"""

from benchmarks.arms import TO_DRAWS, config_of, step_flops

# Steps of stage 1: longer chunks need more.
_AUTOENCODER_STEPS = {4: 2250, 8: 2250, 2: 900, 1: 400}
_COMMON = [
    # An eighth of the quickstart's validation text, as scoring K = 1 and the baseline takes long.
    "--config.data.holdout_every=160",
    "--config.eval.part_blocks=12",
    "--config.autoencoder.min_accuracy=0.9",
]
# The share of the steps of stage 2 that are the warm-up.
_WARMUP = 0.04


def _language_model(variant: str, budget: float, *more: str) -> list[str]:
    words = [f"--config=benchmarks/tokens_512.py:{variant}", *_COMMON, *more]
    steps = max(1, round(budget / step_flops(config_of(words), "lm")))
    words.append(f"--config.lm.training.num_steps={steps}")
    words.append(f"--config.lm.training.eval_every={max(1, steps // 4)}")
    words.append(f"--config.lm.optimizer.warmup_steps={round(_WARMUP * steps)}")
    return words


def get_arms(budget: str = "6e12") -> dict[str, list[str]]:
    """The flags of each arm; `budget`: FLOPs of stage 2."""
    each = float(budget)
    arms = {"baseline": _language_model("head=softmax", each)}
    for K, steps in _AUTOENCODER_STEPS.items():
        arms[f"k{K}-autoencoder"] = [
            f"--config=benchmarks/tokens_512.py:k={K}",
            *_COMMON,
            "--config.stage=autoencoder",
            f"--config.autoencoder.training.num_steps={steps}",
        ]
        shared = f"--config.autoencoder.checkpoint={{k{K}-autoencoder}}"
        arms[f"k{K}"] = _language_model(f"k={K}", each, shared)
        if K == 4:
            arms["k4-as-published"] = _language_model(f"k={K}", each, shared, *TO_DRAWS)
    return arms
