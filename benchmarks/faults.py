"""Fault injection: do commands that are killed, stopped, started twice or lose unsynced data end as undisturbed ones do?

    python -m benchmarks.faults --folder=DIR [--times=10] [--seed=0] [--jobs=train,prepare,...] [--faults=kill,two,...]

A trial starts a command on a tiny recipe, injects the fault after a random part of its CPU time (which other load of the machine
hardly changes; the clock is set back after a random part of its seconds), and repeats the same command until it ends with status 0. Its files must then hold what the undisturbed command
wrote: all checksums of parameters and optimizer, metrics, samples and scores, or the very bytes; and no other file may be left
beside them. If a line of error offers a command to go on with, the trial runs it. DIR gets trials.jsonl, one line for each trial;
the same command resumes from there (a changed program needs a new DIR). The table counts trials whose fault hit, which means that
the command was still running, that its disk was full, or that its clock was set back; trials that recovered; and trials that
lost something, of which there must be none.

Faults: `kill`, `term` and `int` are SIGKILL, SIGTERM and SIGINT, which go to any one process of a job that has more than one;
`stop` is SIGSTOP for 1, 10 or 40 seconds; `orphan` kills the command's parent; `two` starts the command a second time while it runs;
`cut`, a power cut, is SIGKILL to all processes, after which every file loses a random part of the bytes that were not synced yet; `full` is a disk that is
full at a random byte, `readonly` one that cannot be written (both are a tmpfs, which root alone can mount); `clock` sets the clock
back by a day; `source` kills the command and repeats it with a text file that has changed or is gone. Faults that have no meaning
for a job are left out: a server writes no files, and only training and preparation read text again that they began with.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import rich.table
from absl import app, flags

from benchmarks import ROOT
from benchmarks.campaigns import WORDS, check_seed, hashes, working_children
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.files import local_path, write_atomically
from calm_jax.cli.flags import parse_flags
from calm_jax.errors import UserError
from calm_jax.parallel import compilation_cache

_FOLDER = flags.DEFINE_string("folder", "", "folder for runs and results")
_TIMES = flags.DEFINE_integer("times", 10, "trials of each job and fault", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the texts and of the times of faults")

# A command that takes longer counts as hanging.
_MOST_SECONDS = 900
# Seconds within which a command that is about to end has ended, also on a busy machine.
_ABOUT_TO_END = 5
# The largest number of calls until a disturbed command must have ended with status 0.
_MOST_CALLS = 4
# The seconds for which a command may be stopped; Dask and the processes of a training wait for each other that long.
_STOPS = (1, 10, 40)
# A file that takes the last page of a disk that is to be full, and the bytes of a page.
_BALLAST, _PAGE = "ballast", 4096
_TIMING = {
    "seconds",
    "time",
    "tokens_per_second",
    "training_seconds",
    "chunk_seconds",
    "mfu",
    "peak_memory_bytes",
}


def _untimed(value: Any) -> Any:
    """A copy of nested JSON values without times, rates and memory."""
    if isinstance(value, dict):
        return {key: _untimed(one) for key, one in value.items() if key not in _TIMING}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


def _lines(path: pathlib.Path) -> list:
    return [_untimed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _of_run(folder: pathlib.Path) -> dict[str, Any]:
    """The parts of a workdir that a disturbed run must have in common with an undisturbed one, such as checkpoints' checksums."""
    found: dict[str, Any] = {}
    for stage in ("autoencoder", "lm"):
        steps = sorted(int(path.name) for path in (folder / stage).iterdir() if path.name.isdigit())
        about = json.loads((folder / stage / str(steps[-1]) / "about" / "metadata").read_text())
        # The steps of earlier checkpoints are not compared: the one before the last may have been saved at a signal.
        found[stage] = [steps[-1], len(steps), about["checksums"]]
    # No unfinished or temporary file may be left. Damaged checkpoints were moved away, as a line of error said.
    names = [path.name for one in ("", *found) for path in (folder / one).iterdir()]
    found["files"] = sorted(
        name for name in names if not (name.isdigit() or name.endswith(".damaged"))
    )
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if (folder / name).exists():
            found[name] = _lines(folder / name)
    # An interrupted command may have written its evaluation twice, which is no loss.
    if "evaluations.jsonl" in found:
        found["evaluations.jsonl"] = found["evaluations.jsonl"][-1]
    for name in ("results.json", "config.json"):
        if (folder / name).exists():
            found[name] = _untimed(json.loads((folder / name).read_text()))
    if (folder / "samples.txt").exists():
        found["samples.txt"] = (folder / "samples.txt").read_text()
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that is disturbed.

    Attributes:
      arguments: a function that returns the arguments of `python -m` for the path of the output.
      outcome: a function that returns the content of the output at a path, as JSON values that are compared.
      source: the job whose output is copied as the output before the command starts; empty for no such copy.
      victims: the processes, one of which gets a signal: the command "itself", its "children", "all" of these, or its "peers", which
        are children that end together, and the command with their status.
      text: the folder of the command's text.
      without: faults that have no meaning for the command.
    """

    arguments: Callable[[pathlib.Path], list[str]]
    outcome: Callable[[pathlib.Path], Any]
    source: str = ""
    victims: str = "itself"
    text: str = "text"
    without: tuple[str, ...] = ("source",)


def _jobs(folder: pathlib.Path) -> dict[str, Job]:
    recipe = f"--config=tests/tiny_recipe.py:{folder}/text/*.txt"
    often = [f"--config.{stage}.training.checkpoint_every=2" for stage in ("autoencoder", "lm")]
    trained = folder / "reference" / "train"
    text = [f"--input={folder}/records/*.jsonl", "--tokenizer=bytes", "--deduplicate"]
    exported = folder / "reference" / "export"
    return {
        "train": Job(
            lambda out: ["calm_jax.main", recipe, *often, f"--workdir={out}"],
            _of_run,
            without=(),
        ),
        "pair": Job(
            lambda out: [
                *["benchmarks.several", "two", "calm_jax.main", recipe, *often],
                *["--connect_seconds=100", f"--workdir={out}"],
            ],
            _of_run,
            victims="peers",
            without=(),
        ),
        "finetune": Job(
            lambda out: [
                *["calm_jax.main", recipe, *often, f"--workdir={out}", "--config.stage=lm"],
                f"--config.init_from={trained}",
            ],
            _of_run,
            without=(),
        ),
        "serve": Job(
            lambda out: ["benchmarks.several", "asked", str(trained), str(out)],
            _lines,
            victims="children",
            without=("two", "cut", "full", "readonly", "source"),
        ),
        "evaluate": Job(
            lambda out: ["calm_jax.main", "--mode=eval", f"--config=configs/workdir.py:{out}"],
            _of_run,
            "train",
        ),
        "generate": Job(
            lambda out: [
                *["calm_jax.generate", f"--workdir={trained}", "--max_tokens=16", "--overwrite"],
                *["--prompt=def ", "--prompt=class ", f"--output={out}"],
            ],
            _lines,
        ),
        "prepare": Job(
            lambda out: [
                *["calm_jax.data.prepare", *text, "--shard_characters=600000", "--workers=2"],
                f"--output={out}",
            ],
            hashes,
            victims="all",
            text="records",
            without=(),
        ),
        "convert": Job(
            lambda out: [
                *["calm_jax.interop.convert", f"--source={exported}", "--tokenizer=bytes"],
                f"--workdir={out}",
            ],
            _of_run,
        ),
        "export": Job(
            lambda out: [
                *["calm_jax.interop.export", f"--workdir={trained}", "--ae_path=autoencoder"],
                f"--target={out}",
            ],
            hashes,
        ),
    }


FAULTS = (
    *("kill", "term", "int", "stop", "orphan", "two", "cut"),
    *("full", "readonly", "clock", "source"),
)
# Faults that do not kill the command: it runs until it ends by itself.
_TO_AN_END = ("full", "readonly", "clock")
_JOBS = flags.DEFINE_list(
    "jobs",
    ["train", "pair", "finetune", "evaluate", "generate", "serve", "prepare", "convert", "export"],
    "commands to disturb",
)
_FAULTS = flags.DEFINE_list("faults", list(FAULTS), f"what to do to them, of {', '.join(FAULTS)}")


@dataclasses.dataclass
class Disturbance:
    """What a fault met.

    Attributes:
      has_hit: whether the command was still running, its disk was full or read-only, or its clock was set back.
      victim: the process that got a signal, see `_role`; empty for other faults.
      status: the exit status of the command, negative for the number of a signal.
      changed: the exit status of the command with the changed text; None for other faults.
      stage: of a training, the last stage whose folder existed when the fault came; else empty.
      written: the bytes that the output had then, as a share of those of the undisturbed output.
      wrong: what went wrong.
    """

    has_hit: bool = True
    victim: str = ""
    status: int | None = None
    changed: int | None = None
    stage: str = ""
    written: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def meets(self, job: Job, output: pathlib.Path, reference_bytes: int) -> None:
        """Records what is on disk."""
        if job.outcome is _of_run and not job.source:
            stages = [name for name in ("autoencoder", "lm") if (output / name).is_dir()]
            self.stage = stages[-1] if stages else ""
        # Commands write beside their output before they rename it.
        found = _size(output.parent) - _size(output.parent / _BALLAST)
        self.written = round(found / max(1, reference_bytes), 3)


def _start(
    arguments: list[str], log: pathlib.Path, parent: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen:
    with open(log, "ab") as errors:
        return subprocess.Popen(
            [*parent, sys.executable, "-m", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | environment,
            # A session of its own, so that the workers of a preparation can be killed with it.
            start_new_session=True,
        )


def _cpu_seconds(process: psutil.Process) -> float:
    """The CPU seconds of a process and its descendants, including those that have ended."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = one.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total


