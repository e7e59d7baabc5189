"""Reads the tensors of a `pytorch_model.bin` safely: without PyTorch and without unpickling.

The file is a zip archive with one pickle, which describes a dict of tensors (restricted_pickle.py), and one member of
raw numbers for each storage.
"""

import contextlib
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np

from calm_jax.errors import UserError, reason_of
from calm_jax.interop.restricted_pickle import PickledTensor, Refused, state_dict

# Larger than the pickle of any model: the tensors' numbers are in other members.
_MOST_PICKLE_BYTES = 2**26


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of a member. Raises `Refused` if it has more than `most` bytes or is compressed; PyTorch never compresses."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise Refused(f"{info.filename!r} is compressed")
    if info.file_size > most:
        raise Refused(f"{info.filename!r} has {info.file_size} bytes, which is more than {most}")
    return archive.read(info)


def _data_start(path: pathlib.Path, info: zipfile.ZipInfo) -> int:
    """The position of a stored member's first byte in the file.

    The local header in front of it is read, as the lengths in it may differ from those in the archive's directory.
    """
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, name_length, extra_length = struct.unpack("<4s22xHH", file.read(30))
    if signature != b"PK\x03\x04":
        raise Refused(f"{info.filename!r} is not where the archive's directory says")
    return info.header_offset + 30 + name_length + extra_length


# The exceptions that the parsers of zip archives and pickles raise for malformed bytes.
_MALFORMED = (
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    MemoryError,
)


@contextlib.contextmanager
def _refusals(path: pathlib.Path) -> Iterator[None]:
    """Turns the errors of reading `path` into a one-line `UserError` that names the file."""
    try:
        yield
    except Refused as error:
        raise UserError(f"{path} is refused: {error}") from error
    except _MALFORMED as error:
        raise UserError(f"{path} is damaged ({reason_of(error)})") from error


class PickleFile:
    """The tensors of one `pytorch_model.bin`.

    Attributes:
      tensors: where each tensor lies, by name.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the descriptions of all tensors.

        Raises:
          UserError: if the file is damaged, holds anything but a dict of tensors, or its pickle does anything else.
        """
        self._path = path
        try:
            with _refusals(path), open(path, "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise Refused(
                        "it is no zip archive: truncated, or saved by PyTorch before 1.6; load and save it with a newer PyTorch"
                    )
                with zipfile.ZipFile(file) as archive:
                    self._read_directory(archive)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error})") from error

    def _read_directory(self, archive: zipfile.ZipFile) -> None:
        """Reads the pickle and checks that each tensor's storage is a member of the right size."""
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused(f"the archive has {len(pickles)} data.pkl, not one")
        folder = pickles[0].removesuffix("data.pkl")
        members = {info.filename: info for info in archive.infolist()}
        order = members.get(f"{folder}byteorder")
        if order is not None and _read_member(archive, order, 16) != b"little":
            raise Refused("its numbers are not little-endian")
        self.tensors: dict[str, PickledTensor] = state_dict(
            _read_member(archive, members[pickles[0]], _MOST_PICKLE_BYTES)
        )
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._checked: set[str] = set()
        for name, tensor in self.tensors.items():
            storage = tensor.storage
            info = members.get(f"{folder}data/{storage.key}")
            if info is None:
                raise Refused(f"the numbers of {name!r} are missing")
            if info.compress_type != zipfile.ZIP_STORED:
                raise Refused(f"the numbers of {name!r} are compressed")
            if info.file_size != storage.size * storage.dtype.itemsize:
                raise Refused(
                    f"the numbers of {name!r} take {info.file_size} bytes, not {storage.size} of {storage.dtype}"
                )
            self._members[storage.key] = info

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, in the dtype of its storage; the file's pages are released.

        Raises:
          UserError: if the file cannot be read or the storage's checksum is wrong.
        """
        tensor = self.tensors[name]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, tensor.storage.dtype)
        storage, info = tensor.storage, self._members[tensor.storage.key]
        try:
            with _refusals(self._path):
                start = _data_start(self._path, info)
                pages = np.memmap(self._path, np.uint8, "r", start, (info.file_size,))
                if storage.key not in self._checked and zlib.crc32(pages.data) != info.CRC:
                    raise Refused(f"the numbers of {name!r} do not have the saved checksum")
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error})") from error
        self._checked.add(storage.key)
        numbers = np.frombuffer(pages, storage.dtype)[tensor.offset :]
        strides = [stride * storage.dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides).copy()
