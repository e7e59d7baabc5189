"""The documented commands end to end on a tiny recipe: output, files, resuming after signals and kills, and errors."""

import datetime
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest

from calm_jax.run.workdir import Workdir
from tests.tiny_model import run_generate
from tests.workdirs import assert_same_bits, evaluate, metrics, run, start, train


@pytest.mark.slow
def test_a_run_prints_its_table_and_writes_its_files(finished):
    workdir, printed = finished
    for part in ("autoencoder", "language model", "BrierLM", "floor", "calm_jax.generate"):
        assert part in printed
    for name in ("config.json", "metrics.jsonl", "samples.txt", "results.json", "tensorboard"):
        assert (workdir / name).exists()
    # A report that fails does not fail the run.
    assert "<h2>Samples</h2>" in (workdir / "report.html").read_text()
    records = metrics(workdir)
    assert {record["stage"] for record in records} == {"autoencoder", "lm"}
    assert {record["split"] for record in records} == {"train", "validation", "validation_part"}
    keys = [(record["stage"], record["split"], record["step"]) for record in records]
    assert len(keys) == len(set(keys))
    assert (workdir / "samples.txt").read_text().count("--- prompt") == 4
    assert list((workdir / "tensorboard" / "lm").iterdir())


@pytest.mark.slow
def test_a_second_call_on_a_finished_run_changes_nothing(finished, text_glob):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    out = train(text_glob, workdir, "--config.lm.optimizer.learning_rate=0.5")
    assert "there is nothing to do (without effect: lm.optimizer.learning_rate=0.5): " in out
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_validation_of_which_the_log_has_lost_a_part_is_done_again(finished, text_glob, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "results.json").unlink()
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if (record["stage"], record["split"]) == ("autoencoder", "validation"):
            del record["token_accuracy_from_sample"]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    out = train(text_glob, workdir, "--config.lm.training.num_steps=10")
    assert "autoencoder: evaluating the whole validation split" in out
    assert "lm: resumed at step 12, past num_steps=10: nothing is trained" in out
    found, expected = (
        json.loads((one / "results.json").read_text())["autoencoder"]
        for one in (workdir, finished[0])
    )
    assert found | {"seconds": 0} == expected | {"seconds": 0}
    # results.json, which says that the run is finished, comes last: a killed run is not finished without its report.
    report, results = (
        (workdir / name).stat().st_mtime_ns for name in ("report.html", "results.json")
    )
    assert report < results


def command_of(recipe: str, workdir: pathlib.Path) -> list[str]:
    return [
        "calm_jax.main",
        f"--config=tests/tiny_recipe.py:{recipe}",
        f"--workdir={workdir}",
        # Often, so that there is a checkpoint to resume from.
        "--config.autoencoder.training.checkpoint_every=2",
        "--config.lm.training.checkpoint_every=2",
    ]


def signalled(command: list[str], sent: signal.Signals, line: str, errors: pathlib.Path) -> int:
    """The exit status of a command that gets a signal soon after it has printed a line that begins with `line`."""
    with open(errors, "w") as file:
        process = start(*command, stderr=file)
    for printed in process.stdout:
        if printed.startswith(line):
            break
    time.sleep(0.03)
    process.send_signal(sent)
    process.communicate()
    return process.returncode


@pytest.mark.slow
def test_a_run_that_a_signal_and_then_a_full_disk_end_resumes_to_the_same_bits(
    finished, text_glob, tmp_path
):
    """SIGTERM in the first stage saves a checkpoint and ends with status 75 (SIGKILL: test_ownership.py). A limit on the size
    of files stands in for a full disk, which leaves the last complete checkpoint."""
    workdir, errors = tmp_path / "run", tmp_path / "err"
    command = command_of(text_glob, workdir)
    assert signalled(command, signal.SIGTERM, "autoencoder: step 4/", errors) == 75
    message = re.search(
        r"interrupted: SIGTERM: stage autoencoder is saved at step (\d+); .*", errors.read_text()
    )
    assert (workdir / "autoencoder" / message[1]).is_dir()
    # The limit would cut the files of the compilation cache, too, and JAX reads a cut file with an "error: ..." each time. None is
    # written: a program would have to take this many seconds to compile. Those that are there are read.
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    process = start(
        *command,
        "--config.stage=autoencoder",
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    _, err = process.communicate()
    assert process.returncode == 2
    # TensorStore's threads print tracebacks at the same time, even on the same line.
    error = re.search(r"error: .*", err)[0]
    assert "could not be written" in error and f"step {message[1]}" in error
    assert f"autoencoder: resumed at step {message[1]}\n" in run(*command)
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])
    # The recipe of a run that has both stages now: without a stage, --config=configs/workdir.py:DIR trains both further.
    assert Workdir(workdir).config.stage == "all"


