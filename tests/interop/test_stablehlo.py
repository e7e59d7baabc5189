"""Generation as StableHLO: the page's loader, in a process without calm_jax, gives the tokens of `Generator`."""

import dataclasses
import json
import re

import pytest

from calm_jax.run.generator import Generator
from tests.interop.conversions import random_workdir
from tests.workdirs import ROOT, run, run_program

pytest.importorskip("flatbuffers")
NO_CALM_JAX = "import sys; sys.modules['calm_jax'] = None\n"


def call(workdir, tmp_path, *flags: str, status: int = 0) -> str:
    folders = f"--workdir={workdir.path}", f"--target={tmp_path / 'program'}"
    return run("calm_jax.interop.stablehlo", *folders, *flags, status=status)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["head=energy", "head=softmax"])
def test_the_loader_of_the_page_gives_the_generators_tokens(arguments, tmp_path):
    workdir = random_workdir(tmp_path / "ours", arguments)
    call(workdir, tmp_path, "--batch=2", "--prompt_chunks=2", "--new_chunks=4", "--temperature=0.5")
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    [loader] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = run_program(NO_CALM_JAX + loader, cwd=tmp_path)
    generator = Generator.load(workdir.path)
    size = generator.task.chunk_size
    options = dataclasses.replace(
        generator.options, temperature=0.5, max_tokens=4 * size, stop=(), prompt_alignment="left"
    )
    prompts = [[generator.tokenizer.bos_id] * size] * 2
    expected = [one.tokens for one in generator.generate(prompts, options, seed=0)]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    eos = generator.tokenizer.eos_id
    ended = [one[: one.index(eos)] if eos in one else one for one in found]
    assert ended == [one[: one.index(eos)] if eos in one else one for one in expected]
    assert ended[0] != ended[1] and all(ended)


@pytest.mark.slow
def test_a_text_beyond_the_context_is_refused_and_nothing_is_written(tmp_path):
    workdir = random_workdir(tmp_path / "ours", "head=energy")
    out = call(workdir, tmp_path, "--new_chunks=100000", status=2)
    assert "the model's context is" in out and not (tmp_path / "program").exists()
