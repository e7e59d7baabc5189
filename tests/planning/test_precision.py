"""The programs that the compilers of accelerators make have the precision that the models ask for."""

import re

import jax
import jax.numpy as jnp
import pytest

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.parallel.mesh import make_mesh
from calm_jax.planning import planner, topology
from tests import tiny_recipe
from tests.planning.test_planner import need_cuda, need_tpu

RESULT = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \(?([a-z]+\d+)\[", re.M)
# XLA calls a product of matrices a convolution on TPUs, and leaves it to a library on GPUs.
PRODUCT = re.compile(r"= \(?([a-z]+\d+)\[.*? (?:convolution|dot|custom-call)\(([^)]*)\)")
# In the names of operations: the frozen autoencoder, and the products of the energy score and the Brier loss.
IN_FULL = re.compile(r"Autoencoder|PNZ,PMZ->PNM|PiKV,PjKV->PijK")


def gradients_of_both_stages(name: str) -> str:
    """The compiled program, in bfloat16 and with all losses, as HLO text."""
    tree = tiny_recipe.get_config("*.txt,all_losses")
    tree.compute_dtype = "bfloat16"
    # Heads of 64 features, which all attention kernels can have.
    tree.lm.model.hidden_size = 128
    config, words, one = resolve(tree), Vocabulary(259, 258), topology.parse(name)
    first, second = (
        make_autoencoder_task(config, words),
        make_lm_task(config, words, config.eval.published),
    )
    key = jax.random.key(0)
    key_B = jax.random.split(key, 4)
    params = [jax.eval_shape(task.init, key) for task in (first, second)]
    batch = {name: jax.ShapeDtypeStruct((4, 32), jnp.int32) for name in ("tokens", "targets")}

    def gradients(params, frozen, batch):
        def loss(params):
            with jax.named_scope("stage1"):
                one = first.loss(params[0], {}, batch, key_B, jnp.int32(9))["loss"][0]
            return one + second.loss(params[1], frozen, batch, key_B, jnp.int32(9))["loss"][0]

        return jax.grad(loss)(params)

    mesh = make_mesh(config.mesh, one.devices())
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh), one.answering():
        program = jax.jit(gradients, in_shardings=whole).lower(params, {"params": params[0]}, batch)
        options = planner._OPTIONS.get(one.platform)
        return program.compile(compiler_options=options).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("h100:1", marks=need_cuda, id="h100"),
        pytest.param("v5e:1x1", marks=need_tpu, id="v5e"),
    ],
)
def test_products_and_sums_have_the_precision_that_they_need(name):
    text = gradients_of_both_stages(name)
    scatters = re.findall(r"= ([a-z]+\d+)\[\S* scatter\(", text)
    assert scatters and set(scatters) == {"f32"}

    dtype_of = dict(RESULT.findall(text))
    found = set()
    for line in text.splitlines():
        product = PRODUCT.search(line)
        is_library = "custom-call(" in line and "matmul" not in line and "gemm" not in line
        if not product or is_library:
            continue
        operands = [dtype_of[one.split()[-1]] for one in product[2].split(", ")[:2]]
        name = re.search(r'op_name="([^"]*)"', line)
        place = "float32" if IN_FULL.search(name[1]) and "stage1" not in name[1] else "bfloat16"
        precision = "highest" if "highest" in line.lower() else "default"
        found.add((place, precision, product[1], *operands))
    assert found == {
        ("float32", "highest", "f32", "f32", "f32"),
        ("bfloat16", "default", "bf16", "bf16", "bf16"),
        ("bfloat16", "default", "f32", "bf16", "bf16"),
    }