@pytest.mark.slow
def test_evaluation_measures_the_accuracy_diversity_plane_and_does_not_depend_on_the_batch_size(
    finished,
):
    record = evaluate(
        finished[0],
        "--config.eval.batch_size=3",
        "--config.eval.temperatures=(1.0,0.5)",
        "--config.eval.samplers=('pooled','noise')",
        "--config.eval.plane_contexts=8",
        "--config.eval.candidates=(8,)",
    )
    assert record["eval"]["batch_size"] == 3
    assert abs(datetime.datetime.fromisoformat(record["time"]).timestamp() - time.time()) < 3600
    points = record["plane"]["points"]
    assert [point["sampler"] for point in points] == ["model", "pooled", "noise"]
    assert [point["draws"] for point in points] == [1, pytest.approx(32, abs=16), 1]
    assert all(0 <= point["accuracy"] <= 100 and point["seconds"] > 0 for point in points)
    assert (finished[0] / "plane.png").read_bytes().startswith(b"\x89PNG")
    assert 0 < record["autoencoder"]["token_accuracy_from_mean"] <= 1
    in_training = json.loads((finished[0] / "results.json").read_text())
    for stage in ("autoencoder", "lm", "floor"):
        for name, value in record[stage].items():
            if name == "seconds":
                continue
            expected = in_training[stage][name]
            assert value == expected or value == pytest.approx(expected, rel=1e-5), (stage, name)


# --- Other heads and chunk sizes

# Other heads and chunk sizes than the energy head with K = 4, which the other tests train.
VARIANTS = ["head=diffusion,k=1", "head=flow,k=3", "head=flow,k=16", "head=softmax"]


@pytest.fixture(scope="session")
def variant_runs(text_glob, tmp_path_factory):
    """A function from a variant to the workdir of an uninterrupted run, trained on first use."""
    folder, made = tmp_path_factory.mktemp("variants"), {}

    def workdir_of(variant: str) -> pathlib.Path:
        if variant not in made:
            made[variant] = folder / variant
            train(f"{text_glob},{variant}", made[variant])
        return made[variant]

    return workdir_of


def texts_of(*commands: list[str]) -> list[str]:
    """What `python -m calm_jax.generate` prints with each of these arguments, in one process."""
    results = run_generate(*commands)
    assert [status for status, _, _ in results] == [0] * len(commands), results
    return [out for _, out, _ in results]


def assert_finite(values: dict) -> None:
    for name, value in values.items():
        # BrierLM is 0, without a standard error, where one of its factors is not positive.
        if not isinstance(value, str) and not (name == "brierlm_error" and values["brierlm"] == 0):
            assert value is not None and np.isfinite(value), (name, values)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_head_and_chunk_size_trains_and_generates(variant, variant_runs):
    workdir = variant_runs(variant)
    has_autoencoder = variant != "head=softmax"
    results = json.loads((workdir / "results.json").read_text())
    assert ("autoencoder" in results) == (workdir / "autoencoder").exists() == has_autoencoder
    assert results["lm"]["step"] == 12 and {"lm", "floor"} <= set(results)
    for values in results.values():
        assert_finite(values)

    prompts = ("def", "import", "class", "    def __init__(self,")
    text = (workdir / "samples.txt").read_text()
    assert re.findall(r"^--- prompt: '(.*)' ---$", text, re.MULTILINE) == list(prompts)
    samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    # Texts of the baseline may end earlier, at eos.
    lengths = [len(one["tokens"]) for one in samples]
    assert sum(lengths) > 0 and max(lengths) <= 8 and (lengths == [8] * 4 or not has_autoencoder)
    # With K = 16 the text is longer than the context of two chunks.
    command = [f"--workdir={workdir}", "--temperature=1", "--max_tokens=20"]
    command += ["--long_context=slide", *(f"--prompt={prompt}" for prompt in prompts)]
    (text,) = texts_of(command)
    assert text.startswith("def") and "\nclass" in text
    # There is more text than the prompts and the empty lines between them.
    assert len(text) > sum(len(prompt) + 2 for prompt in prompts)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["head=flow,k=3", "head=softmax"])
