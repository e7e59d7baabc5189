"""Arms that compare three losses in runs of several lengths, with 128 and with 32 latent dimensions: the paper's against draws of the
posterior, the same against its mean, and the latter with the token loss (docs/single_spaces.md).

    python -m benchmarks.learning --arms=benchmarks/longer_runs.py[:MULTIPLES[:FILES]] --folder=DIR --seeds=0

The model is the standard small config (configs/bench_small.py), trained like that of `benchmarks/tokens_512.py`. MULTIPLES are
numbers of that recipe's steps of stage 2, such as 1,4 (the default) or 16. FILES is `data.train_files`; without it the text is that
of the quickstart. The arms with 32 in their names have as many latent dimensions, and a warm-up of 300 steps.
"""

from benchmarks.arms import TO_DRAWS, TO_MEAN, config_of
from configs import bench_small

# 3500 steps, a quarter of the chunks random, reconstruct 88 % of the tokens of a vocabulary of 4096.
_AUTOENCODER = [
    "--config.autoencoder.random_chunks=0.0",
    "--config.autoencoder.training.num_steps=7000",
]


def _standard_small() -> list[str]:
    """The sizes of configs/bench_small.py, but 128 latent dimensions."""
    small = bench_small.get_config()
    values = {
        "tokenizer.vocab_size": small.tokenizer.vocab_size,
        "autoencoder.model.hidden_size": small.autoencoder.model.hidden_size,
        "autoencoder.model.intermediate_size": small.autoencoder.model.intermediate_size,
        "lm.model.num_layers": small.lm.model.num_layers,
        "lm.model.num_heads": small.lm.model.num_heads,
        "lm.model.num_kv_heads": small.lm.model.num_kv_heads,
        "lm.head.num_blocks": small.lm.head.num_blocks,
    }
    return [f"--config.{key}={value}" for key, value in values.items()]


def get_arms(argument: str = "") -> dict[str, list[str]]:
    """The flags of each arm; `argument`: MULTIPLES[:FILES]."""
    multiples, _, files = argument.partition(":")
    words = ["--config=benchmarks/tokens_512.py", *_standard_small()]
    if files:
        words.append(f"--config.data.train_files={files}")
    few = [*words, "--config.autoencoder.model.latent_size=32"]
    arms = {
        "autoencoder": [*words, *_AUTOENCODER, "--config.stage=autoencoder"],
        "autoencoder-32": [*few, *_AUTOENCODER, "--config.stage=autoencoder"],
    }
    steps = config_of(words).lm.training.num_steps
    least = "--config.autoencoder.min_accuracy=0.95"
    words += ["--config.autoencoder.checkpoint={autoencoder}", least]
    few += ["--config.autoencoder.checkpoint={autoencoder-32}", least]
    few += ["--config.lm.optimizer.warmup_steps=300"]
    for multiple in (multiples or "1,4").split(","):
        length = [
            f"--config.lm.training.num_steps={int(multiple) * steps}",
            f"--config.lm.training.eval_every={int(multiple) * steps // 4}",
        ]
        for name, flags in (("paper", TO_DRAWS), ("mean", TO_MEAN), ("token", [])):
            arms[f"{name}-{multiple}"] = [*words, *length, *flags]
            arms[f"{name}-32-{multiple}"] = [*few, *length, *flags]
    return arms
