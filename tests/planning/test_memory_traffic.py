"""Bytes of main memory read from HLO text: fusions, slices, updates in place, loops, other memories; and compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from calm_jax.planning.hlo import Program
from calm_jax.planning.memory_traffic import bytes_moved, operations

# A loop of 4 iterations over a cache f32[4,8,16] (512 bytes a layer) and weights bf16[4,16,16] (512 bytes a layer).
LAYERS = """HloModule decode

%slice_in_a_fusion (w: bf16[4,16,16], i: s32[]) -> bf16[16,16] {
  %w = bf16[4,16,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,16,16]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,16,16}
  ROOT %bitcast = bf16[16,16]{1,0} bitcast(%slice)
}

%product (w.1: bf16[4,16,16], i.1: s32[], x: f32[2,16]) -> f32[2,16] {
  %w.1 = bf16[4,16,16]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x = f32[2,16]{1,0} parameter(2)
  %inner = bf16[16,16]{1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%slice_in_a_fusion
  ROOT %dot = f32[2,16]{1,0} convolution(%x, %inner), dim_labels=bf_io->bf
}

%update (c: f32[4,8,16], i.2: s32[], new: f32[2,16]) -> f32[4,8,16] {
  %c = f32[4,8,16]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %new = f32[2,16]{1,0} parameter(2)
  %row = f32[1,2,16]{2,1,0} bitcast(%new)
  %zero.1 = s32[] constant(0)
  ROOT %updated = f32[4,8,16]{2,1,0} dynamic-update-slice(%c, %row, %i.2, %zero.1, %zero.1)
}

%body (t: (s32[], f32[2,16], f32[4,8,16], bf16[4,16,16])) -> (s32[], f32[2,16], f32[4,8,16], bf16[4,16,16]) {
  %t = (s32[], f32[2,16]{1,0}, f32[4,8,16]{2,1,0}, bf16[4,16,16]{2,1,0}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %h = f32[2,16]{1,0} get-tuple-element(%t), index=1
  %cache = f32[4,8,16]{2,1,0} get-tuple-element(%t), index=2
  %weights = bf16[4,16,16]{2,1,0} get-tuple-element(%t), index=3
  %next = f32[2,16]{1,0} fusion(%weights, %k, %h), kind=kOutput, calls=%product
  %written = f32[4,8,16]{2,1,0} fusion(%cache, %k, %next), kind=kLoop, calls=%update, metadata={op_name="model/cache"}
  %one = s32[] constant(1)
  %k.1 = s32[] add(%k, %one)
  ROOT %r = (s32[], f32[2,16]{1,0}, f32[4,8,16]{2,1,0}, bf16[4,16,16]{2,1,0}) tuple(%k.1, %next, %written, %weights)
}

%condition (t.1: (s32[], f32[2,16], f32[4,8,16], bf16[4,16,16])) -> pred[] {
  %t.1 = (s32[], f32[2,16]{1,0}, f32[4,8,16]{2,1,0}, bf16[4,16,16]{2,1,0}) parameter(0)
  %k.2 = s32[] get-tuple-element(%t.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%k.2, %four), direction=LT
}

ENTRY %main (x.1: f32[2,16], c.1: f32[4,8,16], w.2: bf16[4,16,16]) -> f32[4,8,16] {
  %x.1 = f32[2,16]{1,0} parameter(0)
  %c.1 = f32[4,8,16]{2,1,0} parameter(1)
  %w.2 = bf16[4,16,16]{2,1,0} parameter(2)
  %begin = s32[] constant(0)
  %given = (s32[], f32[2,16]{1,0}, f32[4,8,16]{2,1,0}, bf16[4,16,16]{2,1,0}) tuple(%begin, %x.1, %c.1, %w.2)
  %loop = (s32[], f32[2,16]{1,0}, f32[4,8,16]{2,1,0}, bf16[4,16,16]{2,1,0}) while(%given), condition=%condition, body=%body
  ROOT %result = f32[4,8,16]{2,1,0} get-tuple-element(%loop), index=2
}
"""


def moved(text: str) -> dict[str, tuple[float, float, int]]:
    """Bytes read and written in one run, and the number of runs, by operation; without scalars of a loop's counter."""
    found = operations(Program.of(text))
    return {one.name: (one.read, one.written, one.times) for one in found if one.moved > 64}


def test_a_layers_product_reads_its_slice_and_its_cache_is_updated_in_place():
    layer, activations, counter = 16 * 16 * 2, 2 * 16 * 4, 4
    assert moved(LAYERS) == {
        "next": (layer + activations + counter, activations, 4),
        "written": (activations + counter, activations, 4),
    }
    [cache] = [one for one in operations(Program.of(LAYERS)) if one.name == "written"]
    assert cache.scope == "model/cache"


def test_an_updated_array_that_is_also_read_counts_whole():
    """The fusion's result is no longer the update alone."""
    text = LAYERS.replace("ROOT %updated", "%updated").replace(
        "dynamic-update-slice(%c, %row, %i.2, %zero.1, %zero.1)\n",
        "dynamic-update-slice(%c, %row, %i.2, %zero.1, %zero.1)\n"
        "  ROOT %more = f32[4,8,16]{2,1,0} negate(%updated)\n",
    )
    cache = 4 * 8 * 16 * 4
    assert moved(text)["written"] == (cache + 2 * 16 * 4 + 4, cache, 4)


def test_memories_besides_the_main_one_and_scratch_do_not_count():
    """`S(1)` marks a TPU's vector memory; a copy into it reads main memory only."""
    text = """
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %y = f32[8,128]{1,0:T(8,128)S(1)} negate(%near)
  %product = (f32[8,128]{1,0}, s8[33554432]{0}) custom-call(%x, %near), custom_call_target="__cublas$lt$matmul"
  %z = f32[8,128]{1,0} get-tuple-element(%product), index=0
  ROOT %far = f32[8,128]{1,0:T(8,128)} add(%y, %z)
}
"""
    size = 8 * 128 * 4.0
    found = {name: read + written for name, (read, written, _) in moved(text).items()}
    assert found == {"start": size, "product": 2 * size, "far": 2 * size}


# Floats of an array, much more than the programs' small arrays.
SIZE = 2**18


@pytest.mark.parametrize("donated", [True, False])
def test_a_compiled_loop_that_updates_rows_in_place_moves_the_rows(donated):
    """256 rows of 1024 floats, each replaced by its double in turn. Without donation, the array is copied once."""

    def double_rows(x_RD):
        return jax.lax.fori_loop(0, 256, lambda i, x: x.at[i].set(2 * x[i]), x_RD)

    donate = (0,) if donated else ()
    compiled = jax.jit(double_rows, donate_argnums=donate).lower(jnp.ones((256, 1024))).compile()
    found = bytes_moved(Program.of(compiled.as_text()))
    assert found == pytest.approx((2 if donated else 4) * 4 * SIZE, rel=0.05)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jnp.exp(x).sum(),
        lambda x, w: jax.nn.softmax(x @ w),
        lambda x, w: jnp.sort(x, axis=0).T + w[:256, :64],
    ],
    ids=["sum", "product", "sort"],
)
def test_without_loops_the_bytes_are_those_of_xlas_own_analysis(function):
    compiled = jax.jit(function).lower(jnp.ones((64, 256)), jnp.ones((256, 512))).compile()
    expected = compiled.cost_analysis()["bytes accessed"]
    assert bytes_moved(Program.of(compiled.as_text())) == pytest.approx(expected, rel=0.01)
