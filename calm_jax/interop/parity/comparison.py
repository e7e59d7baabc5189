"""Compares every recorded case of a folder with this implementation's results, and prints the errors."""

import dataclasses
import io
import pathlib
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
import rich.table
from jax.typing import ArrayLike

from calm_jax.cli import progress
from calm_jax.cli.files import read_file
from calm_jax.errors import UserError, reason_of, typed_reason_of
from calm_jax.interop.parity import cases
from calm_jax.interop.parity.recorded import Arrays, Comparisons, Missing, MissingArray

# Largest error of float32 results, relative to the largest absolute value of the quantity, also for gradients.
TOLERANCE = 1e-4

# Largest total size of the arrays of a case, in bytes.
_MOST_ARRAY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared quantity.

    Attributes:
      case: name of the npz file.
      quantity: name of the quantity.
      absolute: largest absolute error of its elements.
      relative: absolute error divided by the largest absolute value of the published array.
    """

    case: str
    quantity: str
    absolute: float
    relative: float

    @property
    def passed(self) -> bool:
        return self.relative <= TOLERANCE  # False for NaN.


def compare(case: str, quantity: str, ours: ArrayLike, published: ArrayLike) -> Row:
    """Compares one quantity. The error is infinite if shapes differ, or if integers or booleans (tokens) differ."""
    ours, published = np.asarray(ours), np.asarray(published)
    if ours.shape != published.shape:
        return Row(case, quantity, np.inf, np.inf)
    if not ours.size:
        # Empty arrays agree with everything, so that nothing was compared.
        return Row(case, quantity, np.inf, np.inf)
    absolute = float(np.abs(ours.astype(np.float64) - published.astype(np.float64)).max())
    if published.dtype.kind in "iub":
        return Row(case, quantity, absolute, np.inf if absolute else 0.0)
    if absolute == 0:
        return Row(case, quantity, 0.0, 0.0)
    # If the published array is all zeros, only zeros agree with it.
    scale = float(np.abs(published).max())
    return Row(case, quantity, absolute, absolute / scale if scale else np.inf)


def _cases(folder: pathlib.Path) -> Iterator[tuple[str, Callable[..., Comparisons] | None]]:
    """The name of each case of a folder, and the function that compares it; None for an unknown case."""
    for file in sorted(folder.glob("*.npz")):
        known = [run for pattern, run in cases.CASES.items() if re.fullmatch(pattern, file.stem)]
        yield file.stem, known[0] if known else None


def _compared(folder: pathlib.Path, case: str, run: Callable[..., Comparisons]) -> Iterator[Row]:
    """A row for each quantity of a case; a failed row where damage or a missing array keeps quantities from being compared."""
    file = folder / f"{case}.npz"
    try:
        with np.load(io.BytesIO(read_file(file))) as golden:
            # The arrays of a small compressed file could fill the memory.
            if sum(member.file_size for member in golden.zip.infolist()) > _MOST_ARRAY_BYTES:
                raise ValueError(f"its arrays have more than {_MOST_ARRAY_BYTES >> 20} MiB")
            arrays = Arrays({name: golden[name] for name in golden.files})
    except Exception as error:  # of many kinds, by the place of the damage in an archive
        yield _failed(case, f"{file} cannot be read ({reason_of(error)})")
        return
    try:
        for quantity, ours, published in run(folder / case, arrays):
            if isinstance(published, Missing):
                yield _failed(case, f"{file} has no array {published.name!r}")
            else:
                yield compare(case, quantity, ours, published)
    except MissingArray as error:
        yield _failed(
            case, f"the remaining quantities need the array {str(error)!r}, which {file} lacks"
        )
    except UserError as error:
        yield _failed(case, str(error))
    except Exception as error:
        # An array of another shape or type may end a computation anywhere, with a message that quotes it.
        reason = typed_reason_of(error)
        yield _failed(case, f"the remaining quantities cannot be computed ({reason})")


def _failed(case: str, reason: str) -> Row:
    return Row(case, reason, np.inf, np.inf)


def verify(folder: pathlib.Path) -> tuple[list[Row], list[str]]:
    """Compares every case of a folder.

    Returns:
      One row for each quantity, and the names of the cases that this version does not know. A quantity that
      cannot be compared, because a file is damaged or lacks an array, is a failed row that says so.

    Raises:
      UserError: if there is no case that this version knows.
    """
    rows: list[Row] = []
    found = dict(_cases(folder))
    unknown = [case for case, run in found.items() if run is None]
    if not found:
        raise UserError(f"{folder} holds no golden case (*.npz)")
    if len(unknown) == len(found):
        raise UserError(f"{folder} holds no golden case that is known; it has {unknown[0]}.npz")
    with jax.default_matmul_precision("highest"):
        for case, run in found.items():
            if run is not None:
                compared = list(_compared(folder, case, run))
                rows += compared or [_failed(case, "nothing was compared")]
    return rows, unknown


def worst_of_kind(rows: list[Row]) -> list[Row]:
    """The rows, where the gradients of each case are reduced to the one with the largest relative error."""
    kept: dict[tuple[str, str], Row] = {}
    for row in rows:
        kind = re.sub(r"^gradient .*", "gradients", row.quantity)
        key = (row.case, kind)
        # NaN counts as larger than any other error.
        known = kept[key].relative if key in kept else -np.inf
        if not np.isnan(known) and not row.relative <= known:
            kept[key] = dataclasses.replace(row, quantity=kind)
    return list(kept.values())


def print_table(rows: list[Row], unknown: list[str]) -> None:
    """Prints the rows and the names of unknown cases."""
    table = rich.table.Table()
    table.add_column("case", no_wrap=True)
    table.add_column("quantity", overflow="fold")
    table.add_column("absolute", justify="right")
    table.add_column("relative", justify="right")
    table.add_column("")
    for row in rows:
        verdict = "pass" if row.passed else "FAIL"
        table.add_row(row.case, row.quantity, f"{row.absolute:.1e}", f"{row.relative:.1e}", verdict)

    console = progress.console()
    console.print(table)
    if unknown:
        console.print(f"unknown cases, not compared: {', '.join(unknown)}")
