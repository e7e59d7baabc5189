"""Arms that change one key of the paper's loss, or one of each stage, for a model that learns little from it (docs/single_spaces.md).

    python -m benchmarks.learning --arms=benchmarks/single_changes.py --folder=DIR --seeds=0

The model is that of `benchmarks/tokens_512.py`, trained by the energy score alone for 1000 steps at 1e-3. Arms that
change stage 2 share an autoencoder.
"""

from benchmarks.arms import TO_DRAWS, TO_MEAN

_RECIPE = "--config=benchmarks/tokens_512.py"
_STAGE_1 = {
    "random_chunks-0": ["--config.autoencoder.random_chunks=0.0"],
    "random_chunks-0.05": ["--config.autoencoder.random_chunks=0.05"],
    "kl_weight-1e-3": ["--config.autoencoder.model.kl_weight=1e-3"],
    "latent_size-64": ["--config.autoencoder.model.latent_size=64"],
    "latent_size-32": ["--config.autoencoder.model.latent_size=32"],
    "latent_size-16": ["--config.autoencoder.model.latent_size=16"],
}
_STAGE_2 = {
    "nothing": [],
    "num_samples-8": ["--config.lm.head.num_samples=8"],
    "warmup-300": ["--config.lm.optimizer.warmup_steps=300"],
    "constant-rate": ["--config.lm.optimizer.schedule=constant"],
    "noise_size-256": ["--config.lm.head.noise_size=256"],
    "beta-1.5": ["--config.lm.head.beta=1.5"],
    "target-mean": TO_MEAN,
    "target-mean-warmup-300": [*TO_MEAN, "--config.lm.optimizer.warmup_steps=300"],
}
# A change of stage 1, by its name, and the flags that change stage 2.
_BOTH = {
    "latent_size-16-warmup-300": ("latent_size-16", _STAGE_2["warmup-300"]),
    "latent_size-32-warmup-300": ("latent_size-32", _STAGE_2["warmup-300"]),
    "latent_size-64-warmup-300": ("latent_size-64", _STAGE_2["warmup-300"]),
    "latent_size-32-constant-rate": (
        "latent_size-32",
        [*_STAGE_2["warmup-300"], *_STAGE_2["constant-rate"]],
    ),
    "latent_size-32-beta-1.5": (
        "latent_size-32",
        [*_STAGE_2["warmup-300"], *_STAGE_2["beta-1.5"]],
    ),
    "latent_size-32-steps-2500": (
        "latent_size-32",
        ["--config.lm.optimizer.warmup_steps=600", "--config.lm.training.num_steps=2500"],
    ),
    "latent_size-32-steps-6200": (
        "latent_size-32",
        ["--config.lm.optimizer.warmup_steps=600", "--config.lm.training.num_steps=6200"],
    ),
}


def _trained_on(autoencoder: str) -> list[str]:
    return [
        _RECIPE,
        f"--config.autoencoder.checkpoint={{{autoencoder}}}",
        *TO_DRAWS,
        "--config.lm.optimizer.learning_rate=1e-3",
        "--config.lm.training.num_steps=1000",
        "--config.lm.training.eval_every=1000",
    ]


def get_arms() -> dict[str, list[str]]:
    """The flags of each arm."""
    stage_1 = [_RECIPE, "--config.stage=autoencoder"]
    arms = {"autoencoder": stage_1}
    for name, change in _STAGE_2.items():
        arms[name] = [*_trained_on("autoencoder"), *change]
    for name, change in _STAGE_1.items():
        arms[f"autoencoder-{name}"] = [*stage_1, *change]
    stage_1_alone: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in _STAGE_1}
    for name, (autoencoder, change) in (stage_1_alone | _BOTH).items():
        shared = _trained_on(f"autoencoder-{autoencoder}")
        arms[name] = [*shared, *_STAGE_1[autoencoder], *change]
    return arms
