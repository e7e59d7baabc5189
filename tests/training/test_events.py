"""Metrics as events for TensorBoard: what a resumed run writes, and disks that are full."""

import contextlib
import pathlib
import resource
import struct
from collections.abc import Iterator

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from calm_jax.errors import UserError
from calm_jax.training.log import MetricsLog


def events_of(path: pathlib.Path) -> Iterator[Event]:
    """The events of a file, each between its length with a checksum, and a checksum."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_a_resumed_run_hides_the_events_after_its_checkpoint(tmp_path):
    for step in (0, 3):
        log = MetricsLog(tmp_path)
        log.cut_back("lm", step)
        for later in range(step + 1, step + 5):
            log.write("lm", "train", later, {"loss": 0.5 * later, "norm/0": float("nan")})
        log.close()
    first, second = sorted((tmp_path / "tensorboard" / "lm").iterdir())
    for path, step in ((first, 0), (second, 3)):
        version, started, *written = events_of(path)
        assert version.file_version == "brain.Event:2"
        assert (started.session_log.status, started.step) == (SessionLog.START, step + 1)
        scalars = [(one.step, one.summary.value[0]) for one in written]
        assert [(at, value.tag, value.simple_value) for at, value in scalars] == [
            (later, "train/loss", 0.5 * later) for later in range(step + 1, step + 5)
        ]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Stands in for a full disk: inside the `with` block no file gets more bytes than `size`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [2_000, 10_000])
def test_events_that_do_not_fit_on_the_disk_are_one_line(tmp_path, size, capfd):
    """Of each step there are more values than a queue would hold."""
    log, message = MetricsLog(tmp_path), r"^\S+/tensorboard cannot be written: File too large$"
    values = {f"parameter_norm/layers/{index}": 1.0 for index in range(40)}
    with files_of_at_most(size):
        with pytest.raises(UserError, match=message):
            for step in range(1, 100):
                log.write("lm", "train", step, values)
        # metrics.jsonl is written first.
        assert len(MetricsLog(tmp_path).records) == len(log.records) == step
        with pytest.raises(UserError, match=message):
            log.close()
    del log
    assert capfd.readouterr() == ("", "")


def test_metrics_that_do_not_fit_on_the_disk_are_one_line(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("lm", "train", 1, {"loss": 1.0})
    with (
        files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 1),
        pytest.raises(UserError, match=r"/metrics\.jsonl cannot be written: File too large$"),
    ):
        log.write("lm", "train", 2, {"loss": 1.0})
    log.close()
