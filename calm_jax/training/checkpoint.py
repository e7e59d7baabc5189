"""Checkpoints: asynchronous Orbax saves, exact resume, and loading of the parameters without the optimizer."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from calm_jax.cli.files import sync
from calm_jax.errors import UserError, require_at_least
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import sharded_shapes
from calm_jax.parallel.multihost import AgreedError
from calm_jax.training.checkpoint_files import (
    check_step,
    damage,
    errors_named,
    latest_step,
    writing,
)
from calm_jax.training.checksums import checksums

# The items of a checkpoint. Parameters are an item of their own, so that they load without the optimizer.
_PARAMS, _TRAINING, _ABOUT = "params", "training", "about"
# The key of the item `about` with the checksums of all arrays; checkpoints of earlier commits do not have it.
_CHECKSUMS = "checksums"
# The key of the item `about` with the step that the checkpoint was saved as; checkpoints of earlier commits do not have it.
_STEP = "step"
# Bytes of the chunks and files that `save_params` writes; they bound the memory that it needs.
_CHUNK_BYTES, _FILE_BYTES = 2**25, 2**27


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """`config.checkpoint`; every key is described in `configs/common.py`."""

    keep: int

    def __post_init__(self):
        require_at_least(1, self, "checkpoint.", "keep")


class _Manager(ocp.CheckpointManager):
    """A manager that does not poll the distributed runtime for signals.

    Orbax would poll it with step numbers. The runtime has a single counter for all polls, and the training loop uses it
    already, with other numbers (`calm_jax.parallel.signals`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpointer:
    """The checkpoints of one stage, each a folder named by its step.

    `save` waits until the arrays are computed, hashes them on the host (`checksums`), and returns once Orbax has copied them off
    the devices; files are written while training goes on. A checkpoint's folder gets its name only when it is complete
    and its files are synced to the disk, so that neither a killed run nor a power cut leaves a partial checkpoint.

    Attributes:
      folder: the folder of the checkpoints.
      latest_step: the step of the latest checkpoint, None if there is none.
    """

    def __init__(
        self, folder: pathlib.Path, keep: int, check_folder: Callable[[], None] = lambda: None
    ):
        """Makes the folder if it is missing.

        Args:
          folder: the folder of the checkpoints.
          keep: how many of the latest checkpoints are kept.
          check_folder: called before each save; raises `UserError` if `folder` must not be written to.
        """
        self.folder, self._check_folder = folder, check_folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            # Else the manager reads a file of every checkpoint at once, unchecked: a pipe in its place would never end.
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._sync),
        )
        self._manager = _Manager(folder.resolve(), options=options)

    def _sync(self) -> None:
        """Syncs the metadata files of a complete checkpoint to the disk, before its folder gets its name.

        TensorStore has synced the files of arrays, which are in folders named `d`.
        """
        if not multihost.is_primary():
            return
        for unfinished in self.folder.glob("*.orbax-checkpoint-tmp*"):
            for path in unfinished.rglob("*"):
                if path.is_dir() or path.parent.name != "d":
                    sync(path)

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, params: Any, training: Any, about: dict) -> None:
        """Starts saving the state after `step` updates.

        Args:
          step: names the checkpoint.
          params: the parameters.
          training: the rest of the training state.
          about: JSON-like facts about the checkpoint, which `about()` returns.

        Raises:
          UserError: if this checkpoint or the previous one cannot be written.
        """
        # Only this process checks, as agreeing with the others would cost time at each save. If the check fails, `exit_on_failure`
        # ends this process, and the others end when they lose it.
        self._check_folder()
        signed = _signed(about | {_STEP: step}, {_PARAMS: params, _TRAINING: training})
        items = {
            _PARAMS: ocp.args.StandardSave(params),
            _TRAINING: ocp.args.StandardSave(training),
            _ABOUT: ocp.args.JsonSave(signed),
        }
        # Orbax first waits for the previous save, and raises its error if it failed.
        with writing(self.folder):
            is_saved = self._manager.save(step, args=ocp.args.Composite(**items))
        if not is_saved:
            # Orbax saves a step only if it is later than all saved ones.
            raise UserError(
                f"{self.folder}: the checkpoint of step {step} was not saved, because there is one of step "
                f"{self.latest_step} already: move later ones away, and give the same command again"
            )

    def wait(self) -> None:
        """Returns when every started save is complete on disk; raises `UserError` if one failed."""
        with writing(self.folder):
            self._manager.wait_until_finished()

    def restore(self, params: Any, training: Any, mesh: Mesh) -> tuple[Any, Any]:
        """Restores the latest checkpoint.

        Args:
          params: parameters, or their shapes, as they were saved.
          training: the rest of the training state, likewise.
          mesh: the mesh to shard the arrays over, by the table of `calm_jax.parallel.mesh`.

        Returns:
          `params` and `training` of the checkpoint.

        Raises:
          UserError: if the checkpoint cannot be read, or is not what was saved.
        """
        items = {
            _PARAMS: ocp.args.StandardRestore(sharded_shapes(params, mesh)),
            _TRAINING: ocp.args.StandardRestore(sharded_shapes(training, mesh)),
        }
        with errors_named(self.folder, self.latest_step):
            restored = self._manager.restore(self.latest_step, args=ocp.args.Composite(**items))
            stored = _stored_checksums(_read_about(self.folder, self.latest_step))
        _check(self.folder, self.latest_step, stored, restored)
        return restored[_PARAMS], restored[_TRAINING]

    def about(self) -> dict:
        """The `about` that the latest checkpoint was saved with. Raises `UserError` if it cannot be read."""
        with errors_named(self.folder, self.latest_step):
            return _read_about(self.folder, self.latest_step)

    def close(self) -> None:
        """Waits for a started save, and ends Orbax's threads. Raises `UserError` if the save failed."""
        with writing(self.folder):
            self._manager.close()


