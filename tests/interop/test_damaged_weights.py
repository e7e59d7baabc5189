"""Randomly damaged weight files: each is refused in one line or gives sound tensors, in bounded time and memory."""

import contextlib
import resource
import signal
import struct
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.interop.weights import Weights
from tests.interop.checkpoints import as_float32, assert_same, read_all
from tests.interop.weight_files import BIN, SAFE, pickled, state_dict, write_archive, write_folder


def flips(rng, data, places):
    """A copy with 1 to 4 bytes changed, at random places among `places`."""
    changed = bytearray(data)
    for place in rng.choice(places, size=rng.integers(1, 5)):
        changed[place] ^= int(rng.integers(1, 256))
    return bytes(changed)


def damages(rng, data, head, count):
    """Yields `count` damaged copies: every fifth is truncated, half of the others have changes only in the places of `head`."""
    everywhere = np.arange(len(data))
    for number in range(count):
        if number % 5 == 4:
            yield data[: rng.integers(len(data))]
        else:
            yield flips(rng, data, head if number % 2 else everywhere)


def opened(folder):
    """The tensors of a folder, or None if it is refused in one line that names the folder."""
    try:
        return read_all(folder)
    except UserError as error:
        line = str(error)
        assert "\n" not in line and str(folder) in line, line
        return None


@pytest.fixture
def bounded():
    """Ends a test after two minutes, and asserts that it took little memory."""

    def late(*_):
        raise TimeoutError("a damaged file is still being read")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert peak < 2**24
    # In KiB, including memory that Python does not manage.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


def small():
    rng = np.random.default_rng(1)
    return {
        "encoder.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "encoder.bias": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "norm": rng.normal(size=6).astype(np.float16),
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bin", "sharded bin"])
def test_a_damaged_archive_is_refused_or_read_unchanged(form, bounded, tmp_path):
    """Every byte that matters has a checksum, or a second place that it must agree with."""
    values = small()
    write_folder(tmp_path, form, values)
    path = sorted(tmp_path.glob("*.bin"))[0]
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        stored = [info for info in archive.infolist() if "/data/" in info.filename]
    numbers = {
        place
        for info in stored
        for begin in [info.header_offset + 30 + len(info.filename)]
        for place in range(begin, begin + info.file_size)
    }
    head = np.array(sorted(set(range(len(data))) - numbers))
    rng, refused = np.random.default_rng(2), 0
    for damaged in damages(rng, data, head, 800):
        path.write_bytes(damaged)
        found = opened(tmp_path)
        refused += found is None
        if found is not None:
            assert_same(found, as_float32(values))
    assert 400 < refused < 800


@pytest.mark.slow
def test_a_damaged_number_in_an_archive_is_always_refused(bounded, tmp_path):
    values = small()
    write_folder(tmp_path, "bin", values)
    data = (tmp_path / BIN).read_bytes()
    begin = data.index(values["encoder.weight"].tobytes())
    places = np.arange(begin, begin + values["encoder.weight"].nbytes)
    rng = np.random.default_rng(3)
    for _ in range(200):
        changed = flips(rng, data, places)
        (tmp_path / BIN).write_bytes(changed)
        assert changed == data or opened(tmp_path) is None


@pytest.mark.slow
def test_a_damaged_pickle_with_a_valid_checksum_is_refused_or_gives_finite_tensors(
    bounded, tmp_path
):
    """As an attacker could do: the archive is sound, but its pickle is changed."""
    program, storages = pickled(state_dict(small()))
    rng, places = np.random.default_rng(4), np.arange(len(program))
    refused = 0
    for number in range(800):
        damaged = (
            flips(rng, program, places) if number % 5 else program[: rng.integers(len(program))]
        )
        write_archive(tmp_path / BIN, damaged, storages)
        found = opened(tmp_path)
        refused += found is None
        for array in (found or {}).values():
            assert array.dtype == np.float32 and np.isfinite(array).all()
    assert 400 < refused < 800


@pytest.mark.slow
def test_a_damaged_safetensors_file_is_refused_or_gives_finite_tensors(bounded, tmp_path):
    values = small()
    write_folder(tmp_path, "safetensors", values)
    path = tmp_path / SAFE
    data = path.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    rng, refused = np.random.default_rng(5), 0
    for damaged in damages(rng, data, np.arange(size), 800):
        path.write_bytes(damaged)
        found = opened(tmp_path)
        refused += found is None
        for array in (found or {}).values():
            assert array.dtype == np.float32 and np.isfinite(array).all()
        if found is not None and damaged[:size] == data[:size]:
            # The damage is in the numbers, so that the description is unchanged.
            assert found.keys() == values.keys()
    assert 300 < refused < 800


def test_a_damaged_number_in_safetensors_changes_no_other_tensor(bounded, tmp_path):
    """The format has no checksum, so that the damaged tensor may be read with other numbers."""
    values = small()
    write_folder(tmp_path, "safetensors", values)
    path = tmp_path / SAFE
    data = path.read_bytes()
    rng = np.random.default_rng(6)
    for number in range(200):
        name = list(values)[number % len(values)]
        begin = data.index(values[name].tobytes())
        path.write_bytes(flips(rng, data, np.arange(begin, begin + values[name].nbytes)))
        weights = Weights(tmp_path)
        assert weights.tensors.keys() == values.keys()
        others = {other: weights.read(other) for other in values if other != name}
        assert_same(others, as_float32({other: values[other] for other in others}))
        with contextlib.suppress(UserError):
            assert weights.read(name).shape == values[name].shape


@pytest.mark.parametrize("form", ["sharded safetensors", "sharded bin"])
def test_a_damaged_index_is_refused_or_read_unchanged(form, bounded, tmp_path):
    values = small()
    write_folder(tmp_path, form, values)
    (path,) = tmp_path.glob("*.index.json")
    data = path.read_bytes()
    rng, refused = np.random.default_rng(7), 0
    for damaged in damages(rng, data, np.arange(len(data)), 300):
        path.write_bytes(damaged)
        found = opened(tmp_path)
        refused += found is None
        if found is not None:
            assert_same(found, as_float32(values))
    assert 150 < refused < 300
