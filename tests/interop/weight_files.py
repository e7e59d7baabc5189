"""Writes weight files for tests: `pytorch_model.bin` as PyTorch does but without it, safetensors, and shards with an index."""

import collections
import dataclasses
import io
import json
import pickle
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import safetensors.numpy

KINDS = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


BIN, SAFE = "pytorch_model.bin", "model.safetensors"


@dataclasses.dataclass(frozen=True, eq=False)
class Global:
    """A global that a pickle refers to by name, without importing it."""

    module: str
    name: str

    def __call__(self):
        raise AssertionError("a pickle is only written")


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


PARAMETER = Global("torch._utils", "_rebuild_parameter")


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """The numbers of a storage, and their count as the pickle states it."""

    values: np.ndarray
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A view of a storage; `more` are further arguments of torch's `_rebuild_tensor_v2`, such as metadata."""

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
    """A tensor with its own storage, with the strides of the array."""
    array = np.asarray(array)
    # Axes in the order of the memory.
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Tensor(storage(array.transpose(order)), 0, array.shape, strides, is_parameter)


class Pickler(pickle._Pickler):
    """A pickler that writes `Global`s; in Python, because the C pickler imports the names that it writes."""

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
    """The bytes of data.pkl, and the bytes of each storage."""
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
    """Tensors as `module.state_dict()` returns them: an OrderedDict with `_metadata`."""
    tree = collections.OrderedDict((name, tensor(array)) for name, array in arrays.items())
    tree._metadata = collections.OrderedDict({"": {"version": 1}, "encoder": {"version": 1}})
    return tree


def halves(values):
    """Two dicts, each with every other item."""
    names = list(values)
    return [{name: values[name] for name in part} for part in (names[::2], names[1::2])]


def write_index(folder, whole, parts, write):
    """Writes `parts` as shards with an index, with Hugging Face's file names; `whole` is the name of the unsharded file."""
    stem, ending = whole.split(".")
    where = {}
    for number, part in enumerate(parts):
        file = f"{stem}-{number + 1:05}-of-{len(parts):05}.{ending}"
        write(folder / file, part)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{whole}.index.json").write_text(json.dumps(index))


def write_safetensors(path, values):
    # save_file writes the memory as it is, also that of transposed arrays.
    safetensors.numpy.save_file({k: np.array(v, order="C") for k, v in values.items()}, path)


def write_folder(folder, form, values):
    """Writes weights in one of `FORMS`."""
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


def assert_little_memory(num_bytes, read):
    """Asserts that a call of `read` allocates less than this.

    tracemalloc counts the allocations of all threads, also of those that an earlier test has left behind, so the least of three calls counts.
    """
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            read()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < num_bytes, peaks
