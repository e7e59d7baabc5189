"""Checksums of checkpoints: their definition, on any mesh, and damaged bits of a stored checkpoint."""

import errno
import gc
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.cli import files
from calm_jax.errors import UserError
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.training import checkpoint, checkpoint_files, late_errors
from calm_jax.training.checkpoint import Checkpointer, load_params
from calm_jax.training.checkpoint_files import latest_step
from calm_jax.training.checksums import checksums
from tests.simulated_devices import run_program

# Of more than one block, of parts of a block, and with as few axes and elements as there can be.
SHAPES = [(), (1,), (7,), (70000,), (0, 3), (3, 5), (300, 257), (2, 130, 300), (1, 2, 3, 4)]


def tree_of(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    tree = {f"{number}/kernel": rng.standard_normal(shape) for number, shape in enumerate(SHAPES)}
    tree = {name: np.float32(value) for name, value in tree.items()}
    return tree | {
        "half": np.asarray(jnp.bfloat16(tree["6/kernel"])),
        "step": np.int32(rng.integers(99)),
    }


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def defined(array: np.ndarray) -> str:
    """The checksum, one element after the other."""
    first = second = 0
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.itemsize}")
    for place, element in enumerate(bits.tolist()):
        odd = (2 * place + 1) % 2**32
        hashed = mixed(element * odd % 2**32)
        first, second = (first + hashed) % 2**32, (second + hashed * odd) % 2**32
    return f"{first:08x}{second:08x}"


def mesh_of(data: int, fsdp: int, tensor: int):
    return make_mesh(
        MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    )


def test_a_checksum_is_its_definition():
    tree = tree_of(0)
    expected = {name: defined(np.asarray(value)) for name, value in tree.items()}
    assert checksums(jax.tree.map(jnp.asarray, tree)) == expected


