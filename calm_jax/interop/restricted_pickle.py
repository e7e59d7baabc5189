"""Interprets the pickle of a dict of PyTorch tensors, without unpickling.

A pickle is a program that can call any function. The interpreter here (`_Machine`) knows only the instructions and the
names that a dict of tensors needs, imports and calls nothing, and refuses every other instruction and name.
"""

import dataclasses
import math
import pickletools
from typing import Any

import ml_dtypes
import numpy as np

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
# The only names that a pickle of tensors refers to, as "module name".
_REBUILD = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_ORDERED_DICT = "collections OrderedDict"
_KNOWN = _REBUILD | {_ORDERED_DICT} | {f"torch {name}" for name in _DTYPES}
_MOST_AXES = 8
# Python's pickler writes dicts in groups of a thousand items, so that an honest pickle needs a much smaller stack.
_MOST_STACKED = 2**17


class Refused(Exception):
    """Says why a file is refused. Whoever catches it adds the file's name."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """A global that the pickle refers to, as "module name". The name is compared and never imported."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    """A storage: the archive's member `key`, read as `size` numbers of `dtype`."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class PickledTensor:
    """Where a tensor lies in its storage; `offset` and `strides` count numbers, not bytes."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Marks the start of a tuple or a group of items on the stack."""


def _is_size(x: Any) -> bool:
    return type(x) is int and x >= 0


def _tensor(arguments: tuple) -> PickledTensor:
    """`_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks[, metadata])`."""
    if len(arguments) < 4 or not isinstance(arguments[0], _Storage):
        raise Refused("a tensor has no storage")
    storage, offset, shape, strides = arguments[:4]
    # Metadata can say that the tensor is the negative or the conjugate of the stored numbers.
    if any(arguments[6:]):
        raise Refused("a tensor has metadata, which is not supported")
    is_sane = (
        _is_size(offset)
        and isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides) <= _MOST_AXES
        and all(map(_is_size, shape + strides))
    )
    if not is_sane:
        raise Refused("the offset, shape or strides of a tensor are malformed")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    # The first test also refuses tensors that repeat numbers (stride 0): a small file could fill the memory.
    if math.prod(shape) > storage.size or (0 not in shape and last >= storage.size):
        raise Refused(f"a tensor of shape {shape} reaches beyond its storage")
    if 0 in shape and math.prod(n for n in shape if n) > 2**40:
        raise Refused(f"a tensor has the absurd shape {shape}")
    # The stride of an axis of length 1 has no effect, and files may have any number there.
    strides = tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
    return PickledTensor(storage, offset, shape, strides)


def _call(function: Any, arguments: Any) -> Any:
    """The result of calling one of the known functions with `arguments`."""
    if not isinstance(function, _Named) or not isinstance(arguments, tuple):
        raise Refused("the pickle calls something that is no function")
    if function.name == _ORDERED_DICT and not arguments:
        return {}
    if function.name == "torch._utils _rebuild_tensor_v2":
        return _tensor(arguments)
    is_parameter = function.name == "torch._utils _rebuild_parameter"
    if is_parameter and arguments and isinstance(arguments[0], PickledTensor):
        return arguments[0]
    raise Refused(f"the pickle calls {_dotted(function.name)} with unknown arguments")


def _storage(identity: Any) -> _Storage:
    """The storage of a persistent id `("storage", kind, member, device, size)`."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise Refused("a persistent id is no storage")
    _, kind, key, _, size = identity
    name = kind.name.removeprefix("torch ") if isinstance(kind, _Named) else ""
    if name not in _DTYPES or not isinstance(key, str) or not _is_size(size):
        raise Refused("a storage is of an unknown kind")
    return _Storage(key, _DTYPES[name], size)


def _dotted(name: str) -> str:
    """A "module name" from the file as `module.name`, cut and escaped so that it fits in one line."""
    return repr(name[:200].replace(" ", "."))[1:-1]


def _global(name: str) -> _Named:
    """The reference to a known name. Raises `Refused` for any other name."""
    if name not in _KNOWN:
        raise Refused(f"the pickle refers to {_dotted(name)}, which no tensor needs")
    return _Named(name)


class _Machine:
    """Interprets the pickle of a dict of tensors; its stack and memo are its only state."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """The object that the pickle describes. Raises `Refused` for instructions and names that no tensor needs."""
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._do(opcode.name, argument)
            if len(self._stack) > _MOST_STACKED:
                raise Refused("the pickle stacks more objects than any dict of tensors needs")
        raise Refused("the pickle has no STOP instruction")

    def _pop_to_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[place], _Mark):
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise Refused("the pickle is malformed")

    def _set(self, items: list[Any]) -> None:
        """Adds `[key, value, key, value, ...]` to the dict on top of the stack."""
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise Refused("the pickle sets items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only strings: hashing a deeply nested tuple takes exponential time.
            if not isinstance(key, str):
                raise Refused("a key of a dict is no string")
            target[key] = value

    def _do(self, name: str, argument: Any) -> None:
        """Executes one instruction."""
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
                    raise Refused("the pickle is malformed")
                items = tuple(stack[-size:])
                stack[-size:] = [items]
            case "TUPLE":
                items = tuple(self._pop_to_mark())
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
                    raise Refused("the pickle refers to a name that is no string")
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
                self._set(self._pop_to_mark())
            case "BUILD":
                # The `_metadata` attribute of a state dict, which holds no tensor, is dropped.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise Refused("the pickle sets the state of something that is no dict")
            case _:
                raise Refused(f"the pickle has the instruction {name}, which no tensor needs")


def state_dict(program: bytes) -> dict[str, PickledTensor]:
    """The tensors that a pickle describes, by name. Raises `Refused` for a pickle of anything else."""
    tree = _Machine().run(program)
    if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict):
        raise Refused("the file is a training checkpoint: save its state_dict alone")
    if not isinstance(tree, dict) or not all(isinstance(x, PickledTensor) for x in tree.values()):
        raise Refused("the pickle is not a dict of tensors")
    return tree
