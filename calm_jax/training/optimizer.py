"""AdamW with its weight-decay mask, gradient clipping and the learning-rate schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from calm_jax.errors import UserError, require_at_least, require_one_of, require_within, shown

SCHEDULES = ("constant", "cosine")
# The smallest and the largest value of each key. Outside of them float32 overflows, or no training is stable.
_LIMITS = {
    "learning_rate": (1e-20, 1.0),
    "final_learning_rate": (0.0, 1.0),
    "beta1": (0.0, 0.999999),
    "beta2": (0.0, 0.999999),
    "epsilon": (1e-20, 1.0),
    "weight_decay": (0.0, 1e3),
    "max_grad_norm": (1e-20, 1e10),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """`config.<stage>.optimizer`; every key is described in `configs/common.py`.

    Within the limits of the keys, finite gradients make finite parameters: an update changes a parameter by at most
    learning rate * (max_grad_norm / epsilon + weight_decay * |parameter|), which is far below float32's largest number, and the
    decay alone makes no parameter larger.
    """

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
        require_one_of("optimizer.schedule", self.schedule, SCHEDULES)
        require_at_least(0, self, "optimizer.", "warmup_steps")
        for name, (least, most) in _LIMITS.items():
            require_within(least, most, self, "optimizer.", name)
        highest = max(self.learning_rate, self.final_learning_rate)
        if self.weight_decay * highest > 1:
            raise UserError(
                f"optimizer.weight_decay={self.weight_decay} must be at most {shown(1 / highest)}, one divided by the highest learning rate"
            )


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


def _clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """As `optax.clip_by_global_norm`, but it multiplies each gradient by one scalar factor instead of dividing by the norm.

    XLA for CPUs fuses products into AdamW's arithmetic, where it computes quotients apart and writes them to memory.
    """

    def clip(gradient: optax.Updates, params: optax.Params | None) -> optax.Updates:
        factor = jnp.minimum(1, largest / optax.tree.norm(gradient))
        return jax.tree.map(lambda g: g * factor, gradient)

    return optax.stateless(clip)


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping of the global norm, then AdamW."""
    return optax.chain(
        _clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
