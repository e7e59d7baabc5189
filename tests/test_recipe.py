"""The documented commands, end to end on a tiny recipe: what they print, write, survive and refuse."""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = pathlib.Path(__file__).parent.parent
WORDS = [
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "name",
    "for",
    "in",
    "if",
    "not",
    "None",
    "True",
    "x",
    "y",
    "(",
    ")",
    ":",
    "=",
    ".",
    "\n",
]
STAGES = ("autoencoder", "lm")


@pytest.fixture(scope="session")
def text_glob(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(12):
        words = rng.choice(WORDS, size=400 + 50 * number)
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return f"{folder}/*.txt"


def start(*args: str, **popen) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **popen,
    )


def run(*args: str, status: int = 0, **popen) -> str:
    """stdout of a command that ends with `status`; for a failing one, its only line on stderr."""
    process = start(*args, **popen)
    out, err = process.communicate(timeout=500)
    assert process.returncode == status, out + err
    if not status:
        return out
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "interrupted: "))]
    assert len(lines) == 1, err
    return lines[0]


def train(text_glob: str, workdir, *args: str, **options) -> str:
    """`text_glob` may have config arguments after it, as in `GLOB,head=flow`."""
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    return run("calm_jax.main", recipe, f"--workdir={workdir}", *args, **options)


@pytest.fixture(scope="session")
def finished(text_glob, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """A workdir that an uninterrupted run left, and what the run printed."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, train(text_glob, workdir)


def metrics(workdir: pathlib.Path) -> list[dict]:
    """metrics.jsonl without what is a time or a rate."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    timing = ("seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in timing} for record in records]


def params(workdir: pathlib.Path, stage: str, step: int = 12) -> dict:
    path = workdir / stage / str(step) / "params"
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.resolve())


def assert_same_bits(ours: pathlib.Path, theirs: pathlib.Path, stages=STAGES) -> None:
    import jax

    for stage in stages:
        left, right = params(ours, stage), params(theirs, stage)
        assert jax.tree.structure(left) == jax.tree.structure(right)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        )


@pytest.mark.slow
def test_a_run_prints_its_table_and_writes_its_files(finished):
    workdir, printed = finished
    for part in ("autoencoder", "language model", "BrierLM", "floor", "calm_jax.generate"):
        assert part in printed
    for name in ("config.json", "metrics.jsonl", "samples.txt", "results.json", "tensorboard"):
        assert (workdir / name).exists()
    records = metrics(workdir)
    assert {record["stage"] for record in records} == {"autoencoder", "lm"}
    assert {record["split"] for record in records} == {"train", "validation", "validation_part"}
    keys = [(record["stage"], record["split"], record["step"]) for record in records]
    assert len(keys) == len(set(keys))
    assert (workdir / "samples.txt").read_text().count("--- prompt") == 4
    assert list((workdir / "tensorboard" / "lm").iterdir())


@pytest.mark.slow
def test_a_second_call_has_nothing_to_do(finished, text_glob):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    assert "nothing to do" in train(text_glob, workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_bits(finished, text_glob, tmp_path):
    workdir, _ = finished
    train(text_glob, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(workdir)
    assert_same_bits(tmp_path / "run", workdir)


def kill_and_finish(recipe: str, workdir: pathlib.Path, kill_after: dict[str, int]) -> str:
    """A run that is killed once in each stage, soon after a step, and then ends; what it prints then."""
    rng = np.random.default_rng(1)
    command = (
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{recipe}",
        f"--workdir={workdir}",
        # Often, so that there is something to go on from.
        "--config.autoencoder.training.checkpoint_every=2",
        "--config.lm.training.checkpoint_every=2",
    )
    for stage, after in kill_after.items():
        process = start(*command)
        for line in process.stdout:
            if re.match(rf"{stage}: step {after}/", line):
                break
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    return run(*command)


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_with_the_same_bits(finished, text_glob, tmp_path):
    workdir = tmp_path / "run"
    rng = np.random.default_rng(1)
    steps = {stage: int(rng.integers(1, 3)) * 4 for stage in STAGES}
    kill_and_finish(text_glob, workdir, steps)
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])


@pytest.mark.slow
def test_sigterm_saves_and_says_so(finished, text_glob, tmp_path):
    workdir = tmp_path / "run"
    recipe = (
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{text_glob}",
        f"--workdir={workdir}",
    )
    process = start(*recipe)
    for line in process.stdout:
        if line.startswith("autoencoder: step 4/"):
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 75
    message = re.search(r"interrupted: SIGTERM: stage autoencoder is saved at step (\d+); .*", err)
    assert (workdir / "autoencoder" / message[1]).is_dir()
    run(*recipe)
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])


