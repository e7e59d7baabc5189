"""The README's commands do what it says."""

import json
import re
import shlex
import shutil

import pytest

from calm_jax.config import resolve
from configs import ar_l, ar_m, ar_s, calm_ablation, calm_l, calm_m, calm_xl, quickstart
from tests.test_recipe import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> list[str]:
    """The lines of the command between a marker comment and its end."""
    text = re.search(rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- end -->", README, re.DOTALL)[1]
    return text.strip().splitlines()


def test_both_commands_make_their_own_environment():
    for name in ("quickstart", "test"):
        venv, install, _ = block(name)
        assert venv == "python3 -m venv .venv && . .venv/bin/activate"
        assert "-c constraints.txt -e" in install
    assert block("test")[-1] == "python -m pytest"


def test_every_file_that_the_readme_names_is_there():
    for name in re.findall(r"(?:configs|launch|tests)/[\w./]*\w", README):
        assert (ROOT / name).exists(), name


def has_key(section, key: str) -> bool:
    for part in key.split("."):
        if part not in section:
            return False
        section = section[part]
    return True


def test_every_key_that_the_readme_names_is_there():
    trees = [quickstart.get_config(), quickstart.get_config("head=flow")]
    for key in re.findall(r"--config\.([a-z][\w.]+)=", README):
        assert any(has_key(tree, key) for tree in trees), key


def test_recipes_describe_themselves():
    """Each recipe's docstring holds its command."""
    for recipe in (quickstart, calm_m, calm_l, calm_xl, calm_ablation, ar_s, ar_m, ar_l):
        name = recipe.__name__.rpartition(".")[2]
        assert f"python -m calm_jax.main --config=configs/{name}.py" in recipe.__doc__
        config = recipe.get_config()
        config.tokenizer.path = "" if name == "quickstart" else "tokenizer.model"
        resolve(config)


@pytest.mark.slow
def test_the_quickstart_in_a_short_form(tmp_path):
    """The README's command on the embedded text, with a few steps instead of all."""
    python, *command = shlex.split(block("quickstart")[-1])
    assert python == "python"
    short = [
        f"--workdir={tmp_path / 'run'}",
        "--config.autoencoder.training.num_steps=20",
        "--config.autoencoder.min_accuracy=0.0",
        "--config.lm.training.num_steps=3",
        "--config.sample.max_tokens=8",
    ]
    assert command[0] == "-m"
    out = run(*command[1:], *short)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    # The floor stands on the text alone, so it is the same as after the whole run.
    assert 4 < results["floor"]["brierlm"] < 9
    assert "BrierLM" in out and "--- prompt: 'def '" in out


@pytest.mark.slow
def test_the_parity_command(golden, tmp_path):
    """On one case and one that nobody knows; test_verify.py runs all of them in its own process."""
    assert "python -m calm_jax.interop.verify tests/golden" in README
    shutil.copytree(golden / "ae_k4", tmp_path / "ae_k4")
    shutil.copy(golden / "ae_k4.npz", tmp_path)
    shutil.copy(golden / "temperature.npz", tmp_path / "stranger.npz")
    out = run("calm_jax.interop.verify", str(tmp_path))
    assert "15 of 15 quantities agree" in out
    assert "not known here, not compared: stranger" in out