def test_the_evaluation_of_a_run_has_its_scores_and_those_at_equal_context(variant, variant_runs):
    workdir, has_autoencoder = variant_runs(variant), variant != "head=softmax"
    results = json.loads((workdir / "results.json").read_text())
    record = evaluate(workdir)
    for name in ("equal_context", "equal_context_floor"):
        assert_finite(record[name])
    assert ("autoencoder" in record) == has_autoencoder
    for part in ("lm", "floor", "autoencoder")[: 2 + has_autoencoder]:
        again = {k: v for k, v in record[part].items() if k != "seconds"}
        assert again == {k: results[part][k] for k in again}


@pytest.mark.slow
def test_a_killed_baseline_run_resumes_to_the_same_bits(variant_runs, text_glob, tmp_path):
    uninterrupted = variant_runs("head=softmax")
    command = command_of(f"{text_glob},head=softmax", tmp_path / "run")
    # At step 8 the checkpoint of step 4 is complete, because the save of step 6 waited for it.
    status = signalled(command, signal.SIGKILL, "lm: step 8/", tmp_path / "err")
    assert status == -signal.SIGKILL
    assert re.search(r"lm: resumed at step [468]\n", run(*command))
    assert_same_bits(tmp_path / "run", uninterrupted, ("lm",))
    assert metrics(tmp_path / "run") == metrics(uninterrupted)


@pytest.mark.slow
def test_autoencoder_checkpoint_takes_the_autoencoder_of_another_workdir(
    finished, text_glob, tmp_path
):
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
def test_stage_two_refuses_an_inaccurate_autoencoder(finished, text_glob):
    """And leaves a report, which has the autoencoder's curves."""
    workdir, _ = finished
    (workdir / "report.html").unlink()
    error = train(
        text_glob,
        workdir,
        "--config.lm.training.num_steps=13",
        "--config.autoencoder.min_accuracy=0.98",
        status=2,
    )
    assert "autoencoder.min_accuracy=0.98" in error
    assert (workdir / "report.html").exists()