def test_every_bit_changes_both_halves_of_a_checksum():
    value = np.random.default_rng(0).standard_normal(6).astype(np.float32)
    whole = defined(value)
    for bit in range(value.nbytes * 8):
        bits = value.copy().view(np.uint8)
        bits[bit // 8] ^= 1 << bit % 8
        other = defined(bits.view(np.float32))
        assert other[:8] != whole[:8] and other[8:] != whole[8:]
    # A sum alone would not see these.
    assert defined(value[::-1]) != whole and defined(-value) != whole


ON_MESHES = """
import json
import jax
from calm_jax.parallel.mesh import shardings
from calm_jax.training.checksums import checksums
from tests.training.test_checkpoint import mesh_of, on_meshes
found = []
for sizes in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 4)):
    mesh, tree = mesh_of(*sizes), on_meshes()
    tree = jax.device_put(tree, shardings(tree, mesh))
    split = sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree))
    found.append([split, checksums(tree)])
print(json.dumps(found))
"""


def on_meshes() -> dict:
    """The parameters of the tiny recipe, by which the table of shardings splits most arrays."""
    from tests.tiny_model import tiny

    return tiny().params


@pytest.mark.slow
def test_checksums_are_the_same_on_every_mesh():
    out = run_program(8, ON_MESHES)
    (_, single), *others = json.loads(out.stdout)
    assert all(found == single for _, found in others)
    # With data parallelism alone nothing is split.
    assert [split > 5 for split, _ in others] == [False, True, True, True]


def save(folder: pathlib.Path) -> dict[int, tuple[dict, dict]]:
    """Saves two checkpoints and returns what was saved, by step."""
    mesh, saved = mesh_of(1, 1, 1), {}
    checkpointer = Checkpointer(folder, 2)
    for step in (10, 20):
        rng = np.random.default_rng(step)
        make = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731, B023
        params = {"layers": {"kernel": make(4, 40, 30)}, "norm": {"scale": make(30)}}
        rest = {"step": np.int32(step), "mu": jax.tree.map(np.square, params)}
        with jax.set_mesh(mesh):
            arrays = jax.tree.map(jnp.asarray, (params, rest))
            checkpointer.save(step, *arrays, {"tokenizer": "bytes"})
        saved[step] = params, rest
    checkpointer.close()
    return saved


def load(folder: pathlib.Path, like: tuple[dict, dict]) -> tuple[dict, dict]:
    """What a resumed training reads, after a look at the parameters alone."""
    mesh = mesh_of(1, 1, 1)
    with jax.set_mesh(mesh):
        params = load_params(folder, like[0], mesh)
        checkpointer = Checkpointer(folder, 2)
        try:
            assert checkpointer.about()["tokenizer"]
            restored = checkpointer.restore(*like, mesh)
        finally:
            checkpointer.close()
    assert same(params, restored[0])
    return restored


def same(left, right) -> bool:
    equal = jax.tree.map(np.array_equal, left, right)
    return all(jax.tree.leaves(equal))


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_checkpoint_before_it_offered(tmp_path):
    """Every file of a checkpoint, 60 bits. What is loaded is what was saved; else the line names the checkpoint."""
    saved = save(tmp_path / "lm")
    whole = tmp_path / "lm" / "20"
    shutil.copytree(whole, tmp_path / "whole")
    files = sorted(path for path in whole.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = np.array([path.stat().st_size for path in files])
    rng, found = np.random.default_rng(0), []
    for number in range(60):
        # Half of the bits in any file, half of them in any byte, and most bytes are those of the arrays.
        chosen = None if number % 2 else sizes / sizes.sum()
        file = files[rng.choice(len(files), p=chosen)]
        data = bytearray(file.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        try:
            assert same(load(tmp_path / "lm", saved[20]), saved[20]), file
        except UserError as error:
            found.append(str(error))
            assert found[-1].startswith(f"the checkpoint {whole} is damaged (")
            move = f"`mv {whole} {whole}.damaged`"
            assert f"{move} makes the one of step 10 the latest" in found[-1]
        shutil.rmtree(whole)
        shutil.copytree(tmp_path / "whole", whole)
    assert sum("another checksum" in line for line in found) > 5
    whole.rename(f"{whole}.damaged")
    assert same(load(tmp_path / "lm", saved[10]), saved[10])


def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    """The file is one that Orbax's manager reads when it is made, of all checkpoints."""
    saved = save(tmp_path / "lm")
    for step in (10, 20):
        path = tmp_path / "lm" / str(step) / "_CHECKPOINT_METADATA"
        path.unlink()
        os.mkfifo(path)
    checkpointer = Checkpointer(tmp_path / "lm", 2)
    with pytest.raises(UserError, match=r"_CHECKPOINT_METADATA is no file\); `mv "):
        checkpointer.restore(*saved[20], mesh_of(1, 1, 1))
    checkpointer.close()


@pytest.mark.parametrize("change", ["no checksums", "of another name"])
def test_a_checkpoint_without_checksums_is_read_and_named(tmp_path, change, capfd):
    """As earlier commits wrote them."""
    saved = save(tmp_path / "lm")
    path = tmp_path / "lm" / "20" / "about" / "metadata"
    about = json.loads(path.read_text())
    assert set(about.pop("checksums")) == {"params", "training"}
    path.write_text(json.dumps(about))
    name = tmp_path / "lm" / "20"
    of = f"note: the checkpoint {name} has no checksums of {{}}, as of an earlier version: these arrays are not checked"
    capfd.readouterr()
    if change == "of another name":
        path.write_text(json.dumps(about | {"checksum": {}}))
    assert same(load(tmp_path / "lm", saved[20]), saved[20])
    lines = capfd.readouterr().err.splitlines()
    expected = [of.format("params"), of.format("params and training")]
    assert [line for line in lines if line.startswith("note: ")] == expected


def test_a_checkpoint_without_its_checksums_file_is_damaged(tmp_path):
    saved, mesh = save(tmp_path / "lm"), mesh_of(1, 1, 1)
    shutil.rmtree(tmp_path / "lm" / "20" / "about")
    damaged = r"^the checkpoint \S+/20 is damaged \(.*\); `mv \S+ \S+` makes the one of step 10"
    with jax.set_mesh(mesh), pytest.raises(UserError, match=damaged):
        load_params(tmp_path / "lm", saved[20][0], mesh)


def test_a_copy_of_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    saved, mesh = save(tmp_path / "lm"), mesh_of(1, 1, 1)
    target, synced = tmp_path / "init_lm", set()

    def sync(path):
        if not target.exists():
            synced.add(path)

    monkeypatch.setattr(files, "sync", sync)
    checkpoint_files.copy_latest(tmp_path / "lm", target, leave_out=("training",))
    renamed = {tmp_path / "init_lm" / path.relative_to(tmp_path / "init_lm.tmp") for path in synced}
    assert renamed == {target, *target.rglob("*")}
    with jax.set_mesh(mesh):
        assert same(load_params(target, saved[20][0], mesh), saved[20][0])
    assert {path.name for path in (target / "20").iterdir()} >= {"params", "about"}
    assert not (target / "20" / "training").exists()


def test_a_copy_leaves_checkpoints_that_were_put_aside_where_they_are(tmp_path):
    """The message about a damaged copy tells users to give it another name, in the folder to which it is then copied again."""
    saved, target = save(tmp_path / "lm"), tmp_path / "autoencoder"
    kept = {target / "500.damaged" / "params", target / "7.misnamed" / "params", target / "notes"}
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.parent.name)
    killed = target / "600.orbax-checkpoint-tmp" / "params"
    killed.mkdir(parents=True)
    (killed / "part").touch()
    checkpoint_files.copy_latest(tmp_path / "lm", target, leave_out=())
    assert {path: path.read_text() for path in kept} == {path: path.parent.name for path in kept}
    assert {path.name for path in target.iterdir()} == {"20", "500.damaged", "7.misnamed", "notes"}
    assert same(load(target, saved[20]), saved[20])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["autoencoder", "lm"]


def test_the_message_about_the_only_checkpoint_says_how_to_copy_it_again(tmp_path):
    saved, mesh = save(tmp_path / "lm"), mesh_of(1, 1, 1)
    target = tmp_path / "init_lm"
    checkpoint_files.copy_latest(tmp_path / "lm", target, leave_out=())
    shutil.rmtree(target / "20" / "about")
    way_out = r"If it is a copy \(of init_from or autoencoder\.checkpoint\), `mv (\S+) (\S+)`, and"
    with jax.set_mesh(mesh), pytest.raises(UserError, match=way_out) as raised:
        load_params(target, saved[20][0], mesh)
    damaged, aside = re.search(way_out, str(raised.value)).groups()
    shutil.move(damaged, aside)
    checkpoint_files.copy_latest(tmp_path / "lm", target, leave_out=())
    assert same(load(target, saved[20]), saved[20])


def test_a_link_to_a_folder_elsewhere_gets_the_copy_there(tmp_path):
    """It may be on another disk, onto which no folder can be moved."""
    save(tmp_path / "lm")
    (tmp_path / "disk" / "init_lm").mkdir(parents=True)
    (tmp_path / "init_lm").symlink_to(tmp_path / "disk" / "init_lm")
    checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())
    assert latest_step(tmp_path / "disk" / "init_lm") == 20
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["init_lm"]


def test_a_link_to_nothing_gets_no_copy(tmp_path):
    """It may lead to a disk that is not mounted."""
    save(tmp_path / "lm")
    (tmp_path / "init_lm").symlink_to(tmp_path / "disk" / "init_lm")
    with pytest.raises(
        UserError, match=r"init_lm is a link to .*/disk/init_lm, which does not exist"
    ):
        checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())
    assert not (tmp_path / "disk").exists()


