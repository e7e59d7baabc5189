"""Every command of the README, the docs and launch/ that trains on a named cluster or slice fits there: both stages and their evaluations are compiled for it, unless a smaller cluster's imply them."""

import itertools
import json
import pathlib
import re
import shlex

import pytest

from benchmarks.machines import MACHINES, RECIPES, USES, Cell
from calm_jax.planning.topology import parse
from tests.planning.test_planner import need_cuda, need_tpu, plan
from tests.workdirs import ROOT

# (file, a part of its text, hardware that the text names). Each is a training of CALM-M or CALM-XL with the published batch; a
# text without --config is of a script that trains CALM-M.
COMMANDS = (
    ("README.md", "launch/single_host.sh --config=configs/calm_m.py", "h100:8"),
    ("launch/reproduce_calm_m.sh", "launcher=launch/single_host.sh", "h100:8"),
    (
        "docs/scaling.md",
        "sbatch --nodes=4 launch/slurm_gpu.sh --config=configs/calm_m.py --workdir=/shared/runs/calm_m",
        "h100:8x4",
    ),
    (
        "docs/scaling.md",
        "--accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite --spot",
        "v5e:16x16",
    ),
    ("launch/tpu_pod.sh", "--accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite", "v5e:16x16"),
    ("launch/gke_xpk.sh", "--tpu_type=v5litepod-256", "v5e:16x16"),
    ("launch/gke_xpk.sh", "--tpu-type=v5litepod-256", "v5e:16x16"),
    (
        "launch/reproduce_calm_m.sh",
        "--accelerator=v5litepod-256 --runtime=v2-alpha-tpuv5-lite --spot",
        "v5e:16x16",
    ),
    (
        "launch/reproduce_calm_m.sh",
        "sbatch --wait --nodes=4 launch/slurm_gpu.sh",
        "h100:8x4",
    ),
    ("launch/slurm_gpu.sh", "sbatch [--nodes=4", "h100:8x4"),
    (
        "docs/scaling.md",
        "--config=configs/calm_xl.py --topology=v5e:16x16 --config.mesh.data=16 --config.mesh.fsdp=16",
        "v5e:16x16",
    ),
)


# The commands leave the choice between "none" and "full" to the program, which takes the faster one that fits. So they fit if "full"
# does, and the other need not be compiled here.
LEAST_MEMORY = "--config.lm.model.remat=full"


def planned(text: str, topology: str) -> list[tuple[str, ...]]:
    """The options of the plans of a command, one for each stage and one for its evaluations; a script without --config trains CALM-M."""
    options = [word for word in shlex.split(text) if word.startswith("--config")]
    recipe = (
        []
        if any(word.startswith("--config=") for word in options)
        else ["--config=configs/calm_m.py"]
    )
    return [
        (*recipe, *options, *least, f"--topology={topology}", f"--stage={stage}")
        for stage, least in (("autoencoder", ()), ("lm", (LEAST_MEMORY,)), ("evaluate", ()))
    ]


EVERY = {one for _, text, topology in COMMANDS for one in planned(text, topology)}


def is_implied(options: tuple[str, ...]) -> bool:
    """Whether what fits on one host is planned on four: each device has a quarter of the rows, and no more of the parameters. The
    longest plans, those of second stages, are made all the same."""
    smaller = tuple(word.replace("h100:8x4", "h100:8") for word in options)
    return "--stage=lm" not in options and smaller != options and smaller in EVERY


# Large models and second stages take longest, and come first: with two processes the last one has not to be waited for.
PLANS = sorted(
    (one for one in EVERY if not is_implied(one)),
    key=lambda one: ("--stage=lm" in one, one),
    reverse=True,
)


# Words of commands for clusters and clouds that name hardware; those of `calm_jax.plan` say themselves whether it fits.
HARDWARE = re.compile(r"v\d\w*litepod-\d+|v\d[ep]-\d+ --|sbatch\b[^\n]*--nodes=\d+")


def test_no_command_for_hardware_is_left_out():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "launch").glob("*.sh")]
    for path in files:
        known = [text for file, text, _ in COMMANDS if ROOT / file == path]
        # What a script refuses or sets for itself is no command.
        lines = [
            one for one in path.read_text().splitlines() if not re.search("fail |#SBATCH", one)
        ]
        for line in filter(HARDWARE.search, lines):
            assert any(text[:40] in line for text in known), (path.name, line)


@pytest.mark.parametrize(("file", "text"), [command[:2] for command in COMMANDS])
def test_the_commands_are_those_of_the_files(file, text):
    # Commands are broken into lines.
    joined = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
    assert text in re.sub(r" +", " ", joined)


def _id(options: tuple[str, ...]) -> str:
    return " ".join(word.partition("=")[2] for word in options)


@need_tpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [one for one in PLANS if "v5e" in str(one)], ids=_id)
def test_a_command_for_tpus_fits(options, tmp_path):
    assert_fits(options, tmp_path)


@need_cuda
@pytest.mark.slow
@pytest.mark.parametrize("options", [one for one in PLANS if "h100" in str(one)], ids=_id)
def test_a_command_for_gpus_fits(options, tmp_path):
    assert_fits(options, tmp_path)


# The compiler of TPUs takes less than half the time with the least effort. Its programs need somewhat more memory then (for the
# evaluation of CALM-M 2.23 instead of 2.09 GiB), so that what fits this way fits otherwise.
LEAST_EFFORT = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0", "JAX_MEMORY_FITTING_EFFORT": "-1.0"}


def assert_fits(options: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    done = plan(*options, f"--output={tmp_path}/plan.json", **LEAST_EFFORT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert all(one["fits"] for one in found.get("plans", [found]))


def test_every_cell_of_the_table_of_machines_divides_its_batch_over_the_machines_devices():
    for machine, recipe, use in itertools.product(MACHINES, RECIPES, USES):
        cell = Cell(machine, recipe, use)
        given = dict(one.removeprefix("--").split("=", 1) for one in cell.options)
        devices = int(given["config.mesh.data"]) * int(given["config.mesh.fsdp"])
        assert devices == parse(given["topology"]).num_devices
        if use != "generation":
            rows = int(given["config.lm.training.batch_size"])
            assert rows % (devices * cell.microbatches) == 0
        assert cell.text(None) == "not compiled"
