"""Tasks: a model with its objective and its metrics, behind one interface for the training loop and the evaluator.

Begin with base.py, the interface. autoencoder.py is stage 1, calm.py stage 2, autoregressive.py the baseline, which shares
language_model.py with stage 2; latents.py has the metrics that compare draws with posteriors. May import
`calm_jax.brier` and everything below it: sampling, models, losses, data, parallel.
"""

from calm_jax.tasks.autoencoder import AutoencoderTask
from calm_jax.tasks.autoregressive import AutoregressiveTask
from calm_jax.tasks.base import Batch, Metrics, Params, Stacks, Task
from calm_jax.tasks.calm import CalmTask

LmTask = CalmTask | AutoregressiveTask

__all__ = [
    "AutoencoderTask",
    "AutoregressiveTask",
    "Batch",
    "CalmTask",
    "LmTask",
    "Metrics",
    "Params",
    "Stacks",
    "Task",
]
