"""Types and helpers that all golden cases share."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from calm_jax.interop import names


class MissingArray(Exception):
    """A case cannot go on without an array that its file lacks; the message is the array's name."""


class Missing:
    """Stands for a recorded array that the file lacks. A comparison with it fails; computing with it raises `MissingArray`."""

    def __init__(self, name: str):
        self.name = name

    def reshape(self, *_: Any) -> "Missing":
        """Returns itself: reshaping needs no values, and a later comparison fails."""
        return self

    def __getattr__(self, _: str) -> Any:
        raise MissingArray(self.name)

    def _raise(self, *_: Any) -> Any:
        raise MissingArray(self.name)

    # Python looks up special methods in the class, so `__getattr__` does not see them.
    __array__ = __len__ = __iter__ = __getitem__ = __float__ = __int__ = _raise
    __add__ = __sub__ = __mul__ = __gt__ = __ge__ = _raise


class Arrays(dict[str, np.ndarray]):
    """The arrays of a case's npz file, by name; a `Missing` for a name that it lacks."""

    def __missing__(self, name: str) -> Any:
        return Missing(name)


# Each compared quantity: its name, the value computed here, and the recorded value.
Comparisons = Iterator[tuple[str, ArrayLike, ArrayLike | Missing]]


def up_to_eos(tokens_BT: ArrayLike, prompt_size: int, eos_id: int) -> np.ndarray:
    """Token ids [B, T], with -1 after each row's first generated eos, where the computed tokens have no meaning."""
    tokens_BT = np.array(tokens_BT)
    is_eos_BT = tokens_BT == eos_id
    is_eos_BT[:, :prompt_size] = False
    behind_BT = np.cumsum(is_eos_BT, axis=1) - is_eos_BT > 0
    return np.where(behind_BT, -1, tokens_BT)


def gradients(
    rows: list[names.Row], gradient: dict, golden: Arrays, expected: Iterable[str]
) -> Comparisons:
    """Compares a gradient, a nested dict of the parameters' gradients, with the recorded `grad/NAME`.

    Args:
      rows: table from the parameters to published names.
      gradient: the gradient that is computed here.
      golden: the arrays of the case. Gradients beyond the expected ones are compared too.
      expected: the published names of the parameters whose gradients the case has to have.
    """
    tensors = names.write_parameters(rows, gradient)
    recorded = {key.removeprefix("grad/") for key in golden if key.startswith("grad/")}
    for name in sorted(recorded.union(expected)):
        if name in tensors:
            yield f"gradient {name}", tensors[name], golden[f"grad/{name}"]
        else:
            # A value that agrees with nothing.
            yield f"gradient {name}, which is no parameter", np.zeros(0), golden[f"grad/{name}"]
