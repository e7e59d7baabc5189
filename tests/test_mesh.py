"""The table of sharding rules over every recipe's parameters, and the optimizer."""

import importlib
import math
import pathlib
import re
import types

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import configs
from calm_jax import mesh, optim, workdir
from calm_jax import sizes as sizes_lib
from calm_jax.config import resolve
from calm_jax.errors import UserError
from calm_jax.heads import HEADS

RECIPES = sorted(
    path.stem
    for path in pathlib.Path(configs.__file__).parent.glob("*.py")
    # Those that need a workdir are tested with one.
    if path.stem not in ("__init__", "workdir", "finetune")
)
LLAMA = types.SimpleNamespace(vocab_size=128257, pad_id=128256)
MILLION = 10**6


# Arguments of each recipe that takes some, besides the recipe as it is. CALM-M, with more of them, stands for
# the rest: a head's parameters have the same names in all recipes.
VARIANTS = ("head=diffusion,k=16", "head=softmax")
MORE_VARIANTS = ("head=diffusion", "head=flow,k=1", "k=2", "k=8")


def config_of(name, arguments=""):
    get_config = importlib.import_module(f"configs.{name}").get_config
    tree = get_config(arguments) if arguments else get_config()
    tree.tokenizer.path = "tokenizer.model"
    return resolve(tree)


def shapes_of(name, arguments=""):
    """Every parameter of the stages of a recipe, as shapes by path."""
    config = config_of(name, arguments)
    tasks = {"lm": workdir.make_lm_task(config, LLAMA, config.eval.published)}
    if config.has_autoencoder:
        tasks["autoencoder"] = workdir.make_autoencoder_task(config, LLAMA)
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
    """One recipe's parameters with each head."""
    names = {"energy": "calm_m", "diffusion": "calm_m:head=diffusion", "softmax": "ar_m"}
    names["flow"] = "calm_m:head=flow,k=1"
    return {head: parameters[name] for head, name in names.items()}


def matching(path):
    """The index of the first rule that a path matches."""
    return next((i for i, (pattern, _) in enumerate(mesh.RULES) if re.search(pattern, path)), None)


def test_every_parameter_matches_a_rule_of_its_rank(parameters):
    for shapes in parameters.values():
        for path, shape in shapes.items():
            rule = matching(path)
            assert rule is not None, path
            spec = mesh.RULES[rule][1]
            assert not spec or len(spec) == len(shape), (path, shape, spec)


def test_every_rule_is_the_first_match_of_some_parameter(parameters):
    used = {matching(path) for shapes in parameters.values() for path in shapes}
    assert used == set(range(len(mesh.RULES)))


def test_every_large_parameter_is_split(parameters):
    """By the table, and in fact on eight devices: what does not divide would stay whole."""
    eight = AbstractMesh((1, 8, 1), mesh.AXES)
    large = 0
    for shapes in parameters.values():
        for path, shape in shapes.items():
            if math.prod(shape) > MILLION:
                large += 1
                assert any(mesh.RULES[matching(path)][1]), path
                assert any(mesh.spec_of(path, shape, eight)), (path, shape)
    assert large > 50


@pytest.mark.parametrize("head", HEADS)
def test_every_large_parameter_of_a_head_is_split(heads, head):
    """Over both axes, but for the vocabulary of the softmax, which divides by nothing."""
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


def tiny_tree():
    return {
        "up": {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([0.5, 0.0])},
        "norm": {"scale": jnp.array([2.0])},
    }


def optimizer_config(**changes):
    values = {
        "learning_rate": 0.1,
        "warmup_steps": 0,
        "schedule": "constant",
        "final_learning_rate": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    }
    return optim.OptimizerConfig(**(values | changes))


def test_adams_moments_lie_as_their_parameters_do():
    params = {"mlp": {"up": {"kernel": jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)}}}
    state = jax.eval_shape(optim.make_optimizer(optimizer_config(), 10).init, params)
    abstract = AbstractMesh((1, 2, 2), mesh.AXES)
    moments = [
        sharding.spec
        for path, sharding in jax.tree.leaves_with_path(mesh.shardings(state, abstract))
        if mesh.path_of(path).endswith("kernel")
    ]
    assert moments == [PartitionSpec(None, "fsdp", "tensor")] * 2


def test_mesh_takes_the_devices_that_are_left():
    made = mesh.make_mesh(mesh.MeshConfig(data=-1, fsdp=1, tensor=1))
    assert made.axis_names == mesh.AXES
    assert made.shape["data"] == len(jax.devices())


def counted(shapes, prefix):
    """Parameters below a path."""
    return sum(math.prod(shape) for path, shape in shapes.items() if path.startswith(prefix))


