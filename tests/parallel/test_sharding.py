"""A compiled training step on eight devices gathers parameters, never activations, and never holds logits."""

import json
import re

import pytest

from calm_jax.planning.hlo import Program
from tests.simulated_devices import run_program

# Sizes that no other axis of the program has.
VOCABULARY, WIDTH = 1031, 32

STEP = f"""
import dataclasses, json, sys
import jax
from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.parallel.mesh import BATCH, MeshConfig, make_mesh, shardings
from calm_jax.training.optimizer import make_optimizer
from calm_jax.training.step import batch_shapes, jit_step, make_step, state_shapes
from jax.sharding import NamedSharding
from tests.tiny_recipe import get_config

tree = get_config("*.txt," + sys.argv[1])
tree.lm.model.hidden_size = {WIDTH}
# Activations are much larger than parameters.
tree.lm.training.batch_size = 512
config, words = resolve(tree), Vocabulary({VOCABULARY}, {VOCABULARY - 1})
mesh = make_mesh(MeshConfig(*json.loads(sys.argv[2])))
task = make_lm_task(config, words)
key, frozen = jax.random.key(0), {{}}
if config.has_autoencoder:
    frozen = {{"params": jax.eval_shape(make_autoencoder_task(config, words).init, key)}}
optimizer, training = make_optimizer(config.lm.optimizer, 10), config.lm.training
batch = batch_shapes(training, config.lm.data.block_tokens)


def placed(tree, layout):
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, layout
    )


with jax.set_mesh(mesh):
    state = state_shapes(task, optimizer, key)
    step = make_step(task, optimizer, training, key, words.pad_id)
    arguments = [placed(tree, shardings(tree, mesh)) for tree in (state, frozen)]
    arguments.append(placed(batch, {{name: NamedSharding(mesh, BATCH) for name in batch}}))
    compiled = jit_step(step, state, mesh).lower(*arguments).compile()
sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, frozen)]
print(json.dumps({{"text": compiled.as_text(), "sizes": sizes}}))
"""


def compiled_step(arguments: str, sizes: tuple[int, int, int]) -> tuple[str, list[int], str]:
    """A step's HLO text, the numbers of trained and of frozen parameters, and the compiler's messages."""
    # Without the cache, because loading a cached program gives no messages.
    env = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "0"}
    done = run_program(8, STEP, arguments, json.dumps(sizes), **env)
    record = json.loads(done.stdout)
    return record["text"], record["sizes"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "head, sizes",
    [("energy", (1, 8, 1)), ("energy", (2, 4, 1)), ("diffusion", (1, 8, 1)), ("flow", (2, 4, 1))],
)
def test_calm_gathers_only_parameters_and_never_holds_logits(head, sizes):
    text, (trained, frozen), complaints = compiled_step(f"head={head}", sizes)
    assert "rematerialization" not in complaints
    shapes = {
        tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
    }
    with_vocabulary = {shape for shape in shapes if VOCABULARY in shape}
    # Only the embedding tables, whole and sharded, their gradients and moments have the vocabulary's axis; the frozen
    # autoencoder's table is 16 wide.
    widths = {WIDTH, WIDTH // sizes[1], 16, 16 // sizes[1], 1}
    for shape in with_vocabulary:
        rest = [size for size in shape if size != VOCABULARY]
        assert len(rest) <= 2 and set(rest) <= widths, shape
    assert with_vocabulary
    program = Program.of(text)
    assert not program.runs()[1]
    # No gathered array has an axis of rows or positions.
    rows = {512, 7, 512 * 7, 512 // sizes[0] * 7}
    collectives = program.collectives(8)
    assert any(one.kind == "all-gather" for one in collectives)
    for one in collectives:
        if one.kind == "all-gather":
            dims = {
                int(size)
                for dims in re.findall(r"\[([\d,]+)\]", one.shape)
                for size in dims.split(",")
            }
            assert not dims & rows, one
    gathered = sum(one.moved for one in collectives if one.kind == "all-gather")
    share = (sizes[1] - 1) / sizes[1]
    assert gathered <= 1.1 * 4 * share * (2 * trained + frozen)


BLOCKS = f"""
import json, sys
import jax, jax.numpy as jnp, numpy as np
from calm_jax.models import vocabulary
from calm_jax.parallel.mesh import BATCH, MeshConfig, make_mesh
from jax.sharding import NamedSharding, PartitionSpec

rng = np.random.default_rng(0)
x_BTD = np.float32(rng.normal(size=(8, 6, {WIDTH})))
table_VD = np.float32(rng.normal(size=({VOCABULARY}, {WIDTH})))
target_BT = np.int32(rng.integers(-1, {VOCABULARY}, (8, 6)))
weight_BT = np.float32(rng.normal(size=(8, 6)))
# Blocks of 256 tokens of the vocabulary, with any number of devices.
vocabulary.block_size = lambda positions, vocab_size, on_cpu: 256


def both(x_BTD, table_VD, target_BT, weight_BT):
    loss_BT, pull = jax.vjp(
        lambda x, table: vocabulary.cross_entropy(x, table, target_BT), x_BTD, table_VD
    )
    return loss_BT, *pull(weight_BT)


arguments = x_BTD, table_VD, target_BT, weight_BT
expected = jax.jit(both)(*arguments)
for sizes in ((8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)):
    mesh = make_mesh(MeshConfig(*sizes))
    rows, table = NamedSharding(mesh, BATCH), NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments, (rows, table, rows, rows))
        # A function of its own, as the blocks' constraints depend on the mesh.
        program = jax.jit(lambda *a: both(*a), out_shardings=(rows, rows, table))
        ours = program(*placed)
    for a, b in zip(ours, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_the_loss_in_blocks_of_the_vocabulary_is_the_same_on_every_mesh():
    """Loss and gradients on eight devices equal those on one, with any axes."""
    run_program(8, BLOCKS)


BFLOAT16 = """
import dataclasses, json, sys
import jax
from benchmarks.suites.train import fresh
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.parallel.mesh import MeshConfig
from tests.tiny_recipe import get_config

tree, losses = get_config("*.txt,head=energy"), {}
tree.compute_dtype = "bfloat16"
config = dataclasses.replace(resolve(tree), mesh=MeshConfig(*json.loads(sys.argv[1])))
for stage in ("autoencoder", "lm"):
    trained = fresh(config, stage, Vocabulary(259, 258))
    for _ in range(3):
        trained.advance()
    total, weight = trained.state.metrics["loss"]
    losses[stage] = float(total / weight)
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_bfloat16_trains_alike_on_one_cpu_device_and_on_four():
    """Products have other forms there: those of one device as AMX needs them, those of several as XLA's partitioner allows."""
    alone, split = (
        json.loads(run_program(number, BFLOAT16, json.dumps(sizes)).stdout)
        for number, sizes in ((1, (1, 1, 1)), (4, (1, 2, 2)))
    )
    assert split == pytest.approx(alone, rel=1e-2)
