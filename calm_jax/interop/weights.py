"""Reads the tensors of a published checkpoint folder by name, from any of the formats that Hugging Face writes.

In order of preference: `model.safetensors`, shards of it with an index, `pytorch_model.bin`, shards of that. A tensor
is read only when it is asked for, and its file's pages are released afterwards.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from calm_jax.cli import files
from calm_jax.errors import UserError, installation
from calm_jax.interop.pickled import PickleFile

# The dtypes that convert to float32 without loss.
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


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor, known before its numbers are read."""

    shape: tuple[int, ...]
    dtype: np.dtype


class _File(Protocol):
    """One weight file: its tensors by name, and `read` for the numbers of one in the file's dtype."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray: ...


def is_file(path: pathlib.Path) -> bool:
    """Whether `path` is a regular file. False for a pipe, which might never end, and for impossible file names."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_json(path: pathlib.Path) -> Any:
    """The JSON value in a file. Raises `UserError` if the file is missing, huge or malformed."""
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error


class _SafetensorsFile:
    """One safetensors file. It is opened anew for each tensor, which releases the pages of the previous tensor."""

    def __init__(self, path: pathlib.Path):
        try:
            import safetensors
        except ImportError as error:
            raise UserError(
                f"reading published checkpoints needs safetensors: {installation('interop')}"
            ) from error
        self._path, self._library = path, safetensors
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with self._open() as file:
                for name in file.keys():  # noqa: SIM118 (safe_open's object is no mapping)
                    described = file.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(described.get_dtype())
                    if dtype is None:
                        raise UserError(
                            f"{path}: {name!r} is of type {described.get_dtype()}, which no published checkpoint has"
                        )
                    shape = tuple(described.get_shape())
                    self.tensors[name] = TensorInfo(shape, np.dtype(dtype))
        except (OSError, ValueError, MemoryError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error

    def _open(self) -> Any:
        return self._library.safe_open(self._path, framework="numpy")

    def read(self, name: str) -> np.ndarray:
        try:
            with self._open() as file:
                return file.get_tensor(name)
        except (
            OSError,
            ValueError,
            TypeError,
            MemoryError,
            self._library.SafetensorError,
        ) as error:
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


_FORMATS: tuple[tuple[str, Callable[[pathlib.Path], _File]], ...] = (
    ("model.safetensors", _SafetensorsFile),
    ("pytorch_model.bin", _PickledFile),
)


class Weights:
    """All tensors of a checkpoint folder, in one file or in shards.

    Attributes:
      folder: the checkpoint folder.
      tensors: shape and dtype of each tensor, by its name in the file.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the descriptions of all tensors.

        Raises:
          UserError: if the folder has no weights, or a file or an index is damaged or incomplete.
        """
        self.folder = folder
        self._file_of: dict[str, _File] = {}
        for name, open_file in _FORMATS:
            index = folder / f"{name}.index.json"
            if is_file(folder / name):
                file = open_file(folder / name)
                self._file_of = dict.fromkeys(file.tensors, file)
                break
            if is_file(index):
                self._read_index(index, open_file)
                break
        else:
            raise UserError(
                f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index of shards of them"
            )
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }

    def _read_index(self, path: pathlib.Path, open_file: Callable[[pathlib.Path], _File]) -> None:
        """Opens the shards of an index, and checks that index and shards list the same tensors."""
        index = read_json(path)
        shard_of = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
            raise UserError(f"{path} has no weight_map from tensors to files")
        shards: dict[str, _File] = {}
        for file in sorted(set(shard_of.values())):
            # A shard lies beside its index: any other path could read files outside the folder.
            if file in ("", ".", "..") or len(file) > 255 or any(x in file for x in "/\\\0:"):
                raise UserError(f"{path} is refused: {file!r} is not the name of a file beside it")
            if not is_file(path.parent / file):
                raise UserError(f"{path} names the shard {file!r}, which does not exist")
            shards[file] = open_file(path.parent / file)
        for file, shard in shards.items():
            for name in shard.tensors:
                if shard_of.get(name) != file:
                    raise UserError(
                        f"{path} does not list {name!r} in {file!r}, which has it: index and shards do not belong together"
                    )
        for name, file in shard_of.items():
            if name not in shards[file].tensors:
                raise UserError(f"{path} lists {name!r} in {file!r}, which does not have it")
            self._file_of[name] = shards[file]

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32.

        Raises:
          UserError: if the file cannot be read, its dtype is not one of `FLOATS`, or a number is not finite.
        """
        dtype = self.tensors[name].dtype
        if dtype not in FLOATS:
            raise UserError(
                f"{self.folder}: {name!r} is of type {dtype}, not float32, float16 or bfloat16"
            )
        value = self._file_of[name].read(name).astype(np.float32, copy=False)
        # The sum of float32 numbers in float64 cannot overflow: it is finite exactly when every number is.
        with np.errstate(invalid="ignore"):
            total = value.sum(dtype=np.float64)
        if not np.isfinite(total):
            bad = int(value.size - np.isfinite(value).sum())
            raise UserError(
                f"{self.folder}: {bad} of the {value.size} numbers of {name!r} are not finite: the file is damaged, or the training diverged"
            )
        return value
