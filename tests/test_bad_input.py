"""Bad input: one line that names the thing and the value, a non-zero exit, nothing written."""

import subprocess
import sys

import pytest
from absl import flags

from calm_jax.config import as_json, resolve
from tests import tiny_recipe
from tests.test_recipe import ROOT


@pytest.fixture
def text(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"some text, number {number}. " * 30)
    return f"{tmp_path}/*.txt"


def refuse(capsys, monkeypatch, *args: str) -> str:
    """The one line on stderr of `python -m calm_jax.main ...`, in this process."""
    from calm_jax import main

    values = flags.FLAGS
    values.unparse_flags()
    for override in [name for name in values if name.startswith("config.")]:
        delattr(values, override)
    # Where ml_collections looks for the keys that are overridden.
    monkeypatch.setattr(sys, "argv", ["main", *args])
    with pytest.raises(SystemExit) as exit_:
        main.main(main._parse_flags(["main", *args]))
    assert exit_.value.code == 2
    out = capsys.readouterr()
    lines = out.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), out.err
    return lines[0]


BAD_VALUES = {
    "--config.lm.model.num_heads=3": "lm.model.hidden_size=16",
    "--config.lm.model.num_kv_heads=3": "lm.model.num_kv_heads=3",
    "--config.lm.data.block_tokens=30": "lm.data.block_tokens=30",
    "--config.autoencoder.model.num_encoder_layers=3": "autoencoder.model.num_encoder_layers=3",
    "--config.lm.head.num_samples=1": "lm.head.num_samples=1",
    "--config.lm.head.beta=0.0": "lm.head.beta=0",
    "--config.lm.head.beta=2.5": "lm.head.beta=2.5",
    "--config.lm.head.name=energie": "lm.head.name='energie' is none of energy, diffusion, flow, softmax",
    "--config.sample.temperature=0.0": "temperature=0",
    "--config.sample.temperature=1.5": "temperature=1.5",
    "--config.eval.num_samples=1": "eval.num_samples=1",
    "--config.stage=lm": "stage='lm' needs an autoencoder",
    "--config.seed=-1": "seed=-1",
    "--config.stage=both": "stage='both'",
    # Three tokens a chunk are fine, in blocks of whole chunks.
    "--config.chunk_size=3": "block_tokens=32 must be a multiple of chunk_size=3",
    "--config.chunk_size=0": "chunk_size=0",
    "--config.sample.temperature=2.0": "temperature=2",
    "--config.sample.top_p=0.9": "top_p=0.9",
    "--config.eval.context_tokens=32": "eval.context_tokens=32",
    "--config.eval.start_every=0": "eval.start_every=0",
    "--config.compute_dtype=float8": "compute_dtype='float8'",
    "--config.tokenizer.kind=gpt": "tokenizer.kind='gpt'",
    "--config.tokenizer.kind=llama3": "tokenizer.path",
    "--config.data.on_bad_record=ignore": "data.on_bad_record='ignore'",
    "--config.lm.training.accumulation_steps=3": "training.batch_size=4",
    "--config.lm.optimizer.schedule=linear": "lm.optimizer.schedule='linear'",
    "--config.mesh.fsdp=7": "mesh:",
    "--config.data.train_files=/nowhere/*.txt": "/nowhere/*.txt",
    "--config.autoencoder.checkpoint=/nowhere": "autoencoder.checkpoint='/nowhere'",
    "--config.lm.data.block_tokens=100000": "100000",
    "--config.lm.model.hidden_sise=8": "did you mean 'hidden_size'",
    "--config.lm.model.hidden_size=1e3": "1e3",
    "--profile=5": "--profile='5'",
    "--mode=evaluate": "evaluate",
}


