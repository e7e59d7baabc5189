"""Types and helpers that all golden cases share."""

from collections.abc import Iterator, Mapping

import numpy as np
from jax.typing import ArrayLike

from calm_jax.interop import names

# The arrays of a case's npz file, by name.
Arrays = Mapping[str, np.ndarray]
# Each compared quantity: its name, the value computed here, and the recorded value.
Comparisons = Iterator[tuple[str, ArrayLike, ArrayLike]]


def gradients(rows: list[names.Row], gradient: Mapping, golden: Arrays) -> Comparisons:
    """Compares a gradient, a nested dict of the parameters' gradients, with every recorded `grad/NAME`."""
    tensors = names.write_parameters(rows, gradient)
    for key, value in golden.items():
        if key.startswith("grad/"):
            name = key.removeprefix("grad/")
            yield f"gradient {name}", tensors[name], value