def test_parameters_on_paper_are_those_of_the_shapes(parameters):
    """Of every recipe, in all and by part."""
    vocab = LLAMA.vocab_size
    for name, shapes in parameters.items():
        recipe, _, arguments = name.partition(":")
        config = config_of(recipe, arguments)
        lm = sizes_lib.language_model(config, vocab)
        assert sum(lm.values()) == counted(shapes, "lm/"), name
        assert lm["backbone"] == counted(shapes, "lm/backbone/"), name
        frozen = sizes_lib.frozen(config, "lm", vocab)
        assert sum(frozen.values()) == counted(shapes, "autoencoder/"), name
        if config.has_autoencoder:
            assert lm["head"] == counted(shapes, "lm/head/"), name
            assert frozen == sizes_lib.trained(config, "autoencoder", vocab), name


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 2, 1), (1, 1, 5)])
def test_mesh_of_other_than_all_devices_is_refused(sizes):
    data, fsdp, tensor = sizes
    with pytest.raises(UserError, match=rf"data={data} x fsdp={fsdp} x tensor={tensor}.* 1 device"):
        mesh.make_mesh(mesh.MeshConfig(*sizes), jax.devices()[:1])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -2, 1), (-1, 1, -1)])
def test_mesh_sizes_that_mean_nothing_are_refused(sizes):
    with pytest.raises(UserError, match=f"data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]}"):
        mesh.MeshConfig(*sizes)


def test_batch_must_divide_over_data_and_fsdp():
    abstract = AbstractMesh((2, 3, 5), mesh.AXES)
    mesh.check_batch("eval.batch_size", 12, abstract)
    with pytest.raises(UserError, match=r"eval\.batch_size=10 .* 6 devices"):
        mesh.check_batch("eval.batch_size", 10, abstract)


def test_exactly_matrices_and_embeddings_decay(parameters):
    """By rank here, with the axis of stacked layers left out; by name in the optimizer."""
    stacked_biases = 0
    for shapes in parameters.values():
        tree = flax.traverse_util.unflatten_dict(shapes, sep="/")
        decayed = flax.traverse_util.flatten_dict(
            jax.tree.map(bool, optim.decayed(_leaves(tree))), sep="/"
        )
        for path, shape in shapes.items():
            stacked = bool(re.search(r"(layers|blocks)/", path))
            assert decayed[path] == (len(shape) - stacked >= 2), path
            stacked_biases += stacked and path.endswith("bias")
    assert stacked_biases


def _leaves(tree):
    """Shapes are tuples, which jax takes for trees."""
    return jax.tree.map(lambda _: 0, tree, is_leaf=lambda leaf: isinstance(leaf, tuple))


def schedule_at(steps, **changes):
    schedule = optim.make_schedule(optimizer_config(**changes), num_steps=24)
    return [float(schedule(step)) for step in steps]


def test_constant_schedule_warms_up_from_zero_and_stays():
    values = schedule_at([0, 1, 2, 4, 5, 1000], warmup_steps=4)
    np.testing.assert_allclose(values, [0, 0.025, 0.05, 0.1, 0.1, 0.1], rtol=1e-6)


def test_cosine_schedule_ends_at_the_final_rate():
    values = schedule_at(
        [0, 2, 4, 9, 14, 24, 1000], warmup_steps=4, schedule="cosine", final_learning_rate=0.02
    )
    quarter = 0.02 + 0.08 * (1 + math.sqrt(0.5)) / 2
    np.testing.assert_allclose(values, [0, 0.05, 0.1, quarter, 0.06, 0.02, 0.02], rtol=1e-6)


@pytest.mark.parametrize("schedule", optim.SCHEDULES)
def test_without_warm_up_the_first_step_has_the_peak_rate(schedule):
    np.testing.assert_allclose(schedule_at([0], schedule=schedule), [0.1], rtol=1e-6)


def test_optimizer_steps_equal_adamw_by_hand():
    """Two updates, the first with a clipped gradient, in float64 by the textbook."""
    config = optimizer_config(learning_rate=0.1, epsilon=1e-3)
    params = tiny_tree()
    by_hand = {
        path: np.asarray(leaf, np.float64)
        for path, leaf in flax.traverse_util.flatten_dict(params).items()
    }
    first = {path: np.zeros_like(value) for path, value in by_hand.items()}
    second = {path: np.zeros_like(value) for path, value in by_hand.items()}
    optimizer = optim.make_optimizer(config, num_steps=10)
    state = optimizer.init(params)
    for step, scale in enumerate((5.0, 0.05), 1):
        gradient = jax.tree.map(lambda leaf, scale=scale: scale * (leaf + 1), params)
        updates, state = optimizer.update(gradient, state, params)

        flat = flax.traverse_util.flatten_dict(gradient)
        norm = math.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in flat.values()))
        assert (norm > config.max_grad_norm) == (step == 1)
        for path, g in flat.items():
            g = np.asarray(g, np.float64) / max(1, norm / config.max_grad_norm)
            first[path] = config.beta1 * first[path] + (1 - config.beta1) * g
            second[path] = config.beta2 * second[path] + (1 - config.beta2) * g**2
            m, v = first[path] / (1 - config.beta1**step), second[path] / (1 - config.beta2**step)
            decay = config.weight_decay * by_hand[path] * (path[-1] == "kernel")
            update = m / (np.sqrt(v) + config.epsilon) + decay
            by_hand[path] = by_hand[path] - config.learning_rate * update

        params = jax.tree.map(jnp.add, params, updates)
        for path, leaf in flax.traverse_util.flatten_dict(params).items():
            np.testing.assert_allclose(leaf, by_hand[path], rtol=2e-6, atol=1e-7)