@pytest.mark.slow
def test_a_finished_run_trains_more_language_model_steps_but_no_autoencoder_steps(
    finished, text_glob, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    error = train(text_glob, workdir, "--config.autoencoder.training.num_steps=20", status=2)
    assert "must not change under it" in error
    out = train(text_glob, workdir, "--config.lm.training.num_steps=14")
    assert "lm: resumed at step 12" in out and "step 14, trained" in out
    assert (workdir / "lm" / "14").is_dir()


@pytest.mark.slow
def test_training_refuses_another_runs_config_and_folders_that_are_no_workdir(
    finished, text_glob, tmp_path
):
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
def test_training_does_not_begin_anew_where_checkpoints_are_gone(finished, text_glob, tmp_path):
    """Their disk may not be mounted. A stage that was killed before its first checkpoint begins again without a word."""
    mine, moved = tmp_path / "mine", tmp_path / "moved"
    shutil.copytree(finished[0], mine)
    before = (mine / "metrics.jsonl").read_bytes()
    (mine / "lm").rename(moved)
    for is_there in (False, True):
        if is_there:
            (mine / "lm").mkdir()
        error = train(text_glob, mine, status=2)
        assert (
            "/lm holds no checkpoint, but" in error and "has records of it up to step 12" in error
        )
        assert f"--config.autoencoder.checkpoint={mine}" in error
    # Killed in the midst of the stage, after its second checkpoint.
    records = (mine / "metrics.jsonl").read_text().splitlines()
    trained = [line for line in records if '"split": "validation"' not in line]
    (mine / "metrics.jsonl").write_text("\n".join(trained) + "\n")
    assert "has records of it up to step 12" in train(text_glob, mine, status=2)
    (mine / "metrics.jsonl").write_bytes(before)
    (mine / "lm").rmdir()
    (mine / "lm").symlink_to(tmp_path / "unmounted" / "lm")
    assert "/lm is a link to" in train(text_glob, mine, status=2)
    assert (mine / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "unmounted").exists()
    (mine / "lm").unlink()
    moved.rename(mine / "lm")
    # The autoencoder that the language model was trained on, of this run or copied.
    (mine / "autoencoder").rename(moved)
    for option in ("--config.stage=all", "--config.stage=lm"):
        error = train(text_glob, mine, option, status=2)
        assert "/autoencoder holds no checkpoint, but the language model was trained on it" in error
    moved.rename(mine / "autoencoder")
    assert "--overwrite deletes that of" in train(
        text_glob, mine, "--config.stage=lm", "--overwrite", status=2
    )
    assert "nothing to do" in train(text_glob, mine)


@pytest.mark.slow
def test_a_profiled_run_writes_its_trace_and_refuses_to_resume_on_changed_text(text_glob, tmp_path):
    (tmp_path / "text").mkdir()
    for path in pathlib.Path(text_glob).parent.iterdir():
        (tmp_path / "text" / path.name).write_text(path.read_text())
    glob = f"{tmp_path}/text/*.txt"
    options = ("--config.stage=autoencoder", "--config.autoencoder.training.num_steps=4")
    assert "profile up to step 3" in train(glob, tmp_path / "run", *options, "--profile=2:3")
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    (tmp_path / "text" / "0.txt").write_text("something else " * 100)
    error = train(glob, tmp_path / "run", "--config.stage=autoencoder", status=2)
    assert "train text is not the one that the run began with" in error
    train(glob, tmp_path / "run", *options, "--overwrite")


@pytest.mark.slow
def test_overwrite_deletes_only_files_of_runs(finished, text_glob, tmp_path):
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
def test_the_autoencoder_of_a_trained_language_model_cannot_be_replaced(
    finished, text_glob, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    option = f"--config.autoencoder.checkpoint={finished[0]}"
    more = "--config.lm.training.num_steps=13"
    assert "autoencoder.checkpoint=''" in train(text_glob, workdir, option, more, status=2)
    itself = f"--config.autoencoder.checkpoint={workdir}"
    assert "is the workdir itself" in train(text_glob, workdir, itself, "--overwrite", status=2)
    assert (workdir / "autoencoder" / "12").is_dir()


@pytest.mark.slow
def test_a_damaged_file_of_a_workdir_is_named_and_damaged_metrics_are_repaired(
    finished, text_glob, tmp_path
):
    more = "--config.lm.training.num_steps=13"
    damages = {
        "corpus.json": (lambda path: path.unlink(), "corpus.json cannot be read"),
        "config.json": (
            lambda path: path.write_text("{}"),
            "config.json: the config lacks the key",
        ),
        "lm/12/params": (shutil.rmtree, "makes the one of step 10 the latest"),
        "tokenizer/description.json": (lambda path: path.write_text("[]"), "no readable tokenizer"),
    }
    for number, (name, (damage, expected)) in enumerate(damages.items()):
        workdir = tmp_path / str(number)
        shutil.copytree(finished[0], workdir)
        damage(workdir / name)
        assert expected in train(text_glob, workdir, more, status=2), name
    workdir = tmp_path / "metrics"
    shutil.copytree(finished[0], workdir)
    with open(workdir / "metrics.jsonl", "ab") as lines:
        lines.write(b'5\n\xff\xfe\n{"stage": "lm", "spl')
    damaged = (workdir / "metrics.jsonl").read_bytes()
    shutil.rmtree(workdir / "lm" / "12")
    (workdir / "results.json").write_text("")
    assert "metrics.jsonl.damaged\n" in train(text_glob, workdir)
    assert (workdir / "metrics.jsonl.damaged").read_bytes() == damaged
    assert_same_bits(workdir, finished[0])
    assert metrics(workdir) == metrics(finished[0])
