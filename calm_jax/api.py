"""The Python interface: `load` a model and `evaluate` a run. `from calm_jax import Generator, evaluate, load`."""

import os
from collections.abc import Mapping
from typing import Any

from calm_jax.cli.files import local_path, os_errors
from calm_jax.config import as_dict, resolve
from calm_jax.errors import UserError
from calm_jax.interop.pretrained import is_published, load_pretrained
from calm_jax.run.generator import Continuation, Generator
from calm_jax.run.recipe import run_evaluation
from calm_jax.run.workdir import Workdir

__all__ = ["Continuation", "Generator", "evaluate", "load"]


def load(source: str | os.PathLike[str], tokenizer: str = "", revision: str = "") -> Generator:
    """Loads a language model onto all available devices, ready to continue prompts.

    Args:
      source: the workdir of a run; or a published checkpoint, which is a folder or `owner/name` on the Hugging Face hub
        (extra `interop`).
      tokenizer: the tokenizer of a published checkpoint: a file, or "bytes"; if empty, the one in its folder.
      revision: the revision of a checkpoint on the hub: a branch, a tag or a commit; its main branch if empty.

    Raises:
      UserError: if there is no such model, or one of its files is damaged.
    """
    path = local_path(os.fspath(source), "source")
    with os_errors("source", "read"):
        is_workdir = path.is_dir() and not is_published(path)
    if not is_workdir:
        return load_pretrained(os.fspath(source), tokenizer, revision)
    if tokenizer or revision:
        raise UserError(
            f"source={str(source)!r} is a workdir, which has its own tokenizer and no revision"
        )
    return Generator.load(path)


def evaluate(
    workdir: str | os.PathLike[str], changes: Mapping[str, Any] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Scores a run as `calm_jax.main --mode=eval` does: prints the tables and appends to evaluations.jsonl.

    Args:
      workdir: folder of the run.
      changes: keys of the config with their values, such as `{"eval.num_samples": 8}`. All may change but those that
        are fixed in evaluation (docs/checkpoints.md, Resume).

    Returns:
      The scores by name: "lm" (with `brierlm` and `brierlm_error`), "autoencoder", "equal_context", "floor" and others, as far
      as the run has them.

    Raises:
      UserError: for a key or a value that does not fit, or a folder that is no workdir.
    """
    run = Workdir(local_path(os.fspath(workdir), "workdir"))
    tree = as_dict(run.config)
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        section: Any = tree
        for part in sections:
            section = section.get(part)
            if not isinstance(section, dict):
                raise UserError(f"changes: {key!r} is no key of the config")
        section[name] = value
    return run_evaluation(resolve(tree), run)