def _wait_for_moment(process: subprocess.Popen, moment: float) -> None:
    """Returns when a process has used `moment` seconds of CPU time, or has ended."""
    ends = time.monotonic() + _MOST_SECONDS
    with contextlib.suppress(psutil.NoSuchProcess):
        watched = psutil.Process(process.pid)
        while process.poll() is None and _cpu_seconds(watched) < moment:
            time.sleep(0.05)
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired(process.args, _MOST_SECONDS)


def _end(process: subprocess.Popen) -> int:
    """Waits for a process, which is killed if it hangs, and kills the rest of its process group. Returns its status."""
    try:
        return process.wait(_MOST_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# A shell that runs the words after it as a child process.
_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has ended, so that it can wait for them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _wait_for_orphans(group: int) -> None:
    """Waits for the adopted processes of a group. Raises `TimeoutExpired` as `wait` does."""
    ends = time.monotonic() + _MOST_SECONDS
    with contextlib.suppress(ChildProcessError):
        while True:
            if not os.waitpid(-group, os.WNOHANG)[0]:
                time.sleep(0.1)
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("the orphans", _MOST_SECONDS)


def _role(pid: int) -> str:
    """A process by the modules and numbers of its command, such as "calm_jax.main --process_id=1"."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = psutil.Process(pid).cmdline()[1:]
        kept = [
            word
            for word in words
            if re.match(r"(calm_jax|benchmarks)\.|--process_id=|from multiprocessing", word)
        ]
        return " ".join(kept or words)[:80]
    return "ended"


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal; False if it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def _victim(process: subprocess.Popen, job: Job, chance: random.Random) -> int:
    """The process that a signal goes to; the command itself as long as it has no children."""
    if job.victims == "itself":
        return process.pid
    children: list[int] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = [one.pid for one in working_children(psutil.Process(process.pid))]
    if job.victims == "all":
        children.append(process.pid)
    return chance.choice(children or [process.pid])


@contextlib.contextmanager
def _mounted(folder: pathlib.Path, room: int) -> Iterator[None]:
    """Mounts a tmpfs with room for `room` bytes, in whole pages, at an empty folder."""
    # For tmpfs a size of 0 means that there is no limit, so a file takes one more page.
    _mount("-t", "tmpfs", "-o", f"size={_PAGE + room}", "tmpfs", str(folder))
    try:
        (folder / _BALLAST).write_bytes(bytes(_PAGE))
        yield
    finally:
        _unmount(folder)


def _unmount(folder: pathlib.Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"--faults=full,readonly need the right to mount a tmpfs ({error})"
        ) from error


def _size(path: pathlib.Path) -> int:
    """The bytes of a file, or of the files in a folder, in whole pages. Files that vanish meanwhile do not count."""
    files = [path] if path.is_file() else []
    files += [pathlib.Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for one in files:
        with contextlib.suppress(FileNotFoundError):
            total += -(-one.stat().st_size // _PAGE) * _PAGE
    return total


def _last_error(log: pathlib.Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), "")


def _lose(paths: list[pathlib.Path], log: pathlib.Path, chance: random.Random) -> int:
    """Cuts files to a random length that is not below the synced one. Returns the number of files cut.

    The names of files, which a journal keeps in order, are not lost.
    """
    synced: dict[int, int] = {}
    if log.exists():
        for line in log.read_text().splitlines():
            inode, size = map(int, line.split())
            synced[inode] = size
    cut = 0
    for path in paths:
        about = path.stat()
        kept = synced.get(about.st_ino, 0)
        if kept < about.st_size:
            os.truncate(path, chance.randint(kept, about.st_size - 1))
            cut += 1
    return cut


def _preloaded(folder: pathlib.Path, name: str) -> str:
    """The path of a shared library for LD_PRELOAD, compiled from a C file beside this one."""
    library = folder / f"{name}.so"
    if not library.exists():
        source = pathlib.Path(__file__).with_name(f"{name}.c")
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"--faults=cut,clock need a C compiler, cc ({error})") from error
    return str(library)


def _disturb(
    fault: str, job: Job, output: pathlib.Path, reference: dict, chance: random.Random
) -> Disturbance:
    """Runs a command with a fault at a random moment of it, and returns what the fault met."""
    log, root, found = _log_of(output), output.parents[1], Disturbance()
    synced, jumped = log.with_suffix(".synced"), log.with_suffix(".jumped")
    share, size = chance.random(), reference["bytes"]
    environment: dict[str, str] = {}
    if fault == "cut":
        environment = {"LD_PRELOAD": _preloaded(root, "synced"), "SYNCED_LOG": str(synced)}
        # Files that exist before the command count as synced.
        for path in output.rglob("*"):
            with open(synced, "a") as lines:
                lines.write(f"{path.stat().st_ino} {path.stat().st_size}\n")
    elif fault == "clock":
        # One moment for all processes of the command.
        moment = time.monotonic() + share * reference["seconds"]
        environment = {
            "LD_PRELOAD": _preloaded(root, "clock"),
            "CLOCK_BACK_AT": str(moment),
            "CLOCK_LOG": str(jumped),
        }
    parent = _SHELL if fault == "orphan" else ()
    process = _start(job.arguments(output), log, parent, **environment)
    try:
        if fault not in _TO_AN_END:
            _wait_for_moment(process, share * reference["cpu_seconds"])
            found.has_hit = process.poll() is None
            found.meets(job, output, size)
        if fault == "two":
            _start_again(process, job, output, found)
        elif fault in _TO_AN_END:
            found.status = process.wait(_MOST_SECONDS)
            found.meets(job, output, size)
            found.has_hit = jumped.exists() if fault == "clock" else found.status == 2
            if found.status not in _expected(fault, job):
                found.wrong.append(f"the command ended with status {found.status}: {_tail(log)}")
            if found.status == 2 and "Traceback" in log.read_text(errors="replace"):
                found.wrong.append(f"the command ended with a traceback: {_tail(log)}")
        elif fault == "cut":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        elif fault == "orphan":
            process.kill()
            process.wait()
            _wait_for_orphans(process.pid)
        else:
            _signal(fault, process, job, found, log, chance)
    except BaseException:
        # Ctrl-C to the campaign, perhaps while the command is stopped: nothing is waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        found.status = _end(process)
    if fault == "cut":
        _lose([path for path in output.parent.rglob("*") if path.is_file()], synced, chance)
    if fault == "source":
        _change_text(job, output, found, chance)
    return found


def _expected(fault: str, job: Job) -> tuple[int, ...]:
    """The statuses with which a command may end that is not killed."""
    if fault != "clock":
        return (0, 2)
    # 75: a save that would have to wait for the clock ends the command as a signal would. Of several processes, JAX's
    # distributed service aborts all, because by the new time their heartbeats are missing, as it does when one has died.
    return (0, 75, 256 - signal.SIGABRT) if job.victims == "peers" else (0, 75)


def _start_again(
    process: subprocess.Popen, job: Job, output: pathlib.Path, found: Disturbance
) -> None:
    """Starts a command a second time while it runs. Both may end well, or one is refused."""
    log = _log_of(output)
    second = _end(_start(job.arguments(output), log))
    refused = "is in use" in _last_error(log) or "already exists" in _last_error(log)
    if second not in (0, 2) or (second == 2 and not refused):
        found.wrong.append(f"the second command ended with status {second}: {_last_error(log)}")
    found.status = process.wait(_MOST_SECONDS)
    if found.status != 0 and second != 0:
        found.wrong.append(f"both commands failed: {_last_error(log)}")


def _signal(
    fault: str,
    process: subprocess.Popen,
    job: Job,
    found: Disturbance,
    log: pathlib.Path,
    chance: random.Random,
) -> None:
    """Sends a signal to one of a command's processes and waits for the end of those that do not end at once."""
    numbers = {"term": signal.SIGTERM, "int": signal.SIGINT, "stop": signal.SIGSTOP}
    number = numbers.get(fault, signal.SIGKILL)
    victim = _victim(process, job, chance)
    found.victim = _role(victim)
    # The handlers of both signals are set together; Python itself has one for SIGINT before.
    is_handled = fault in ("term", "int") and _handles(victim, signal.SIGTERM)
    sent = time.monotonic()
    try:
        os.kill(victim, number)
    except ProcessLookupError:
        found.has_hit = False
    if fault == "stop":
        time.sleep(chance.choice(_STOPS))
        # The process may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
        found.status = process.wait(_MOST_SECONDS)
        if found.status != 0:
            found.wrong.append(f"the stopped command failed: {_last_error(log)}")
    elif fault in ("term", "int") or job.victims != "itself":
        # The other processes of the command have to end by themselves, as has one that handles the signal.
        found.status = process.wait(_MOST_SECONDS)
    # A command that is about to end may still end with status 0.
    seconds = time.monotonic() - sent
    expected = (75, 0) if seconds < _ABOUT_TO_END else (75,)
    is_its_status = victim == process.pid or job.victims == "peers"
    if is_handled and is_its_status and found.status not in expected:
        found.wrong.append(
            f"{seconds:.0f} s after SIG{fault.upper()} it ended with status {found.status}: {_tail(log)}"
        )


def _has_begun(output: pathlib.Path) -> bool:
    """Whether an unfinished command has left checkpoints or shards, which another text must not continue."""
    if any((output / name).exists() for name in ("results.json", "index.json")):
        return False
    checkpoints = [one for one in output.glob("*/*") if one.name.isdigit()]
    return bool(checkpoints) or any(output.rglob("shard-*"))


def _change_text(job: Job, output: pathlib.Path, found: Disturbance, chance: random.Random) -> None:
    """Runs the command with a text file that has changed or is gone. The file is restored."""
    path = chance.choice(sorted((output.parents[1] / job.text).iterdir()))
    content, log, has_begun = path.read_bytes(), _log_of(output), _has_begun(output)
    log.unlink(missing_ok=True)
    try:
        if chance.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(_with_other_part(content, chance))
        found.changed = _end(_start(job.arguments(output), log))
    finally:
        path.write_bytes(content)
    if found.changed not in (0, 2):
        found.wrong.append(
            f"with a changed text it ended with status {found.changed}: {_tail(log)}"
        )
    elif found.changed == 0 and has_begun:
        found.wrong.append("it went on with a changed text")
    elif found.changed == 0:
        # The command had not begun or had nothing left to do, so it took the changed text: the next call begins anew.
        shutil.rmtree(output, ignore_errors=True)


def _with_other_part(content: bytes, chance: random.Random) -> bytes:
    """Changes a random part of a text, which remains text of the same length."""
    begin = chance.randrange(len(content))
    end = chance.randint(begin + 1, len(content))
    part = content[begin:end].translate(bytes.maketrans(b"aio", b"oai"))
    changed = content[:begin] + part + content[end:]
    # The part may have none of these letters.
    return changed if changed != content else content[::-1]


def _log_of(output: pathlib.Path) -> pathlib.Path:
    """The file for a command's stderr, outside of the folder of its trial."""
    return output.parent.with_name(f"{output.parent.name}.log")


def _tail(log: pathlib.Path) -> str:
    return log.read_text(errors="replace")[-500:]


def _recover(job: Job, output: pathlib.Path) -> tuple[int, list[str]]:
    """Repeats the command until it ends with status 0. Returns the number of calls, and what went wrong."""
    log = _log_of(output)
    for call in range(1, _MOST_CALLS + 1):
        log.unlink(missing_ok=True)
        status, line = _end(_start(job.arguments(output), log)), _last_error(log)
        if status == 0 or (status == 2 and f"{output} already exists" in line):
            return call, []
        offered = re.search(r"`mv (\S+) (\S+)`", line)
        if status != 2 or not offered:
            return call, [f"status {status}: {_tail(log)}"]
        os.rename(offered[1], offered[2])
    return _MOST_CALLS, [f"the command did not end with status 0 within {_MOST_CALLS} calls"]


def _trial(
    name: str, fault: str, number: int, job: Job, reference: dict, root: pathlib.Path
) -> dict:
    chance = random.Random(f"{_SEED.value} {name} {fault} {number}")
    folder = root / f"{name}-{fault}-{number}"
    if folder.is_mount():
        # A campaign that was killed left its file system mounted.
        _unmount(folder)
    shutil.rmtree(folder, ignore_errors=True)
    # The logs of a trial that was interrupted.
    for path in root.glob(f"{folder.name}.*"):
        path.unlink()
    folder.mkdir()
    # The output has the same name as the reference's, because the model card of an export contains it.
    output = folder / name
    room = 2**30
    if fault == "full":
        # What the output has before the command has room, and what it has afterwards has not.
        room = _size(root / "reference" / job.source) if job.source else 0
        room += chance.randint(0, max(0, reference["bytes"] - room - 1)) // _PAGE * _PAGE
    disk = _mounted(folder, room) if fault in ("full", "readonly") else contextlib.nullcontext()
    with disk:
        calls, found = _disturb_and_recover(name, fault, job, output, chance, reference)
    if not found.wrong:
        shutil.rmtree(folder)
        for path in root.glob(f"{folder.name}.*"):
            path.unlink()
    asked = {"seed": _SEED.value, "job": name, "fault": fault, "number": number}
    return asked | {"calls": calls} | dataclasses.asdict(found)


def _disturb_and_recover(
    name: str, fault: str, job: Job, output: pathlib.Path, chance: random.Random, reference: dict
) -> tuple[int, Disturbance]:
    """How many calls a disturbed command took to its end, and what the fault met and what went wrong."""
    folder, calls, found = output.parent, 0, Disturbance()
    if job.source:
        shutil.copytree(folder.with_name("reference") / job.source, output)
    try:
        if fault == "readonly":
            _mount("-o", "remount,ro", str(folder))
        found = _disturb(fault, job, output, reference, chance)
        if fault in ("full", "readonly"):
            _mount("-o", f"remount,rw,size={2**30}", str(folder))
            (folder / _BALLAST).unlink()
        calls, more = _recover(job, output)
        found.wrong += more
    except subprocess.TimeoutExpired:
        # `_end` has killed the command.
        found.wrong = ["it hangs"]
    if not found.wrong:
        try:
            outcome = json.loads(json.dumps(job.outcome(output)))
            found.wrong += [f"{key} differs" for key in _differing(outcome, reference["outcome"])]
        except (OSError, ValueError, LookupError, TypeError) as error:
            found.wrong.append(f"the output cannot be read: {error!r}")
        left = {path.name for path in folder.iterdir()} - {name}
        found.wrong += [f"{one} is left" for one in sorted(left)]
    return calls, found


def _differing(found: Any, expected: Any) -> list[str]:
    if found == expected:
        return []
    if not isinstance(found, dict):
        return ["the output"]
    return [key for key in expected | found if found.get(key) != expected.get(key)]


def _kept_programs() -> set[str]:
    """Names of the programs that commands have compiled and kept for later commands."""
    folder = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or compilation_cache.folder())
    return {path.name for path in folder.glob("*-cache")}


