"""Names that notebooks and scripts of users import from before the package had folders."""

import calm_jax
from calm_jax.sampling import ChunkModel, SamplerConfig, sample_chunk, temperature


def test_names_of_the_old_notebooks_still_import():
    from calm_jax import temperature as law
    from calm_jax.samplers import SamplerConfig as OldConfig
    from calm_jax.samplers import sample_chunk as old_sample_chunk
    from calm_jax.sampling import ChunkModel as OldModel
    from calm_jax.text import Generator

    assert Generator is calm_jax.Generator
    assert law.log_weights is temperature.log_weights
    assert (OldConfig, old_sample_chunk, OldModel) == (SamplerConfig, sample_chunk, ChunkModel)
