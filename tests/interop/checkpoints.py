"""Golden checkpoints for tests: their names, changed copies of them, and helpers that compare tensors and check refusals."""

import json
import shutil
import time

import numpy as np
import pytest
import safetensors.numpy

from calm_jax.errors import UserError
from calm_jax.interop.weights import Weights
from tests.interop.weight_files import BIN, SAFE, write_safetensors

AUTOENCODERS = ["ae_k1", "ae_k2", "ae_k4", "ae_k8"]


CHECKPOINTS = [*AUTOENCODERS, "energy_k2", "energy_k4", "diffusion", "flow", "ar"]


# The cases that are not marked slow.
FAST = {"ae_k4", "energy_k2", "ar", "head=softmax"}


def each(cases):
    """The cases as pytest parameters, marked slow unless they are in `FAST`."""
    return [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in cases]


def tensors_of(folder):
    """The tensors in a folder's model.safetensors, by name."""
    return safetensors.numpy.load_file(folder / SAFE)


def read_all(folder):
    """Every tensor of a checkpoint by name, as float32."""
    weights = Weights(folder)
    return {name: weights.read(name) for name in weights.tensors}


def changed(source, target, config=None, tensors=None):
    """Copies a checkpoint with changes.

    config: keys of config.json; the value ... deletes a key. tensors: a function that changes the dict of tensors in place.
    """
    shutil.copytree(source, target)
    path = target / "config.json"
    values = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    if tensors is not None:
        (target / BIN).unlink(missing_ok=True)
        weights = tensors_of(target)
        tensors(weights)
        write_safetensors(target / SAFE, weights)
    return target


def drop(*beginnings):
    """A change for `changed`: deletes the tensors whose names begin so."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return change


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_same(ours, theirs):
    """Asserts that two dicts of arrays are equal in names, dtypes, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.shape == theirs[name].shape, name
        assert array.tobytes() == theirs[name].tobytes(), name


def as_float32(arrays):
    return {name: np.asarray(array).astype(np.float32) for name, array in arrays.items()}


def refusal(function, *arguments, **options):
    """The message of the `UserError` that a call raises: one short line, within ten seconds."""
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert time.monotonic() - began < 10
    line = str(error.value)
    assert "\n" not in line and len(line) < 1000, line[:2000]
    return line


def refusal_to_read(folder):
    """The message of the `UserError` that reading every tensor raises, which names the folder."""
    line = refusal(read_all, folder)
    assert str(folder) in line
    return line
