"""`calm_jax.load` and `calm_jax.evaluate`, and the README's example as it is written."""

import json
import os
import re
import shutil

import pytest

import calm_jax
from calm_jax.errors import UserError
from calm_jax.interop.exported import export
from tests.interop.conversions import random_workdir
from tests.test_readme import README
from tests.workdirs import ROOT, run_program


@pytest.mark.slow
def test_unknown_models_and_keys_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="neither a folder nor the name of a repository"):
        calm_jax.load(tmp_path / "no")
    with pytest.raises(UserError, match="source cannot be read: File name too long"):
        calm_jax.load("x" * 300)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        calm_jax.load(tmp_path)
    workdir = random_workdir(tmp_path / "ours", "head=energy")
    with pytest.raises(UserError, match="own tokenizer"):
        calm_jax.load(workdir.path, tokenizer="bytes")
    # The same file tells a workdir from a published checkpoint.
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json cannot be read \(too many levels"):
        calm_jax.load(tmp_path / "deep")
    for key in ("evaluation.num_samples", "eval.number"):
        with pytest.raises(UserError, match=key.rpartition(".")[2]):
            calm_jax.evaluate(workdir.path, {key: 4})


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["head=energy", "head=softmax"])
def test_a_published_checkpoint_generates_as_the_run_that_it_was_exported_from(arguments, tmp_path):
    # A published checkpoint is computed with in bfloat16.
    workdir = random_workdir(tmp_path / "ours", arguments, compute_dtype="bfloat16")
    export(workdir, tmp_path / "out", str(tmp_path / "out" / "autoencoder"))
    ours, theirs = calm_jax.load(workdir.path), calm_jax.load(tmp_path / "out", tokenizer="bytes")
    prompts = ["def f(x):", "a"]
    texts = [
        [one.tokens for one in model.generate(prompts, ours.options, seed=3)]
        for model in (ours, theirs)
    ]
    assert texts[0] == texts[1] and len(texts[0][0]) > 4
    if arguments == "head=energy":
        with pytest.raises(UserError, match="is an autoencoder"):
            calm_jax.load(tmp_path / "out" / "autoencoder", tokenizer="bytes")


@pytest.mark.slow
def test_the_readmes_example_runs_as_written(finished, tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shutil.copytree(finished[0], tmp_path / "runs" / "quickstart")
    done = run_program(example, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    [expected] = calm_jax.load(tmp_path / "runs" / "quickstart").generate(["def main("], seed=0)
    records = (tmp_path / "runs" / "quickstart" / "evaluations.jsonl").read_text().splitlines()
    score = json.loads(records[-1])
    assert score["eval"]["num_samples"] == 4
    assert done.stdout.startswith(expected.text)
    assert done.stdout.splitlines()[-1] == str(score["lm"]["brierlm"])
