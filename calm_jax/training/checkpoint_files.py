"""The folder of a stage's checkpoints: which there are, copies of them, and errors that say which is damaged and how to go on."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator

from calm_jax.cli.clock import ends_if_set_back
from calm_jax.cli.files import open_regular, os_errors, sync, sync_tree
from calm_jax.errors import UserError
from calm_jax.parallel.multihost import AgreedError
from calm_jax.training.late_errors import hide_late_errors

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
# The most characters of a library's message that are quoted.
_MOST_REASON = 600
# Bytes of the largest metadata file that a checkpoint may have. Files of arrays, in folders named `d`, may be larger.
_MOST_DESCRIPTION_BYTES = 2**30
# Bytes of a file that are copied at once.
_COPIED_BYTES = 2**25


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


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Turns an error while a checkpoint is written into a `UserError`. Ends the process if it waits for a clock that was set back."""
    hide_late_errors()
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


@contextlib.contextmanager
def errors_named(folder: pathlib.Path, step: int | None) -> Iterator[None]:
    """Turns every error while a checkpoint is read into a `UserError`: for damaged files Orbax raises many types.

    Ends the process if it waits for a clock that was set back.
    """
    hide_late_errors()
    try:
        _check_files(folder, step)
        with ends_if_set_back(str(folder), "reading the checkpoint", "reads it again"):
            yield
    except Exception as error:
        if step != latest_step(folder):
            raise UserError(
                f"the checkpoint {folder / str(step)} was deleted or replaced while it was being read, probably by a "
                "running training: give the same command again"
            ) from error
        if isinstance(error, UserError):
            raise
        told = _told(error)
        reason = _first_line(told)
        if isinstance(error, MemoryError) or any(word in str(told) for word in _NOT_DAMAGE):
            raise UserError(
                f"the checkpoint {folder / str(step)} cannot be read ({reason})"
            ) from error
        if any(words in str(error) for words in _OTHER_ARRAYS):
            # The rest of Orbax's message is advice on its own options.
            reason = reason.split(". ")[0]
            raise UserError(
                f"config.json and the checkpoint {folder / str(step)} do not match ({reason}): config.json has changed since "
                "it was saved, or the checkpoint is damaged"
            ) from error
        raise UserError(damage(folder, step, reason)) from error


def _first_line(error: BaseException) -> str:
    """The first line of a library's message, without TensorStore's description of how it reads an array."""
    line = str(error).strip().partition("\n")[0].partition(" [tensorstore_spec")[0]
    return line[:_MOST_REASON].rstrip(":") or type(error).__name__


def _told(error: Exception) -> BaseException:
    """TensorStore's error, which has the reason, where Orbax's error about it describes the array alone."""
    is_description = "See full TensorStore details" in str(error)
    return error.__cause__ or error if is_description else error


def damage(folder: pathlib.Path, step: int | None, reason: str) -> str:
    """The message about a damaged checkpoint; it says how to go on without it."""
    path, before = (
        folder / str(step),
        max((one for one in _steps(folder) if one != step), default=None),
    )
    put_aside = f"`mv {path} {path}.damaged`"
    way_out = (
        f"there is no other checkpoint. If it is a copy (of init_from or autoencoder.checkpoint), {put_aside}, and the same "
        "command copies it again; otherwise train (or convert) again into a new workdir"
        if before is None
        else f"{put_aside} makes the one of step {before} the latest, from which the same command goes on"
    )
    return f"the checkpoint {path} is damaged ({reason}); {way_out}"


def _check_files(folder: pathlib.Path, step: int | None) -> None:
    """Raises `UserError` if a checkpoint has anything but folders and regular files, or a metadata file that is too large."""
    for path in (folder / str(step)).rglob("*"):
        # Reading a pipe might never end, and TensorStore ends the process if a metadata file does not fit into memory.
        is_array = path.parent.name == "d"
        if not path.is_dir() and not path.is_file():
            raise UserError(damage(folder, step, f"{path} is no file"))
        if path.is_file() and not is_array and path.stat().st_size > _MOST_DESCRIPTION_BYTES:
            raise UserError(damage(folder, step, f"{path} is too large"))


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
            while piece := file.read(_COPIED_BYTES):
                with os_errors(target, "written"):
                    written.write(piece)
                    written.flush()


def copy_latest(folder: pathlib.Path, target: pathlib.Path, leave_out: Collection[str]) -> None:
    """Copies the latest checkpoint in `folder`, without its items of the names in `leave_out`, into `target`.

    The copy is made beside `target`, synced to the disk and then moved there, so that it has its name only when it is complete.
    `target` is made if it is missing; what is in it stays, such as a checkpoint that was put aside, except what killed saves left.
    A training may write to `folder` meanwhile.

    Raises:
      UserError: if the checkpoint cannot be read, is deleted while it is being read, or cannot be written.
    """
    step = latest_step(folder)
    if step is None:
        raise UserError(
            f"{folder} holds no checkpoint: were its checkpoints deleted or moved meanwhile?"
        )
    if target.is_symlink() and not target.exists():
        raise UserError(f"{target} is a link to {target.readlink()}, which does not exist")
    # A link may lead to another disk, onto which no folder can be moved.
    target = target.resolve()
    source, unfinished = folder / str(step), target.with_name(f"{target.name}.tmp")
    with os_errors(target, "written"):
        if unfinished.is_symlink():
            unfinished.unlink()
        shutil.rmtree(unfinished, ignore_errors=True)
        # A stage that was killed before its first checkpoint leaves a part of it.
        for part in target.glob("*.orbax-checkpoint-tmp*"):
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
        (unfinished / str(step)).mkdir(parents=True)
    with errors_named(folder, step):
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
        target.mkdir(exist_ok=True)
        (unfinished / str(step)).rename(target / str(step))
        unfinished.rmdir()
        sync(target)
        sync(target.parent)
