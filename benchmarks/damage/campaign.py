"""The campaign: cases of damage for each reader, in processes that are bounded in time and memory."""

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.damage import damages
from benchmarks.damage.readers import NO_FILES, READERS, Reader, Refusal
from calm_jax.errors import UserError

# Bounds of a case, in seconds and in bytes. A case usually takes a second; a busy machine needs the generous bound.
_MOST_SECONDS = 60.0
_MOST_MEMORY = 2**32
# The longest line of error, in characters, and the number of lines of a traceback that are kept.
_LONGEST = 1600
_LINES_OF_ERROR = 12
# The file with everything that readers print, and words in it that mean that an error was printed instead of raised.
_LOG, _OF_ERRORS = "log.txt", ("Traceback", "never retrieved")


@dataclasses.dataclass(frozen=True)
class Case:
    """The outcome of a case.

    Attributes:
      reader, number: the name of the case: its reader, and its number among the reader's cases.
      kind: the kind of the damage.
      file: the damaged file.
      outcome: "right", "other" for another result without an error, "refused", or a fault.
      detail: the message of a refusal, or a description of a fault.
      seconds: the time that the case took.
    """

    reader: str
    number: int
    kind: str
    file: str
    outcome: str
    detail: str
    seconds: float


GOOD = ("right", "other", "refused")


def _tree(folder: pathlib.Path, *without: pathlib.Path) -> dict[str, str]:
    """Every file and folder of a folder with a hash of its content, but those inside the folders `without`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else "no file"
        for path in sorted(folder.rglob("*"))
        if not any(path.is_relative_to(other) for other in without)
    }


def _changes(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """What was written or deleted between two calls of `_tree`."""
    names = sorted(before.keys() | now.keys())
    return {name: now.get(name, "deleted") for name in names if before.get(name) != now.get(name)}


def _plan(
    reader: Reader, name: str, number: int, intact: pathlib.Path, seed: int
) -> tuple[pathlib.Path, str, random.Random]:
    """The file and the kind of damage of a case, and the generator of its random numbers."""
    chance = random.Random(f"{seed} {name} {number}")
    files = sorted(
        path.relative_to(intact) for path in intact.glob(reader.damaged) if path.is_file()
    )
    kinds = [*damages.OF_BYTES]
    if name not in NO_FILES:
        kinds += [kind for kind in damages.OF_FILES if kind not in reader.without]
    return chance.choice(files), chance.choice(kinds), chance


def _read(reader: Reader, folder: pathlib.Path) -> tuple[str, Any]:
    """The outcome of reading, and the result or the reason."""
    try:
        return "result", reader.read(folder)
    except (UserError, Refusal) as error:
        line = str(error)
        if "\n" in line or len(line) > _LONGEST or not line:
            return "not one line", line[:3000]
        return "refused", line
    except BaseException as error:
        where = traceback.format_exc().splitlines()[-_LINES_OF_ERROR:]
        return type(error).__name__, "\n".join(where)


class _Cases:
    """Runs the cases of one reader, on a copy of its intact input.

    No case may write anything, except into the copy if the reader `writes`. The copy lies so deep in the reader's folder that damaged paths that leave it still end in the
    reader's folder, which is watched. The working folder and the folder of temporary files are watched as well.
    """

    def __init__(self, name: str, root: pathlib.Path, seed: int):
        self._name, self._reader, self._seed = name, READERS[name], seed
        self._root = root / name.replace(" ", "_")
        self._intact = self._root / "intact"
        inner = self._root.joinpath(*["inner"] * (damages.MOST_UP - 1))
        self._folder, self._outside = inner / "case", inner / "outside"
        self._shown = 0
        if not self._intact.exists():
            unfinished = self._root / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self._reader.write(unfinished)
            unfinished.rename(self._intact)
        # A case that ended its process may have left files.
        for one in self._root.iterdir():
            if one != self._intact:
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        self._outside.mkdir(parents=True)
        self._renew()
        self._whole, self._elsewhere = _tree(self._folder), self._tree_elsewhere()
        os.chdir(self._outside)
        os.environ["TMPDIR"], tempfile.tempdir = str(self._outside), None
        outcome, self._right = _read(self._reader, self._folder)
        if outcome != "result":
            raise RuntimeError(f"{name}: the intact input is not read: {outcome}: {self._right}")
        # A second reading, now that everything is compiled and imported, must give the same result.
        if self._reader.writes:
            self._renew()
        _, again = _read(self._reader, self._folder)
        if self._reader.writes:
            self._renew()
        if again != self._right:
            raise RuntimeError(f"{name}: the intact input is read differently the second time")
        if written := self._written():
            raise RuntimeError(f"{name}: reading the intact input writes {written}")
        self._log = root / _LOG
        self._printed()
        self._bound_memory()

    def _renew(self) -> None:
        """Makes the case's folder anew, a copy of the intact one."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._intact, self._folder)

    def _tree_elsewhere(self) -> dict[str, str]:
        return _tree(self._root, self._intact, self._folder)

    def _written(self) -> dict[str, str]:
        """What was written or deleted outside the case's folder, or if there is nothing, inside."""
        outside = _changes(self._elsewhere, self._tree_elsewhere())
        return outside or _changes(self._whole, _tree(self._folder))

    @staticmethod
    def _bound_memory() -> None:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def _printed(self) -> str:
        """The output of this process since the last call; threads of a library may print after the end of their case."""
        sys.stderr.flush()
        with open(self._log, "rb") as log:
            log.seek(self._shown)
            text = log.read()
        self._shown += len(text)
        return text.decode("utf-8", "replace")

    def run(self, number: int) -> Case:
        file, kind, chance = _plan(self._reader, self._name, number, self._intact, self._seed)
        path, original = self._folder / file, (self._intact / file).read_bytes()
        if kind in damages.OF_BYTES:
            path.write_bytes(damages.OF_BYTES[kind](original, chance))
        else:
            others = [one for one in sorted(self._intact.rglob("*")) if one.is_file()]
            damages.replace(path, kind, others, chance)
        began = time.monotonic()
        outcome, found = _read(self._reader, self._folder)
        seconds = time.monotonic() - began
        if outcome == "result":
            same = found == self._right
            outcome = "right" if same else "wrong result" if self._reader.is_checked else "other"
            found = "" if same else repr(found)[:300]
        printed = self._printed()
        if outcome in GOOD and any(words in printed for words in _OF_ERRORS):
            outcome, found = "an error is printed", printed[-1000:]
        if self._reader.writes:
            self._renew()
        else:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.write_bytes(original)
        if written := self._written():
            outcome, found = "something was written", str(written)
            self._renew()
            for one in sorted(self._tree_elsewhere().keys() - self._elsewhere, reverse=True):
                new = self._root / one
                new.rmdir() if new.is_dir() and not new.is_symlink() else new.unlink()
        return Case(self._name, number, kind, str(file), outcome, str(found), round(seconds, 3))