def test_checkpoints_that_are_gone_leave_no_copy(tmp_path):
    """As where the source is overwritten while the text is read."""
    (tmp_path / "lm").mkdir()
    with pytest.raises(UserError, match=r"/lm holds no checkpoint: were its checkpoints deleted"):
        checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())
    assert [path.name for path in tmp_path.iterdir()] == ["lm"]


def test_a_source_that_cannot_be_read_is_not_taken_for_a_full_disk(tmp_path):
    save(tmp_path / "lm")
    (tmp_path / "lm" / "20" / "params" / "more").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"/lm/20 is damaged \(.*Input/output error"):
        checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())


@pytest.mark.parametrize("deleted", ["before it is listed", "before it is copied"])
def test_a_checkpoint_that_a_training_deletes_meanwhile_is_not_copied(
    tmp_path, deleted, monkeypatch
):
    """In part, it would be found damaged only when it is loaded, and again each time."""
    save(tmp_path / "lm")
    entries = checkpoint_files._entries

    def delete():
        shutil.copytree(tmp_path / "lm" / "20", tmp_path / "lm" / "30")
        shutil.rmtree(tmp_path / "lm" / "20" / "params")

    def listed(folder):
        if deleted == "before it is listed":
            delete()
            return entries(folder)
        found = entries(folder)
        monkeypatch.setattr(checkpoint_files, "latest_step", deleted_after)
        return found

    def deleted_after(folder):
        monkeypatch.setattr(checkpoint_files, "latest_step", latest_step)
        delete()
        return 20

    monkeypatch.setattr(checkpoint_files, "_entries", listed)
    with pytest.raises(UserError, match=r"/lm/20 was deleted or replaced while it was being read"):
        checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())
    assert not (tmp_path / "init_lm").exists()
    monkeypatch.undo()
    checkpoint_files.copy_latest(tmp_path / "lm", tmp_path / "init_lm", leave_out=())
    assert latest_step(tmp_path / "init_lm") == 30


