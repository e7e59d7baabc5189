"""Arms that change one key of the paper's loss, for a model that learns little from it (docs/experiments.md).

    python -m benchmarks.learning --arms=benchmarks/single_changes.py --folder=DIR --seeds=0

The model is that of `configs/quickstart.py:k=4`, trained by the energy score alone for 1000 steps at 1e-3, on one autoencoder.
"""

from benchmarks.arms import PAPERS_LOSS

_RECIPE = "--config=configs/quickstart.py:k=4"
_CHANGES = {
    "nothing": [],
    "num_samples-8": ["--config.lm.head.num_samples=8"],
    "warmup-300": ["--config.lm.optimizer.warmup_steps=300"],
    "constant-rate": ["--config.lm.optimizer.schedule=constant"],
    "noise_size-256": ["--config.lm.head.noise_size=256"],
    "beta-1.5": ["--config.lm.head.beta=1.5"],
}


def get_arms() -> dict[str, list[str]]:
    """The flags of each arm."""
    words = [
        _RECIPE,
        "--config.autoencoder.checkpoint={autoencoder}",
        *PAPERS_LOSS,
        "--config.lm.head.decoded_brier_delay=0",
        "--config.lm.optimizer.learning_rate=1e-3",
        "--config.lm.training.num_steps=1000",
        "--config.lm.training.eval_every=1000",
    ]
    arms = {"autoencoder": [_RECIPE, "--config.stage=autoencoder"]}
    return arms | {name: [*words, *change] for name, change in _CHANGES.items()}
