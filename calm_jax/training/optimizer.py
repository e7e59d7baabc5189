"""AdamW with its weight-decay mask, gradient clipping and the learning-rate schedule."""

import dataclasses

import jax
import optax

from calm_jax.errors import UserError, require_at_least, require_one_of, require_positive

SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """`config.<stage>.optimizer`; every key is described in `configs/common.py`."""

    learning_rate: float
    warmup_steps: int
    schedule: str
    final_learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self):
        path = "optimizer."
        require_one_of("optimizer.schedule", self.schedule, SCHEDULES)
        require_positive(self, path, "learning_rate", "max_grad_norm", "epsilon")
        require_at_least(0, self, path, "warmup_steps", "final_learning_rate", "weight_decay")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from zero, then constant, or a cosine decay that reaches `final_learning_rate` at `num_steps`."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        decay_steps = max(1, num_steps - warmup)
        after = optax.cosine_decay_schedule(peak, decay_steps, config.final_learning_rate / peak)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def decayed(params: dict) -> dict:
    """The mask of weight decay: True for kernels and embeddings, False for biases and norm scales.

    It goes by names, because the stacked layers' biases have two axes, as a kernel has.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.endswith(("kernel", "embedding")), params
    )


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping of the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
