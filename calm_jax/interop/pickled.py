"""Reads the tensors of a `pytorch_model.bin`, and nothing else, without PyTorch and without unpickling.

The file is a zip archive: a pickle that describes a dict of tensors, and the raw numbers of each storage in
a member of its own. A pickle is a program; this module runs the few instructions that a dict of tensors needs on
a machine that has no way to look up or call anything else, and refuses every other one by name.
"""

import dataclasses
import math
import pathlib
import pickletools
import struct
import zipfile
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from calm_jax.errors import UserError

_DTYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# The only names that a pickle of tensors has to ask for.
_REBUILD = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_ORDERED_DICT = "collections OrderedDict"
_KNOWN = _REBUILD | {_ORDERED_DICT} | {f"torch {name}" for name in _DTYPES}
# More than any model's description of tensors; their numbers are elsewhere.
_MOST_PICKLE_BYTES = 2**26
_MOST_AXES = 8
# Pickles hand over dicts in groups of a thousand.
_MOST_STACKED = 2**17


class _Refused(Exception):
    """What is wrong with the pickle; the caller knows the file."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """Something that the pickle asked for by module and name: never looked up, only compared."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    """A member of the archive as `size` numbers."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class PickledTensor:
    """A tensor's place: `offset` and `strides` count numbers of its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Where a tuple or a group of items begins on the stack."""


def _is_size(x: Any) -> bool:
    return type(x) is int and x >= 0


def _tensor(arguments: tuple) -> PickledTensor:
    """`_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks[, metadata])`."""
    if len(arguments) < 4 or not isinstance(arguments[0], _Storage):
        raise _Refused("a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    # Metadata says that the tensor is not its numbers, but their negatives or conjugates.
    if any(arguments[6:]):
        raise _Refused("a tensor with metadata, which nothing here heeds")
    is_sane = (
        _is_size(offset)
        and isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides) <= _MOST_AXES
        and all(map(_is_size, shape + strides))
    )
    if not is_sane:
        raise _Refused("a tensor without a sane shape")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    # Numbers that are repeated (stride 0) would make more of a file than it holds.
    if math.prod(shape) > storage.size or (0 not in shape and last >= storage.size):
        raise _Refused(f"a tensor of shape {shape} that reaches beyond its storage")
    if 0 in shape and math.prod(n for n in shape if n) > 2**40:
        raise _Refused(f"a tensor of shape {shape}")
    # Along an axis of one the stride means nothing, and may be anything.
    strides = tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
    return PickledTensor(storage, offset, shape, strides)


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Named) or not isinstance(arguments, tuple):
        raise _Refused("a call of something that is no function")
    if function.name == _ORDERED_DICT and not arguments:
        return {}
    if function.name == "torch._utils _rebuild_tensor_v2":
        return _tensor(arguments)
    is_parameter = function.name == "torch._utils _rebuild_parameter"
    if is_parameter and arguments and isinstance(arguments[0], PickledTensor):
        return arguments[0]
    raise _Refused(f"a call of {_dotted(function.name)} with unknown arguments")


def _storage(identity: Any) -> _Storage:
    """The persistent id `("storage", kind, member, device, size)`."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise _Refused("a persistent id that is no storage")
    _, kind, key, _, size = identity
    name = kind.name.removeprefix("torch ") if isinstance(kind, _Named) else ""
    if name not in _DTYPES or not isinstance(key, str) or not _is_size(size):
        raise _Refused("a storage of an unknown kind")
    return _Storage(key, _DTYPES[name], size)


def _dotted(name: str) -> str:
    """A name that may hold anything, as a line can show it."""
    return repr(name[:200].replace(" ", "."))[1:-1]


def _global(name: str) -> _Named:
    if name not in _KNOWN:
        raise _Refused(f"the pickle asks for {_dotted(name)}, which no tensor needs")
    return _Named(name)


class _Machine:
    """Runs a pickle of tensors: a stack, a memo, and no way to the outside."""

    def __init__(self):
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._do(opcode.name, argument)
            if len(self._stack) > _MOST_STACKED:
                raise _Refused("the pickle stacks more than any description of tensors")
        raise _Refused("the pickle has no end")

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[place], _Mark):
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise _Refused("the pickle is malformed")

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused("items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Strings alone: hashing a tuple of tuples of tuples may take forever.
            if not isinstance(key, str):
                raise _Refused("a key that is no string")
            target[key] = value

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_Mark())
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE" | "NONE":
                stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(name[-1])
                if len(stack) < size:
                    raise _Refused("the pickle is malformed")
                items = tuple(stack[-size:])
                stack[-size:] = [items]
            case "TUPLE":
                items = tuple(self._since_mark())
                stack.append(items)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_global(argument))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise _Refused("a name that is no string")
                stack.append(_global(f"{module} {name}"))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._since_mark())
            case "BUILD":
                # A state dict's `_metadata`, which describes no tensor.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise _Refused("a state of something that is no dict")
            case _:
                raise _Refused(f"the pickle has the instruction {name}, which no tensor needs")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """A small member, which PyTorch never compresses."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _Refused(f"{info.filename!r} is compressed")
    if info.file_size > most:
        raise _Refused(f"{info.filename!r} is larger than any description of tensors")
    return archive.read(info)


