"""The README's commands do what it says."""

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from calm_jax.config import resolve
from configs import ar_l, ar_m, ar_s, calm_ablation, calm_l, calm_m, calm_xl, quickstart
from tests.workdirs import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Every page for readers, by its name in the repository.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}


def block(name: str) -> list[str]:
    """The lines of the command between a marker comment and its end."""
    text = re.search(rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- end -->", README, re.DOTALL)[1]
    return text.strip().splitlines()


def dry_run(*command: str) -> list[list[str]]:
    """The commands that a script would run."""
    out = subprocess.run(
        [*command, "--dry_run"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [shlex.split(line) for line in out.splitlines()]


def test_the_readme_is_a_front_page():
    assert len(README.splitlines()) <= 200


def test_both_commands_are_one_line_and_make_their_own_environment():
    [quickstart_line], [test_line] = block("quickstart"), block("test")
    venv, activate, install, tests = test_line.split(" && ")
    assert (venv, activate) == ("python3 -m venv .venv", ". .venv/bin/activate")
    assert "-c constraints.txt -e '.[test]'" in install
    assert tests == "python -m pytest"
    assert quickstart_line == "launch/quickstart.sh"
    assert os.access(ROOT / quickstart_line, os.X_OK)


def test_ci_finds_the_test_command():
    """`.ci/run` cuts it out with sed and grep."""
    cut = "sed -n '/<!-- test -->/,/<!-- end -->/p' README.md | grep -v '^<!--\\|^```'"
    out = subprocess.run(
        ["bash", "-c", cut], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert out.splitlines() == block("test")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page):
    folders = "configs|launch|tests|notebooks|docs|benchmarks|calm_jax"
    for name in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./]*\w", PAGES[page]):
        # calm_jax/models/heads/NAME.py is the reader's.
        assert (ROOT / name).exists() or "NAME" in name, f"{page}: {name}"


def has_key(section, key: str) -> bool:
    for part in key.split("."):
        if part not in section:
            return False
        section = section[part]
    return True


def defined_flags(module: str) -> set[str]:
    """Names of a command's flags, read from its source."""
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {
        call.args[0].value
        for call in calls
        if ast.unparse(call.func).startswith(("flags.DEFINE_", "define_fraction"))
    }
    return names | ({"config"} if "define_recipe(" in source else set())


def _spelt_out(text: str) -> list[str]:
    """A word without the {a,b} that a shell expands."""
    found = re.search(r"\{([^{}]*,[^{}]*)\}", text)
    if not found:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    return [one for part in found[1].split(",") for one in _spelt_out(before + part + after)]


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_is_there(page):
    trees = [quickstart.get_config("head=energy"), quickstart.get_config("head=flow")]
    text = PAGES[page]
    given = re.findall(r"--config\.([a-z{][\w.,{}]+)=", text)
    sections = "|".join(name for name, value in trees[0].items() if hasattr(value, "keys"))
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", text)
    # Names of tokenizers' files.
    named = [name for name in named if name not in ("tokenizer.model", "tokenizer.json")]
    for key in [one for word in given + named for one in _spelt_out(word)]:
        assert any(has_key(tree, key) for tree in trees), f"{page}: {key}"


def test_recipes_describe_themselves():
    """Each recipe's docstring holds its command."""
    for recipe in (quickstart, calm_m, calm_l, calm_xl, calm_ablation, ar_s, ar_m, ar_l):
        name = recipe.__name__.rpartition(".")[2]
        assert f"python -m calm_jax.main --config=configs/{name}.py" in recipe.__doc__
        assert f"`configs/{name}.py`" in README
        config = recipe.get_config()
        config.tokenizer.path = "" if name == "quickstart" else "tokenizer.model"
        resolve(config)


# --- launch/quickstart.sh, with stand-ins for Python

# Notes each call; `-m venv FOLDER` puts another one of these into it.
PYTHON = """#!/bin/bash
echo "${0##*/} $*" >> "$CALLS"
if [[ $1 == -c ]]; then exit "${UNFIT:-0}"; fi
if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [[ $2 == pip ]]; then exit "${PIP:-0}"; fi
if [[ $2 == calm_jax.main ]]; then exit "${RUN:-0}"; fi
"""
VENV = "-m venv .venv"
INSTALL = "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e ."
TRAIN = "-m calm_jax.main --config=configs/quickstart.py"
INSTALLING = "installing calm_jax into .venv, which takes a minute or two\n"


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    folder = tmp_path / "a checkout"
    for name in ("launch/quickstart.sh", "launch/common.sh", "configs/quickstart.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (folder / name).touch()
        os.utime(folder / name, (1e9, 1e9))
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    return folder


def call(checkout: pathlib.Path, *flags: str, **environment: str) -> tuple[int, str, list[str]]:
    """Status, stderr, and what was called but for the question whether Python fits."""
    calls = checkout.parent / "calls"
    calls.write_text("")
    result = subprocess.run(
        ["bash", str(checkout / "launch" / "quickstart.sh"), *flags],
        cwd=checkout.parent,
        env={
            "PATH": f"{checkout.parent / 'bin'}:/usr/bin:/bin",
            "CALLS": str(calls),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    noted = [line.partition(" ")[2] for line in calls.read_text().splitlines()]
    return result.returncode, result.stderr, [line for line in noted if not line.startswith("-c")]


def test_the_quickstart_installs_once_and_runs_each_time(checkout):
    assert call(checkout) == (0, INSTALLING, [VENV, INSTALL, TRAIN])
    flag = "--config.data.train_files=/a b"
    assert call(checkout, flag) == (0, "", [f"{TRAIN} {flag}"])
    (checkout / "constraints.txt").touch()
    os.utime(checkout / "constraints.txt", (4e9, 4e9))
    assert call(checkout) == (0, INSTALLING, [VENV, INSTALL, TRAIN])


def test_the_quickstart_takes_another_recipe_in_the_place_of_its_own(checkout):
    other = "--config=configs/quickstart.py:head=energy"
    assert call(checkout, other)[2][-1] == f"-m calm_jax.main {other}"


def test_the_quickstart_says_in_which_folder_its_commands_work(checkout):
    """Where it was called from another one."""
    line = f"These commands are for the folder {checkout}: cd there first."
    script = ["bash", str(checkout / "launch" / "quickstart.sh")]
    path = f"{checkout.parent / 'bin'}:/usr/bin:/bin"
    for folder, printed in ((checkout.parent, line), (checkout, "")):
        environment = {"PATH": path, "CALLS": str(checkout.parent / "calls")}
        done = subprocess.run(
            script, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == printed


def test_the_quickstart_repeats_an_installation_that_failed(checkout):
    assert call(checkout, PIP="1") == (1, INSTALLING, [VENV, INSTALL])
    assert call(checkout) == (0, INSTALLING, [VENV, INSTALL, TRAIN])


def test_the_quickstart_ends_as_the_run_does(checkout):
    for status in (2, 75):
        assert call(checkout, RUN=str(status))[0] == status


def test_the_quickstart_refuses_other_pythons_in_one_line(checkout):
    for version in (11, 12, 13):
        shutil.copy(checkout.parent / "bin/python3", checkout.parent / f"bin/python3.{version}")
    status, error, calls = call(checkout, UNFIT="1")
    assert status == 2 and not calls and not (checkout / ".venv").exists()
    assert error.startswith("error: there is no Python 3.11, 3.12 or 3.13")
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--dry", "--dryrun", "--dry-run"])
def test_a_misspelt_dry_run_of_the_quickstart_installs_nothing(flag, checkout):
    assert call(checkout, flag) == (2, f"error: there is no flag {flag}: write --dry_run\n", [])


def test_the_quickstarts_dry_run_does_nothing(checkout):
    before = sorted(checkout.rglob("*"))
    assert call(checkout, "--dry_run") == (0, "", [])
    assert sorted(checkout.rglob("*")) == before


# --- The commands themselves


@pytest.mark.slow
def test_the_quickstart_in_a_short_form(tmp_path):
    """The script's run on the embedded text, with a few steps and one layer instead of all, compiled as users' are."""
    python, *command = dry_run(*block("quickstart"))[-1]
    assert python == ".venv/bin/python"
    short = [
        f"--workdir={tmp_path / 'run'}",
        "--config.autoencoder.training.num_steps=20",
        "--config.autoencoder.min_accuracy=0.0",
        "--config.lm.training.num_steps=3",
        # Compiling takes most of the time.
        "--config.lm.model.num_layers=1",
        "--config.lm.head.num_blocks=1",
        "--config.sample.max_tokens=8",
        # A sixth of the held-out text, as scoring takes longer than so few steps.
        "--config.data.holdout_every=120",
    ]
    assert command[0] == "-m"
    out = run(*command[1:], *short, xla_flags="")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    # The floor stands on the text alone, so it is about the same as after the whole run.
    assert 0.01 < results["floor"]["brierlm"] < 0.06
    assert "BrierLM" in out and "--- prompt: 'def'" in out


@pytest.mark.slow
def test_the_parity_command(golden, tmp_path):
    """On one case and one that nobody knows; test_verify.py runs all of them in its own process."""
    assert "python -m calm_jax.interop.verify tests/golden" in PAGES["docs/benchmarks.md"]
    shutil.copytree(golden / "ae_k4", tmp_path / "ae_k4")
    shutil.copy(golden / "ae_k4.npz", tmp_path)
    shutil.copy(golden / "temperature.npz", tmp_path / "stranger.npz")
    out = run("calm_jax.interop.verify", str(tmp_path))
    assert "15 of 15 quantities agree" in out
    assert "unknown cases, not compared: stranger" in out
