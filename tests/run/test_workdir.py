"""The files of a workdir: what their parameters are."""

import shutil

from tests.interop.conversions import random_workdir


def warnings_of(caplog, action) -> list[str]:
    caplog.clear()
    action()
    return [record.getMessage() for record in caplog.records]


def set_step(workdir, stage, step):
    """Renames the only checkpoint of a stage."""
    [folder] = workdir.checkpoints(stage).iterdir()
    folder.rename(folder.with_name(str(step)))


def test_parameters_of_an_unfinished_training_come_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("calm_jax.run.workdir._load", lambda *_: {})
    workdir = random_workdir(tmp_path, "head=softmax")
    last = workdir.config.lm.training.num_steps
    for step, warned in ((0, False), (last - 1, True), (last, False)):
        set_step(workdir, "lm", step)
        messages = warnings_of(caplog, lambda: workdir.load_params("lm", None, None))
        assert [f"stage lm is at step {step} of {last}" in one for one in messages] == [
            True
        ] * warned


def test_a_copied_autoencoder_is_judged_by_the_run_that_trained_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("calm_jax.run.workdir._load", lambda *_: {})
    source = random_workdir(tmp_path / "source", "head=energy")
    last = source.config.autoencoder.training.num_steps
    changes = {
        "autoencoder__checkpoint": str(source.path),
        "autoencoder__training__num_steps": 2 * last,
    }
    workdir = random_workdir(tmp_path / "run", "head=energy", **changes)
    for step, warned in ((last, False), (last - 1, True)):
        shutil.rmtree(workdir.checkpoints("autoencoder"))
        set_step(source, "autoencoder", step)
        messages = warnings_of(caplog, lambda: workdir.import_autoencoder(source))
        assert [f"stage autoencoder is at step {step} of {last}" in one for one in messages] == [
            True
        ] * warned
        assert not warnings_of(caplog, lambda: workdir.load_params("autoencoder", None, None))
