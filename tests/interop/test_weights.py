"""Readers of published weights: every format gives the same bits; bad safetensors files and indices are refused in one line."""

import json
import math
import os
import shutil
import struct
import time
import warnings

import ml_dtypes
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.interop.pickled import PickleFile
from calm_jax.interop.weights import Weights
from tests.interop.checkpoints import as_float32, assert_same, read_all, refusal_to_read
from tests.interop.weight_files import (
    BIN,
    FORMS,
    SAFE,
    write_folder,
    write_index,
    write_safetensors,
)


def arrays():
    rng = np.random.default_rng(0)
    return {
        "half": rng.normal(size=(3, 5)).astype(np.float16),
        "brain": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "full": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "transposed": np.asfortranarray(rng.normal(size=(4, 6)).astype(np.float32)),
        "number": np.float32(2.5),
        "none": np.zeros((0, 3), np.float32),
    }


def good():
    return {"x": np.ones(6, np.float32), "y": np.arange(4, dtype=np.float32)}


# --- Sound files


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_bits(form, tmp_path):
    write_folder(tmp_path, form, arrays())
    assert_same(read_all(tmp_path), as_float32(arrays()))
    described = Weights(tmp_path).tensors
    for name, array in arrays().items():
        info = described[name]
        assert (info.shape, info.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("name", ["ae_k4", "energy_k4"])
def test_the_pickle_and_the_safetensors_file_of_a_golden_checkpoint_give_the_same_bits(
    name, golden, tmp_path
):
    shutil.copy(golden / name / BIN, tmp_path)
    assert_same(read_all(tmp_path), as_float32(read_all(golden / name)))


def test_formats_are_preferred_in_the_documented_order(tmp_path):
    values = arrays()
    for number, form in enumerate(FORMS):
        write_folder(tmp_path, form, values | {"full": np.float32([number])})
    for form, file in enumerate((SAFE, f"{SAFE}.index.json", BIN)):
        # `form` counts the formats in the order of FORMS, which is that of preference.
        assert read_all(tmp_path)["full"] == [form]
        (tmp_path / file).unlink()
    assert read_all(tmp_path)["full"] == [3]


def test_a_pickle_file_can_be_read_without_weights(golden):
    file = PickleFile(golden / "ae_k4" / BIN)
    assert file.read("encoder.norm.weight").shape == (32,)


def test_a_tensor_that_float32_may_not_hold_is_described_but_not_read(tmp_path):
    for kind in (np.float64, np.int64, np.bool_):
        values = {"fine": np.ones(2, np.float32), "other": np.ones(3, kind)}
        for form in FORMS:
            folder = tmp_path / f"{form}{kind.__name__}"
            write_folder(folder, form, values)
            weights = Weights(folder)
            assert weights.tensors["other"].dtype == kind
            assert weights.read("fine").tolist() == [1, 1]
            with pytest.raises(UserError, match=f"'other' is of type {np.dtype(kind)}"):
                weights.read("other")


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_nan_and_infinity_are_counted_and_refused(form, bad, kind, tmp_path):
    values = {"good": np.ones(3, kind), "bad": np.array([1, *bad, 2], kind)}
    write_folder(tmp_path, form, values)
    with warnings.catch_warnings():
        # A warning would print a second line.
        warnings.simplefilter("error")
        line = refusal_to_read(tmp_path)
    assert f"{len(bad)} of the {2 + len(bad)} numbers of 'bad'" in line


def test_a_sum_of_the_largest_float32_numbers_does_not_overflow(tmp_path):
    largest = np.finfo(np.float32).max
    write_folder(tmp_path, "safetensors", {"x": np.full(1000, largest, np.float32)})
    assert (read_all(tmp_path)["x"] == largest).all()


def test_the_refusal_of_a_folder_without_weights_names_the_files(tmp_path):
    line = refusal_to_read(tmp_path)
    assert SAFE in line and BIN in line
    (tmp_path / SAFE).mkdir()
    assert SAFE in refusal_to_read(tmp_path)


def test_a_named_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "has no weights" in refusal_to_read(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert "has no weights" in refusal_to_read(tmp_path)


def test_a_line_break_in_a_tensor_name_is_escaped(tmp_path):
    values = {"a\nerror: b": np.ones(2)}
    for form in FORMS:
        folder = tmp_path / form
        write_folder(folder, form, values)
        refusal_to_read(folder)


# --- Malformed safetensors files


def write_header(path, header, data=b"", length=None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(kind, shape, begin, end):
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


ONES = np.ones(4, np.float32).tobytes()


FOUR = entry("F32", [4], 0, 16)


SAFETENSORS = {
    "an empty file": dict(header=b"", data=b"", length=None),
    "a header of gigabytes": dict(header={"x": FOUR}, data=ONES, length=2**33),
    "a header of 2**64": dict(header={"x": FOUR}, data=ONES, length=2**64 - 1),
    "a header that ends early": dict(header={"x": FOUR}, data=ONES, length=10),
    "no JSON": dict(header=b"{" * 100),
    "deep JSON": dict(header=b'{"x":' * 100000),
    "a list": dict(header=b"[]"),
    "overlapping tensors": dict(header={"x": FOUR, "y": entry("F32", [4], 8, 24)}, data=ONES * 2),
    "one place twice": dict(header={"x": FOUR, "y": FOUR}, data=ONES),
    "offsets beyond the file": dict(header={"x": FOUR, "y": entry("F32", [4], 16, 32)}, data=ONES),
    "offsets of 2**64": dict(header={"x": entry("F32", [4], 2**64 - 17, 2**64 - 1)}, data=ONES),
    "negative offsets": dict(header={"x": entry("F32", [4], -16, 0)}, data=ONES),
    "offsets the wrong way": dict(header={"x": entry("F32", [4], 16, 0)}, data=ONES),
    "numbers of nobody": dict(header={"x": FOUR}, data=ONES * 2),
    "a hole": dict(header={"x": entry("F32", [4], 16, 32)}, data=ONES * 2),
    "an absurd shape": dict(header={"x": entry("F32", [2**40, 2**40], 0, 16)}, data=ONES),
    "a shape that overflows to 4": dict(
        header={"x": entry("F32", [2**32, 2**32, 4], 0, 16)}, data=ONES
    ),
    "a negative shape": dict(header={"x": entry("F32", [-2, -2], 0, 16)}, data=ONES),
    "a shape of fractions": dict(header={"x": entry("F32", [4.0], 0, 16)}, data=ONES),
    "another shape": dict(header={"x": entry("F32", [5], 0, 16)}, data=ONES),
    "an unknown type": dict(header={"x": entry("F31", [4], 0, 16)}, data=ONES),
    "a type of no checkpoint": dict(header={"x": entry("F8_E4M3", [16], 0, 16)}, data=ONES),
    "no type": dict(header={"x": {"shape": [4], "data_offsets": [0, 16]}}, data=ONES),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_malformed_safetensors_file_is_refused(case, tmp_path):
    write_header(tmp_path / SAFE, **SAFETENSORS[case])
    if case == "an empty file":
        (tmp_path / SAFE).write_bytes(b"")
    began = time.monotonic()
    assert SAFE in refusal_to_read(tmp_path)
    assert time.monotonic() - began < 2


def test_a_sound_file_of_the_same_writer_is_read(tmp_path):
    write_header(tmp_path / SAFE, {"x": FOUR, "y": entry("F32", [2, 2], 16, 32)}, ONES * 2)
    assert_same(read_all(tmp_path), as_float32({"x": np.ones(4), "y": np.ones((2, 2))}))


# --- Indices of shards


def indexed(folder, change):
    """Writes two shards and their index; `change` gets the weight_map and returns another one, or the text of the index."""
    write_folder(folder, "sharded safetensors", good())
    path = folder / f"{SAFE}.index.json"
    index = json.loads(path.read_text())
    changed = change(index["weight_map"])
    if isinstance(changed, dict):
        changed = json.dumps({"weight_map": changed})
    path.write_text(changed)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


INDICES = {
    "a way up": (lambda m: m | {"x": f"../{ONE}"}, "../"),
    "an absolute path": (lambda m: m | {"x": "/etc/passwd"}, "/etc/passwd"),
    "a backslash": (lambda m: m | {"x": f"..\\{ONE}"}, "\\"),
    "a drive": (lambda m: m | {"x": f"C:{ONE}"}, "C:"),
    "a zero byte": (lambda m: m | {"x": f"{ONE}\0"}, ONE),
    "the folder": (lambda m: m | {"x": "."}, "'.'"),
    "the folder above": (lambda m: m | {"x": ".."}, "'..'"),
    "no name": (lambda m: m | {"x": ""}, "''"),
    "half a letter": (lambda m: m | {"x": "\ud800"}, "ud800"),
    "a name too long for a file": (lambda m: m | {"x": "a" * 300}, "aaa"),
    "a missing shard": (lambda m: m | {"x": "model-00003-of-00002.safetensors"}, "00003"),
    "itself": (lambda m: m | {"x": f"{SAFE}.index.json"}, "index.json"),
    "a tensor that no shard has": (lambda m: m | {"z": ONE}, "z"),
    "a tensor in the other shard": (lambda m: m | {"x": TWO}, "x"),
    "a tensor that it forgets": (lambda m: {"x": ONE, "y": TWO, "y2": TWO}, "y2"),
    "shards the wrong way round": (lambda m: {"x": TWO, "y": ONE}, "do not belong together"),
    "a shard that is no string": (lambda m: m | {"x": 5}, "weight_map"),
    "a list of shards": (lambda m: m | {"x": [ONE]}, "weight_map"),
    "no map": (lambda m: '{"weight_map": []}', "weight_map"),
    "no object": (lambda m: "[]", "weight_map"),
    "nothing": (lambda m: "", "index.json"),
    "no JSON": (lambda m: "{'x'}", "index.json"),
    "deep JSON": (lambda m: "[" * 200000, "index.json"),
    "deep JSON objects": (lambda m: '{"weight_map":' * 100000, "index.json"),
    "a number of a million digits": (lambda m: '{"weight_map": ' + "1" * 10**6 + "}", "index.json"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_malformed_or_wrong_index_is_refused(case, tmp_path):
    change, words = INDICES[case]
    # A file that an index with ../ would find.
    write_safetensors(tmp_path / ONE, good())
    indexed(tmp_path / "model", change)
    assert words in refusal_to_read(tmp_path / "model")


def test_an_index_that_lacks_a_tensor_of_its_shard_is_refused(tmp_path):
    write_index(tmp_path, SAFE, [good() | {"z": np.ones(2)}], write_safetensors)
    path = tmp_path / f"{SAFE}.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["z"]
    path.write_text(json.dumps(index))
    assert "does not list 'z' in" in refusal_to_read(tmp_path)


def test_an_index_that_is_binary_or_huge_is_refused(tmp_path):
    path = tmp_path / f"{SAFE}.index.json"
    path.write_bytes(b"\xff\xfe{}")
    assert path.name in refusal_to_read(tmp_path)
    with open(path, "wb") as file:
        file.truncate(2**40)
    assert path.name in refusal_to_read(tmp_path)