@pytest.mark.parametrize("checksums", [None, [], {"params": None}, {"params": [1, 2]}])
@pytest.mark.parametrize("is_whole_file", [False, True])
def test_checksums_of_another_form_are_damage(tmp_path, checksums, is_whole_file):
    saved = save(tmp_path / "lm")
    path = tmp_path / "lm" / "20" / "about" / "metadata"
    about = {"tokenizer": "bytes", "checksums": checksums}
    # An object without checksums is one of an earlier commit.
    about = [checksums] if is_whole_file else about
    path.write_text(json.dumps(about))
    mesh = mesh_of(1, 1, 1)
    damaged = r"^the checkpoint \S+/20 is damaged \(.*\); `mv \S+ \S+` makes the one of step 10"
    with jax.set_mesh(mesh):
        with pytest.raises(UserError, match=damaged):
            load_params(tmp_path / "lm", saved[20][0], mesh)
        checkpointer = Checkpointer(tmp_path / "lm", 2)
        with pytest.raises(UserError, match=damaged):
            checkpointer.restore(*saved[20], mesh)
        checkpointer.close()


@pytest.mark.parametrize("change", ["shapes", "names"])
def test_a_checkpoint_of_other_arrays_is_not_called_damaged(tmp_path, change):
    """Else every good one would be moved away where config.json has changed."""
    params, _ = save(tmp_path / "lm")[20]
    other = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), params)
    if change == "names":
        other = params | {"token_predictor": params["norm"]}
    message = r"^config\.json and the checkpoint \S+/20 do not match \(.*[^:]\): config\.json has changed since it was saved"
    with jax.set_mesh(mesh_of(1, 1, 1)), pytest.raises(UserError, match=message):
        load_params(tmp_path / "lm", other, mesh_of(1, 1, 1))


@pytest.mark.parametrize("folder", ["d", "ocdbt.process_0/d"])
def test_the_reason_for_a_truncated_file_is_its_size(tmp_path, folder):
    saved = save(tmp_path / "lm")
    files = (tmp_path / "lm" / "20" / "params" / folder).iterdir()
    os.truncate(max(files, key=lambda one: one.stat().st_size), 100)
    message = r"is damaged \(OUT_OF_RANGE: .* is not valid for value of size 100\); `mv "
    with pytest.raises(UserError, match=message):
        load(tmp_path / "lm", saved[20])


@pytest.mark.slow
def test_reads_that_end_after_an_error_print_nothing(tmp_path, monkeypatch, caplog):
    """At any time after it: TensorStore's threads report them to the hook, and asyncio logs those that nobody asked for."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    late_errors.hide_late_errors.cache_clear()
    saved = save(tmp_path / "lm")
    files = (tmp_path / "lm" / "20" / "params" / "d").iterdir()
    largest = max(files, key=lambda one: one.stat().st_size)
    whole = largest.read_bytes()
    for number in range(20):
        largest.write_bytes(b"" if number % 2 else whole[: len(whole) // 2])
        with jax.set_mesh(mesh_of(1, 1, 1)), pytest.raises(UserError, match="is damaged"):
            load_params(tmp_path / "lm", saved[20][0], mesh_of(1, 1, 1))
        largest.write_bytes(whole)
        assert same(load(tmp_path / "lm", saved[20]), saved[20])
        gc.collect()
    assert not shown and not [one for one in caplog.messages if "never retrieved" in one]
    log = logging.getLogger("asyncio")
    late = RuntimeError("Event loop is closed"), ValueError("Error reading x in OCDBT database")
    for error in (*late, RuntimeError("another")):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error, object=None))
        log.error("Task exception was never retrieved", exc_info=error)
    assert [str(one.exc_value) for one in shown] == ["another"]
    assert len([one for one in caplog.messages if "never retrieved" in one]) == 1


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_while_the_run_closes_is_one_line(tmp_path, monkeypatch):
    """`close` waits for a started save, as `wait` does, and must not raise Orbax's error."""
    tree = {"x": jnp.ones(8)}
    for end in (Checkpointer.wait, Checkpointer.close):
        folder = tmp_path / end.__name__
        with jax.set_mesh(mesh_of(1, 1, 1)):
            checkpointer = Checkpointer(folder, 2)
            checkpointer.save(10, tree, tree, {})
            checkpointer.wait()
            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, "sync", full_disk)
                checkpointer.save(20, tree, tree, {})
                with pytest.raises(UserError, match=r"No space .* the last good one is of step 10"):
                    end(checkpointer)


