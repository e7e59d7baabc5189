"""The tensors of a published checkpoint folder by name, whichever of three formats they are in.

`model.safetensors`, shards of it with an index, and `pytorch_model.bin` (or shards of that), in this order. A
tensor is read when it is asked for, and nothing of its file stays in memory.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from calm_jax.errors import UserError
from calm_jax.interop.pickled import PickleFile

# What becomes a float32 parameter without loss.
FLOATS = {np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}
_SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
# Far above any config or index, far below what would fill the memory.
_MOST_JSON_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


class _File(Protocol):
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray: ...


def is_file(path: pathlib.Path) -> bool:
    """Whether there is a regular file; not a pipe, which might never end, and not a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_json(path: pathlib.Path) -> Any:
    """The JSON of a file; raises `UserError` if it is missing, huge or malformed."""
    if not is_file(path):
        raise UserError(f"{path} cannot be read: there is no such file")
    try:
        size = path.stat().st_size
        if size > _MOST_JSON_BYTES:
            raise UserError(f"{path} is refused: {size} bytes are no description of a model")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error


class _SafetensorsFile:
    """One safetensors file. It is opened anew for each tensor, which lets go of the pages of the last."""

    def __init__(self, path: pathlib.Path):
        try:
            import safetensors
        except ImportError as error:
            raise UserError(
                "reading published checkpoints needs safetensors: pip install 'calm_jax[interop]'"
            ) from error
        self._path, self._library = path, safetensors
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with self._open() as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    described = file.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(described.get_dtype())
                    if dtype is None:
                        raise UserError(
                            f"{path}: {name!r} is of type {described.get_dtype()}, which no published checkpoint has"
                        )
                    shape = tuple(described.get_shape())
                    self.tensors[name] = TensorInfo(shape, np.dtype(dtype))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error

    def _open(self):
        return self._library.safe_open(self._path, framework="numpy")

    def read(self, name: str) -> np.ndarray:
        try:
            with self._open() as file:
                return file.get_tensor(name)
        except (OSError, ValueError, TypeError, self._library.SafetensorError) as error:
            raise UserError(f"{self._path}: {name!r} cannot be read ({error})") from error


class _PickledFile:
    """One `pytorch_model.bin`."""

    def __init__(self, path: pathlib.Path):
        self._file = PickleFile(path)
        self.tensors = {
            name: TensorInfo(tensor.shape, tensor.storage.dtype)
            for name, tensor in self._file.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._file.read(name)


class Weights:
    """The tensors of a folder: `tensors` says which there are, `read` gives one as float32."""

    def __init__(self, folder: pathlib.Path):
        """Raises `UserError` if there are none, or the files are not whole."""
        self.folder = folder
        self._file_of: dict[str, _File] = {}
        for name, kind in (
            ("model.safetensors", _SafetensorsFile),
            ("pytorch_model.bin", _PickledFile),
        ):
            index = folder / f"{name}.index.json"
            if is_file(folder / name):
                file = kind(folder / name)
                self._file_of = dict.fromkeys(file.tensors, file)
                break
            if is_file(index):
                self._read_index(index, kind)
                break
        else:
            raise UserError(
                f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index of shards of them"
            )
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }

    def _read_index(self, path: pathlib.Path, kind: type[_File]) -> None:
        index = read_json(path)
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict) or not all(isinstance(x, str) for x in where.values()):
            raise UserError(f"{path} has no weight_map from tensors to files")
        files: dict[str, _File] = {}
        for file in sorted(set(where.values())):
            # A shard lies beside its index; anything else is a way out of the folder.
            if file in ("", ".", "..") or len(file) > 255 or any(x in file for x in "/\\\0:"):
                raise UserError(f"{path} is refused: {file!r} is no name of a file beside it")
            if not is_file(path.parent / file):
                raise UserError(f"{path} names the shard {file!r}, which is not there")
            files[file] = kind(path.parent / file)
        for file, shard in files.items():
            for name in shard.tensors:
                if where.get(name) != file:
                    raise UserError(
                        f"{path} does not know that {name!r} is in {file!r}: index and shards do not belong together"
                    )
        for name, file in where.items():
            if name not in files[file].tensors:
                raise UserError(f"{path} looks for {name!r} in {file!r}, which does not have it")
            self._file_of[name] = files[file]

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32. Raises `UserError` if its numbers are not finite, or float32 could not hold them."""
        dtype = self.tensors[name].dtype
        if dtype not in FLOATS:
            raise UserError(
                f"{self.folder}: {name!r} is of type {dtype}, not float32, float16 or bfloat16"
            )
        value = self._file_of[name].read(name).astype(np.float32, copy=False)
        # Of float32 numbers, a sum in float64 is finite exactly when all of them are.
        with np.errstate(invalid="ignore"):
            total = value.sum(dtype=np.float64)
        if not np.isfinite(total):
            bad = int(value.size - np.isfinite(value).sum())
            raise UserError(
                f"{self.folder}: {bad} of the {value.size} numbers of {name!r} are not finite: the file is damaged, or the training diverged"
            )
        return value
