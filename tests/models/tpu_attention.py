"""Compiles a transformer's training step ahead of time for TPUs, and prints how many TPU kernels it calls.

A separate program, `python -m tests.models.tpu_attention`, as only one process at a time can use libtpu.
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from calm_jax.models.kv_cache import SegmentIds
from calm_jax.models.transformer import Transformer, TransformerConfig
from calm_jax.parallel.mesh import BATCH, MeshConfig, make_mesh, shardings


def kernels(topology: str, head_size: int, length: int, isolated: bool, remat: str) -> int:
    """The number of calls of TPU kernels in the compiled forward and backward pass of the scanned layers."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), list(devices))
    config = TransformerConfig(
        hidden_size=4 * head_size,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=1e4,
        rms_norm_epsilon=1e-6,
        norm_epsilon=1e-6,
        remat=remat,
        attention="auto",
    )
    model = Transformer(config, jnp.bfloat16)

    def loss(params, x_BLD, segment_BL):
        h_BLD, _ = model.apply(
            {"params": params}, x_BLD, SegmentIds(segment_BL) if isolated else None
        )
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