def _reference(name: str, job: Job, jobs: dict[str, Job], root: pathlib.Path) -> dict:
    """Outcome, bytes, seconds and CPU seconds of an undisturbed command.

    After a call that has kept compiled programs, a second one is measured, which takes as long as those of the trials.
    """
    path = root / "reference" / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    (root / "reference").mkdir(exist_ok=True)
    output, log = root / "reference" / name, root / "reference" / "log.txt"
    for _ in range(2):
        if output.is_dir():
            shutil.rmtree(output)
        if job.source:
            _reference(job.source, jobs[job.source], jobs, root)
            shutil.copytree(root / "reference" / job.source, output)
        log.unlink(missing_ok=True)
        kept, began = _kept_programs(), os.times()
        try:
            status = _end(_start(job.arguments(output), log))
        except subprocess.TimeoutExpired as error:
            raise UserError(f"the undisturbed {name} takes more than {_MOST_SECONDS} s") from error
        if status:
            raise UserError(f"the undisturbed {name} failed: {_last_error(log)}, see {log}")
        ended = os.times()
        if _kept_programs() <= kept:
            break
    used = ended.children_user + ended.children_system - began.children_user - began.children_system
    record = {
        "cpu_seconds": used,
        "seconds": ended.elapsed - began.elapsed,
        "bytes": _size(output),
        "outcome": job.outcome(output),
    }
    write_atomically(path, json.dumps(record))
    return json.loads(json.dumps(record))


