"""Readers of published weights: three formats give the same bits; what is damaged or hostile is one clear line."""

import collections
import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import pickletools
import resource
import shutil
import signal
import struct
import time
import tracemalloc
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from calm_jax.errors import UserError
from calm_jax.interop import pickled as reader
from calm_jax.interop.pickled import PickleFile
from calm_jax.interop.weights import Weights

KINDS = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}
BIN, SAFE = "pytorch_model.bin", "model.safetensors"


# --- A writer of PyTorch's files


@dataclasses.dataclass(frozen=True, eq=False)
class Global:
    """What a pickle calls by name; nobody has it here."""

    module: str
    name: str

    def __call__(self):
        raise AssertionError("a pickle is only written")


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Global("torch._utils", "_rebuild_parameter")


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """size: how many numbers the pickle says that there are."""

    values: np.ndarray
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    storage: Storage
    offset: int
    shape: tuple
    strides: tuple
    is_parameter: bool = False
    more: tuple = ()


def storage(values, size=None):
    values = np.ascontiguousarray(values).ravel()
    return Storage(values, values.size if size is None else size)


def tensor(array, is_parameter=False):
    """A tensor with a storage of its own, whose strides are the array's."""
    array = np.asarray(array)
    # The memory in the order in which it lies.
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Tensor(storage(array.transpose(order)), 0, array.shape, strides, is_parameter)


class Pickler(pickle._Pickler):
    """In Python, as the one in C looks the names up that it writes."""

    dispatch = pickle._Pickler.dispatch.copy()

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        if obj not in self.storages:
            self.storages.append(obj)
        key = str(self.storages.index(obj))
        return ("storage", TORCH[KINDS[obj.values.dtype]], key, "cpu", obj.size)

    def save_name(self, obj):
        if self.proto >= 4:
            self.save(obj.module)
            self.save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def save_tensor(self, obj):
        where = (obj.storage, obj.offset, obj.shape, obj.strides)
        arguments = (*where, False, collections.OrderedDict(), *obj.more)
        if obj.is_parameter:
            inner = dataclasses.replace(obj, is_parameter=False)
            self.save_reduce(PARAMETER, (inner, True, collections.OrderedDict()), obj=obj)
        else:
            self.save_reduce(REBUILD, arguments, obj=obj)

    dispatch[Global] = save_name
    dispatch[Tensor] = save_tensor


TORCH = {kind: Global("torch", kind) for kind in KINDS.values()}


def pickled(tree, protocol=2):
    """`(data.pkl, storages)`."""
    written = io.BytesIO()
    pickler = Pickler(written, protocol)
    pickler.dump(tree)
    return written.getvalue(), [storage.values.tobytes() for storage in pickler.storages]


