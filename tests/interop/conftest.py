"""Fixtures for tests of conversions."""

import pytest

from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.interop.conversion import make_plan
from calm_jax.interop.converted import convert
from calm_jax.interop.source import find_tokenizer
from calm_jax.run.workdir import Workdir
from configs import ar_m, common
from tests.interop.conversions import SPECIAL, sentencepiece_model


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """A tokenizer with the vocabulary size and the special ids of the golden checkpoints."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(sentencepiece_model(**SPECIAL))
    return path


@pytest.fixture
def plan_of(tokenizer_file):
    """Plans a conversion as the command does; `a__b=value` is the key --config.a.b=value."""

    def plan(source, autoencoder=None, tokenizer=tokenizer_file, **overrides):
        found, tokenizer_config = (
            open_tokenizer(str(tokenizer)) if tokenizer else find_tokenizer(source)
        )
        recipes = {True: common.get_config(), False: ar_m.get_config()}
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return make_plan(source, autoencoder, found, tokenizer_config, recipes, keys)

    return plan


@pytest.fixture
def converted(plan_of, tmp_path):
    """Converts a checkpoint and returns the workdir; arguments as for `plan_of`."""

    def make(source, *arguments, name="converted", **options):
        convert(plan_of(source, *arguments, **options), tmp_path / name)
        return Workdir(tmp_path / name)

    return make
