"""What the golden cases have in common: recorded arrays, comparisons, gradients by published name."""

from collections.abc import Iterator, Mapping

import numpy as np

from calm_jax.interop import names

Arrays = Mapping[str, np.ndarray]
# (quantity, ours, published)
Comparisons = Iterator[tuple[str, np.ndarray, np.ndarray]]


def gradients(rows: list[names.Row], gradient: dict, golden: Arrays) -> Comparisons:
    """Every recorded gradient beside ours."""
    tensors = names.write_parameters(rows, gradient)
    for key, value in golden.items():
        if key.startswith("grad/"):
            name = key.removeprefix("grad/")
            yield f"gradient {name}", tensors[name], value
