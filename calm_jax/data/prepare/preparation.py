"""Prepares a whole folder: checks what an earlier run left in it, runs the two passes, and writes the index."""

import functools
import json
import pathlib
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from calm_jax.cli.clock import ends_if_set_back
from calm_jax.cli.files import os_errors, read_json, write_atomically
from calm_jax.cli.ownership import LOCK, is_foreign, owned
from calm_jax.data.prepare import make_shards, scan
from calm_jax.data.prepare.cluster import Cluster
from calm_jax.data.prepare.options import KEY, Input, Options
from calm_jax.data.prepare.scan import Layout
from calm_jax.data.shards import INDEX, PreparedText
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# The most shards that one task makes.
_MOST_SHARDS = 8


def _make_or_refuse(output: pathlib.Path) -> None:
    """Makes the folder if necessary. Raises `UserError` if it contains anything but a preparation."""
    with os_errors(f"--output={output}", "made"):
        output.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in output.iterdir()}
        # A run that was killed before it wrote inputs.json leaves only these.
        left = {name for name in names if name == LOCK or name.startswith("inputs.json.")}
        others = bool(names - left) or is_foreign(output)
    if others and "inputs.json" not in names:
        raise UserError(
            f"--output={output} is not empty and holds no prepared text: give another folder"
        )


def _clean(work: pathlib.Path) -> None:
    """Removes the markers of earlier runs, which ends their remaining tasks, and unfinished shards of killed workers."""
    for path in work.glob("run-*"):
        path.unlink()
    for path in work.glob("shard-*"):
        shutil.rmtree(path, ignore_errors=True)