def _show(records: list[dict]) -> None:
    table = rich.table.Table(
        "job", "fault", "times", "hit", "recovered", "after a `mv`", "lost", title="faults"
    )
    for name, fault in dict.fromkeys((one["job"], one["fault"]) for one in records):
        some = [one for one in records if (one["job"], one["fault"]) == (name, fault)]
        lost = [one for one in some if one["wrong"]]
        again = sum(one["calls"] > 1 for one in some if not one["wrong"])
        hit = sum(one["has_hit"] for one in some)
        cells = (len(some), hit, len(some) - len(lost), again, len(lost))
        table.add_row(name, fault, *map(str, cells))
    progress.console().print(table)
    for one in records:
        for reason in one["wrong"]:
            print(f"{one['job']}-{one['fault']}-{one['number']}: {reason}")


def _write_text(root: pathlib.Path) -> None:
    """Writes text/, little text to train on, and for `prepare` records/, text that takes it seconds, with copies."""
    (root / "text").mkdir(parents=True, exist_ok=True)
    chance = random.Random(_SEED.value)
    for number in range(12):
        words = " ".join(chance.choices(WORDS, k=400 + 50 * number))
        write_atomically(root / "text" / f"{number}.txt", words)
    if "prepare" not in _JOBS.value:
        return
    (root / "records").mkdir(exist_ok=True)
    texts = [" ".join(chance.choices(WORDS, k=60)) for _ in range(60_000)]
    for number in range(4):
        lines = (json.dumps({"text": text}) + "\n" for text in chance.choices(texts, k=24_000))
        write_atomically(root / "records" / f"{number}.jsonl", "".join(lines))


