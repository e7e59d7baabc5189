"""The generate command on a stored model with random parameters: what it prints and writes.

The errors of the command are tested in test_bad_input.py.
"""

import dataclasses
import functools
import json

import pytest

from calm_jax.run.generator import Continuation, Generator
from tests.tiny_model import run_generate, tiny

# The commands take a quarter of a minute together.
pytestmark = pytest.mark.slow

OPTIONS = {"max_tokens": 11, "temperature": 0.5, "sampler": "batch"}
PROMPTS = ["def f(x):\n", "", "a b"]
IDS = [[256, 100, 101], [], "text", [7] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    tiny().save(folder / "model")
    # As Windows writes it: a carriage return at the end of each line is no part of a prompt.
    (folder / "prompts.txt").write_bytes(b"def f(x):\r\n\r\n\na b\r\n")
    lines = [json.dumps({"prompt": prompt, "more": 1}) for prompt in IDS]
    (folder / "ids.jsonl").write_text("\n".join(lines))
    for name in ("old.jsonl", "kept.jsonl"):
        (folder / name).write_text("old")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """The exit status, stdout and stderr of commands by name; all are run in one process."""
    model = [f"--workdir={folder / 'model'}"]
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    several = [f"--prompt={prompt}" for prompt in PROMPTS]
    commands = {
        "one": [*model, *options, several[0]],
        "again": [*model, *options, several[0]],
        "other seed": [*model, *options, several[0], "--seed=1"],
        "several": [*model, *options, *several],
        "one by one": [*model, *options, *several, "--batch_size=1"],
        "file": [*model, *options, f"--prompts_file={folder / 'prompts.txt'}"],
        "ids": [
            *model,
            *options,
            f"--prompts_file={folder / 'ids.jsonl'}",
            f"--output={folder / 'ids_out.jsonl'}",
        ],
        "one of ids": [*model, *options, f"--prompts_file={folder / 'one.jsonl'}"],
        "output": [*model, *options, *several, f"--output={folder / 'texts.jsonl'}"],
        "refused": [*model, *options, *several, f"--output={folder / 'kept.jsonl'}"],
        "replaced": [*model, *options, *several, f"--output={folder / 'old.jsonl'}", "--overwrite"],
        "own options": [*model, several[0]],
        "stop": [*model, *options, several[0], "--stop=zzzz", f"--stop={first_text(folder)[1]}"],
    }
    (folder / "one.jsonl").write_text(json.dumps({"prompt": [100, 101, 102]}))
    return dict(zip(commands, run_generate(*commands.values()), strict=True))


load = functools.cache(Generator.load)


def expected(folder, prompts=PROMPTS, seed=0, **changes) -> list[Continuation]:
    generator = load(folder / "model")
    options = dataclasses.replace(generator.options, **(OPTIONS | changes))
    return generator.generate(prompts, options, seed)


def first_text(folder) -> str:
    return expected(folder)[0].text


def test_one_prompt_is_printed_with_its_continuation(results, folder):
    status, out, err = results["one"]
    assert (status, out) == (0, f"{PROMPTS[0]}{first_text(folder)}\n\n")
    assert err == ("temperature 0.5, sampler batch: 8 draws a chunk, 3 of 3 chunks not exact\n")
    assert results["again"] == results["one"]
    (other,) = expected(folder, PROMPTS[:1], seed=1)
    assert results["other seed"][1] == f"{PROMPTS[0]}{other.text}\n\n" != out


def test_several_prompts_are_printed_in_order(results, folder):
    done = expected(folder)
    shown = "".join(f"{one.prompt}{one.text}\n\n" for one in done)
    assert results["several"][:2] == results["one by one"][:2] == (0, shown)


def test_every_line_of_a_prompts_file_is_a_prompt(results, folder):
    """An empty line is an empty prompt; the line break at the end of the file does not begin another one."""
    done = expected(folder, ["def f(x):", "", "", "a b"])
    shown = "".join(f"{one.prompt}{one.text}\n\n" for one in done)
    assert results["file"][:2] == (0, shown)


def test_options_that_are_not_given_come_from_the_config_of_the_workdir(results, folder):
    sample = tiny().config.sample
    given = {name: getattr(sample, name) for name in OPTIONS}
    (one,) = expected(folder, PROMPTS[:1], **given)
    assert results["own options"][:2] == (0, f"{PROMPTS[0]}{one.text}\n\n")
    assert results["own options"][2] == "temperature 1, 1 draw a chunk with every sampler\n"


def test_a_text_ends_before_its_first_stop_string(results, folder):
    text = first_text(folder)
    assert results["stop"][:2] == (0, f"{PROMPTS[0]}{text[: text.index(text[1])]}\n\n")


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "seconds"}


def test_output_has_one_object_with_all_fields_for_each_prompt(results, folder):
    done = expected(folder)
    status, out, _ = results["output"]
    path = folder / "texts.jsonl"
    assert status == 0 and out.startswith(f"{path}: 3 texts; temperature 0.5, sampler batch: 8 ")
    records = read(path)
    assert [without_times(one) for one in records] == [
        without_times(dataclasses.asdict(one)) for one in done
    ]
    for record in records:
        assert record["seconds"] == sorted(record["seconds"]) and record["seconds"][0] > 0
        assert len(record["seconds"]) == len(record["chunk_ends"]) == 3
        assert record["draws"] == [8, 8, 8] and record["exact"] == [False] * 3
    assert not list(folder.glob("*.tmp"))


def test_an_existing_output_file_is_replaced_only_with_overwrite(results, folder):
    status, out, err = results["refused"]
    path = folder / "kept.jsonl"
    assert (status, out) == (2, "")
    assert err == f"error: --output={path} already exists: give another name, or --overwrite\n"
    assert path.read_text() == "old"
    assert results["replaced"][0] == 0
    assert [one["text"] for one in read(folder / "old.jsonl")] == [
        one.text for one in expected(folder)
    ]


def test_prompts_may_be_token_ids(results, folder):
    records, done = read(folder / "ids_out.jsonl"), expected(folder, IDS)
    assert [record["prompt"] for record in records] == IDS
    assert [record["tokens"] for record in records] == [one.tokens for one in done]
    # The terminal shows them decoded.
    (one,) = expected(folder, [[100, 101, 102]])
    assert results["one of ids"][:2] == (0, f"def{one.text}\n\n")