def _child(name: str, root: pathlib.Path, seed: int, numbers: list[int], pipe: int) -> None:
    """Runs cases in this process, and writes a line for each. Never returns."""
    with open(root / _LOG, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = 1
    try:
        cases = _Cases(name, root, seed)
        os.write(pipe, b"ready\n")
        for number in numbers:
            os.write(pipe, json.dumps(dataclasses.asdict(cases.run(number))).encode() + b"\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _lines(pipe: int, process: int) -> Iterator[bytes | None]:
    """Yields the lines that a child process writes. A child that takes too long for a line is killed, and None is yielded last."""
    pending = b""
    # The child compiles before its first line.
    bound = 10 * _MOST_SECONDS
    while True:
        ready, _, _ = select.select([pipe], [], [], bound)
        part = os.read(pipe, 2**16) if ready else b""
        if not ready:
            os.kill(process, signal.SIGKILL)
            yield None
            return
        if not part:
            return
        pending += part
        *whole, pending = pending.split(b"\n")
        for line in whole:
            yield line
            bound = _MOST_SECONDS


def run(name: str, root: pathlib.Path, seed: int, numbers: list[int]) -> Iterator[Case]:
    """Yields a `Case` for each number. If a case ends the process or hangs, the remaining cases run in a new process."""
    root.mkdir(parents=True, exist_ok=True)
    # The first value takes a while, and hypothesis keeps a table in its own folder: before the fork, for all child processes.
    damages.json_value(random.Random(0))
    todo = list(numbers)
    while todo:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            _child(name, root, seed, todo, writing)
        os.close(writing)
        is_ready, late = False, False
        for line in _lines(reading, process):
            if line is None:
                late = True
            elif not is_ready:
                is_ready = True
            else:
                yield Case(**json.loads(line))
                del todo[0]
        os.close(reading)
        _, status = os.waitpid(process, 0)
        if not is_ready:
            raise UserError(f"{name}: the intact input cannot be read: see {root / _LOG}")
        if todo:
            reader, intact = READERS[name], root / name.replace(" ", "_") / "intact"
            file, kind, _ = _plan(reader, name, todo[0], intact, seed)
            outcome = "hangs" if late else "ends the process"
            yield Case(name, todo[0], kind, str(file), outcome, f"status {status}", 0.0)
            del todo[0]


def numbers_of(names: list[str], times: int) -> dict[str, int]:
    """How many of `times` cases each reader gets, by its share."""
    total = sum(READERS[name].share for name in names)
    return {name: max(1, round(times * READERS[name].share / total)) for name in names}
