"""Long runs under load: is memory flat, and is no file, socket or process left?

    python -m benchmarks.soak --folder=DIR [--minutes=60] [--seed=0] [--jobs=train,serve,prepare]

`train` trains a tiny recipe and saves a checkpoint about every second. `serve` answers sixteen clients, of whom every third closes
its connection in the midst of a stream. `prepare` prepares text again and again, while its workers are killed; each time it
must write the same bytes. Every ten seconds memory (RSS), open files and processes are counted, of the command and of all its
children. The table compares the middle of the time, when everything is compiled, with its end. DIR gets soak.jsonl.
"""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import rich.table
from absl import app, flags

from benchmarks.words import WORDS
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError
from tests.tiny_model import tiny

_FOLDER = flags.DEFINE_string("folder", "", "folder for runs and results")
_MINUTES = flags.DEFINE_float("minutes", 60, "of each job", lower_bound=0.5)
_SEED = flags.DEFINE_integer("seed", 0, "seed of text and moments")
_JOBS = flags.DEFINE_list("jobs", ["train", "serve", "prepare"], "what to run, one after the other")

_ROOT = pathlib.Path(__file__).parent.parent
_EVERY = 10.0
_CLIENTS = 16


def _start(log: pathlib.Path, *arguments: str) -> psutil.Popen:
    with open(log, "ab") as errors:
        return psutil.Popen(
            [sys.executable, "-m", *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _counts(process: psutil.Process) -> dict[str, int]:
    """Memory in MiB, open files and sockets, and the number of a process and all its children."""
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
        """Seconds."""
        return self.began + 60 * _MINUTES.value - time.monotonic()

    def watch(self, process: psutil.Process, disturb: Callable[[], None] = lambda: None) -> None:
        """Counts until the time is over or the process has ended."""
        following = time.monotonic()
        while self.left > 0 and process.poll() is None:
            time.sleep(min(0.5, max(0.0, self.left)))
            disturb()
            if time.monotonic() < following:
                continue
            following += _EVERY
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds = round(time.monotonic() - self.began)
                sample = {"job": self.job, "seconds": seconds} | _counts(process)
                self.samples.append(sample)
                with open(self.root / "soak.jsonl", "a") as lines:
                    lines.write(json.dumps(sample) + "\n")


def _text(root: pathlib.Path, files: int, words: int) -> str:
    chance = random.Random(_SEED.value)
    (root / "text").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (root / "text" / f"{number}.txt").write_text(" ".join(chance.choices(WORDS, k=words)))
    return f"{root}/text/*.txt"


def _train(soak: _Soak) -> None:
    workdir = soak.root / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    forever = [
        "--config.lm.training.num_steps=100000000",
        "--config.lm.training.eval_every=100000000",
    ]
    often = ["--config.lm.training.checkpoint_every=20", "--config.lm.training.log_every=20"]
    recipe = f"--config=tests/tiny_recipe.py:{_text(soak.root, 12, 400)}"
    process = _start(soak.log, "calm_jax.main", recipe, f"--workdir={workdir}", *forever, *often)
    # Its lines must not fill the pipe.
    reader = threading.Thread(target=process.stdout.read)
    reader.start()
    soak.watch(process)
    process.send_signal(signal.SIGTERM)
    status = process.wait(300)
    reader.join()
    names = [path.name for path in (workdir / "lm").glob("*")]
    left = [name for name in names if not name.isdigit()]
    soak.done = max((int(name) for name in names if name.isdigit()), default=0) // 20
    soak.wrong += [f"{name} is left" for name in left]
    if status != 75:
        soak.wrong.append(f"status {status}")


def _ask(address: str, chance: random.Random) -> bool:
    """One request; whether it was answered in full, or the client has gone away."""
    connection = http.client.HTTPConnection(address, timeout=120)
    is_vanishing = chance.random() < 1 / 3
    prompt = "def " * chance.randint(1, 8)
    body = {
        "prompt": prompt,
        "seed": 1,
        "max_tokens": chance.randint(1, 32),
        "stream": is_vanishing,
    }
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if is_vanishing:
            answer.read(chance.randint(1, 200))
            return True
        return answer.status == 200 and "choices" in json.loads(answer.read())
    finally:
        connection.close()


def _serve(soak: _Soak) -> None:
    workdir = soak.root / "served"
    if not workdir.exists():
        tiny().save(workdir)
    soak.began = time.monotonic()
    process = _start(soak.log, "calm_jax.serve", f"--workdir={workdir}", "--port=0")
    address = process.stdout.readline().partition("http://")[2].split()[0]

    def client(number: int) -> tuple[int, int]:
        chance, answered, failed = random.Random(f"{_SEED.value} {number}"), 0, 0
        while soak.left > 5:
            try:
                is_right = _ask(address, chance)
            except (OSError, http.client.HTTPException):
                is_right = False
            answered, failed = answered + is_right, failed + (not is_right)
        return answered, failed

    with concurrent.futures.ThreadPoolExecutor(_CLIENTS) as pool:
        results = [pool.submit(client, number) for number in range(_CLIENTS)]
        soak.watch(process)
        soak.done = sum(result.result()[0] for result in results)
        failed = sum(result.result()[1] for result in results)
        soak.wrong += [f"{failed} requests had no answer"] * bool(failed)
    time.sleep(5)
    sockets = [one for one in process.net_connections("tcp") if one.status != psutil.CONN_LISTEN]
    soak.wrong += [f"a connection is left: {one}" for one in sockets]
    process.send_signal(signal.SIGTERM)
    status = process.wait(300)
    soak.wrong += [f"status {status}"] * bool(status)


def _hash(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("lock", "inputs.json"):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _prepare(soak: _Soak) -> None:
    globs, output = _text(soak.root / "prepared text", 60, 20_000), soak.root / "prepared"
    arguments = [
        f"--input={globs}",
        "--tokenizer=bytes",
        f"--output={output}",
        "--workers=2",
        "--shard_characters=200000",
    ]
    chance, expected, killed = random.Random(_SEED.value), "", 0

    def kill_a_worker() -> None:
        nonlocal killed
        if not expected or chance.random() > 0.1:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = [one for one in process.children(recursive=True) if not one.children()]
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
        status = process.wait(600)
        process.stdout.close()
        if status == 2:
            # A worker that died too often ends the command in one line; the same command goes on.
            status = _start(soak.log, "calm_jax.data.prepare", *arguments).wait(600)
        found = _hash(output)
        expected = expected or found
        if status or found != expected:
            soak.wrong.append(f"preparation {soak.done}: status {status}, {found} for {expected}")
        soak.done += 1
        _, alive = psutil.wait_procs(children, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    soak.wrong.append(f"a process is left: {one}")
    print(f"prepare: {killed} workers were killed")


_RUN = {"train": _train, "serve": _serve, "prepare": _prepare}
_DONE = {"train": "checkpoints", "serve": "answers", "prepare": "preparations"}


def _mean(samples: list[dict], name: str, begin: float, end: float) -> float:
    most = max(one["seconds"] for one in samples)
    some = [one[name] for one in samples if begin * most <= one["seconds"] <= end * most]
    return statistics.mean(some) if some else float("nan")


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
        changes = [
            f"{_mean(soak.samples, name, 0.4, 0.6):.0f} → {_mean(soak.samples, name, 0.9, 1.0):.0f}"
            for name in ("MiB", "open files", "processes")
        ]
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
