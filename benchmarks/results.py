"""The JSON files of `python -m benchmarks`: written by --output, read by --compare."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.table

from benchmarks.measure import Record
from calm_jax.cli import progress
from calm_jax.cli.files import nan_to_none, write_atomically
from calm_jax.config import differences as differing_leaves
from calm_jax.errors import UserError

# Facts that may explain a difference; the date and the commit always differ.
_FACTS = ("python", "jax", "jaxlib", "cpu", "cores", "device", "compilation_cache")


def write(path: pathlib.Path, about: dict[str, Any], results: Sequence[Record]) -> None:
    """Writes what was measured; numbers that are not known are null. Raises `UserError` if that is impossible."""
    write_atomically(path, json.dumps(nan_to_none(about | {"results": results}), indent=2) + "\n")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `write` wrote. Raises `UserError` for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(one["suite"] and one["case"] and one["ms"] > 0 for one in found["results"]):
            raise ValueError("a time is not positive")
    except OSError as error:
        raise UserError(f"--compare={path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--compare={path} is no file that --output of this command wrote ({error!r})"
        ) from error
    return found


def ratios(new: Sequence[Record], old: Sequence[Record]) -> dict[str, dict[str, float]]:
    """For each case of both: "speed", new / old, above 1 is faster; "memory", new / old of the peak, where both have one."""
    before = {(one["suite"], one["case"]): one for one in old}
    found = {}
    for one in new:
        earlier = before.get((one["suite"], one["case"]))
        if earlier is not None:
            row = {"speed": earlier["ms"] / one["ms"]}
            if one.get("rss_mb") and earlier.get("rss_mb"):
                row["memory"] = one["rss_mb"] / earlier["rss_mb"]
            found[one["case"]] = row
    return found


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """The differences between two files, except date and commit: the machine, versions, and keys of recipe and options."""
    ours, theirs = (
        {name: one.get(name) for name in _FACTS}
        | {name: one.get(name) or {} for name in ("config", "options")}
        for one in (new, old)
    )
    return [f"{key}: {before} -> {now}" for key, now, before in differing_leaves(ours, theirs)]


def print_ratios(new: dict[str, Any], old: dict[str, Any], path: pathlib.Path) -> None:
    """Prints a line for each case of both files, and what may explain differences. Raises `UserError` if they share no case."""
    rows = ratios(new["results"], old["results"])
    if not rows:
        raise UserError(f"--compare={path} has none of the cases that were measured")
    print(f"compared with {path}, commit {old.get('commit')}, {old.get('date')}")
    for line in differences(new, old):
        print(f"  differs: {line}")
    table = rich.table.Table()
    table.add_column("case", no_wrap=True)
    for heading in ("speed, new / old", "peak memory, new / old"):
        table.add_column(heading, justify="right")
    for case, row in rows.items():
        table.add_row(
            case, f"{row['speed']:.3f}", f"{row['memory']:.3f}" if "memory" in row else ""
        )
    progress.console().print(table, highlight=False)
