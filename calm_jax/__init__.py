"""CALM, Continuous Autoregressive Language Models, in JAX and Flax."""

import os
from typing import TYPE_CHECKING, Any

from calm_jax.parallel.host_memory import computes_on_cpus

if TYPE_CHECKING:
    from calm_jax.api import Continuation, Generator, evaluate, load

# jaxlib 0.10 logs two lines of error, which mean nothing, for each kernel that it loads from the compilation cache of a CPU.
# It reads this variable when it is imported. Real errors are raised as exceptions all the same.
if computes_on_cpus():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__all__ = ["Continuation", "Generator", "evaluate", "load"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that commands that need no device start without importing JAX.
    if name in __all__:
        from calm_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