def evaluate(workdir: pathlib.Path, *options: str) -> dict:
    stored = f"--config=configs/workdir.py:{workdir}"
    assert "BrierLM" in run("calm_jax.main", "--mode=eval", stored, *options)
    return json.loads((workdir / "evaluations.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_evaluation_of_a_stored_config(finished):
    record = evaluate(
        finished[0],
        "--config.eval.num_samples=8",
        "--config.eval.temperatures=(1.0,0.5)",
        "--config.eval.samplers=('pooled','noise')",
        "--config.eval.plane_contexts=8",
        "--config.eval.candidates=(8,)",
    )
    assert record["eval"]["num_samples"] == 8
    points = record["plane"]["points"]
    assert [point["sampler"] for point in points] == ["model", "pooled", "noise"]
    assert [point["draws"] for point in points] == [1, pytest.approx(32, abs=16), 1]
    assert all(0 <= point["accuracy"] <= 100 and point["seconds"] > 0 for point in points)
    assert (finished[0] / "plane.png").read_bytes().startswith(b"\x89PNG")
    assert 0 < record["autoencoder"]["token_accuracy_from_mean"] <= 1


# --- Other heads and chunk sizes

# Every head but the energy head's K = 4, which the other tests run, and every K from 1 to 16 once.
VARIANTS = ["head=diffusion,k=1", "k=2", "head=flow,k=3", "head=flow,k=8", "k=16", "head=softmax"]


@pytest.fixture(scope="session")
def variant_runs(text_glob, tmp_path_factory):
    """`variant -> workdir` of an uninterrupted run, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("variants"), {}

    def workdir_of(variant: str) -> pathlib.Path:
        if variant not in made:
            made[variant] = folder / variant
            train(f"{text_glob},{variant}", made[variant])
        return made[variant]

    return workdir_of


def assert_finite(values: dict) -> None:
    for name, value in values.items():
        # A BrierLM of 0 from a factor that is not positive has no error of its own.
        if not isinstance(value, str) and not (name == "brierlm_error" and values["brierlm"] == 0):
            assert value is not None and np.isfinite(value), (name, values)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_head_and_chunk_size_trains_scores_and_writes(variant, variant_runs):
    workdir = variant_runs(variant)
    has_autoencoder = variant != "head=softmax"
    results = json.loads((workdir / "results.json").read_text())
    assert ("autoencoder" in results) == (workdir / "autoencoder").exists() == has_autoencoder
    assert results["lm"]["step"] == 12 and {"lm", "floor"} <= set(results)
    for values in results.values():
        assert_finite(values)

    record = evaluate(workdir)
    for name in ("equal_context", "equal_context_floor"):
        assert_finite(record[name])
    assert ("autoencoder" in record) == has_autoencoder
    for part in ("lm", "floor", "autoencoder")[: 2 + has_autoencoder]:
        again = {k: v for k, v in record[part].items() if k != "seconds"}
        assert again == {k: results[part][k] for k in again}

    prompts = ("def ", "class ", "")
    command = ["calm_jax.generate", f"--workdir={workdir}", "--temperature=1", "--max_tokens=20"]
    # The context of two chunks of 16 is too short for it.
    slide = "--long_context=slide"
    text = run(*command, slide, *(f"--prompt={prompt}" for prompt in prompts))
    assert text.startswith("def ") and "\nclass " in text
    # More than the prompts and the empty lines between them.
    assert len(text) > sum(len(prompt) + 2 for prompt in prompts)


@pytest.mark.slow
def test_a_killed_baseline_run_goes_on_and_ends_with_the_same_bits(
    variant_runs, text_glob, tmp_path
):
    uninterrupted = variant_runs("head=softmax")
    # At step 8 the checkpoint of step 4 is whole: that of step 6 waited for it.
    out = kill_and_finish(f"{text_glob},head=softmax", tmp_path / "run", {"lm": 8})
    assert re.search(r"lm: resumed at step [468]\n", out)
    assert_same_bits(tmp_path / "run", uninterrupted, ("lm",))
    assert metrics(tmp_path / "run") == metrics(uninterrupted)


@pytest.mark.slow
def test_a_baseline_takes_temperatures_that_flatten_and_top_p(variant_runs):
    command = ("calm_jax.generate", f"--workdir={variant_runs('head=softmax')}", "--prompt=def ")
    likeliest = [run(*command, "--temperature=0", f"--seed={seed}") for seed in (0, 1)]
    assert likeliest[0] == likeliest[1]
    # So small a share leaves the likeliest token alone.
    assert run(*command, "--temperature=2", "--top_p=1e-6") == likeliest[0]
    assert run(*command, "--temperature=2").startswith("def ")
    error = run(*command, "--sampler=batch", status=2)
    assert "--sampler=batch has no meaning for lm.head.name='softmax'" in error


@pytest.mark.slow
def test_evaluation_refuses_a_context_longer_than_every_document(variant_runs):
    workdir = variant_runs("head=softmax")
    error = run(
        "calm_jax.main",
        "--mode=eval",
        f"--config=configs/workdir.py:{workdir}",
        "--config.eval.context_tokens=90000",
        "--config.eval.block_tokens=100000",
        status=2,
    )
    assert "eval.context_tokens=90000: nothing to score after so much context" in error


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_batch_size(finished):
    workdir, _ = finished
    in_training = json.loads((workdir / "results.json").read_text())
    record = evaluate(workdir, "--config.eval.batch_size=3")
    for stage in ("autoencoder", "lm", "floor"):
        for name, value in record[stage].items():
            if name == "seconds":
                continue
            expected = in_training[stage][name]
            assert value == expected or value == pytest.approx(expected, rel=1e-5), (stage, name)


@pytest.mark.slow
def test_generation_follows_its_seed_and_nothing_else(finished, tmp_path):
    workdir, _ = finished
    command = ("calm_jax.generate", f"--workdir={workdir}", "--max_tokens=6", "--temperature=1")
    alone = run(*command, "--prompt=def ", "--seed=3")
    assert alone.startswith("def ")
    assert run(*command, "--prompt=def ", "--seed=3") == alone
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def \nclass Value(x\n")
    both = run(*command, f"--prompts_file={prompts}", "--seed=3")
    assert both.startswith(alone) and "\n\nclass Value(x" in both
    assert run(*command, "--prompt=def ", "--seed=4") != alone


@pytest.mark.slow
def test_generation_writes_an_object_a_prompt(finished, tmp_path):
    """The documented command, with the sampler of T < 1."""
    output = tmp_path / "texts.jsonl"
    command = ("calm_jax.generate", f"--workdir={finished[0]}", f"--output={output}")
    options = (
        "--prompt=def ",
        "--prompt=",
        "--temperature=0.5",
        "--max_tokens=6",
        "--max_draws=32",
    )
    out = run(*command, *options)
    assert re.fullmatch(
        re.escape(f"{output}: 2 texts; temperature 0.5, sampler pooled: ")
        + r"[\d.]+ draws a chunk, \d of \d chunks not exact\n",
        out,
    )
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["def ", ""]
    assert all(len(record["tokens"]) == 6 or record["finish"] == "eos" for record in records)
    before = output.read_bytes()
    assert "is there already" in run(*command, *options, status=2)
    assert output.read_bytes() == before


@pytest.mark.slow
def test_another_workdirs_autoencoder(finished, text_glob, tmp_path):
    workdir, _ = finished
    option = f"--config.autoencoder.checkpoint={workdir}"
    out = train(text_glob, tmp_path / "run", option)
    assert "autoencoder: step" not in out
    assert_same_bits(tmp_path / "run", workdir)
    error = train(
        text_glob,
        tmp_path / "other",
        option,
        "--config.autoencoder.model.latent_size=4",
        status=2,
    )
    assert "autoencoder.model.latent_size=8" in error
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_stage_two_refuses_a_bad_autoencoder(finished, text_glob):
    workdir, _ = finished
    error = train(
        text_glob,
        workdir,
        "--config.lm.training.num_steps=13",
        "--config.autoencoder.min_accuracy=0.98",
        status=2,
    )
    assert "autoencoder.min_accuracy=0.98" in error


@pytest.mark.slow
def test_a_finished_run_goes_on_but_its_autoencoder_stays(finished, text_glob, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    error = train(text_glob, workdir, "--config.autoencoder.training.num_steps=20", status=2)
    assert "must not change under it" in error
    out = train(text_glob, workdir, "--config.lm.training.num_steps=14")
    assert "lm: resumed at step 12" in out and "step 14, trained" in out
    assert (workdir / "lm" / "14").is_dir()


@pytest.mark.slow
def test_a_workdir_refuses_what_is_not_its_own(finished, text_glob, tmp_path):
    workdir, _ = finished
    changed = {
        "--config.lm.model.num_layers=3": "lm.model.num_layers=2",
        "--config.tokenizer.kind=sentencepiece": "tokenizer.kind='bytes'",
        "--config.lm.data.append_eos=False": "lm.data.append_eos=True",
        "--config.data.train_files=*.md": "data.train_files=",
    }
    for option, stored in changed.items():
        assert stored in train(text_glob, workdir, option, "--config.seed=0", status=2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for option in ("--overwrite", "--nooverwrite"):
        assert "no workdir of calm_jax" in train(text_glob, foreign, option, status=2)
    assert (foreign / "thesis.tex").exists()
    (tmp_path / "file").write_text("")
    assert "is a file" in train(text_glob, tmp_path / "file", status=2)
    assert "cannot be written" in train(text_glob, tmp_path / "file" / "below", status=2)


@pytest.mark.slow
def test_changed_text_is_refused(text_glob, tmp_path):
    (tmp_path / "text").mkdir()
    for path in pathlib.Path(text_glob).parent.iterdir():
        (tmp_path / "text" / path.name).write_text(path.read_text())
    glob = f"{tmp_path}/text/*.txt"
    options = ("--config.stage=autoencoder", "--config.autoencoder.training.num_steps=2")
    train(glob, tmp_path / "run", *options)
    (tmp_path / "text" / "0.txt").write_text("something else " * 100)
    error = train(glob, tmp_path / "run", "--config.stage=autoencoder", status=2)
    assert "text has changed" in error
    train(glob, tmp_path / "run", *options, "--overwrite")


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(finished, text_glob, tmp_path):
    """A limit on the size of files stands in for a disk that is full."""
    workdir = tmp_path / "run"
    options = ("--config.stage=autoencoder", "--config.autoencoder.training.num_steps=6")
    train(text_glob, workdir, *options)
    # The compilation cache would meet the limit too.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    process = start(
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{text_glob}",
        f"--workdir={workdir}",
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    _, err = process.communicate()
    assert process.returncode == 2
    # TensorStore's threads print tracebacks of their own meanwhile, which may even share a line with ours.
    error = re.search(r"error: .*", err)[0]
    assert "could not be written" in error and "step 6" in error
    train(text_glob, workdir)


@pytest.mark.slow
def test_a_profile_is_written(text_glob, tmp_path):
    out = train(
        text_glob,
        tmp_path / "run",
        "--config.stage=autoencoder",
        "--config.autoencoder.training.num_steps=4",
        "--profile=2:3",
    )
    assert "profile up to step 3" in out
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_overwrite_deletes_nothing_but_runs(finished, text_glob, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Llama"]}')
    (model / "weights.bin").write_text("months of work")
    assert "error: " in train(text_glob, model, "--overwrite", status=2)
    assert (model / "weights.bin").exists()
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "thesis.tex").write_text("years of work")
    assert "would delete" in train(text_glob, workdir, "--overwrite", status=2)
    assert (workdir / "thesis.tex").exists() and (workdir / "lm" / "12").is_dir()


@pytest.mark.slow
def test_an_autoencoder_is_not_swapped_under_its_model(finished, text_glob, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    option = f"--config.autoencoder.checkpoint={finished[0]}"
    more = "--config.lm.training.num_steps=13"
    assert "autoencoder.checkpoint=''" in train(text_glob, workdir, option, more, status=2)
    itself = f"--config.autoencoder.checkpoint={workdir}"
    assert "is the workdir itself" in train(text_glob, workdir, itself, "--overwrite", status=2)
    assert (workdir / "autoencoder" / "12").is_dir()


@pytest.mark.slow
def test_damaged_workdirs_are_named(finished, text_glob, tmp_path):
    more = "--config.lm.training.num_steps=13"
    damages = {
        "corpus.json": lambda path: path.unlink(),
        "config.json": lambda path: path.write_text("{}"),
        "lm/12/params": shutil.rmtree,
        "tokenizer/description.json": lambda path: path.write_text("[]"),
    }
    for number, (name, damage) in enumerate(damages.items()):
        workdir = tmp_path / str(number)
        shutil.copytree(finished[0], workdir)
        damage(workdir / name)
        assert "cannot be read" in (error := train(text_glob, workdir, more, status=2)) or (
            "lacks the key" in error or "no readable tokenizer" in error
        ), (name, error)
    workdir = tmp_path / "metrics"
    shutil.copytree(finished[0], workdir)
    with open(workdir / "metrics.jsonl", "ab") as lines:
        lines.write(b'5\n\xff\xfe\n{"stage": "lm", "spl')
    shutil.rmtree(workdir / "lm")
    (workdir / "results.json").write_text("")
    train(text_glob, workdir)
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])
