"""Compiled programs are kept in the user's cache folder, unless the user has chosen another."""

import pathlib

import jax
import pytest

from calm_jax.parallel import compilation_cache


@pytest.fixture
def undecided(monkeypatch):
    """JAX's options as they are where the environment says nothing."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv(names[1].upper())
    jax.config.update(names[0], None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_is_in_the_users_folder_for_this_cpu(undecided, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.keep_compiled_programs()
    [first, second, cpu] = (
        tmp_path.joinpath(jax.config.jax_compilation_cache_dir).relative_to(tmp_path).parts
    )
    assert (first, second) == ("calm_jax", "compiled") and len(cpu.split("-")[-1]) == 8
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 1


def test_without_a_home_folder_there_is_no_cache(undecided, monkeypatch):
    def no_home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", no_home)
    compilation_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_chosen_cache_stays():
    """conftest.py has chosen one."""
    before = jax.config.jax_compilation_cache_dir
    assert before is not None
    compilation_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == before
