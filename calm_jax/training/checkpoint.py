"""Checkpoints: asynchronous Orbax saves, exact resume, and loading of the parameters without the optimizer."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from calm_jax.cli.clock import ends_if_set_back
from calm_jax.cli.files import open_regular, os_errors, sync, sync_tree
from calm_jax.errors import UserError, require_at_least
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import sharded_shapes
from calm_jax.parallel.multihost import AgreedError
from calm_jax.training import tensorstore_leak
from calm_jax.training.checksums import checksums

# The items of a checkpoint. Parameters are an item of their own, so that they load without the optimizer.
_PARAMS, _TRAINING, _ABOUT = "params", "training", "about"
# The key of the item `about` with the checksums of all arrays; checkpoints of earlier commits do not have it.
_CHECKSUMS = "checksums"
# The key of the item `about` with the step that the checkpoint was saved as; checkpoints of earlier commits do not have it.
_STEP = "step"
# Words by which to recognise errors that are not due to a damaged checkpoint.
_NOT_DAMAGE = (
    "RESOURCE_EXHAUSTED",
    "Out of memory",
    "PERMISSION_DENIED",
    "Permission denied",
    "Too many open files",
)
# Words by which to recognise errors about arrays that are missing, or have other shapes than the config says.
_OTHER_ARRAYS = ("not compatible with the stored shape", "tree structures do not match")
# Bytes of the largest metadata file that a checkpoint may have. Files of arrays, in folders named `d`, may be larger.
_MOST_DESCRIPTION_BYTES = 2**30
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

    `save` returns once the arrays are copied off the devices. A checkpoint's folder gets its name only when it is complete
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
        tensorstore_leak.avoid()
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
        with _writing(self.folder):
            is_saved = self._manager.save(step, args=ocp.args.Composite(**items))
        if not is_saved:
            # Orbax saves no step that is not later than all that it has.
            raise UserError(
                f"{self.folder}: the checkpoint of step {step} was not saved, because there is one of step "
                f"{self.latest_step} already: move later ones away, and give the same command again"
            )

    def wait(self) -> None:
        """Returns when every started save is complete on disk; raises `UserError` if one failed."""
        with _writing(self.folder):
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
        with _errors_named(self.folder, self.latest_step):
            restored = self._manager.restore(self.latest_step, args=ocp.args.Composite(**items))
            stored = _stored_checksums(self.about())
        _check(self.folder, self.latest_step, stored, restored)
        return restored[_PARAMS], restored[_TRAINING]

    def about(self) -> dict:
        """The `about` that the latest checkpoint was saved with. Raises `UserError` if it cannot be read."""
        items = ocp.args.Composite(**{_ABOUT: ocp.args.JsonRestore()})
        with _errors_named(self.folder, self.latest_step):
            about = self._manager.restore(self.latest_step, args=items)[_ABOUT]
            _stored_checksums(about)
            return about

    def close(self) -> None:
        """Waits for a started save, and ends Orbax's threads. Raises `UserError` if the save failed."""
        with _writing(self.folder):
            self._manager.close()


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    """Turns an error while a checkpoint is written into a `UserError`. Ends the process if it waits for a clock that was set back."""
    _hide_late_errors()
    try:
        with ends_if_set_back(
            str(folder), "the checkpoint", "resumes from the last complete checkpoint"
        ):
            yield
    except (OSError, ValueError, RuntimeError) as error:
        complete = latest_step(folder)
        kept = (
            "there is none yet" if complete is None else f"the last good one is of step {complete}"
        )
        raise UserError(
            f"{folder}: a checkpoint could not be written ({_first_line(error)}); {kept}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _damage(folder: pathlib.Path, step: int | None, reason: str) -> str:
    """The message about a damaged checkpoint; it says how to go on from the checkpoint before it."""
    path, before = (
        folder / str(step),
        max((one for one in _steps(folder) if one != step), default=None),
    )
    way_out = (
        "there is no other checkpoint: train (or convert) again into a new workdir"
        if before is None
        else f"`mv {path} {path}.damaged` makes the one of step {before} the latest, from which the same command goes on"
    )
    return f"the checkpoint {path} is damaged ({reason}); {way_out}"


def _check_files(folder: pathlib.Path, step: int | None) -> None:
    """Raises `UserError` if a checkpoint has anything but folders and regular files, or a metadata file that is too large."""
    for path in (folder / str(step)).rglob("*"):
        # Reading a pipe might never end, and TensorStore ends the process if a metadata file does not fit into memory.
        is_array = path.parent.name == "d"
        if not path.is_dir() and not path.is_file():
            raise UserError(_damage(folder, step, f"{path} is no file"))
        if path.is_file() and not is_array and path.stat().st_size > _MOST_DESCRIPTION_BYTES:
            raise UserError(_damage(folder, step, f"{path} is too large"))


def _is_late(error: BaseException | None) -> bool:
    """Whether an error is one of those that `_hide_late_errors` hides."""
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return True
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return "OCDBT" in str(error) or any("orbax" in frame.filename for frame in frames)


class _NoLateErrors(logging.Filter):
    """Drops asyncio's log records about errors that nobody retrieved (see `_hide_late_errors`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_unasked = "exception was never retrieved" in record.getMessage()
        return not (is_unasked and _is_late(record.exc_info[1] if record.exc_info else None))


@functools.cache
def _hide_late_errors() -> None:
    """From now on, keeps this process from printing the errors of reads and writes that end after another one has failed.

    Orbax reads and writes all arrays concurrently. At the first error it closes its event loop and raises the error. The others
    end later: TensorStore's threads then find the loop closed, and if such a read or write fails too, nobody retrieves its error.
    """
    shown = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        if not (_is_late(unraisable.exc_value) or (code and "orbax" in code.co_filename)):
            shown(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_NoLateErrors())


@contextlib.contextmanager
def _errors_named(folder: pathlib.Path, step: int | None) -> Iterator[None]:
    """Turns every error while a checkpoint is read into a `UserError`: for damaged files Orbax raises many types."""
    _hide_late_errors()
    try:
        _check_files(folder, step)
        yield
    except Exception as error:
        if step != latest_step(folder):
            raise UserError(
                f"the checkpoint {folder / str(step)} was deleted or replaced while it was being read, probably by a "
                "running training: give the same command again"
            ) from error
        if isinstance(error, UserError):
            raise
        if isinstance(error, MemoryError) or any(word in str(error) for word in _NOT_DAMAGE):
            raise UserError(
                f"the checkpoint {folder / str(step)} cannot be read ({_first_line(error)})"
            ) from error
        if any(words in str(error) for words in _OTHER_ARRAYS):
            # The rest of Orbax's message is advice on its own options.
            reason = _first_line(error).split(". ")[0]
            raise UserError(
                f"config.json and the checkpoint {folder / str(step)} do not match ({reason}): config.json has changed since "
                "it was saved, or the checkpoint is damaged"
            ) from error
        raise UserError(_damage(folder, step, _first_line(error))) from error


def _signed(about: dict, items: dict[str, Any]) -> dict:
    return about | {_CHECKSUMS: {name: checksums(tree) for name, tree in items.items()}}


def _stored_checksums(about: Any) -> dict[str, dict[str, Any]]:
    """The checksums in a checkpoint's `about`, by item and array. Raises `ValueError` if they are malformed.

    Empty for checkpoints of earlier commits, which have no checksums.
    """
    if not isinstance(about, dict):
        raise ValueError(f"{_ABOUT} is no JSON object")
    stored = about.get(_CHECKSUMS, {})
    if not isinstance(stored, dict) or not all(isinstance(one, dict) for one in stored.values()):
        raise ValueError(f"{_CHECKSUMS!r} in {_ABOUT!r} is malformed")
    return stored


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
                raise AgreedError(_damage(folder, step, reason))


def check_step(folder: pathlib.Path, step: int, stored: object) -> None:
    """Compares the step that names a checkpoint with the one stored in it. Raises `AgreedError` if the folder was renamed."""
    if step == stored:
        return
    path, right = folder / str(step), folder / str(stored)
    # `mv` would move it into a folder that is there.
    name = f"{path}.misnamed" if right.exists() else right
    raise AgreedError(
        f"the checkpoint {path} is of step {stored}, not {step}: its folder was renamed; `mv {path} {name}`, and give the same "
        "command again"
    )


def _steps(folder: pathlib.Path) -> list[int]:
    # A folder that cannot be read must not look like a folder without checkpoints.
    with os_errors(folder, "read"), contextlib.suppress(FileNotFoundError):
        if folder.is_symlink() and not folder.exists():
            raise UserError(
                f"{folder} is a link to {os.readlink(folder)}, which is not there: is its disk mounted?"
            )
        names = [name for name in os.listdir(folder) if name.isdecimal() and name.isascii()]
        # Orbax, too, counts no files.
        return [int(name) for name in names if (folder / name).is_dir()]
    return []


def latest_step(folder: pathlib.Path) -> int | None:
    """The step of the latest complete checkpoint in `folder`; None if there is none."""
    return max(_steps(folder), default=None)


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
        _writing(folder),
        ocp.CheckpointManager(folder.resolve(), item_handlers=handlers) as manager,
    ):
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()


def _entries(folder: pathlib.Path) -> dict[pathlib.PurePath, int | None]:
    """Everything in a folder by its relative path, folders before what is in them: bytes of a file, None for a folder."""
    return {
        path.relative_to(folder): None if path.is_dir() else path.stat().st_size
        for path in sorted(folder.rglob("*"))
    }


def _copy_file(source: pathlib.Path, copy: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file. Raises `OSError` if `source` cannot be read, and `UserError` about `target` if `copy` cannot be written."""
    with open_regular(source) as file:
        with os_errors(target, "written"):
            written = open(copy, "xb")  # noqa: SIM115
        with written:
            while piece := file.read(_CHUNK_BYTES):
                with os_errors(target, "written"):
                    written.write(piece)
                    written.flush()


def copy_latest(folder: pathlib.Path, target: pathlib.Path, leave_out: Collection[str]) -> None:
    """Copies the latest checkpoint in `folder`, without its items of the names in `leave_out`, into the new folder `target`.

    The copy is made beside `target`, synced to the disk and then renamed, so that `target` appears only when it is complete. A
    training may write to `folder` meanwhile.

    Raises:
      UserError: if the checkpoint cannot be read, is deleted while it is being read, or cannot be written.
    """
    step = latest_step(folder)
    if step is None:
        raise UserError(
            f"{folder} holds no checkpoint: were its checkpoints deleted or moved meanwhile?"
        )
    source, unfinished = folder / str(step), target.with_name(f"{target.name}.tmp")
    with os_errors(target, "written"):
        if unfinished.is_symlink():
            unfinished.unlink()
        shutil.rmtree(unfinished, ignore_errors=True)
        # A stage that was killed before its first checkpoint leaves a folder without one.
        shutil.rmtree(target, ignore_errors=True)
        (unfinished / str(step)).mkdir(parents=True)
    with _errors_named(folder, step):
        entries = _entries(source)
        # A training deletes a checkpoint only when there is a later one: at this moment nothing of it was missing.
        if latest_step(folder) != step:
            raise FileNotFoundError(f"{source} is not the latest checkpoint any more")
        for name, size in entries.items():
            if name.parts[0] in leave_out:
                continue
            copy = unfinished / str(step) / name
            if size is None and (source / name).is_symlink():
                raise ValueError(f"{name} is a link to a folder, which is not copied")
            if size is None:
                with os_errors(target, "written"):
                    copy.mkdir()
                continue
            _copy_file(source / name, copy, target)
            if copy.stat().st_size != size:
                raise ValueError(f"{name} changed while it was being copied")
    with os_errors(target, "written"):
        sync_tree(unfinished)
        unfinished.rename(target)
        sync(target.parent)


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
    path = folder.resolve() / str(step)
    with _errors_named(folder, step):
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            about = reader.restore(path / _ABOUT)
        stored = _stored_checksums(about)
        is_step = type(about.get(_STEP, 0)) is int and 0 <= about.get(_STEP, 0) < 2**53
        if not is_step:
            raise ValueError(f"{_STEP!r} in {_ABOUT!r} is no step")
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(path / _PARAMS, sharded_shapes(like, mesh))
    check_step(folder, step, about.get(_STEP, step))
    _check(folder, step, stored, {_PARAMS: params})
    return params
