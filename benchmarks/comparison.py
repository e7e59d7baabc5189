"""Arms of the comparison of K = 1, 2, 4, 8 with the baseline at equal FLOPs of stage 2 (docs/comparison.md).

    python -m benchmarks.learning --arms=benchmarks/comparison.py[:FLOPS] --folder=DIR --seeds=0,1,2

FLOPS is the training budget of stage 2, the same for each arm. Stage 1 is trained before it, once for each K. Every arm is
`configs/quickstart.py` with its K and as many steps as the budget allows; "k1" to "k8" have the energy head, "k1-flow" to "k8-flow"
the flow head, and "k4-as-published" the paper's losses, latents and numbers of samples.
"""

from benchmarks.arms import config_of, step_flops

# What the recipe changed of the paper's is set back, in both stages. Dropout is a third of the paper's 0.15; stage 1 needs more steps
# with it than the recipe has. The latent dimensions are the paper's already.
_PUBLISHED_STAGE_1 = [
    "--config.autoencoder.model.dropout=0.05",
    "--config.autoencoder.model.kl_weight=1e-3",
    "--config.autoencoder.random_chunks=0.0",
    "--config.autoencoder.training.num_steps=1500",
]
_PUBLISHED_STAGE_2 = [
    "--config.lm.token_loss_weight=0.0",
    "--config.lm.token_prior_weight=0.0",
    "--config.lm.head.num_samples=8",
    "--config.lm.head.num_target_samples=100",
]


def _recipe(variant: str) -> list[str]:
    # In float32 on every CPU, so that runs of different machines can be compared.
    return [f"--config=configs/quickstart.py:{variant}", "--config.compute_dtype=float32"]


def _stage_1(variant: str, *more: str) -> list[str]:
    return [*_recipe(variant), "--config.stage=autoencoder", *more]


def _stage_2(variant: str, budget: float, *more: str) -> list[str]:
    words = [*_recipe(variant), *more]
    steps = max(1, round(budget / step_flops(config_of(words), "lm")))
    words.append(f"--config.lm.training.num_steps={steps}")
    words.append(f"--config.lm.training.eval_every={max(1, steps // 4)}")
    return words


def get_arms(budget: str = "2.5e13") -> dict[str, list[str]]:
    """The flags of each arm; `budget`: FLOPs of stage 2."""
    each = float(budget)
    arms = {"baseline": _stage_2("head=softmax", each)}
    for K in (1, 2, 4, 8):
        arms[f"k{K}-autoencoder"] = _stage_1(f"k={K}")
        shared = f"--config.autoencoder.checkpoint={{k{K}-autoencoder}}"
        arms[f"k{K}"] = _stage_2(f"k={K},head=energy", each, shared)
        arms[f"k{K}-flow"] = _stage_2(f"k={K},head=flow", each, shared)
    arms["k4-as-published-autoencoder"] = _stage_1("k=4", *_PUBLISHED_STAGE_1)
    shared = "--config.autoencoder.checkpoint={k4-as-published-autoencoder}"
    arms["k4-as-published"] = _stage_2("k=4,head=energy", each, shared, *_PUBLISHED_STAGE_2)
    return arms
