"""The programs that the compilers of accelerators make: the precision of products, and losses that go block by block."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.planning import planner, topology
from calm_jax.tasks.autoencoder import AutoencoderTask
from calm_jax.tasks.calm import CalmTask
from tests import tiny_recipe
from tests.models import test_vocabulary
from tests.planning.test_planner import need_cuda, need_tpu

RESULT = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \(?([a-z]+\d+)\[", re.M)
# XLA calls a product of matrices a convolution on TPUs, and leaves it to a library on GPUs.
PRODUCT = re.compile(r"= \(?([a-z]+\d+)\[.*? (?:convolution|dot|custom-call)\(([^)]*)\)")
# In the names of operations: the frozen autoencoder, and the product of the energy score.
IN_FULL = re.compile(r"Autoencoder|PNZ,PMZ->PNM")


def both_tasks() -> tuple[AutoencoderTask, CalmTask]:
    """The tasks of both stages, in bfloat16 and with the token loss."""
    tree = tiny_recipe.get_config("*.txt,token_predictor")
    tree.compute_dtype = "bfloat16"
    # Heads of 64 features, which all attention kernels can have.
    tree.lm.model.hidden_size = 128
    config, words = resolve(tree), Vocabulary(259, 258)
    second = make_lm_task(config, words)
    assert isinstance(second, CalmTask)
    return make_autoencoder_task(config, words), second


def gradients_of_both_stages(name: str) -> str:
    """The compiled program as HLO text."""
    one, (first, second) = topology.parse(name), both_tasks()
    key = jax.random.key(0)
    key_B = jax.random.split(key, 4)
    params = [jax.eval_shape(task.init, key) for task in (first, second)]
    batch = {name: jax.ShapeDtypeStruct((4, 32), jnp.int32) for name in ("tokens", "targets")}

    def gradients(params, frozen, batch):
        def loss(params):
            with jax.named_scope("stage1"):
                one = first.loss(params[0], {}, batch, key_B)["loss"][0]
            return one + second.loss(params[1], frozen, batch, key_B)["loss"][0]

        return jax.grad(loss)(params)

    mesh = make_mesh(MeshConfig(1, 1, 1), one.devices())
    return compiled(gradients, one, mesh, [params, {"params": params[0]}, batch]).as_text()


def compiled(
    function: Callable, one: topology.Topology, mesh: Mesh, shapes: list, layouts: Any = None
) -> jax.stages.Compiled:
    """A function's program for other hardware, from the shapes and layouts of its arguments; None: whole on every device."""
    layouts = layouts or NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh), one.answering():
        lowered = jax.jit(function, in_shardings=layouts).lower(*shapes)
        return lowered.compile(compiler_options=planner.COMPILER_OPTIONS.get(one.platform))


def products(text: str) -> Iterator[tuple[str, str, str, str, str]]:
    """The name of each product, its precision, and the dtypes of its result and its operands."""
    dtype_of = dict(RESULT.findall(text))
    for line in text.splitlines():
        product = PRODUCT.search(line)
        is_other_call = "custom-call(" in line and "matmul" not in line and "gemm" not in line
        if not product or is_other_call:
            continue
        first, second = (dtype_of[one.split()[-1]] for one in product[2].split(", ")[:2])
        name = re.search(r'op_name="([^"]*)"', line)
        precision = "highest" if "highest" in line.lower() else "default"
        yield name[1], precision, product[1], first, second


hardware = pytest.mark.parametrize(
    "name",
    [
        pytest.param("h100:1", marks=need_cuda, id="h100"),
        pytest.param("v5e:1x1", marks=need_tpu, id="v5e"),
    ],
)


@pytest.mark.slow
@hardware
def test_products_and_sums_have_the_precision_that_they_need(name):
    text = gradients_of_both_stages(name)
    scatters = re.findall(r"= ([a-z]+\d+)\[\S* scatter\(", text)
    assert scatters and set(scatters) == {"f32"}
    found = set()
    for name, *precision_and_dtypes in products(text):
        in_full = IN_FULL.search(name) and "stage1" not in name
        found.add(("float32" if in_full else "bfloat16", *precision_and_dtypes))
    assert found == {
        ("float32", "highest", "f32", "f32", "f32"),
        ("bfloat16", "default", "bf16", "bf16", "bf16"),
        ("bfloat16", "default", "f32", "bf16", "bf16"),
    }


@pytest.mark.slow
@hardware
def test_a_loss_of_65536_positions_over_llamas_vocabulary_needs_a_gibibyte(name):
    """As stage 1 of CALM-M has on one of eight devices, whose logits alone are 31 GiB. All four products are bfloat16."""
    one = topology.parse(name)
    mesh = make_mesh(MeshConfig(1, 1, 1), one.devices())
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((65536, 512), jnp.bfloat16),
            ((128257, 512), jnp.float32),
            ((65536,), jnp.int32),
            ((65536,), jnp.float32),
        )
    ]
    program = compiled(test_vocabulary.program(), one, mesh, shapes)
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * 2**30
    found = [dtypes for _, _, *dtypes in products(program.as_text())]
    assert sorted(found) == [["bf16", "bf16", "bf16"]] + 3 * [["f32", "bf16", "bf16"]]
