"""Rows of integers in files: every range of them, and every damage."""

import random

import numpy as np
import pytest

from calm_jax.data.prepare import work_files
from calm_jax.errors import UserError


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 8, 41])
def test_a_range_is_that_of_all_rows(tmp_path, monkeypatch, num_rows):
    """With few values, so that equal ones stand on both sides of the blocks' borders."""
    monkeypatch.setattr(work_files, "_BLOCK", 4)
    rng = np.random.default_rng(num_rows)
    values = np.asarray([0, 1, 2, 7, 2**63, 2**64 - 1], np.uint64)
    rows_N2 = rng.choice(values, (num_rows, 2))
    rows_N2 = rows_N2[np.argsort(rows_N2[:, 0])]
    index = tmp_path / "a.json"
    work_files.write_rows(index, rows_N2)
    np.testing.assert_array_equal(work_files.read_rows(index), rows_N2)
    ends = (0, 1, 3, 7, 8, 2**63, 2**64 - 2, 2**64 - 1)
    for lowest in ends:
        for highest in ends:
            inside = [low for low in rows_N2.tolist() if lowest <= low[0] <= highest]
            assert work_files.read_rows(index, lowest, highest).tolist() == inside


def test_every_flipped_bit_every_cut_and_every_other_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(work_files, "_BLOCK", 4)
    index, rng = tmp_path / "a.json", random.Random(0)
    work_files.write_rows(index, np.arange(22)[:, None])
    for path in (index, tmp_path / "a.rows"):
        whole = path.read_bytes()
        for _ in range(200):
            bad = bytearray(whole)
            bad[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            cut = whole[: rng.randrange(len(whole) - 1)]
            for content in (bytes(bad), cut):
                path.write_bytes(content)
                with pytest.raises(UserError, match=rf"{path.name} cannot be read \(.*\): delete "):
                    work_files.read_rows(index)
        path.write_bytes(whole)
    assert work_files.read_rows(index)[:, 0].tolist() == list(range(22))
    other = tmp_path / "b.json"
    work_files.write_value(other, {"shape": [0, 1], "first": [], "crc32": []})
    index.write_bytes(other.read_bytes())
    with pytest.raises(
        UserError, match=r"a.json cannot be read \(its checksum is wrong\): delete "
    ):
        work_files.read_rows(index)
