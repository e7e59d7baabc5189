"""CALM, Continuous Autoregressive Language Models, in JAX and Flax."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calm_jax.run.generator import Continuation, Generator

__all__ = ["Continuation", "Generator"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that commands that need no device start without importing JAX.
    if name in __all__:
        from calm_jax.run import generator

        return getattr(generator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