def _delete(work: pathlib.Path) -> None:
    """Deletes what preparations leave in the folder of intermediate files, and the folder if that was all."""
    with suppress(OSError):
        for path in work.iterdir():
            if not re.fullmatch(r"dask|(checked|copies|digests|run|shard)[-.].*", path.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        work.rmdir()


def _differences(output: pathlib.Path, about: dict) -> list[tuple[str, Any, Any]]:
    """`(name, then, now)` of every option or input that has changed since the preparation of the folder began."""
    path = output / "inputs.json"
    if not path.exists():
        return []
    try:
        then, now = _flat(read_json(path)), _flat(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): give another --output") from error
    pairs = [(key, then.get(key), now.get(key)) for key in now | then]
    return [(key, a, b) for key, a, b in pairs if a != b]


def _begin(output: pathlib.Path, about: dict) -> None:
    """Writes inputs.json. Raises `UserError` if the folder holds results of other options or inputs."""
    other = _differences(output, about)
    # Without results (after an error such as a wrong field name) the preparation simply starts anew.
    if other and any((*output.glob("shard-*"), *output.glob("work/checked-*.json"))):
        key, then, now = other[0]
        difference = f"with {key}={then!r}, not {now!r}"
        if now is None:
            difference = f"with {key}={then!r}, which is not given now"
        elif then is None:
            difference = f"without {key}={now!r}"
        raise UserError(
            f"--output={output} was begun {difference}: give another folder, or delete it"
        )
    if other:
        _delete(output / "work")
    write_atomically(output / "inputs.json", json.dumps(about, indent=1) + "\n")


def _flat(about: dict) -> dict:
    """The content of inputs.json as a flat dict, whose keys are shown in messages."""
    files = {f"input {n}": file for n, file in enumerate(about["files"])}
    states = {
        f"the content of {file}": s for file, s in zip(about["files"], about["states"], strict=True)
    }
    return about["options"] | {"tokenizer": about["tokenizer"]} | files | states


def _is_done(output: pathlib.Path) -> bool:
    """Whether the folder is complete. Prints a note if it was complete once and something is missing now."""
    if not (output / INDEX).exists():
        return False
    try:
        _ = PreparedText(output).tokenizer
    except UserError:
        print(f"{output} is no longer complete: rebuilding the missing parts", flush=True)
        return False
    return True


def _runs(layout: Layout, numbers: Sequence[int], num_workers: int) -> list[tuple[int, int]]:
    """Divides shards into tasks. Each is a pair: the number of its first shard, and of the shard after its last.

    A shard at which reading can begin starts a new task. A compressed file has to be decompressed from its beginning, so a
    task makes several of its shards in one reading, but few enough that all workers get tasks. `num_workers` is 0 while
    all workers were killed and are being replaced.
    """
    longest = min(_MOST_SHARDS, -(-len(numbers) // (2 * max(1, num_workers))))
    runs: list[tuple[int, int]] = []
    for number in numbers:
        follows = runs and runs[-1][1] == number and not layout.can_begin_at(layout.bounds[number])
        if follows and number - runs[-1][0] < longest:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _make_layout(cluster: Cluster, work: pathlib.Path, inputs: Input, options: Options) -> Layout:
    """Does the first pass, without the steps that an earlier run finished."""
    if scan.layout_path(work).exists():
        return Layout.load(work)
    groups = list(enumerate(inputs.groups()))
    todo = [group for group in groups if not scan.scan_path(work, group[0]).exists()]
    call = functools.partial(scan.scan, work, inputs, options, cluster.report)
    cluster.run(call, todo, "reading")
    files, digests = scan.scanned(work, range(len(groups)))
    layout = Layout(work, inputs, files, [])
    num_documents, num_parts = int(layout.first_document[-1]), 0
    if not num_documents:
        raise UserError(f"{KEY} holds no text")
    if options.deduplicate:
        num_parts = scan.num_parts(num_documents)
        parts = [part for part in range(num_parts) if not scan.copies_path(work, part).exists()]
        cluster.run(functools.partial(scan.find_copies, work, digests, num_parts), parts)
    copies_N = scan.merge_copies(work, layout.first_document, num_parts)
    layout = Layout(work, inputs, files, scan.shard_bounds(files, options, copies_N))
    layout.save()
    return layout


def _check_touched(cluster: Cluster, work: pathlib.Path, layout: Layout, options: Options) -> None:
    """Raises `UserError` if the text of a file has changed since the first pass.

    Complete shards may hold what was there before the change. All other text is checked when it is read again.
    """
    with os_errors(KEY, "read"):
        touched = layout.touched()
    if touched:
        call = functools.partial(make_shards.check_text, work, options, cluster.report)
        total = sum(layout.files[n]["documents"] for n in touched)
        cluster.run(call, touched, "checking", total)


def prepare(
    files: Sequence[str],
    tokenizer: Tokenizer,
    output: pathlib.Path,
    options: Options,
    workers: int,
    scheduler: str = "",
) -> dict:
    """Prepares a folder, or continues the preparation that an earlier call with the same arguments began.

    Args:
        files: local or remote files of text.
        tokenizer: encodes the text, and is saved in the folder.
        output: the folder, which all workers share.
        options: how the text is processed.
        workers: processes to start on this machine, 0 for one per core; ignored with a scheduler.
        scheduler: the address of a running Dask cluster, or empty.

    Returns:
        The index, as in `PreparedText.index`.

    Raises:
        UserError: an input is missing, bad or has changed; the folder holds another preparation; or the cluster fails.
    """
    inputs = Input.of(files)
    about = {
        "options": options.identity,
        "tokenizer": tokenizer.fingerprint,
        "files": list(inputs.files),
        "states": list(inputs.states),
    }
    output = output.absolute()
    _make_or_refuse(output)
    work = output / "work"
    if not _differences(output, about) and _is_done(output):
        print(f"{output} is prepared, there is nothing to do")
        if work.exists():
            # Another preparation of this folder, if there is one, mends a part of it and needs its files.
            with suppress(UserError), owned(output, f"--output={output}"):
                _delete(work)
        return PreparedText(output).index
    with owned(output, f"--output={output}"):
        _begin(output, about)
        with os_errors(output, "written"):
            tokenizer.save(output / "tokenizer")
            if (output / INDEX).exists():
                # The folder was complete once. An attempt to mend it may have read another text than that of the index.
                _delete(work)
            work.mkdir(exist_ok=True)
            _clean(work)
        with (
            ends_if_set_back(str(output), "the preparation", "goes on with it"),
            Cluster(work, workers, scheduler) as cluster,
        ):
            layout = _make_layout(cluster, work, inputs, options)
            todo = make_shards.pending(output, layout.num_shards)
            if len(todo) < layout.num_shards:
                _check_touched(cluster, work, layout, options)
            call = functools.partial(make_shards.make_shards, output, work, options, cluster.report)
            total = sum(map(layout.num_kept, todo))
            cluster.run(call, _runs(layout, todo, cluster.num_workers), "tokenising", total)
        index = make_shards.write_index(output, layout, options, tokenizer)
        _delete(work)
        return index