def test_only_numbers_name_checkpoints_and_an_unreadable_folder_is_not_an_empty_one(tmp_path):
    assert latest_step(tmp_path / "lm") is None
    for name in ("5", "12", "99.damaged", "²", "٣", "20.orbax-checkpoint-tmp"):
        (tmp_path / "lm" / name).mkdir(parents=True)
    assert latest_step(tmp_path / "lm") == 12
    with pytest.raises(UserError, match=r"/x+ cannot be read: File name too long"):
        latest_step(tmp_path / ("x" * 300))


def test_a_file_that_is_named_like_a_step_is_no_checkpoint(tmp_path):
    saved = save(tmp_path / "lm")
    (tmp_path / "lm" / "500").touch()
    assert latest_step(tmp_path / "lm") == 20
    assert same(load(tmp_path / "lm", saved[20]), saved[20])


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path, is_taken):
    saved = save(tmp_path / "lm")
    (tmp_path / "lm" / "20").rename(tmp_path / "lm" / "999")
    if is_taken:
        (tmp_path / "lm" / "20").mkdir()
    name = "999.misnamed" if is_taken else "20"
    refused = (
        rf"^the checkpoint \S+/lm/999 is of step 20, not 999: .* `mv \S+/lm/999 \S+/lm/{name}`"
    )
    with jax.set_mesh(mesh_of(1, 1, 1)), pytest.raises(UserError, match=refused):
        load_params(tmp_path / "lm", saved[20][0], mesh_of(1, 1, 1))


@pytest.mark.parametrize("step", [None, "20", [20], -1, 10**400])
def test_a_stored_step_that_is_none_is_damage(tmp_path, step):
    saved = save(tmp_path / "lm")
    path = tmp_path / "lm" / "20" / "about" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}))
    damaged = r"^the checkpoint \S+/20 is damaged \('step' in 'about' is no step\); `mv "
    mesh, checkpointer = mesh_of(1, 1, 1), Checkpointer(tmp_path / "lm", 2)
    with jax.set_mesh(mesh):
        for read in (
            lambda: load_params(tmp_path / "lm", saved[20][0], mesh),
            checkpointer.about,
            lambda: checkpointer.restore(*saved[20], mesh),
        ):
            with pytest.raises(UserError, match=damaged):
                read()
    checkpointer.close()


def test_a_save_that_orbax_leaves_out_is_an_error(tmp_path):
    """It leaves out a step that is not later than the latest one."""
    save(tmp_path / "lm")
    tree = {"x": jnp.ones(8)}
    checkpointer = Checkpointer(tmp_path / "lm", 3)
    with (
        jax.set_mesh(mesh_of(1, 1, 1)),
        pytest.raises(UserError, match=r"step 15 was not saved, because there is one of step 20"),
    ):
        checkpointer.save(15, tree, tree, {})
    checkpointer.close()


def test_a_checkpoint_that_a_training_deletes_meanwhile_is_not_called_damaged(
    tmp_path, monkeypatch
):
    saved = save(tmp_path / "lm")
    sharded_shapes = checkpoint.sharded_shapes

    def train_on(*args):
        (tmp_path / "lm" / "20").rename(tmp_path / "lm" / "30")
        return sharded_shapes(*args)

    monkeypatch.setattr(checkpoint, "sharded_shapes", train_on)
    refused = r"^the checkpoint \S+/20 was deleted or replaced while it was being read, .*the same command again$"
    with jax.set_mesh(mesh_of(1, 1, 1)), pytest.raises(UserError, match=refused):
        load_params(tmp_path / "lm", saved[20][0], mesh_of(1, 1, 1))