def _signed(about: dict, items: dict[str, Any]) -> dict:
    return about | {_CHECKSUMS: {name: checksums(tree) for name, tree in items.items()}}


def _read_about(folder: pathlib.Path, step: int | None) -> dict:
    """The item `about` of a checkpoint. Raises `ValueError` if it is malformed, and other errors if it cannot be read."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        about = reader.restore(folder.resolve() / str(step) / _ABOUT)
    if not isinstance(about, dict):
        raise ValueError(f"{_ABOUT} is no JSON object")
    stored, saved_as = _stored_checksums(about), about.get(_STEP, 0)
    if not isinstance(stored, dict) or not all(isinstance(one, dict) for one in stored.values()):
        raise ValueError(f"{_CHECKSUMS!r} in {_ABOUT!r} is malformed")
    if type(saved_as) is not int or not 0 <= saved_as < 2**53:
        raise ValueError(f"{_STEP!r} in {_ABOUT!r} is no step")
    return about


def _stored_checksums(about: dict) -> dict[str, dict[str, Any]]:
    """The checksums in a checkpoint's `about`, by item and array; empty for checkpoints of earlier commits."""
    return about.get(_CHECKSUMS, {})


def _check(
    folder: pathlib.Path,
    step: int | None,
    stored: Mapping[str, Mapping[str, Any]],
    restored: Mapping[str, Any],
) -> None:
    """Compares restored arrays with their checksums, and says so if the checkpoint has none for some of them.

    Raises `AgreedError` for an array that is not what was saved.
    """
    unchecked = sorted(restored.keys() - stored.keys())
    if unchecked and multihost.is_primary():
        print(
            f"note: the checkpoint {folder / str(step)} has no checksums of {' and '.join(unchecked)}, as of an earlier version: "
            "these arrays are not checked",
            file=sys.stderr,
        )
    # Sorted, because all processes compute each checksum together, and the order of a set differs between processes.
    for item in sorted(stored.keys() & restored.keys()):
        for name, value in checksums(restored[item]).items():
            if stored[item].get(name) != value:
                reason = f"{item}/{name} has another checksum than when it was saved"
                raise AgreedError(damage(folder, step, reason))


def save_params(folder: pathlib.Path, params: Any, about: dict) -> None:
    """Saves parameters that were not trained here, such as converted ones, as a checkpoint of step 0.

    Needs much less memory than the parameters take: arrays are written one at a time, in chunks, to files of 128 MiB,
    because Orbax collects a file's chunks in memory.

    Args:
      folder: the folder of the checkpoints.
      params: the parameters.
      about: JSON-like facts about the checkpoint.

    Raises:
      UserError: if they cannot be written.
    """
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    handlers = {
        # Orbax's limit of bytes in flight has to be above the largest array.
        _PARAMS: ocp.PyTreeCheckpointHandler(save_concurrent_gb=(largest + 2**20) / 1e9),
        _ABOUT: ocp.JsonCheckpointHandler(),
    }
    in_chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    items = {
        _PARAMS: ocp.args.PyTreeSave(
            params, save_args=in_chunks, ocdbt_target_data_file_size=_FILE_BYTES
        ),
        _ABOUT: ocp.args.JsonSave(_signed(about | {_STEP: 0}, {_PARAMS: params})),
    }
    with (
        writing(folder),
        ocp.CheckpointManager(folder.resolve(), item_handlers=handlers) as manager,
    ):
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()


def load_params(folder: pathlib.Path, like: Any, mesh: Mesh) -> Any:
    """Loads the parameters of the latest checkpoint in `folder`, without the optimizer.

    Args:
      folder: the folder of the checkpoints.
      like: the shapes of the parameters.
      mesh: the mesh to shard them over.

    Raises:
      UserError: if there is no checkpoint, it cannot be read, or it is not what was saved.
    """
    step = latest_step(folder)
    if step is None:
        raise UserError(f"{folder} holds no checkpoint: train first")
    with errors_named(folder, step):
        about = _read_about(folder, step)
        with ocp.StandardCheckpointer() as checkpointer:
            path = folder.resolve() / str(step) / _PARAMS
            params = checkpointer.restore(path, sharded_shapes(like, mesh))
    check_step(folder, step, about.get(_STEP, step))
    _check(folder, step, _stored_checksums(about), {_PARAMS: params})
    return params
