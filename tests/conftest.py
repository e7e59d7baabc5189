"""Shared set-up: CPU, the persistent compilation cache, and tiny recipes."""

import json
import os
import pathlib

# Before jax is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest  # noqa: E402

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> pathlib.Path:
    """The folder of the published code's recorded numbers."""
    return GOLDEN


@pytest.fixture
def pile_folder(tmp_path) -> pathlib.Path:
    """What launch/prepare_pile.sh looks for."""
    (tmp_path / "pile").mkdir()
    for number in range(30):
        (tmp_path / "pile" / f"{number:02}.jsonl.zst").touch()
    (tmp_path / "wikitext.json").write_text(json.dumps({"text": "a text"}) + "\n")
    (tmp_path / "tokenizer.model").touch()
    return tmp_path


@pytest.fixture
def stubs(tmp_path):
    """Stand-ins for the commands that a script of launch/ calls."""
    from tests.stubs import Stubs

    (tmp_path / "stubs").mkdir()
    return Stubs(tmp_path / "stubs")
