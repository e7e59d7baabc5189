"""Trains the arms of an experiment, for `benchmarks.learning`: each is a recipe with changes, trained with several seeds."""

import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from absl import flags

from benchmarks import ROOT
from calm_jax.cli import progress
from calm_jax.cli.files import write_atomically
from calm_jax.cli.flags import define_recipe
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.errors import UserError
from calm_jax.run.workdir import Workdir

_NAMED = re.compile(r"\{([^{}]*)\}")

# The arms of an experiment by name: for each, the flags of `python -m calm_jax.main`, --config=RECIPE and --config.KEY=VALUE.
# {NAME} in a flag stands for the workdir of an earlier arm, which is then trained only once, with the first seed.
Arms = Mapping[str, Sequence[str]]
# The flags for the paper's loss alone against the posterior's mean, and against draws of the posterior.
TO_MEAN = ["--config.lm.token_loss_weight=0.0", "--config.lm.head.num_target_samples=0"]
TO_DRAWS = ["--config.lm.token_loss_weight=0.0", "--config.lm.head.num_target_samples=16"]


def config_of(words: Sequence[str]) -> Config:
    """The config that flags of `calm_jax.main` make. Raises `UserError` for a flag or a value that is wrong."""
    if not any(word.startswith("--config=") for word in words):
        raise UserError("--config=RECIPE is missing")
    argv, given = ["", *words], flags.FlagValues()
    try:
        define_recipe("the arm's recipe", given, argv)
        given(argv)
        return resolve(given.config)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error


def step_flops(config: Config, stage: str) -> float:
    """Training FLOPs of a step of "autoencoder" or "lm", for a recipe that trains its own SentencePiece tokenizer."""
    section = getattr(config, stage)
    tokens = section.training.batch_size * section.data.block_tokens
    return tokens * flops.training(config, stage, config.tokenizer.vocab_size)


def runs(
    arms: Arms, seeds: Sequence[int], folder: pathlib.Path
) -> dict[pathlib.Path, tuple[str, ...]]:
    """The flags of every run by its workdir, FOLDER/ARM/SEED, in the order of training: all arms with a seed, then with the next.

    Raises `UserError` for an arm that cannot be trained.
    """
    names = {name for words in arms.values() for word in words for name in _NAMED.findall(word)}
    shared = {name: folder / name / str(seeds[0]) for name in names}
    found: dict[pathlib.Path, tuple[str, ...]] = {}
    for seed in seeds:
        for arm, words in arms.items():
            path = folder / arm / str(seed)
            if shared.get(arm, path) != path:
                continue
            if not re.fullmatch(r"[\w.=+-]+", arm):
                raise UserError(f"arm {arm!r}: a name has letters, digits and .=+-_ only")
            for name in _NAMED.findall(" ".join(words)):
                if shared[name] not in found:
                    raise UserError(f"arm {arm}: {{{name}}} is no arm before it")
            filled = [_NAMED.sub(lambda match: str(shared[match[1]]), word) for word in words]
            found[path] = (*filled, f"--config.seed={seed}")
            try:
                config_of(found[path])
            except UserError as error:
                raise UserError(f"arm {arm}: {error}") from error
    return found


def train(arms: Arms, seeds: Sequence[int], folder: pathlib.Path) -> list[str]:
    """Trains the runs that are not finished, scores language models by --mode=eval, and prints a line for each run.

    A finished run is not run again unless its flags have changed; a stopped run resumes. The output of a run goes to
    FOLDER/ARM/SEED.log. Returns a sentence for each run that failed.
    """
    commands, failed = runs(arms, seeds, folder), []
    for number, (path, words) in enumerate(commands.items(), start=1):
        name = f"{path.parent.name}, seed {path.name}"
        what = f"[{number}/{len(commands)}] {name}"
        done, log = path.with_suffix(".done"), path.with_suffix(".log")
        if done.exists() and json.loads(done.read_text()) == list(words):
            print(f"{what}: is done", flush=True)
            continue
        began = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        status = _run(log, *words, f"--workdir={path}")
        if not status and "lm" in config_of(words).stages:
            status = _run(log, "--mode=eval", f"--config=configs/workdir.py:{path}")
        if status:
            failed.append(f"{name}: status {status}, {_last_line(log)} ({log})")
            print(f"{what}: status {status}", flush=True)
        else:
            write_atomically(done, json.dumps(words))
            print(f"{what}: {progress.duration(time.monotonic() - began)}", flush=True)
    return failed


def _run(log: pathlib.Path, *words: str) -> int:
    """Runs `python -m calm_jax.main` and returns its status. If this process is interrupted, the run gets SIGTERM and saves."""
    with (
        open(log, "ab") as output,
        subprocess.Popen(
            [sys.executable, "-m", "calm_jax.main", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            return process.wait()
        finally:
            process.terminate()


def _last_line(log: pathlib.Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def begun(arms: Arms, seeds: Sequence[int], folder: pathlib.Path) -> dict[str, list[Workdir]]:
    """The runs of each arm that have begun."""
    found: dict[str, list[Workdir]] = {}
    for path in runs(arms, seeds, folder):
        if Workdir(path).exists:
            found.setdefault(path.parent.name, []).append(Workdir(path))
    return found
