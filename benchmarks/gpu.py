"""Measures on a GPU, in one call, what this repository says about GPUs, beside the planner's predictions.

    python -m benchmarks.gpu --output=runs/gpu [--topology=h100:1] [--dry_run]

Each part is a command of its own with a limit of time: the planner's predictions, the quickstart, training steps of CALM-M
(bfloat16, which has cuDNN's attention), and decoding at T = 1 and T = 1/2. A part leaves NAME.log in --output and, but for the
quickstart, NAME.json; a second call runs only the parts that have not succeeded or that have other options now, such as another
--topology, and the quickstart goes on where it stopped. JAX gets the share of the GPU's memory that the planner assumes, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. The summary says the time and the MFU of a training step beside the planner's, how
far decoding is from the bound of memory bandwidth for texts of this length, and whether both reach their goals. With --dry_run the same parts run on this machine's CPU at tiny sizes, in the folder dry_run of
--output, except the planner's, which need NVIDIA's compiler (the extra `cuda` has it).
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from typing import Any

from absl import app, flags

from benchmarks import ROOT
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError
from calm_jax.planning.topology import GPU_MEMORY_SHARE

_OUTPUT = flags.DEFINE_string("output", "", "folder for logs and results")
_TOPOLOGY = flags.DEFINE_string("topology", "h100:1", "the hardware to plan for")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "tiny sizes, on the CPU")

# The variable of JAX for the share of a GPU's memory that it allocates.
_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_BATCHES = "1,8,64"
# Tokens of a prompt, as the suite has them, and of a continuation. The bound is planned for a cache of both.
_PROMPT, _NEW = 32, 256
# What a step and decoding are to reach: MFU, and times the bound. On an H100 CALM-M's step has an MFU of 36.5 %, of 79.5 % that the
# planner's bound allows, and decoding takes 5 (batch 1) and 8 times (batch 64) the bound (docs/benchmarks.md, "On a GPU").
_LEAST_MFU, _MOST_TIMES = 0.45, 2.0
# A step of 131,072 tokens (32,768 chunks); the published batch of two million tokens only repeats such microbatches.
_CALM_M = ("--config=configs/calm_m.py", "--config.lm.training.batch_size=16")
_TINY_MODEL = (
    "--config.lm.model.hidden_size=64",
    "--config.lm.model.intermediate_size=128",
    "--config.lm.model.num_layers=1",
    "--config.lm.head.num_blocks=1",
)
_TINY = (
    "--config=configs/bench_small.py",
    "--config.lm.data.block_tokens=128",
    "--config.autoencoder.data.block_tokens=128",
    *_TINY_MODEL,
)
_TINY_RUN = (
    *_TINY_MODEL,
    "--config.tokenizer.kind=bytes",
    "--config.autoencoder.training.num_steps=2",
    "--config.autoencoder.min_accuracy=0.0",
    "--config.lm.training.num_steps=2",
    # Given, so that no step is compiled beforehand to see whether it fits into memory.
    "--config.autoencoder.training.accumulation_steps=1",
    "--config.lm.training.accumulation_steps=1",
    "--config.lm.model.remat=none",
    "--config.sample.max_tokens=4",
)


def _text(folder: pathlib.Path) -> pathlib.Path:
    """Writes a short text for the dry run, a page of the documentation, and returns its path."""
    page = ROOT / "docs" / "architecture.md"
    path = folder / "text.txt"
    path.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def _parts(
    folder: pathlib.Path, dry_run: bool, topology: str
) -> dict[str, tuple[float, list[str]]]:
    """The limit in seconds and the command of each part, after `python -m`, in the order in which they run."""

    def result(name: str) -> str:
        return f"--output={folder / name}.json"

    recipe = _TINY if dry_run else _CALM_M
    repeats = ["--repeats=1", "--case_seconds=1"] if dry_run else ["--repeats=20"]
    rows = (
        ["--batches=1", "--new_tokens=8"]
        if dry_run
        else [f"--batches={_BATCHES}", f"--new_tokens={_NEW}"]
    )
    parts = {
        "quickstart": (
            1800.0,
            [
                "calm_jax.main",
                "--config=configs/quickstart.py",
                f"--workdir={folder / 'quickstart'}",
                *((*_TINY_RUN, f"--config.data.train_files={_text(folder)}") if dry_run else ()),
            ],
        ),
        "train": (
            1200.0,
            ["benchmarks", "--suite=train", "--stage=lm", *recipe, *repeats, result("train")],
        ),
        "decode": (
            2400.0,
            [
                "benchmarks",
                "--suite=generate",
                "--samplers=pooled",
                *recipe,
                *repeats,
                *rows,
                result("decode"),
            ],
        ),
    }
    if dry_run:
        return parts
    plan = ["calm_jax.plan", *recipe, f"--topology={topology}"]
    return {
        "plan_train": (900.0, [*plan, "--stage=lm", result("plan_train")]),
        "plan_decode": (
            1800.0,
            [
                *plan,
                "--stage=generate",
                f"--config.lm.data.block_tokens={_PROMPT + _NEW}",
                result("plan_decode"),
            ],
        ),
    } | parts


def _run(name: str, seconds: float, words: list[str], folder: pathlib.Path) -> str:
    """Runs a part, unless the same command has succeeded, and returns how it went."""
    done, asked = folder / f"{name}.done", shlex.join(words)
    if done.exists():
        before, _, text = done.read_text(encoding="utf-8").partition("\n")
        if before == asked:
            return text
        # Results of other options must not stand in the summary if the part fails now.
        done.unlink()
        (folder / f"{name}.json").unlink(missing_ok=True)
    print(f"{name}: python -m {asked}", flush=True)
    began = time.monotonic()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            status = subprocess.run(
                [sys.executable, "-m", *words],
                stdout=log,
                stderr=log,
                timeout=seconds,
                check=False,
                env={_SHARE: f"{GPU_MEMORY_SHARE:g}"} | os.environ,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after its limit of {seconds:.0f} s; {log.name} has what it printed"
    if status:
        return f"failed with status {status}; {log.name} says why"
    text = f"done in {time.monotonic() - began:.0f} s"
    done.write_text(f"{asked}\n{text}", encoding="utf-8")
    return text


def _read(path: pathlib.Path, key: str) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))[key] if path.exists() else []


def _goal(is_reached: bool, goal: str) -> str:
    return f" (goal {goal}: {'reached' if is_reached else 'missed'})"


def summary(folder: pathlib.Path) -> list[str]:
    """Lines about the training step and each decoding, beside the planner's where it ran."""
    lines = []
    for one in _read(folder / "train.json", "results"):
        share = "MFU not known for this device"
        if one["mfu"] is not None:
            goal = _goal(one["mfu"] >= _LEAST_MFU, f"{_LEAST_MFU:.0%}")
            share = f"MFU {one['mfu']:.1%}{goal}"
        lines.append(f"train: {one['ms']:.1f} ms a step, {share}")
    planned = folder / "plan_train.json"
    if planned.exists():
        plan = json.loads(planned.read_text(encoding="utf-8"))
        least = 1e3 * max(plan["limits"].values())
        lines.append(
            f"train, planned: at least {least:.1f} ms a step ({plan['limit']}), MFU at most "
            f"{plan['utilisation_bound']:.1%}"
        )
    bounds = {
        (one["batch"], one["temperature"]): one["tokens_per_second"]
        for one in _read(folder / "plan_decode.json", "plans")
    }
    for one in _read(folder / "decode.json", "results"):
        _, temperature, batch, *_ = one["case"].split(":")
        bound = bounds.get((int(batch), float(temperature)))
        times = ""
        if bound is not None:
            distance = bound / one["tokens_per_s"]
            goal = _goal(distance <= _MOST_TIMES, f"{_MOST_TIMES:g}")
            times = f", {distance:.2f} times from the bound{goal}"
        lines.append(f"decode {one['case']}: {one['tokens_per_s']:,.0f} tokens/s{times}")
    return lines


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_OUTPUT, "a folder for the results")
    if _DRY_RUN.value:
        folder /= "dry_run"
        # For the parts, which are processes of their own.
        os.environ["JAX_PLATFORMS"] = "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    went = {
        name: _run(name, seconds, words, folder)
        for name, (seconds, words) in _parts(folder, _DRY_RUN.value, _TOPOLOGY.value).items()
    }
    for name, text in went.items():
        print(f"{name}: {text}")
    print("\n".join(summary(folder)))
    failed = [name for name, text in went.items() if not text.startswith("done")]
    if failed:
        raise UserError(f"not done: {', '.join(failed)}. The same call runs these parts again")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
