"""Fuzzing with damaged input: does every reader give the right result or one clear line of error?

    python -m benchmarks.damage --folder=DIR [--times=10000] [--seed=0] [--readers=pickles,requests,...]

A case damages one file of a reader's intact input: bytes flip, parts are cut, repeated or exchanged, numbers become huge or NaN,
JSON gets other values or a hundred thousand levels, archives get members with paths outside the folder, or a folder, a pipe, an
endless device or a file of 64 GiB takes the file's place. Then the reader must give a result, or refuse in one line, in bounded
time and memory; if the input has checksums, any result but the intact input's is a fault. Nothing may be executed or written.

DIR gets the intact input and cases.jsonl, a line for each case; the same command resumes from there (a changed program needs a new
DIR). With the same DIR, `--case=READER:NUMBER` repeats a case and shows its whole error.
"""

import collections
import dataclasses
import json
import pathlib

import rich.table
from absl import app, flags

from benchmarks.campaigns import check_seed
from benchmarks.damage.campaign import GOOD, Case, numbers_of, run
from benchmarks.damage.readers import READERS
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError

_FOLDER = flags.DEFINE_string("folder", "", "folder for cases and results")
_TIMES = flags.DEFINE_integer("times", 10_000, "cases, over all readers", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of all damage")
_READERS = flags.DEFINE_list("readers", list(READERS), "readers to give damaged input to")
_CASE = flags.DEFINE_string("case", "", "repeat this one, READER:NUMBER, and show its whole error")


def _show(cases: list[Case]) -> None:
    for title, key in (("damage, by reader", "reader"), ("damage, by kind", "kind")):
        table = rich.table.Table(
            key, "times", "right", "other result", "refused", "faults", "slowest", title=title
        )
        groups = collections.defaultdict(list)
        for case in cases:
            groups[getattr(case, key)].append(case)
        for name, some in groups.items():
            counts = collections.Counter(case.outcome for case in some)
            faults = sum(count for outcome, count in counts.items() if outcome not in GOOD)
            slowest = max(case.seconds for case in some)
            cells = (len(some), *(counts[outcome] for outcome in GOOD), faults)
            table.add_row(name, *map(str, cells), f"{slowest:.1f} s")
        progress.console().print(table)
    for case in cases:
        if case.outcome not in GOOD:
            print(
                f"--case={case.reader}:{case.number} ({case.kind} of {case.file}): {case.outcome}: {case.detail}"
            )


def _read_cases(path: pathlib.Path) -> list[Case]:
    """The cases in a file; an empty list if there is none. Raises `UserError` for a line that is none, such as a cut one."""
    if not path.exists():
        return []
    cases = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        try:
            cases.append(Case(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: line {number} is no case: delete the line, and the case runs again"
            ) from error
    return cases


@command
def main(argv: list[str]) -> int:
    root = given_folder(_FOLDER, "a folder for cases and results").absolute()
    names = _READERS.value
    one, _, number = _CASE.value.rpartition(":")
    for name in [one] if _CASE.value else names:
        if name not in READERS:
            raise UserError(f"{name!r} is no reader: there are {', '.join(READERS)}")
    if _CASE.value and not (number.isascii() and number.isdecimal()):
        raise UserError(f"--case={_CASE.value} must be READER:NUMBER, such as {one}:0")
    check_seed(root, _SEED.value)
    if _CASE.value:
        for case in run(one, root, _SEED.value, [int(number)]):
            print(f"{case.kind} of {case.file}: {case.outcome}\n{case.detail}")
        return 0
    path = root / "cases.jsonl"
    cases = _read_cases(path)
    done = {(case.reader, case.number) for case in cases}
    with open(path, "a", buffering=1) as lines:
        for name, times in numbers_of(names, _TIMES.value).items():
            todo = [number for number in range(times) if (name, number) not in done]
            for case in run(name, root, _SEED.value, todo):
                cases.append(case)
                lines.write(json.dumps(dataclasses.asdict(case)) + "\n")
            bad = sum(case.outcome not in GOOD for case in cases if case.reader == name)
            print(f"{name}: {times} cases, {bad} faults", flush=True)
    _show(cases)
    return int(any(case.outcome not in GOOD for case in cases))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
