"""The models as models of lm-evaluation-harness: the command on tasks with local data, and single requests."""

import dataclasses
import functools
import json
import sys

import pytest

pytest.importorskip("lm_eval", reason="the harness is lm-eval (in the extra 'eval')")

from lm_eval.api.instance import Instance

from calm_jax.errors import UserError
from calm_jax.lm_eval import main
from calm_jax.run.generator import Generator
from calm_jax.run.harness import HarnessModel
from tests.captured import captured
from tests.tiny_model import tiny
from tests.workdirs import run

# Importing the harness alone takes seconds.
pytestmark = pytest.mark.slow

PROMPTS = ["1 + 1 =", "2 + 5 =", "a", "b c"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {generation}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module", autouse=True)
def _models_are_loaded_once():
    """A model that is loaded again is compiled again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "load", functools.cache(Generator.load))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    for name, arguments in {"calm": "k=4", "baseline": "head=softmax"}.items():
        tiny(arguments).save(folder / name)
    return folder


def request(prompt="a", task="task", kind="generate_until", **generation) -> Instance:
    return Instance(kind, {}, (prompt, generation), 0, metadata=(task, 0, 1))


def texts(folder, prompts=PROMPTS, seed=0, **options) -> list[str]:
    """What the model itself writes."""
    generator = Generator.load(str(folder))
    options = dataclasses.replace(generator.options, long_context="slide", **options)
    return [one.text for one in generator.generate(prompts, options, seed)]


def test_the_command_scores_two_tasks_by_the_texts_of_the_generator(folder, monkeypatch):
    """Half of the answers of each task are the model's own texts, so half of them must match."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    sampled = texts(folder / "calm", max_tokens=24, temperature=0.9, seed=3)
    # A stop string that a text has, but does not begin with.
    stop = next(
        one[place] for one in sampled for place in range(4, 24) if one[place] not in one[:4]
    )
    greedy = texts(folder / "calm", max_tokens=12, temperature=0.5, seed=3, stop=("\n", stop))
    tasks = {
        "sampled": (sampled, "{do_sample: true, temperature: 0.9, max_gen_toks: 24, until: []}"),
        # YAML reads escapes as JSON does.
        "greedy": (greedy, f'{{max_gen_toks: 12, until: ["\\n", {json.dumps(stop)}]}}'),
    }
    (folder / "tasks").mkdir()
    for name, (answers, generation) in tasks.items():
        data = folder / f"{name}.jsonl"
        wrong = [text if number % 2 else "no" for number, text in enumerate(answers)]
        lines = [
            json.dumps({"prompt": p, "answer": a}) for p, a in zip(PROMPTS, wrong, strict=True)
        ]
        data.write_text("\n".join(lines))
        task = TASK.format(
            name=name, data=data, output_type="generate_until", generation=generation
        )
        (folder / "tasks" / f"{name}.yaml").write_text(task)
    argv = [
        "lm_eval",
        *(
            "--model",
            "calm_jax",
            "--model_args",
            f"workdir={folder / 'calm'},temperature=0.5,seed=3",
        ),
        *("--include_path", str(folder / "tasks"), "--tasks", "sampled,greedy"),
        *("--output_path", str(folder / "scores"), "--log_samples"),
    ]
    # In this process, which has imported the harness already. It takes a model of one name once, so that the other commands are forked.
    monkeypatch.setattr(sys, "argv", argv)
    status, printed, err = captured(lambda: main([]))
    assert status == 0 and "exact_match" in printed, printed + err
    [path] = (folder / "scores").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    for name, (answers, _) in tasks.items():
        [path] = (folder / "scores").rglob(f"samples_{name}_*.jsonl")
        samples = sorted(
            map(json.loads, path.read_text().splitlines()), key=lambda one: one["doc_id"]
        )
        assert [one["resps"][0][0] for one in samples] == answers
        assert results[name]["exact_match,none"] == 0.5
    error = run(
        "calm_jax.lm_eval",
        *(
            "--model",
            "calm_jax",
            "--model_args",
            f"workdir={folder / 'calm'}",
            "--tasks",
            "nothing",
        ),
        status=2,
    )
    assert error == "error: Tasks not found: nothing"


def test_a_run_is_fine_tuned_on_records_and_scored_by_exact_match(finished, tmp_path, monkeypatch):
    """The documented commands, on sums that all have the same answer, which is learnt in seconds."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data, scores = tmp_path / "sums.jsonl", tmp_path / "scores"
    sums = [{"prompt": f"{a} + {7 - a} = ", "completion": "7\n", "answer": "7"} for a in range(8)]
    data.write_text("".join(json.dumps(one) + "\n" for one in sums * 3))
    few = [
        f"--config.{stage}.{key}"
        for stage, rate in (("autoencoder", 0.02), ("lm", 0.01))
        for key in (
            "training.num_steps=100",
            "training.batch_size=8",
            # The recipe's are for a dozen steps.
            "training.checkpoint_every=100",
            "training.eval_every=100",
            f"optimizer.learning_rate={rate}",
        )
    ]
    recipe = (f"--config=configs/finetune.py:{finished[0]}", f"--config.data.train_files={data}")
    run("calm_jax.main", *recipe, "--config.stage=all", f"--workdir={tmp_path / 'run'}", *few)
    generation = '{until: ["\\n"], do_sample: true, temperature: 0.5, max_gen_toks: 8}'
    task = TASK.format(name="sums", data=data, output_type="generate_until", generation=generation)
    (tmp_path / "sums.yaml").write_text(task)
    model = ("--model", "calm_jax", "--model_args", f"workdir={tmp_path / 'run'}")
    asked = ("--tasks", "sums", "--include_path", str(tmp_path), "--batch_size", "8")
    run("calm_jax.lm_eval", *model, *asked, "--output_path", str(scores))
    [path] = scores.rglob("results_*.json")
    assert json.loads(path.read_text())["results"]["sums"]["exact_match,none"] == 1


def test_the_texts_of_a_task_do_not_depend_on_other_tasks_or_the_batch_size(folder):
    model = HarnessModel(str(folder / "calm"))
    alone = [request(prompt, "one", max_gen_toks=9) for prompt in PROMPTS]
    others = [request(prompt, "two", max_gen_toks=7) for prompt in PROMPTS]
    mixed = [request for pair in zip(others, alone, strict=True) for request in pair]
    answers = model.generate_until(alone)
    assert answers == texts(folder / "calm", max_tokens=9)
    assert model.generate_until(mixed)[1::2] == answers
    assert HarnessModel(str(folder / "calm"), batch_size="2").generate_until(alone) == answers
    assert HarnessModel(str(folder / "calm"), seed=1).generate_until(alone) != answers


def test_greedy_tasks_take_the_runs_temperature_and_the_baselines_likeliest_tokens(folder):
    asked = [request(prompt, max_gen_toks=9, do_sample=False, num_beams=1) for prompt in PROMPTS]
    model = HarnessModel(str(folder / "calm"), temperature=0.5, max_draws=20)
    expected = texts(folder / "calm", max_tokens=9, temperature=0.5, max_draws=20)
    assert model.generate_until(asked) == expected
    model = HarnessModel(str(folder / "baseline"))
    expected = texts(folder / "baseline", max_tokens=9, temperature=0.0)
    assert model.generate_until(asked) == expected
    asked = [request(prompt, do_sample=True, top_p=0.5, max_tokens=9) for prompt in PROMPTS]
    expected = texts(folder / "baseline", max_tokens=9, temperature=1.0, top_p=0.5)
    assert model.generate_until(asked) == expected


def test_tasks_that_do_not_say_how_much_get_256_tokens_and_the_end_of_a_long_prompt(folder):
    [text] = HarnessModel(str(folder / "calm"), temperature=1).generate_until([request("ab" * 150)])
    [expected] = texts(folder / "calm", ["ab" * 150], max_tokens=256)
    assert text == expected


@pytest.mark.parametrize(
    ("kind", "generation", "message"),
    [
        (
            "loglikelihood",
            {},
            "task has_it asks for likelihoods (loglikelihood), which CALM does not",
        ),
        ("loglikelihood_rolling", {}, "choose tasks with output_type: generate_until"),
        ("generate_until", {"num_beams": 4}, "asks for num_beams=4, which calm_jax does not have"),
        ("generate_until", {"do_sample": True, "top_p": 0.9}, "top_p=0.9 needs the probabilities"),
        (
            "generate_until",
            {"do_sample": True, "temperature": 1.5},
            "temperature=1.5 must be in (0",
        ),
    ],
)
def test_what_calm_cannot_do_is_refused_before_anything_is_generated(
    folder, monkeypatch, kind, generation, message
):
    model = HarnessModel(str(folder / "calm"))
    monkeypatch.setattr(Generator, "batch", lambda *_: pytest.fail("generated"))
    asked = [request(task="has_it", kind=kind, **generation)]
    if kind == "generate_until":
        asked = [request(max_gen_toks=4), *asked]
    with pytest.raises(UserError) as error:
        getattr(model, kind)(asked)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the folder of a trained model: --model_args workdir=DIR"),
        ({"workdir": "nowhere"}, "nowhere is no workdir"),
        ({"temprature": 1}, "config has no key sample.temprature: did you mean 'temperature'?"),
        ({"seed": "x"}, "seed='x' must be int"),
        ({"batch_size": "many"}, "--batch_size=many must be a whole number or auto"),
    ],
)
def test_bad_arguments_are_named(folder, arguments, message):
    if arguments and "workdir" not in arguments:
        arguments = {"workdir": str(folder / "calm"), **arguments}
    with pytest.raises(UserError) as error:
        HarnessModel(**arguments)
    assert message in str(error.value)
