"""`python -m benchmarks.learning`: which runs it makes, in which order, and that it makes none twice."""

import pathlib
import signal
import time

import pytest

from benchmarks import arms, comparison, longer_runs, single_changes
from calm_jax.errors import UserError
from tests.workdirs import run, start

RECIPE = "--config=tests/tiny_recipe.py:nothing"
# Of few documents one is held out.
LITTLE_TO_SCORE = ["--config.data.holdout_every=1000"]
SHARED = {
    "ae": [RECIPE, "--config.stage=autoencoder"],
    "k4": [RECIPE, "--config.autoencoder.checkpoint={ae}"],
}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, ...]]:
    """The flags that `calm_jax.main` was given. A stand-in takes its place, which refuses a seed of 13."""
    made: list[tuple[str, ...]] = []

    def stand_in(log: pathlib.Path, *words: str) -> int:
        made.append(words)
        log.write_text("error: 13\n\n")
        return 2 if "--config.seed=13" in words else 0

    monkeypatch.setattr(arms, "_run", stand_in)
    return made


def test_every_arm_has_a_run_for_each_seed_and_a_shared_one_a_single_run(tmp_path, calls):
    assert arms.train(SHARED, [3, 1], tmp_path) == []
    from_shared = f"--config.autoencoder.checkpoint={tmp_path}/ae/3"
    expected = [(*SHARED["ae"], "--config.seed=3", f"--workdir={tmp_path}/ae/3")]
    for seed in (3, 1):
        path = f"{tmp_path}/k4/{seed}"
        expected.append((RECIPE, from_shared, f"--config.seed={seed}", f"--workdir={path}"))
        expected.append(("--mode=eval", f"--config=configs/workdir.py:{path}"))
    assert calls == expected


def test_what_is_done_is_not_done_again(tmp_path, calls):
    arms.train(SHARED, [0], tmp_path)
    calls.clear()
    arms.train(SHARED, [0], tmp_path)
    assert calls == []
    arms.train(SHARED, [0, 1], tmp_path)
    assert [words[-1] for words in calls if words[0] != "--mode=eval"] == [
        f"--workdir={tmp_path}/k4/1"
    ]
    calls.clear()
    longer = SHARED | {"k4": [*SHARED["k4"], "--config.lm.training.num_steps=13"]}
    arms.train(longer, [0], tmp_path)
    assert [words[-1] for words in calls] == [
        f"--workdir={tmp_path}/k4/0",
        f"--config=configs/workdir.py:{tmp_path}/k4/0",
    ]


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, calls):
    for _ in range(2):
        [sentence] = arms.train(SHARED, [0, 13, 1], tmp_path)
        assert sentence.startswith("k4, seed 13: status 2, error: 13 ")
    trained = [words[-1] for words in calls if words[0] != "--mode=eval"]
    places = [f"--workdir={tmp_path}/{name}" for name in ("ae/0", "k4/0", "k4/13", "k4/1")]
    # The second call tries it again.
    assert trained == [*places, places[2]]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"k4": [RECIPE, "--config.autoencoder.checkpoint={ea}"]}, "{ea} is no arm before it"),
        (dict(reversed(SHARED.items())), "{ae} is no arm before it"),
        ({"a/b": [RECIPE]}, "a name has letters"),
        ({"a": [RECIPE, "--config.lm.steps=3"]}, "arm a: "),
        ({"a": [RECIPE, "--config.chunk_size=0"]}, "chunk_size=0"),
        ({"a": [RECIPE, "--workdir=x"]}, "workdir"),
        ({"a": ["--config=nothing.py"]}, "nothing.py"),
        ({"a": []}, "--config=RECIPE is missing"),
    ],
)
def test_wrong_arms_are_refused_before_anything_is_trained(tmp_path, calls, wrong, message):
    with pytest.raises(UserError, match=message.replace("{", r"\{")):
        arms.train({"good": [RECIPE]} | wrong, [0], tmp_path)
    assert calls == []


@pytest.mark.parametrize("experiment", [comparison, longer_runs, single_changes])
def test_the_arms_of_every_experiment_can_be_trained(experiment, tmp_path):
    found = arms.runs(experiment.get_arms(), [0, 1], tmp_path)
    assert len(found) > 4 and len(set(found.values())) == len(found)


def test_arms_of_the_comparison_have_equal_flops(tmp_path):
    found = arms.runs(comparison.get_arms("2e13"), [0, 1], tmp_path)
    configs = {path: arms.config_of(words) for path, words in found.items()}
    trained = [config for config in configs.values() if "lm" in config.stages]
    assert len(trained) == 20 and len(configs) == 25
    for config in trained:
        step = arms.step_flops(config, "lm")
        assert abs(config.lm.training.num_steps * step - 2e13) <= step / 2


@pytest.mark.slow
def test_an_experiment_that_is_stopped_goes_on_and_ends_with_a_table(text_glob, tmp_path):
    experiment = {
        name: [word.replace("nothing", text_glob) for word in words] + LITTLE_TO_SCORE
        for name, words in SHARED.items()
    }
    file, folder = tmp_path / "arms.py", tmp_path / "runs"
    file.write_text(f"def get_arms(_):\n    return {experiment!r}\n")
    command = ["benchmarks.learning", f"--arms={file}:x", f"--folder={folder}", "--seeds=0,1"]
    stopped, log = start(*command), folder / "k4" / "0.log"
    while stopped.poll() is None and not (log.exists() and "lm:" in log.read_text()):
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate(timeout=500)
    assert stopped.returncode == 75 and "[1/3] ae, seed 0: " in out
    out = run(*command)
    assert "ae, seed 0: is done" in out and out.count("is done") == 1
    [row] = [line for line in out.splitlines() if "k4" in line and "energy" in line]
    assert row.count("±") == 3 and row.split()[:3] == ["k4", "2", "4"]
    assert "<svg" in (folder / "learning.html").read_text()
    assert "seed" in run(*command[:-1], "--seeds=0,x", status=2)
