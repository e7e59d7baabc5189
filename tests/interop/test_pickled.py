"""The reader of `pytorch_model.bin`: it reads what PyTorch writes, and refuses every other pickle and archive in one line."""

import collections
import pickletools
import zipfile

import numpy as np
import pytest

from tests.interop.checkpoints import as_float32, assert_same, read_all, refusal_to_read
from tests.interop.weight_files import (
    BIN,
    Tensor,
    assert_little_memory,
    pickled,
    state_dict,
    storage,
    tensor,
    write_archive,
    write_bin,
)

# --- Sound files


def test_the_writer_of_these_tests_uses_the_instructions_that_torch_uses(golden, tmp_path):
    real = golden / "ae_k4" / BIN
    values = read_all(golden / "ae_k4")
    write_bin(tmp_path / BIN, {name: tensor(values[name]) for name in values})

    def described(path):
        with zipfile.ZipFile(path) as archive:
            (program,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            operations = list(pickletools.genops(archive.read(program)))
            kinds = {
                name.partition("/")[2]: info.compress_type
                for name, info in ((info.filename, info) for info in archive.infolist())
            }
        asked = {argument for operation, argument, _ in operations if operation.name == "GLOBAL"}
        return {operation.name for operation, _, _ in operations}, asked, kinds

    ours, theirs = described(tmp_path / BIN), described(real)
    assert ours[:2] == theirs[:2]
    # In torch's file the two names of the embedding share a storage, and there are further members that are not read.
    assert {key: ours[2][key] for key in theirs[2] if key in ours[2]}.keys() >= {
        "data.pkl",
        "byteorder",
        "version",
        "data/0",
        "data/25",
    }
    assert set(ours[2].values()) == set(theirs[2].values()) == {zipfile.ZIP_STORED}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("make", [dict, collections.OrderedDict], ids=["dict", "OrderedDict"])
def test_views_of_a_shared_storage_are_read_under_every_protocol(make, protocol, tmp_path):
    base = np.arange(40, dtype=np.float32)
    shared = storage(base)
    tree = make(
        whole=Tensor(shared, 0, (40,), (1,)),
        rows=Tensor(shared, 3, (3, 4), (4, 1)),
        columns=Tensor(shared, 10, (6, 5), (1, 6)),
        spread=Tensor(shared, 1, (13,), (3,)),
        repeated=Tensor(shared, 2, (4, 5), (0, 1)),
        parameter=Tensor(shared, 39, (1,), (7,), is_parameter=True),
        nothing=Tensor(shared, 40, (0, 9), (9, 1)),
        twin=Tensor(shared, 0, (40,), (1,)),
    )
    write_bin(tmp_path / BIN, tree, protocol)
    expected = {
        "whole": base,
        "rows": base[3:15].reshape(3, 4),
        "columns": base[10:].reshape(5, 6).T,
        "spread": base[1:38:3],
        "repeated": np.tile(base[2:7], (4, 1)),
        "parameter": base[39:],
        "nothing": np.zeros((0, 9)),
        "twin": base,
    }
    assert_same(read_all(tmp_path), as_float32(expected))


def test_the_long_forms_of_pickle_instructions_are_read(tmp_path):
    """More than 255 memo entries, names longer than 255 bytes, sizes above 16 bits."""
    values = {f"{i}" + "x" * i: np.full(i, i, np.float32) for i in range(400)}
    values["long"] = np.zeros(70000, np.float32)
    for protocol in (2, 4):
        write_bin(tmp_path / BIN, state_dict(values), protocol)
        assert_same(read_all(tmp_path), as_float32(values))


# --- Malformed archives


def good():
    return {"x": np.ones(6, np.float32), "y": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." * 3, b"x" * 5000]
)
def test_a_file_that_is_no_archive_is_refused(data, tmp_path):
    (tmp_path / BIN).write_bytes(data)
    assert "no zip archive" in refusal_to_read(tmp_path)


def test_compressed_numbers_are_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()), compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal_to_read(tmp_path)


def test_a_compressed_pickle_is_refused(tmp_path):
    """A few compressed bytes could expand to gigabytes of objects."""
    program, storages = pickled(state_dict(good()))
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", program, zipfile.ZIP_DEFLATED)
        for key, data in enumerate(storages):
            archive.writestr(f"m/data/{key}", data)
    assert "compressed" in refusal_to_read(tmp_path)


@pytest.mark.parametrize("method", range(1, 100))
def test_every_compression_method_of_the_pickle_is_refused(method, tmp_path):
    """The bytes are not really compressed, so that a decompressor would fail on them."""
    write_bin(tmp_path / BIN, state_dict(good()))
    data = bytearray((tmp_path / BIN).read_bytes())
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(signature) + place] = method
    (tmp_path / BIN).write_bytes(data)
    refusal_to_read(tmp_path)


def test_a_compressed_pickle_is_not_expanded_in_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + b"}" * 2**17, zipfile.ZIP_DEFLATED)
    size = (tmp_path / BIN).stat().st_size
    assert_little_memory(2**20 + 100 * size, lambda: refusal_to_read(tmp_path))


@pytest.mark.slow
def test_a_huge_pickle_is_refused_before_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + b"0" * 2**27, zipfile.ZIP_DEFLATED)
    assert_little_memory(2**22, lambda: refusal_to_read(tmp_path))


def test_a_wrong_checksum_is_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()))
    data = (tmp_path / BIN).read_bytes()
    numbers = np.arange(4, dtype=np.float32).tobytes()
    changed = np.array([0, 1, 2, 4], np.float32).tobytes()
    assert data.count(numbers) == 1
    (tmp_path / BIN).write_bytes(data.replace(numbers, changed))
    assert "'y' do not have the saved checksum" in refusal_to_read(tmp_path)


def test_big_endian_numbers_are_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()), order=b"big")
    assert "little-endian" in refusal_to_read(tmp_path)


def test_a_missing_storage_and_zero_or_two_pickles_are_refused(tmp_path):
    program, storages = pickled(state_dict(good()))
    write_archive(tmp_path / BIN, program, storages[:1])
    assert "the numbers of 'y' are missing" in refusal_to_read(tmp_path)
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/other", program)
    assert "data.pkl" in refusal_to_read(tmp_path)
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", program)
        archive.writestr("n/data.pkl", program)
    assert "data.pkl" in refusal_to_read(tmp_path)