@pytest.mark.parametrize("option", BAD_VALUES)
def test_a_bad_value_is_named(option, text, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    recipe = f"--config=tests/tiny_recipe.py:{text}"
    assert BAD_VALUES[option] in refuse(capsys, monkeypatch, recipe, f"--workdir={workdir}", option)
    assert not workdir.exists()


BAD_ARGUMENTS = {
    "head=nope": "head='nope' is none of energy, diffusion, flow, softmax",
    "k=100000": "k=100000: a block of autoencoder.data.block_tokens=64 must hold at least 2 chunks",
    "k=0": "k='0' must be a number of tokens",
    "k=four": "k='four' must be a number of tokens",
    "head=softmax,k=2": "k=2: head=softmax predicts single tokens",
    "depth=3": "config argument 'depth=3': give head=NAME or k=TOKENS",
    "k=2,k=4": "config argument 'k=4': give head=NAME or k=TOKENS, each at most once",
}


def test_a_recipe_without_arguments_says_so(capsys, monkeypatch):
    line = refuse(capsys, monkeypatch, "--config=configs/ar_s.py:head=flow")
    assert "configs/ar_s.py:head=flow: this recipe takes no argument" in line


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_a_bad_config_argument_is_named(arguments, tmp_path, capsys, monkeypatch):
    recipe = f"--config=configs/quickstart.py:{arguments}"
    workdir = tmp_path / "run"
    error = refuse(capsys, monkeypatch, recipe, f"--workdir={workdir}")
    assert error.startswith(f"error: {BAD_ARGUMENTS[arguments]}")
    assert not workdir.exists()


# Config arguments and an option that does not go with them.
BAD_VARIANTS = {
    ("head=softmax", "--config.chunk_size=4"): "chunk_size=4: lm.head.name='softmax'",
    ("head=softmax", "--config.stage=autoencoder"): "stage='autoencoder': lm.head.name='softmax'",
    ("head=softmax", "--config.autoencoder.checkpoint=runs/x"): "autoencoder.checkpoint='runs/x'",
    ("head=softmax", "--config.sample.top_p=0.0"): "top_p=0",
    ("head=softmax", "--config.lm.head.num_blocks=2"): "no key 'num_blocks'",
    ("head=flow", "--config.lm.head.solver=rk4"): "lm.head.solver='rk4' is none of midpoint, euler",
    ("head=flow", "--config.lm.head.beta=1.0"): "no key 'beta'",
    ("head=flow", "--config.sample.top_p=0.5"): "top_p=0.5",
    ("head=diffusion", "--config.lm.head.num_steps=1"): "lm.head.num_steps=1",
    ("head=diffusion", "--config.lm.head.num_steps=1001"): "lm.head.num_steps=1001",
    ("head=diffusion", "--config.sample.temperature=0.0"): "temperature=0",
}


@pytest.mark.parametrize(("arguments", "option"), BAD_VARIANTS)
def test_a_value_that_does_not_fit_the_head_is_named(
    arguments, option, text, tmp_path, capsys, monkeypatch
):
    recipe = f"--config=tests/tiny_recipe.py:{text},{arguments}"
    workdir = tmp_path / "run"
    error = refuse(capsys, monkeypatch, recipe, f"--workdir={workdir}", option)
    assert BAD_VARIANTS[arguments, option] in error
    assert not workdir.exists()


BAD_TEXT = {
    "broken.jsonl": (b'{"text": "good"}\n{"text": \n', "broken.jsonl, line 2"),
    "field.json": (b'{"body": "no text"}\n', "no field 'text'"),
    "number.jsonl": (b'{"text": 7}\n', "is int, not a string"),
    "latin.txt": ("caf\u00e9".encode("latin-1"), "byte 3 is not valid UTF-8"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "is not valid UTF-8"),
    "empty.jsonl": (b"", "holds no text"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_named(name, tmp_path, capsys, monkeypatch):
    content, expected = BAD_TEXT[name]
    (tmp_path / name).write_bytes(content)
    recipe = f"--config=tests/tiny_recipe.py:{tmp_path / name}"
    assert expected in refuse(capsys, monkeypatch, recipe, f"--workdir={tmp_path / 'run'}")


def test_a_batch_that_does_not_divide_over_the_devices(text, tmp_path):
    """In a process of its own, which can have two devices."""
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "calm_jax.main",
            f"--config=tests/tiny_recipe.py:{text}",
            f"--workdir={tmp_path / 'run'}",
            "--config.lm.training.batch_size=5",
        ],
        cwd=ROOT,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 2
    assert "lm.training.batch_size=5 must be a multiple of" in out.stderr


GENERATE = {
    "--workdir=/nowhere": "/nowhere is no workdir",
    "--workdir=": "--workdir=DIR",
}


@pytest.mark.parametrize("option", GENERATE)
def test_generation_refuses(option):
    out = subprocess.run(
        [sys.executable, "-m", "calm_jax.generate", option, "--prompt=x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 2 and GENERATE[option] in out.stderr


SAMPLE = {
    "--top_p=0.9": "top_p=0.9 needs the probabilities of tokens, which lm.head.name='energy'",
    "--temperature=2": "temperature=2 must be in (0, 1]",
    "--temperature=0": "temperature=0 must be in (0, 1]",
}


@pytest.mark.parametrize("option", SAMPLE)
def test_generation_refuses_what_a_latent_head_cannot_do(option, text, tmp_path):
    """Before it looks for parameters: the folder has none."""
    config = resolve(tiny_recipe.get_config(text))
    (tmp_path / "config.json").write_text(as_json(config), encoding="utf-8")
    command = ["calm_jax.generate", f"--workdir={tmp_path}", "--prompt=x", option]
    out = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert out.returncode == 2 and "Traceback" not in out.stderr
    errors = [line for line in out.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and SAMPLE[option] in errors[0]
