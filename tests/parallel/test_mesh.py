"""The table of sharding rules, applied to every parameter of every recipe; and the mesh."""

import dataclasses
import importlib
import math
import pathlib
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import configs
from calm_jax import build
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.errors import UserError
from calm_jax.models.heads import HEADS
from calm_jax.parallel import mesh
from calm_jax.training import optimizer
from tests.training.test_optimizer import optimizer_config

RECIPES = sorted(
    path.stem
    for path in pathlib.Path(configs.__file__).parent.glob("*.py")
    # These two need a workdir, and tests/run has one.
    if path.stem not in ("__init__", "workdir", "finetune")
)
LLAMA = Vocabulary(vocab_size=128257, pad_id=128256)
MILLION = 10**6


# Every CALM recipe is tested as it is and with these arguments; CALM-M with more of them, because a head's parameters have
# the same names in all recipes.
VARIANTS = ("head=diffusion,k=16", "head=softmax")
MORE_VARIANTS = ("head=diffusion", "head=flow,k=1", "k=2", "k=8")


def config_of(name, arguments=""):
    get_config = importlib.import_module(f"configs.{name}").get_config
    tree = get_config(arguments) if arguments else get_config()
    tree.tokenizer.path = "tokenizer.model"
    return resolve(tree)


def shapes_of(name, arguments=""):
    """The shape of every parameter of a recipe's stages, by "<stage>/<path>"."""
    config = config_of(name, arguments)
    tasks = {"lm": build.make_lm_task(config, LLAMA)}
    if config.has_autoencoder:
        tasks["autoencoder"] = build.make_autoencoder_task(config, LLAMA)
    shapes = {}
    for stage, task in tasks.items():
        params = jax.eval_shape(task.init, jax.random.key(0))
        shapes |= {
            f"{stage}/{path}": leaf.shape
            for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()
        }
    return shapes


@pytest.fixture(scope="module")
def parameters():
    shapes = {name: shapes_of(name) for name in RECIPES}
    for name in RECIPES:
        if name != "common" and not name.startswith("ar_"):
            variants = VARIANTS + MORE_VARIANTS * (name == "calm_m")
            shapes |= {f"{name}:{variant}": shapes_of(name, variant) for variant in variants}
    return shapes


@pytest.fixture(scope="module")
def heads(parameters):
    """CALM-M's parameters with each head."""
    names = {"energy": "calm_m", "diffusion": "calm_m:head=diffusion", "softmax": "ar_m"}
    names["flow"] = "calm_m:head=flow,k=1"
    return {head: parameters[name] for head, name in names.items()}


def matching(path):
    """The index of the first rule that a path matches; None if it matches none."""
    return next((i for i, (pattern, _) in enumerate(mesh.RULES) if re.search(pattern, path)), None)


@pytest.mark.slow
def test_every_parameter_matches_a_rule_of_its_rank(parameters):
    for shapes in parameters.values():
        for path, shape in shapes.items():
            rule = matching(path)
            assert rule is not None, path
            spec = mesh.RULES[rule][1]
            assert not spec or len(spec) == len(shape), (path, shape, spec)


@pytest.mark.slow
def test_every_rule_is_the_first_match_of_some_parameter(parameters):
    used = {matching(path) for shapes in parameters.values() for path in shapes}
    assert used == set(range(len(mesh.RULES)))


@pytest.mark.slow
def test_every_large_parameter_is_split(parameters):
    """By its rule, and on eight devices, where an axis that does not divide would not be split."""
    eight = AbstractMesh((1, 8, 1), mesh.AXES)
    large = 0
    for shapes in parameters.values():
        for path, shape in shapes.items():
            if math.prod(shape) > MILLION:
                large += 1
                assert any(mesh.RULES[matching(path)][1]), path
                assert any(mesh.spec_of(path, shape, eight)), (path, shape)
    assert large > 50


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_every_large_parameter_of_a_head_is_split(heads, head):
    """Over both axes; for the softmax head over `fsdp` alone, because its vocabulary does not divide."""
    large = {
        path: shape
        for path, shape in heads[head].items()
        if "head/" in path and math.prod(shape) > MILLION
    }
    assert large
    eight = AbstractMesh((1, 4, 2), mesh.AXES)
    for path, shape in large.items():
        split = [axis for axis in mesh.spec_of(path, shape, eight) if axis]
        assert sorted(split) == (["fsdp"] if head == "softmax" else ["fsdp", "tensor"]), path


@pytest.mark.slow
def test_stacked_layers_are_never_split_over_layers(parameters):
    stacked = 0
    for shapes in parameters.values():
        for path, shape in shapes.items():
            if re.search(r"(layers|blocks)/", path):
                stacked += 1
                spec = mesh.RULES[matching(path)][1]
                assert not spec or spec[0] is None, (path, shape, spec)
    assert stacked


def test_an_axis_that_does_not_divide_is_not_split():
    spec_of = mesh.spec_of
    odd = AbstractMesh((1, 3, 2), mesh.AXES)
    assert spec_of("a/kernel", (6, 4), odd) == PartitionSpec("fsdp", "tensor")
    assert spec_of("a/kernel", (4, 6), odd) == PartitionSpec(None, "tensor")
    assert spec_of("a/kernel", (6, 5), odd) == PartitionSpec("fsdp", None)
    assert spec_of("tokens/embedding", (6, 6), odd) == PartitionSpec(None, "fsdp")
    assert spec_of("a/bias", (6,), odd) == PartitionSpec()
    assert spec_of("step", (), odd) == PartitionSpec()


