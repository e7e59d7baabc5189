"""Soak test, long runs under load: does memory stay flat, and is no file, socket or process left over?

    python -m benchmarks.soak --folder=DIR [--minutes=60] [--seed=0] [--jobs=train,serve,prepare]

`train` trains a tiny recipe and saves a checkpoint every 5 steps; at the end each step must be in metrics.jsonl once, and the same
command must go on from the last checkpoint. `serve` answers sixteen clients, of whom every third closes its connection in the
midst of a stream; the others must get a response, and always the same one to the same request. `prepare` prepares text again and
again, while its workers are killed; each time it must write the same bytes. Every ten seconds, in runs of less than two minutes
twelve times, the memory (RSS), open files and sockets, and processes of the command and all its children are counted. The table
has the maximum of each in the first tenth of the time, in tenths around a quarter and a half of it, and in the last tenth. DIR
gets soak.jsonl.
"""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import rich.table
from absl import app, flags

from benchmarks import ROOT
from benchmarks.campaigns import WORDS, hashes, working_children
from benchmarks.client import completion, server
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError
from calm_jax.run.workdir import OWN_FILES
from calm_jax.training.checkpoint_files import latest_step
from tests.tiny_model import tiny

_FOLDER = flags.DEFINE_string("folder", "", "folder for runs and results")
_MINUTES = flags.DEFINE_float("minutes", 60, "minutes for each job", lower_bound=0.1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of texts, requests and kills")
_JOBS = flags.DEFINE_list("jobs", ["train", "serve", "prepare"], "what to run, one after the other")

# Seconds from one count to the next. The few counts of a short run could all meet processes that have just started, so it has more.
_EVERY, _COUNTS = 10.0, 12
_CLIENTS = 16
# Seconds that a resumed command may take, even on a busy machine.
_PATIENCE = 3600
# Steps between two checkpoints of the training, and between two records in its log.
_STEPS = 5


def _start(log: pathlib.Path, *arguments: str) -> psutil.Popen:
    with open(log, "ab") as errors:
        return psutil.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _counts(process: psutil.Process) -> dict[str, int]:
    """Memory (RSS) in MiB, open files with sockets, and processes: totals over a process and all its children."""
    found = {"MiB": 0, "open files": 0, "processes": 0}
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found["MiB"] += one.memory_info().rss >> 20
            found["open files"] += one.num_fds()
            found["processes"] += 1
    return found


class _Soak:
    """Counts of one job over its time."""

    def __init__(self, job: str, root: pathlib.Path):
        self.job, self.root, self.log = job, root, root / f"{job}.log"
        self.began = time.monotonic()
        self.samples: list[dict] = []
        self.done = 0
        self.wrong: list[str] = []

    @property
    def left(self) -> float:
        """The seconds until the job's time is over."""
        return self.began + 60 * _MINUTES.value - time.monotonic()

    def watch(self, process: psutil.Process, disturb: Callable[[], None] = lambda: None) -> None:
        """Counts until the time is over or the process has ended."""
        following = time.monotonic()
        while self.left > 0 and process.poll() is None:
            time.sleep(min(0.5, max(0.0, self.left)))
            disturb()
            if time.monotonic() < following:
                continue
            following += min(_EVERY, 60 * _MINUTES.value / _COUNTS)
            with contextlib.suppress(psutil.NoSuchProcess):
                self.count(process)

    def count(self, process: psutil.Process) -> dict:
        seconds = round(time.monotonic() - self.began)
        sample = {"job": self.job, "seconds": seconds} | _counts(process)
        self.samples.append(sample)
        with open(self.root / "soak.jsonl", "a") as lines:
            lines.write(json.dumps(sample) + "\n")
        return sample


def _text(root: pathlib.Path, files: int, words: int) -> str:
    chance = random.Random(_SEED.value)
    (root / "text").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (root / "text" / f"{number}.txt").write_text(" ".join(chance.choices(WORDS, k=words)))
    return f"{root}/text/*.txt"


def _train(soak: _Soak) -> None:
    workdir = soak.root / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    often = [f"--config.lm.training.{name}={_STEPS}" for name in ("checkpoint_every", "log_every")]
    often.append("--config.lm.training.eval_every=100000000")
    recipe = f"--config=tests/tiny_recipe.py:{_text(soak.root, 12, 400)}"
    arguments = ["calm_jax.main", recipe, f"--workdir={workdir}", *often]
    process = _start(soak.log, *arguments, "--config.lm.training.num_steps=100000000")
    # Reads the output, so that it does not fill the pipe and block the process.
    reader = threading.Thread(target=process.stdout.read)
    reader.start()
    # The time begins with the first checkpoint, after compilation and the first stage.
    while latest_step(workdir / "lm") is None and process.poll() is None:
        time.sleep(0.1)
    soak.began = time.monotonic()
    soak.watch(process)
    process.send_signal(signal.SIGTERM)
    status = process.wait(300)
    reader.join()
    if status != 75:
        soak.wrong.append(f"status {status}")
    soak.wrong += [f"{one.name} is left" for one in workdir.iterdir() if one.name not in OWN_FILES]
    for stage in ("autoencoder", "lm"):
        names = [path.name for path in (workdir / stage).glob("*")]
        soak.wrong += [f"{stage}/{name} is left" for name in names if not name.isdigit()]
    last = latest_step(workdir / "lm") or 0
    soak.done = last // _STEPS
    resumed = _start(soak.log, *arguments, f"--config.lm.training.num_steps={last + _STEPS}")
    shown, _ = resumed.communicate(timeout=_PATIENCE)
    if resumed.returncode or f"resumed at step {last}" not in shown:
        soak.wrong.append(f"not resumed at step {last}: status {resumed.returncode}")
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [one["step"] for one in records if (one["stage"], one["split"]) == ("lm", "train")]
    if steps != sorted({*range(_STEPS, last + _STEPS, _STEPS), last + _STEPS}):
        soak.wrong.append("metrics.jsonl lacks or repeats steps")


def _ask(address: str, chance: random.Random) -> tuple[str, str] | None:
    """Sends a request and returns it with its text; None if it closed its connection. Raises `AssertionError` for an error."""
    is_vanishing = chance.random() < 1 / 3
    prompt = "def " * chance.randint(1, 8)
    body = {
        "prompt": prompt,
        "seed": 1,
        "max_tokens": chance.randint(1, 32),
        "stream": is_vanishing,
    }
    with completion(address, body) as answer:
        if is_vanishing:
            answer.read(chance.randint(1, 200))
            return None
        content = answer.read().decode()
        assert answer.status == 200, f"status {answer.status}: {content[:200]}"
        return json.dumps(body), json.loads(content)["choices"][0]["text"]


def _serve(soak: _Soak) -> None:
    workdir = soak.root / "served"
    if not workdir.exists():
        tiny().save(workdir)
    texts: dict[str, str] = {}
    done: collections.Counter[str] = collections.Counter()

    def client(number: int, address: str) -> None:
        chance = random.Random(f"{_SEED.value} {number}")
        while soak.left > min(5, 30 * _MINUTES.value):
            try:
                asked = _ask(address, chance)
                assert asked is None or texts.setdefault(*asked) == asked[1], "another text"
                done["vanished" if asked is None else "answers"] += 1
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                soak.wrong.append(f"{soak.left:.0f} s before the end: {error!r}")
                # If the server has ended, the requests must not fail in a busy loop.
                time.sleep(1)

    with open(soak.log, "ab") as errors, server(str(workdir), errors) as (process, address):
        # The server's start does not count.
        soak.began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(_CLIENTS) as pool:
            running = [pool.submit(client, number, address) for number in range(_CLIENTS)]
            soak.watch(process)
            for one in running:
                one.result()
        soak.done = done["answers"]
        time.sleep(5)
        print(f"serve: {done['vanished']} clients vanished; afterwards {soak.count(process)}")
        left = [one for one in process.net_connections("tcp") if one.status != psutil.CONN_LISTEN]
        soak.wrong += [f"a connection is left: {one}" for one in left]
    soak.wrong += [f"status {process.returncode}"] * bool(process.returncode)


def _prepare(soak: _Soak) -> None:
    globs, output = _text(soak.root / "prepared text", 60, 20_000), soak.root / "prepared"
    arguments = [
        f"--input={globs}",
        "--tokenizer=bytes",
        f"--output={output}",
        "--workers=2",
        "--shard_characters=200000",
    ]
    chance, killed, repeated = random.Random(_SEED.value), 0, 0
    expected: dict[str, str] = {}

    def kill_a_worker() -> None:
        nonlocal killed
        if not expected or chance.random() > 0.04:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = [one for one in working_children(process) if not one.children()]
            if workers:
                os.kill(chance.choice(workers).pid, signal.SIGKILL)
                killed += 1

    while soak.left > 0:
        shutil.rmtree(output, ignore_errors=True)
        process = _start(soak.log, "calm_jax.data.prepare", *arguments)
        children: set[psutil.Process] = set()

        def disturb() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children.update(process.children(recursive=True))  # noqa: B023
            kill_a_worker()

        soak.watch(process, disturb)
        process.communicate(timeout=600)
        status = process.returncode
        if status == 2:
            # If workers die too often, the command ends with one line of error; the same command resumes.
            again = _start(soak.log, "calm_jax.data.prepare", *arguments)
            again.communicate(timeout=600)
            status, repeated = again.returncode, repeated + 1
        found = hashes(output)
        expected = expected or found
        if status or found != expected:
            differ = sorted(dict(found.items() ^ expected.items()))
            soak.wrong.append(f"preparation {soak.done}: status {status}, other files: {differ}")
        soak.done += 1
        _, alive = psutil.wait_procs(children, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    soak.wrong.append(f"a process is left: {one}")
    print(f"prepare: {killed} workers were killed, {repeated} commands given again")


_RUN = {"train": _train, "serve": _serve, "prepare": _prepare}
_DONE = {"train": "checkpoints", "serve": "answers", "prepare": "preparations"}


# Parts of the time whose maximum the table shows: the first tenth, around a quarter and a half, and the last tenth.
_PARTS = ((0.0, 0.1), (0.2, 0.3), (0.45, 0.55), (0.9, 1.0))


def _over_time(samples: list[dict], name: str) -> str:
    most = 60 * _MINUTES.value
    parts = [
        [one[name] for one in samples if begin * most <= one["seconds"] <= end * most]
        for begin, end in _PARTS
    ]
    return " → ".join(str(max(part)) if part else "?" for part in parts)


@command
def main(argv: list[str]) -> int:
    root = given_folder(_FOLDER, "a folder for runs and results").absolute()
    for job in _JOBS.value:
        if job not in _RUN:
            raise UserError(f"--jobs={job} is none of {', '.join(_RUN)}")
    root.mkdir(parents=True, exist_ok=True)
    table = rich.table.Table(
        "job", "minutes", "done", "wrong", "MiB", "open files", "processes", title="soak"
    )
    wrong: list[str] = []
    for job in _JOBS.value:
        soak = _Soak(job, root)
        _RUN[job](soak)
        changes = [_over_time(soak.samples, name) for name in ("MiB", "open files", "processes")]
        minutes = (time.monotonic() - soak.began) / 60
        table.add_row(
            job, f"{minutes:.0f}", f"{soak.done} {_DONE[job]}", str(len(soak.wrong)), *changes
        )
        wrong += [f"{job}: {reason}" for reason in soak.wrong]
    progress.console().print(table)
    for reason in wrong:
        print(reason)
    return int(bool(wrong))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
