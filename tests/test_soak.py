"""`python -m benchmarks.soak` in its short form."""

import json

import pytest

from tests.workdirs import run


@pytest.mark.slow
def test_a_short_soak_loses_nothing(tmp_path):
    """Status 0: no step, answer or byte was lost, and no file, connection or process is left."""
    run("benchmarks.soak", f"--folder={tmp_path}", "--minutes=0.1")
    counts = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert {one["job"] for one in counts} == {"train", "serve", "prepare"}
    for job in ("train", "serve", "prepare"):
        # A process that has just started has little memory.
        assert max(one["MiB"] for one in counts if one["job"] == job) > 50