def test_adams_moments_are_sharded_as_their_parameters():
    params = {"mlp": {"up": {"kernel": jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)}}}
    state = jax.eval_shape(optimizer.make_optimizer(optimizer_config(), 10).init, params)
    abstract = AbstractMesh((1, 2, 2), mesh.AXES)
    moments = [
        sharding.spec
        for path, sharding in jax.tree.leaves_with_path(mesh.shardings(state, abstract))
        if mesh.path_of(path).endswith("kernel")
    ]
    assert moments == [PartitionSpec(None, "fsdp", "tensor")] * 2


def test_an_axis_of_size_minus_one_takes_the_remaining_devices():
    made = mesh.make_mesh(mesh.MeshConfig(data=-1, fsdp=1, tensor=1))
    assert made.axis_names == mesh.AXES
    assert made.shape["data"] == len(jax.devices())


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 2, 1), (1, 1, 5)])
def test_a_mesh_that_is_not_all_devices_is_refused(sizes):
    data, fsdp, tensor = sizes
    with pytest.raises(UserError, match=rf"data={data} x fsdp={fsdp} x tensor={tensor}.* 1 device"):
        mesh.make_mesh(mesh.MeshConfig(*sizes), jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX reads of a TPU's device to make a mesh."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str
    platform = "tpu"
    core_on_chip = 0
    process_index = 0


def chips(kind, width, number):
    """The chips of a slice of this width."""
    return [Chip(i, (i % width, i // width, 0), kind) for i in range(number)]


@pytest.mark.parametrize(
    "kind, number, used",
    [
        ("TPU v5 lite", 4, {1: 1, 2: 2, 3: 1, 4: 4, 6: 2}),
        ("TPU v4", 4, {3: 1, 6: 2, 8: 4}),
        ("TPU v6 lite", 8, {3: 1, 4: 4, 5: 1, 6: 2, 7: 1, 8: 8, 12: 4}),
    ],
)
@pytest.mark.parametrize("sizes", [(1, -1, 1), (-1, 1, 1)])
def test_numbers_of_chips_that_make_no_mesh_are_passed_over(kind, number, used, sizes, monkeypatch):
    """An odd number of chips of a slice that is two chips wide; and 6 of 8, for which the compiler aborts."""
    monkeypatch.setattr(jax, "devices", lambda: chips(kind, 2, number))
    for rows, expected in used.items():
        assert mesh.make_training_mesh(mesh.MeshConfig(*sizes), [rows]).size == expected


def test_sizes_that_do_not_suit_the_whole_slice_are_refused(monkeypatch):
    """Its message says more than a mesh of fewer chips would."""
    monkeypatch.setattr(jax, "devices", lambda: chips("TPU v4", 4, 16))
    with pytest.raises(UserError, match=r"data=2 x fsdp=8 x tensor=1 does not suit .* 16 devices"):
        mesh.make_training_mesh(mesh.MeshConfig(2, -1, 1), [16])
    with pytest.raises(UserError, match=r"data=3 x fsdp=1 x tensor=1 does not suit .* 3 devices"):
        mesh.make_mesh(mesh.MeshConfig(-1, 1, 1), chips("TPU v4", 2, 3))


def test_a_mesh_is_adapted_to_the_shape_of_a_slice():
    """A side of 4 can be split over 4 chips and not over 2, and all 16 make one axis."""
    slice_ = chips("TPU v6 lite", 4, 16)
    for trained, expected in {
        (1, 8, 1): (-1, 4, 1),
        (1, 2, 1): (-1, 1, 1),
        (1, -1, 1): (1, -1, 1),
    }.items():
        made = mesh.adapted(mesh.MeshConfig(*trained), slice_)
        assert made == mesh.MeshConfig(*expected)
        assert mesh.make_mesh(made, slice_).size == 16


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -2, 1), (-1, 1, -1)])
def test_invalid_mesh_sizes_are_refused(sizes):
    with pytest.raises(UserError, match=f"data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]}"):
        mesh.MeshConfig(*sizes)


def test_batch_must_divide_over_data_and_fsdp():
    abstract = AbstractMesh((2, 3, 5), mesh.AXES)
    mesh.check_batch("eval.batch_size", 12, abstract)
    with pytest.raises(UserError, match=r"eval\.batch_size=10 .* 6 devices"):
        mesh.check_batch("eval.batch_size", 10, abstract)


@pytest.mark.slow
def test_weight_decay_applies_to_exactly_matrices_and_embeddings(parameters):
    """The test tells them by their rank, without the axis of stacked layers; the optimizer by their names."""
    stacked_biases = 0
    for shapes in parameters.values():
        tree = flax.traverse_util.unflatten_dict(shapes, sep="/")
        decayed = flax.traverse_util.flatten_dict(
            jax.tree.map(bool, optimizer.decayed(_leaves(tree))), sep="/"
        )
        for path, shape in shapes.items():
            stacked = bool(re.search(r"(layers|blocks)/", path))
            assert decayed[path] == (len(shape) - stacked >= 2), path
            stacked_biases += stacked and path.endswith("bias")
    assert stacked_biases


def _leaves(tree):
    """The tree with a number in place of each shape, because JAX takes a tuple for a tree."""
    return jax.tree.map(lambda _: 0, tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
