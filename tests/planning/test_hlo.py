"""Collectives read from HLO text: nested loops, asynchronous pairs, tuples, replica groups."""

import pytest

from calm_jax.planning.hlo import Program

# A program for four devices with a loop of 5 iterations, in which there is a loop of 3, whose counter goes from 0 to 6 by 2.
NESTED = """HloModule step, is_scheduled=true

FileNames
1 "step.py"

%inner_body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %halfway = s32[]{:T(128)} add(%i, %one)
  %next = s32[]{:T(128)} add(%halfway, %one)
  %gathered = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="model/layers"}
  %y = bf16[4,8]{1,0:T(8,128)(2,1)} slice(%gathered), slice={[0:4], [0:8]}
  ROOT %t = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) tuple(%next, %y)
}

%inner_condition (p: (s32[], bf16[4,8])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %six = s32[]{:T(128)} constant(6)
  %j = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %six), direction=LT
}

%outer_body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.2 = (s32[], bf16[4,8]) parameter(0)
  %k = s32[] get-tuple-element(%p.2), index=0
  %z = bf16[4,8] get-tuple-element(%p.2), index=1
  %zero = s32[] constant(0)
  %inside = (s32[], /*index=1*/bf16[4,8]{1,0:T(8,128)(2,1)}) tuple(%zero, %z)
  %loop = (s32[], bf16[4,8]) while(%inside), condition=%inner_condition, body=%inner_body
  %w = bf16[4,8] get-tuple-element(%loop), index=1
  %pair = (bf16[4,8], bf16[4,8]) reduce-scatter(%w, %w), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%sum
  %v = bf16[4,8] get-tuple-element(%pair), index=0
  %step = s32[] constant(1)
  %k.1 = s32[] add(%k, %step)
  ROOT %t.1 = (s32[], bf16[4,8]) tuple(%k.1, %v)
}

%outer_condition (p: (s32[], bf16[4,8])) -> pred[] {
  %p.3 = (s32[], bf16[4,8]) parameter(0)
  %five = s32[] constant(5)
  %l = s32[] get-tuple-element(%p.3), index=0
  ROOT %fused = pred[] fusion(%l, %five), kind=kLoop, calls=%comparison
}

%comparison (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> f32[2] {
  %x.1 = bf16[4,8] parameter(0)
  %start = s32[] constant(0)
  %given = (s32[], bf16[4,8]) tuple(%start, %x.1)
  %outer = (s32[], bf16[4,8]) while(%given), condition=%outer_condition, body=%outer_body
  %pieces = f32[2] constant({0, 1})
  %begun = ((f32[2]), (f32[8])) all-gather-start(%pieces), replica_groups=[1,4]<=[4], dimensions={0}
  %ended = f32[8] all-gather-done(%begun)
  %sums = f32[8] all-reduce(%ended), replica_groups={}, to_apply=%sum
  ROOT %s = f32[2] slice(%sums), slice={[0:2]}
}
"""


def moved(text: str, num_devices: int = 4) -> dict[str, tuple[int, float]]:
    """Number of runs and bytes received, by kind of collective."""
    found = {}
    for one in Program.of(text).collectives(num_devices):
        assert one.kind not in found
        found[one.kind] = (one.times, one.moved)
    return found


def test_runs_in_nested_loops_multiply():
    """3 x 5 all-gathers of 256 bytes, of which each device receives three quarters."""
    assert Program.of(NESTED).runs()[1] == ()
    gathers = [one for one in Program.of(NESTED).collectives(4) if one.kind == "all-gather"]
    assert [(one.times, one.full, one.group) for one in gathers] == [(1, 32, 4), (15, 256, 4)]
    assert gathers[1].moved == 15 * 256 * 3 / 4
    assert gathers[1].scope == "model/layers"


def test_an_asynchronous_pair_counts_once_and_a_tuple_counts_all_its_arrays():
    by_kind = {one.kind: one for one in Program.of(NESTED).collectives(4)}
    # Two arrays, whose halves have 64 bytes each.
    assert by_kind["reduce-scatter"].moved == 5 * (2 * 64 * 2) / 2
    # Over all devices, because no group is named; an all-reduce moves the array twice.
    assert by_kind["all-reduce"].moved == 2 * 32 * 3 / 4
    # The pair's result has 32 bytes; its operand would have 8.
    assert min(one.full for one in Program.of(NESTED).collectives(4)) == 32


SPREAD = """
%first (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %g = f32[32] all-gather(%p), channel_id=7, replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}
}

%last (p: f32[8]) -> f32[8] {
  %p.1 = f32[8] parameter(0)
  ROOT %g.1 = f32[32] all-gather(%p.1), channel_id=7, replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8] parameter(0)
  %a = f32[32] fusion(%x), kind=kCustom, calls=%first
  ROOT %b = f32[32] fusion(%x), kind=kCustom, calls=%last
}
"""


def test_a_collective_spread_over_fusions_counts_once():
    """Its group is the named mesh axis."""
    assert moved(SPREAD, 8) == {"all-gather": (1, 32 * 4 * 3 / 4)}


def test_a_loop_with_an_unknown_number_of_iterations_is_reported():
    text = NESTED.replace("constant(6)", "parameter(1)")
    assert Program.of(text).runs()[1] == ("loop",)


def test_the_compilers_trip_count_comes_first():
    text = NESTED.replace(
        "body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    gathers = [one for one in Program.of(text).collectives(4) if one.kind == "all-gather"]
    assert [one.times for one in gathers] == [1, 21]


def test_a_collective_that_also_runs_elsewhere_does_not_shorten_the_loop_of_the_next():
    """An all-gather that a loop's body shares with the entry runs once, the all-reduce after it as often as the loop."""
    shared = "%x.2 = bf16[16,8] all-gather(%x.1), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
    text = NESTED.replace("%start = s32[]", f"{shared}\n  %start = s32[]").replace(
        "%y = bf16[4,8]{1,0:T(8,128)(2,1)} slice",
        "%z.1 = f32[8] all-reduce(%gathered), channel_id=3, replica_groups={}, to_apply=%sum\n  %y = bf16[4,8] slice",
    )
    found = [(one.kind, one.times) for one in Program.of(text).collectives(4)]
    assert sorted(found) == [
        ("all-gather", 1),
        ("all-gather", 1),
        ("all-reduce", 1),
        ("all-reduce", 15),
        ("reduce-scatter", 5),
    ]


@pytest.mark.parametrize(
    "shape, size", [("pred[4]", 4), ("f8e4m3fn[8]", 8), ("s4[8]", 4), ("(f32[2], bf16[2])", 12)]
)
def test_bytes_of_element_types_and_tuples(shape, size):
    text = f"""
ENTRY %main (x: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT %p = {shape} collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
}}
"""
    assert moved(text, 2) == {"collective-permute": (1, size)}