def _described(program: bytes) -> dict:
    tree = _Machine().run(program)
    if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict):
        raise _Refused("it is a training checkpoint; save its state_dict alone")
    if not isinstance(tree, dict) or not all(isinstance(x, PickledTensor) for x in tree.values()):
        raise _Refused("it holds something else than a dict of tensors")
    return tree


def _data_start(path: pathlib.Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: after its local header, whose lengths may differ from the directory's."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, name_length, extra_length = struct.unpack("<4s22xHH", file.read(30))
    if signature != b"PK\x03\x04":
        raise _Refused(f"{info.filename!r} is not where the archive says")
    return info.header_offset + 30 + name_length + extra_length


class PickleFile:
    """The tensors of one file: `tensors` by name, `read` for the numbers of one."""

    def __init__(self, path: pathlib.Path):
        """Raises `UserError` for everything but a whole archive of tensors."""
        self._path = path
        try:
            with _refusals(path), open(path, "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise _Refused(
                        "no zip archive: truncated, or saved by PyTorch before 1.6, which has to save it again"
                    )
                with zipfile.ZipFile(file) as archive:
                    self._read_directory(archive)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error})") from error

    def _read_directory(self, archive: zipfile.ZipFile) -> None:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _Refused("the archive has no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        members = {info.filename: info for info in archive.infolist()}
        order = members.get(f"{folder}byteorder")
        if order is not None and _read_member(archive, order, 16) != b"little":
            raise _Refused("its numbers are not little-endian")
        self.tensors: dict[str, PickledTensor] = _described(
            _read_member(archive, members[pickles[0]], _MOST_PICKLE_BYTES)
        )
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._checked: set[str] = set()
        for name, tensor in self.tensors.items():
            storage = tensor.storage
            info = members.get(f"{folder}data/{storage.key}")
            if info is None:
                raise _Refused(f"the numbers of {name!r} are missing")
            if info.compress_type != zipfile.ZIP_STORED:
                raise _Refused(f"the numbers of {name!r} are compressed")
            if info.file_size != storage.size * storage.dtype.itemsize:
                raise _Refused(
                    f"the numbers of {name!r} take {info.file_size} bytes, not {storage.size} of {storage.dtype}"
                )
            self._members[storage.key] = info

    def read(self, name: str) -> np.ndarray:
        """One tensor, copied out of the file, whose pages are let go."""
        tensor = self.tensors[name]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, tensor.storage.dtype)
        storage, info = tensor.storage, self._members[tensor.storage.key]
        try:
            with _refusals(self._path):
                start = _data_start(self._path, info)
                pages = np.memmap(self._path, np.uint8, "r", start, (info.file_size,))
                if storage.key not in self._checked and zlib.crc32(pages) != info.CRC:
                    raise _Refused(f"the numbers of {name!r} have another checksum than was saved")
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error})") from error
        self._checked.add(storage.key)
        numbers = np.frombuffer(pages, storage.dtype)[tensor.offset :]
        strides = [stride * storage.dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides).copy()


class _refusals:
    """What the file does wrong, as one line that names it."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _) -> None:
        # What the parsers of zip archives and pickles raise for bytes that make no sense.
        malformed = (zipfile.BadZipFile, struct.error, ValueError, IndexError, KeyError, TypeError)
        malformed += (EOFError, NotImplementedError, RuntimeError, OverflowError, MemoryError)
        if isinstance(error, _Refused):
            raise UserError(f"{self._path} is refused: {error}") from error
        if isinstance(error, malformed):
            reason = str(error).split("\n")[0] or type(error).__name__
            raise UserError(f"{self._path} is damaged ({reason})") from error