@command
def main(argv: list[str]) -> int:
    if not _FOLDER.value:
        raise UserError("give a folder: --folder=DIR")
    root = local_path(_FOLDER.value, "--folder").absolute()
    jobs = _jobs(root)
    for flag, known in ((_JOBS, tuple(jobs)), (_FAULTS, FAULTS)):
        for value in flag.value:
            if value not in known:
                raise UserError(f"--{flag.name}={value} is none of {', '.join(known)}")
    check_seed(root, _SEED.value)
    _write_text(root)
    trials = root / "trials.jsonl"
    text = trials.read_text() if trials.exists() else ""
    # A campaign that was killed may have left the beginning of a line.
    write_atomically(trials, text[: text.rfind("\n") + 1])
    records = [json.loads(line) for line in trials.read_text().splitlines()]
    done = {(one["job"], one["fault"], one["number"]) for one in records}
    _adopt_orphans()
    if {"finetune", "generate", "serve", "export", "convert"} & set(_JOBS.value):
        _reference("train", jobs["train"], jobs, root)
    if "convert" in _JOBS.value:
        _reference("export", jobs["export"], jobs, root)
    references = {name: _reference(name, jobs[name], jobs, root) for name in _JOBS.value}
    for number in range(_TIMES.value):
        for name in _JOBS.value:
            for fault in _FAULTS.value:
                if (name, fault, number) in done or fault in jobs[name].without:
                    continue
                record = _trial(name, fault, number, jobs[name], references[name], root)
                records.append(record)
                with open(trials, "a") as lines:
                    lines.write(json.dumps(record) + "\n")
                print(
                    f"{name}-{fault}-{number}: {'LOST' if record['wrong'] else 'recovered'}",
                    flush=True,
                )
    _show(records)
    return int(any(one["wrong"] for one in records))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
