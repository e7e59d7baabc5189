"""Compiles a training step's attention for TPUs that are not here; prints what came out.

A program of its own, as libtpu is for one process at a time: `python -m tests.tpu_attention`.
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from calm_jax.mesh import BATCH, MeshConfig, make_mesh, shardings
from calm_jax.models.transformer import Packed, Transformer, TransformerConfig


def kernels(topology: str, head_size: int, length: int, isolated: bool, remat: str) -> int:
    """How often a TPU's own kernel is called in the compiled forward and backward pass of some layers."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), list(devices))
    config = TransformerConfig(
        hidden_size=4 * head_size,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=1e4,
        norm_epsilon=1e-6,
        remat=remat,
        attention="auto",
    )
    model = Transformer(config, jnp.bfloat16)

    def loss(params, x_BLD, segment_BL):
        h_BLD, _ = model.apply({"params": params}, x_BLD, Packed(segment_BL) if isolated else None)
        return (h_BLD.astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, length, config.hidden_size), jnp.bfloat16)
        segment = jax.ShapeDtypeStruct((4, length), jnp.int32)
        params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), x)["params"]
        over = NamedSharding(mesh, BATCH)
        step = jax.jit(jax.grad(loss), in_shardings=(shardings(params, mesh), over, over))
        return step.lower(params, x, segment).compile().as_text().count("tpu_custom_call")


if __name__ == "__main__":
    json.dump({name: kernels(*json.loads(name)) for name in sys.argv[1:]}, sys.stdout)