def write_archive(path, program, storages, compression=zipfile.ZIP_STORED, order=b"little"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pytorch_model/data.pkl", program)
        archive.writestr("pytorch_model/byteorder", order)
        for key, data in enumerate(storages):
            archive.writestr(f"pytorch_model/data/{key}", data, compression)
        archive.writestr("pytorch_model/version", b"3\n")


def write_bin(path, tree, protocol=2, **options):
    write_archive(path, *pickled(tree, protocol), **options)


def state_dict(arrays):
    """What `module.state_dict()` is."""
    tree = collections.OrderedDict((name, tensor(array)) for name, array in arrays.items())
    tree._metadata = collections.OrderedDict({"": {"version": 1}, "encoder": {"version": 1}})
    return tree


def read_all(folder):
    weights = Weights(folder)
    return {name: weights.read(name) for name in weights.tensors}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        expected = np.asarray(theirs[name])
        assert array.shape == expected.shape, name
        assert array.dtype == np.float32
        assert array.tobytes() == expected.astype(np.float32).tobytes(), name


def refusal(folder):
    """The line that opening and reading everything ends with."""
    with pytest.raises(UserError) as error:
        read_all(folder)
    line = str(error.value)
    assert "\n" not in line and len(line) < 1000, line[:2000]
    assert str(folder) in line
    return line


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


def halves(values):
    names = list(values)
    return [{name: values[name] for name in part} for part in (names[::2], names[1::2])]


def write_index(folder, whole, parts, write):
    """Shards as Hugging Face names them."""
    stem, ending = whole.split(".")
    where = {}
    for number, part in enumerate(parts):
        file = f"{stem}-{number + 1:05}-of-{len(parts):05}.{ending}"
        write(folder / file, part)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{whole}.index.json").write_text(json.dumps(index))


def write_safetensors(path, values):
    # It writes the memory as it lies.
    safetensors.numpy.save_file({k: np.array(v, order="C") for k, v in values.items()}, path)


def write_folder(folder, form, values):
    folder.mkdir(exist_ok=True)
    if form == "safetensors":
        write_safetensors(folder / SAFE, values)
    elif form == "sharded safetensors":
        write_index(folder, SAFE, halves(values), write_safetensors)
    elif form == "bin":
        write_bin(folder / BIN, state_dict(values))
    else:
        write_index(
            folder, BIN, halves(values), lambda path, part: write_bin(path, state_dict(part))
        )


FORMS = ["safetensors", "sharded safetensors", "bin", "sharded bin"]


# --- What is whole


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_bits(form, tmp_path):
    write_folder(tmp_path, form, arrays())
    assert_same(read_all(tmp_path), arrays())
    described = Weights(tmp_path).tensors
    for name, array in arrays().items():
        info = described[name]
        assert (info.shape, info.dtype) == (array.shape, array.dtype)
        assert info.num_bytes == array.nbytes


@pytest.mark.parametrize("name", ["ae_k4", "energy_k4"])
def test_the_two_files_of_a_published_checkpoint_give_the_same_bits(name, golden, tmp_path):
    shutil.copy(golden / name / BIN, tmp_path)
    assert_same(read_all(tmp_path), read_all(golden / name))


def test_safetensors_are_preferred_and_whole_files_to_shards(tmp_path):
    values = arrays()
    for number, form in enumerate(FORMS):
        write_folder(tmp_path, form, values | {"full": np.float32([number])})
    for form, file in enumerate((SAFE, f"{SAFE}.index.json", BIN)):
        # In the order safetensors, shards of them, bin, shards of it.
        assert read_all(tmp_path)["full"] == [form]
        (tmp_path / file).unlink()
    assert read_all(tmp_path)["full"] == [3]


def test_the_writer_here_writes_what_torch_does(golden, tmp_path):
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
    # The embedding has two names and one storage there, and torch adds members that nobody reads.
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
def test_tensors_share_a_storage_under_every_protocol(make, protocol, tmp_path):
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
    assert_same(read_all(tmp_path), expected)


def test_a_file_that_needs_the_long_forms_of_a_pickle_is_read(tmp_path):
    """More than 255 memos, a name longer than 255 bytes, sizes above 16 bits."""
    values = {f"{i}" + "x" * i: np.full(i, i, np.float32) for i in range(400)}
    values["long"] = np.zeros(70000, np.float32)
    for protocol in (2, 4):
        write_bin(tmp_path / BIN, state_dict(values), protocol)
        assert_same(read_all(tmp_path), values)


def test_types_that_are_no_parameters_are_described_and_not_read(tmp_path):
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
def test_numbers_that_are_not_finite_are_counted_and_refused(form, bad, kind, tmp_path):
    values = {"good": np.ones(3, kind), "bad": np.array([1, *bad, 2], kind)}
    write_folder(tmp_path, form, values)
    with warnings.catch_warnings():
        # A warning would be a second line.
        warnings.simplefilter("error")
        line = refusal(tmp_path)
    assert f"{len(bad)} of the {2 + len(bad)} numbers of 'bad'" in line


def test_the_largest_numbers_are_finite(tmp_path):
    largest = np.finfo(np.float32).max
    write_folder(tmp_path, "safetensors", {"x": np.full(1000, largest, np.float32)})
    assert (read_all(tmp_path)["x"] == largest).all()


# --- Pickles that want something else


class Marked:
    """Makes a file when a pickle of it is run."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def dumps(function, *arguments, protocol=2):
    return pickle.dumps({"x": Marked(function, *arguments)}, protocol)


# t, then t = (t, t) as often as wanted: 30 times, written out, would be a billion words.
def nested(times):
    return b"()q\x00" + b"h\x00h\x00\x86q\x00" * times + b"t"


# {"x": <what is put here>}
def item(program):
    return b"\x80\x02}X\x01\x00\x00\x00x" + program + b"s."


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE = {
    "os.system": (lambda mark: dumps(os.system, f"touch {mark}"), "system"),
    "os.system, protocol 4": (
        lambda mark: dumps(os.system, f"touch {mark}", protocol=4),
        "posix.system",
    ),
    "builtins.eval": (
        lambda mark: dumps(eval, f"open({str(mark)!r}, 'w')", protocol=4),
        "builtins.eval",
    ),
    "builtins.eval, protocol 2": (
        lambda mark: dumps(eval, f"open({str(mark)!r}, 'w')"),
        "__builtin__.eval",
    ),
    "pathlib.Path": (lambda mark: b"\x80\x02cpathlib\nPath\n.", "pathlib.Path"),
    "something innocent": (lambda mark: b"\x80\x02ccollections\nCounter\n.", "collections.Counter"),
    "of torch": (lambda mark: b"\x80\x02ctorch\nload\n.", "torch.load"),
    "a dotted name": (
        lambda mark: b"\x80\x04" + short("torch") + short("os.system") + b"\x93.",
        "torch.os.system",
    ),
    "a known name cut elsewhere": (
        lambda mark: b"\x80\x04" + short("torch._utils _rebuild_tensor_v2") + short("") + b"\x93.",
        "_rebuild_tensor_v2",
    ),
    "INST": (lambda mark: b"(X\x01\x00\x00\x00xios\nsystem\n.", "INST"),
    "OBJ": (lambda mark: b"\x80\x02(ctorch._utils\n_rebuild_tensor_v2\no.", "OBJ"),
    "NEWOBJ": (lambda mark: b"\x80\x02ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
    "EXT1": (lambda mark: b"\x80\x02\x82\x01.", "EXT1"),
    "PERSID": (lambda mark: b"\x80\x02Pstorage\n.", "PERSID"),
    "a list": (lambda mark: b"\x80\x02].", "EMPTY_LIST"),
    "BUILD on a function": (lambda mark: item(REBUILT + b"}b"), "no dict"),
    "BUILD on a class": (lambda mark: item(b"ccollections\nOrderedDict\n}b"), "no dict"),
    "an argument for OrderedDict": (
        lambda mark: item(b"ccollections\nOrderedDict\n}\x85R"),
        "collections.OrderedDict",
    ),
    "a call of a string": (lambda mark: item(b"X\x01\x00\x00\x00x)R"), "no function"),
    "a call with no tuple": (lambda mark: item(REBUILT + b"}R"), "no function"),
    "a call of a storage": (lambda mark: item(b"ctorch\nFloatStorage\n)R"), "torch.FloatStorage"),
    "a tensor of nothing": (lambda mark: item(REBUILT + b")R"), "storage"),
    "a parameter of nothing": (
        lambda mark: item(b"ctorch._utils\n_rebuild_parameter\n)R"),
        "_rebuild_parameter",
    ),
    "a nested tuple as a key": (lambda mark: b"\x80\x02}" + nested(60) + b"Ns.", "key"),
    "a nested tuple as a value": (lambda mark: item(nested(60)), "dict of tensors"),
    "a nested tuple alone": (lambda mark: b"\x80\x02" + nested(60) + b".", "dict of tensors"),
    "a nested tuple as a storage": (lambda mark: item(nested(60) + b"Q"), "storage"),
    "a nested tuple as a shape": (
        lambda mark: item(REBUILT + b"(" + nested(60) + b"h\x00h\x00h\x00tR"),
        "storage",
    ),
    # No more than 2**20 of them: with 60, an error would be the machine's.
    "a nested tuple as a module": (
        lambda mark: b"\x80\x04" + nested(20) + short("x") + b"\x93.",
        "",
    ),
    "a nested tuple as a name": (
        lambda mark: b"\x80\x04" + short("os") + nested(20) + b"\x93.",
        "",
    ),
    "a number as a module": (lambda mark: b"\x80\x04K\x01" + short("x") + b"\x93.", ""),
    "a line break in a name": (
        lambda mark: b"\x80\x04" + short("os") + short("a\nb") + b"\x93.",
        "",
    ),
    "a mark as the result": (lambda mark: b"\x80\x02(.", "dict of tensors"),
    "a mark in a tuple": (lambda mark: item(b"(\x85"), "dict of tensors"),
    "nothing": (lambda mark: b"", ""),
    "no end": (lambda mark: b"\x80\x02}", ""),
    "an empty stack": (lambda mark: b"\x80\x02.", ""),
    "a memo that is not there": (lambda mark: b"\x80\x02h\x07.", ""),
    "items without a mark": (lambda mark: b"\x80\x02}u.", ""),
    "no tensors": (lambda mark: b"\x80\x02}X\x01\x00\x00\x00xK\x01s.", "dict of tensors"),
    "a training checkpoint": (
        lambda mark: b"\x80\x02}X\x0a\x00\x00\x00state_dict}s.",
        "state_dict alone",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pickle_that_wants_more_than_tensors_is_refused_and_runs_nothing(case, tmp_path):
    program, words = HOSTILE[case]
    mark = tmp_path / "mark"
    write_archive(tmp_path / BIN, program(mark), [])
    began = time.monotonic()
    line = refusal(tmp_path)
    assert time.monotonic() - began < 1
    assert BIN in line and words in line
    assert not mark.exists()


def test_the_hostile_pickles_are_hostile(tmp_path):
    """Unpickling them does what is asked."""
    for case in ("os.system", "builtins.eval"):
        mark = tmp_path / case
        pickle.loads(HOSTILE[case][0](mark))
        assert mark.exists()


def damaged_tensors():
    """Trees of tensors that no file holds."""
    good = storage(np.ones(6, np.float32))
    huge = 2**62
    yield "beyond its storage", Tensor(good, 0, (7,), (1,))
    yield "an offset beyond its storage", Tensor(good, 5, (2,), (1,))
    yield "a stride beyond its storage", Tensor(good, 0, (2, 3), (4, 1))
    yield "an absurd shape", Tensor(good, 0, (huge, huge), (1, 1))
    yield "an absurd shape of one number", Tensor(good, 0, (huge,), (0,))
    yield "numbers repeated", Tensor(good, 0, (1000, 1000, 1000), (0, 0, 0))
    yield "numbers repeated a little", Tensor(good, 0, (7, 1), (0, 1))
    yield "a negative stride", Tensor(good, 5, (6,), (-1,))
    yield "a negative offset", Tensor(good, -1, (2,), (1,))
    yield "a negative shape", Tensor(good, 0, (-2, -3), (1, 1))
    yield "a shape that is no tuple", Tensor(good, 0, "6", (1,))
    yield "a shape of strings", Tensor(good, 0, ("6",), (1,))
    yield "a shape of booleans", Tensor(good, 0, (True,), (1,))
    yield "more strides than axes", Tensor(good, 0, (6,), (1, 1))
    yield "too many axes", Tensor(good, 0, (1,) * 100, (1,) * 100)
    yield "a storage that is larger", Tensor(storage(np.ones(6, np.float32), 7), 0, (7,), (1,))
    yield "a storage that is smaller", Tensor(storage(np.ones(6, np.float32), 5), 0, (5,), (1,))
    yield (
        "a storage of gigabytes",
        Tensor(storage(np.ones(6, np.float32), huge), 0, (2,), (huge // 2,)),
    )
    yield "a storage of negative size", Tensor(storage(np.ones(6, np.float32), -6), 0, (6,), (1,))
    # Nothing to read, and a place that no machine counts.
    yield "an absurd shape of nothing", Tensor(good, 0, (0, huge, huge), (1, 1, 1))
    yield "an absurd stride", Tensor(good, 0, (1,), (10**30,))
    yield "an absurd stride in bytes", Tensor(good, 0, (1,), (huge,))
    yield "an absurd stride of nothing", Tensor(good, 0, (0, 3), (10**30, 1))


@contextlib.contextmanager
def little_memory(num_bytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("case", "bad"), list(damaged_tensors()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(case, bad, tmp_path):
    write_bin(tmp_path / BIN, {"x": bad})
    with little_memory(2**22):
        try:
            read_all(tmp_path)
        except UserError as error:
            assert BIN in str(error) and "\n" not in str(error)
        else:
            # A stride along an axis of one or no number leads nowhere.
            assert "absurd stride" in case


# --- Archives that are not what they should be


def good():
    return {"x": np.ones(6, np.float32), "y": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." * 3, b"x" * 5000]
)
def test_what_is_no_archive_is_refused(data, tmp_path):
    (tmp_path / BIN).write_bytes(data)
    assert "no zip archive" in refusal(tmp_path)


def test_compressed_numbers_are_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()), compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(tmp_path)


def test_a_compressed_description_is_refused(tmp_path):
    """Of a few bytes it may become gigabytes of objects."""
    program, storages = pickled(state_dict(good()))
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", program, zipfile.ZIP_DEFLATED)
        for key, data in enumerate(storages):
            archive.writestr(f"m/data/{key}", data)
    assert "compressed" in refusal(tmp_path)


def test_a_small_file_stays_small_in_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + b"}" * 2**17, zipfile.ZIP_DEFLATED)
    size = (tmp_path / BIN).stat().st_size
    with little_memory(2**20 + 100 * size):
        refusal(tmp_path)


def test_a_description_larger_than_any_is_refused_before_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + b"0" * 2**27, zipfile.ZIP_DEFLATED)
    with little_memory(2**22):
        refusal(tmp_path)


def test_another_checksum_is_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()))
    data = (tmp_path / BIN).read_bytes()
    numbers = np.arange(4, dtype=np.float32).tobytes()
    changed = np.array([0, 1, 2, 4], np.float32).tobytes()
    assert data.count(numbers) == 1
    (tmp_path / BIN).write_bytes(data.replace(numbers, changed))
    assert "'y' have another checksum" in refusal(tmp_path)


@pytest.mark.parametrize("method", range(1, 100))
def test_any_way_of_compressing_the_description_is_refused(method, tmp_path):
    """Of bytes that are not compressed that way, for a library to fail on."""
    write_bin(tmp_path / BIN, state_dict(good()))
    data = bytearray((tmp_path / BIN).read_bytes())
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(signature) + place] = method
    (tmp_path / BIN).write_bytes(data)
    refusal(tmp_path)


def test_a_tensor_that_is_not_what_its_storage_holds_is_refused(tmp_path):
    """PyTorch saves `x.conj().imag` as the numbers and a note that they are negated."""
    values = storage(np.ones(3, np.float32))
    write_bin(tmp_path / BIN, {"x": Tensor(values, 0, (3,), (1,), more=({"neg": True},))})
    refusal(tmp_path)


def test_big_endian_numbers_are_refused(tmp_path):
    write_bin(tmp_path / BIN, state_dict(good()), order=b"big")
    assert "little-endian" in refusal(tmp_path)


def test_members_that_are_missing_or_twice_are_refused(tmp_path):
    program, storages = pickled(state_dict(good()))
    write_archive(tmp_path / BIN, program, storages[:1])
    assert "the numbers of 'y' are missing" in refusal(tmp_path)
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/other", program)
    assert "data.pkl" in refusal(tmp_path)
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("m/data.pkl", program)
        archive.writestr("n/data.pkl", program)
    assert "data.pkl" in refusal(tmp_path)


def test_a_storage_has_one_type(tmp_path):
    """Two persistent ids of one member: each says how its own tensor is read."""
    values = np.arange(6, dtype=np.float32)
    program, storages = pickled({"x": tensor(values), "y": tensor(values.view(np.float16))})
    # The second storage under the first one's key; the sizes in bytes agree.
    key = b"X\x01\x00\x00\x00"
    write_archive(tmp_path / BIN, program.replace(key + b"1", key + b"0"), storages[:1])
    found = read_all(tmp_path)
    assert_same(found, {"x": values, "y": values.view(np.float16)})


# --- Safetensors that are not what they should be


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
def test_safetensors_that_make_no_sense_are_refused(case, tmp_path):
    write_header(tmp_path / SAFE, **SAFETENSORS[case])
    if case == "an empty file":
        (tmp_path / SAFE).write_bytes(b"")
    began = time.monotonic()
    assert SAFE in refusal(tmp_path)
    assert time.monotonic() - began < 2


def test_the_safetensors_here_would_be_whole(tmp_path):
    write_header(tmp_path / SAFE, {"x": FOUR, "y": entry("F32", [2, 2], 16, 32)}, ONES * 2)
    assert_same(read_all(tmp_path), {"x": np.ones(4), "y": np.ones((2, 2))})


def test_a_line_break_in_a_tensors_name_makes_no_second_line(tmp_path):
    values = {"a\nerror: b": np.ones(2)}
    for form in FORMS:
        folder = tmp_path / form
        write_folder(folder, form, values)
        refusal(folder)


# --- Indices


def indexed(folder, change):
    """Writes two shards and the index that `change` makes of theirs."""
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
def test_an_index_that_leads_elsewhere_is_refused(case, tmp_path):
    change, words = INDICES[case]
    # What a way up would find.
    write_safetensors(tmp_path / ONE, good())
    indexed(tmp_path / "model", change)
    assert words in refusal(tmp_path / "model")


def test_an_index_that_forgets_a_tensor_is_refused(tmp_path):
    write_index(tmp_path, SAFE, [good() | {"z": np.ones(2)}], write_safetensors)
    path = tmp_path / f"{SAFE}.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["z"]
    path.write_text(json.dumps(index))
    assert "does not know that 'z' is in" in refusal(tmp_path)


def test_an_index_that_is_no_text_or_huge_is_refused(tmp_path):
    path = tmp_path / f"{SAFE}.index.json"
    path.write_bytes(b"\xff\xfe{}")
    assert path.name in refusal(tmp_path)
    with open(path, "wb") as file:
        file.truncate(2**40)
    assert path.name in refusal(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path):
    line = refusal(tmp_path)
    assert SAFE in line and BIN in line
    (tmp_path / SAFE).mkdir()
    assert SAFE in refusal(tmp_path)


# --- Damage


def flips(rng, data, places):
    """1 to 4 bytes of the places changed."""
    changed = bytearray(data)
    for place in rng.choice(places, size=rng.integers(1, 5)):
        changed[place] ^= int(rng.integers(1, 256))
    return bytes(changed)


def damages(rng, data, head, count):
    """Half of the flips in the places of `head`; a fifth of all are truncations."""
    everywhere = np.arange(len(data))
    for number in range(count):
        if number % 5 == 4:
            yield data[: rng.integers(len(data))]
        else:
            yield flips(rng, data, head if number % 2 else everywhere)


def opened(folder):
    """The tensors, or None for a refusal, whose tensor is not known."""
    try:
        return read_all(folder)
    except UserError as error:
        line = str(error)
        assert "\n" not in line and str(folder) in line, line
        return None


@pytest.fixture
def bounded():
    """Ends a test that hangs; asserts that it took little memory."""

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
    # In KiB; what no Python object holds, too.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


def small():
    rng = np.random.default_rng(1)
    return {
        "encoder.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "encoder.bias": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "norm": rng.normal(size=6).astype(np.float16),
    }


@pytest.mark.parametrize("form", ["bin", "sharded bin"])
def test_a_damaged_archive_is_refused_or_the_same(form, bounded, tmp_path):
    """Every byte that says anything has a checksum, or something else that it has to agree with."""
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
            assert_same(found, values)
    assert 400 < refused < 800


def test_a_damaged_number_in_an_archive_is_always_seen(bounded, tmp_path):
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


def test_a_damaged_pickle_with_a_right_checksum_is_refused_or_tensors(bounded, tmp_path):
    """What a hostile hand could do: the archive is whole, its program is anything."""
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


def test_damaged_safetensors_are_refused_or_arrays(bounded, tmp_path):
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
            # Only numbers have changed.
            assert found.keys() == values.keys()
    assert 300 < refused < 800


def test_a_damaged_number_in_safetensors_changes_no_other_tensor(bounded, tmp_path):
    """The format has no checksum: the numbers themselves may be others."""
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
        assert_same(others, {other: values[other] for other in others})
        with contextlib.suppress(UserError):
            assert weights.read(name).shape == values[name].shape


@pytest.mark.parametrize("form", ["sharded safetensors", "sharded bin"])
def test_a_damaged_index_is_refused_or_the_same(form, bounded, tmp_path):
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
            assert_same(found, values)
    assert 150 < refused < 300


def test_pickle_files_are_opened_alone_too(golden):
    file = PickleFile(golden / "ae_k4" / BIN)
    assert file.read("encoder.norm.weight").shape == (32,)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "has no weights" in refusal(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert "has no weights" in refusal(tmp_path)


def test_a_pickle_that_only_stacks_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_STACKED", 1000)
    with pytest.raises(reader._Refused, match="stacks more"):
        reader._Machine().run(b"\x80\x02" + b"}" * 2000 + b".")


def test_a_name_that_is_asked_for_is_cut_to_a_line():
    program = b"\x80\x02c" + b"a" * 10**6 + b"\nb\n."
    with pytest.raises(reader._Refused) as refused:
        reader._Machine().run(program)
    assert len(str(refused.value)) < 300
