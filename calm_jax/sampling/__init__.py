"""From a hidden state to the next chunk of tokens, and from there to whole texts.

Begin with temperature.py, the mathematics of likelihood-free temperature sampling, and chunk_model.py, the interface
of a model to all samplers. samplers.py has `sample_chunk` and the table of samplers: exact.py those that are exact,
pools.py those that choose by weight from one pool. search.py is what the samplers share, counting.py counts equal
draws, config.py has the options. decode.py generates chunk after chunk. May import models and everything below them.
"""

from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SampleConfig, SamplerConfig
from calm_jax.sampling.samplers import SAMPLERS, sample_chunk

__all__ = ["SAMPLERS", "ChunkModel", "SampleConfig", "SamplerConfig", "sample_chunk"]
