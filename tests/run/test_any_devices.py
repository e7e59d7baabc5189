"""The same run on other numbers of devices: trained, continued, scored, sampled and exported; one result."""

import json
import pathlib

import jax
import pytest

from calm_jax.parallel.mesh import MeshConfig, adapted
from tests.simulated_devices import on, run_program
from tests.workdirs import evaluate, metrics, run

PROMPT = "def value("
SPLIT = """
import dataclasses, json, sys
import jax
from calm_jax.run import generator
generator.memory_here = lambda: 1.0
model = generator.Generator.load(sys.argv[1])
assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(model.params))
[text] = model.generate([sys.argv[2]], dataclasses.replace(model.options, max_tokens=16))
print(json.dumps([int(token) for token in text.tokens]))
"""


def train(number: int, text_glob: str, workdir: pathlib.Path, *options: str) -> str:
    """Trains the tiny recipe with a token prior on so many devices."""
    recipe = f"--config=tests/tiny_recipe.py:{text_glob},token_predictor"
    # A cosine depends on the last step, which the two parts of a run do not share.
    constant = [f"--config.{name}.optimizer.schedule=constant" for name in ("autoencoder", "lm")]
    arguments = [recipe, f"--workdir={workdir}", *constant, *options]
    return run("calm_jax.main", *arguments, xla_flags=on(number))


def numbers(tree: dict) -> dict[str, float]:
    return {
        name: value
        for name, value in tree.items()
        if isinstance(value, float) and name != "seconds"
    }


@pytest.fixture(scope="module")
def runs(text_glob, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A run on one device, and the same one begun on four devices and continued on two."""
    folder = tmp_path_factory.mktemp("devices")
    train(1, text_glob, folder / "one")
    first = ("--config.mesh.fsdp=4", "--config.lm.training.num_steps=5")
    train(4, text_glob, folder / "several", *first)
    train(2, text_glob, folder / "several", "--config.mesh.fsdp=2")
    return folder / "one", folder / "several"


@pytest.fixture(scope="module")
def scored(runs) -> dict:
    """The scores of the run of several devices on one device, without further flags."""
    return evaluate(runs[1], xla_flags=on(1))


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_devices(runs):
    """The devices' parts of a sum are added up in another order, hence the tolerance for float32."""
    one, several = (
        {(record["stage"], record["step"]): record for record in metrics(workdir)}
        for workdir in runs
    )
    assert len(one) > 6
    for place, record in one.items():
        for name, value in record.items():
            ours = several[place][name]
            assert ours == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 32])
def test_scores_do_not_depend_on_the_devices(runs, scored, number):
    """The stored mesh is fsdp=2, and eval.batch_size=8 does not divide over 32 devices."""
    _, workdir = runs
    trained = json.loads((workdir / "results.json").read_text())
    found = scored if number == 1 else evaluate(workdir, xla_flags=on(number))
    for name in ("autoencoder", "lm"):
        ours, theirs = numbers(trained[name]), numbers(found[name])
        common = ours.keys() & theirs.keys() - {"training_seconds"}
        assert len(common) > 3
        for key in common:
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-4), key


@pytest.mark.slow
def test_a_model_is_scored_without_its_token_prior(runs, scored):
    """The record says what differs from the run's config."""
    _, workdir = runs
    stored = (workdir / "config.json").read_bytes()
    without = evaluate(workdir, "--config.lm.token_prior_weight=0.0", xla_flags=on(1))
    assert scored["changed"] == {}
    assert without["changed"] == {"lm.token_prior_weight": 0.0}
    assert without["lm"]["loss"] == scored["lm"]["loss"]
    assert without["lm"]["brier_1"] != scored["lm"]["brier_1"]
    assert (workdir / "config.json").read_bytes() == stored


@pytest.mark.slow
def test_text_and_exported_weights_do_not_depend_on_the_devices(runs, tmp_path):
    _, workdir = runs
    texts, weights = [], []
    for number in (1, 4):
        made = (f"--workdir={workdir}", f"--prompt={PROMPT}", "--max_tokens=16")
        output = tmp_path / f"{number}.jsonl"
        run("calm_jax.generate", *made, f"--output={output}", xla_flags=on(number))
        texts.append(json.loads(output.read_text())["tokens"])
        target = tmp_path / f"exported_{number}"
        exported = (f"--workdir={workdir}", f"--target={target}", "--ae_path=autoencoder")
        run("calm_jax.interop.export", *exported, xla_flags=on(number))
        weights.append((target / "model.safetensors").read_bytes())
    # Four devices with too little memory for all parameters, which stay split as the run had them.
    texts.append(json.loads(run_program(4, SPLIT, str(workdir), PROMPT).stdout.splitlines()[-1]))
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 16
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_fine_tuning_does_not_depend_on_the_devices(runs, tmp_path):
    """From a run whose mesh is fsdp=2, on one device and on four."""
    records = tmp_path / "records.jsonl"
    lines = [{"prompt": f"say {n}: ", "completion": "ab" * (n % 3 + 1)} for n in range(40)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = []
    for number in (1, 4):
        workdir = tmp_path / str(number)
        recipe = f"--config=configs/finetune.py:{runs[1]}"
        given = (f"--workdir={workdir}", f"--config.data.train_files={records}")
        sizes = ("--config.lm.training.num_steps=3", "--config.lm.training.batch_size=4")
        often = ("--config.lm.training.log_every=1", "--config.autoencoder.min_accuracy=0.0")
        run("calm_jax.main", recipe, *given, *sizes, *often, xla_flags=on(number))
        found = [one for one in metrics(workdir) if one["stage"] == "lm"]
        losses.append([one["loss"] for one in found if one["split"] == "train"])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_batch_that_is_smaller_than_the_mesh_runs_on_a_part_of_it(text_glob, tmp_path):
    """Batches of 4 and 6 rows on 8 devices: two of them work."""
    short = [f"--config.{name}.training.num_steps=2" for name in ("autoencoder", "lm")]
    printed = train(
        8, text_glob, tmp_path / "run", *short, "--config.autoencoder.training.batch_size=6"
    )
    assert "batches of 6 and 4 rows divide over 2 of 8 devices" in printed
    assert "BrierLM" in printed


@pytest.mark.parametrize(
    "sizes, number, expected",
    [
        ((-1, 1, 1), 5, (-1, 1, 1)),
        ((1, 8, 1), 8, (1, 8, 1)),
        ((1, 8, 1), 1, (-1, 1, 1)),
        ((2, 8, 1), 4, (-1, 4, 1)),
        ((1, 8, 2), 64, (-1, 8, 2)),
        ((4, 6, 4), 12, (-1, 3, 4)),
        ((1, -1, 4), 6, (-1, 3, 2)),
        ((1, 2, -1), 3, (-1, 1, 1)),
    ],
)
def test_a_mesh_is_adapted_to_the_number_of_devices(sizes, number, expected):
    assert adapted(MeshConfig(*sizes), jax.devices()[:1] * number) == MeshConfig(*expected)
