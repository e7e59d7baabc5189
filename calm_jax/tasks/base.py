"""`Task`, the interface of a model to the training loop and the evaluator, and the arithmetic of metrics."""

from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.models.stack import Stacks

Params = dict[str, Any]
Batch = dict[str, Array]
# A metric is a (sum, weight) pair. Pairs are added up, and divided once on the host, so that a mean is right with masks,
# microbatches of different weight and several processes.
Metrics = dict[str, tuple[Array, Array]]


class Task(Protocol):
    """A model and its objective.

    A batch is a dict of int32 arrays [B, T]: "tokens"; "targets", which are the tokens or MASKED; and with
    `data.isolate_documents` "segments", where tokens of one document have equal ids. Every row has its own random key,
    so that a batch may be split over devices, processes or microbatches without changing a draw. `frozen` are
    parameters that are not trained ({} if there are none).
    """

    @property
    def stacks(self) -> Stacks:
        """The paths of the stacks of equal layers in the trained parameters; axis 0 of a stack's parameters counts layers."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that `loss` returns. A new training state has a zero for each, without tracing the loss."""
        ...

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        ...

    def loss(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Metrics:
        """The metrics of training; the one called "loss" is minimised."""
        ...

    def evaluate(self, params: Params, frozen: Params, batch: Batch, key_B: Array) -> Any:
        """A tree of sums over the batch, to be added up over a split."""
        ...

    def report(self, sums: Any) -> dict[str, float]:
        """Named values from the sums over a split, on the host."""
        ...


def call(module: nn.Module, variables: Params, method: str, *arguments: Any) -> Any:
    """Calls a method of a Flax module. `Module.apply` is typed as if it returned mutable collections too; there are none."""
    return module.apply(variables, *arguments, method=method)


def split_keys(key_B: Array, num: int) -> Array:
    """`num` keys from each row's key, [B, num]."""
    return jax.vmap(lambda key: jax.random.split(key, num))(key_B)


def flatten(x: Array) -> Array:
    """Merges the first two axes."""
    return x.reshape(-1, *x.shape[2:])


def chunks(batch: Batch, chunk_size: int) -> tuple[Array, Array]:
    """The tokens and the targets of a batch as chunks, [B, L, K] each."""
    shape = (len(batch["tokens"]), -1, chunk_size)
    return batch["tokens"].reshape(shape), batch["targets"].reshape(shape)


def total(x: Array, counted: Array) -> tuple[Array, Array]:
    """The metric of `x`: its sum where `counted` (bool) is true, and the number of these elements."""
    return jnp.where(counted, x, 0).sum(), counted.sum(dtype=jnp.float32)


def ratio(pair: tuple[Any, Any]) -> float:
    """The value of a metric, sum / weight; NaN for weight 0."""
    total, weight = pair
    return float(total) / float(weight) if float(weight) else float("nan")
