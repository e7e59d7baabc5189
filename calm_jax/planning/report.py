"""The output of `python -m calm_jax.plan`: plans as printed tables and as JSON."""

import dataclasses
import json
import math
import pathlib
import sys
import time

import rich.console
import rich.table

from calm_jax.cli.files import nan_to_none
from calm_jax.cli.output import write_result
from calm_jax.cli.progress import console, duration
from calm_jax.config import Config
from calm_jax.cost import flops
from calm_jax.planning.evaluation import plan_evaluations
from calm_jax.planning.generation import TEMPERATURES, mesh_of, plan_decode, planned_batches
from calm_jax.planning.planner import Lowered, compile_plan
from calm_jax.planning.result import Plan
from calm_jax.planning.topology import Topology


def _size(number: float) -> str:
    """A number of bytes in the largest unit of which it has at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} B"


def compile_aloud(lowered: Lowered) -> Plan:
    """Compiles a step, which takes minutes, and shows on stderr that it is still compiling."""
    text = f"compiling {lowered.stage} for {lowered.topology} ..."
    began, shown = time.monotonic(), rich.console.Console(stderr=True)
    if shown.is_terminal:
        with shown.status(text):
            plan = compile_plan(lowered)
    else:
        print(text, file=sys.stderr, flush=True)
        plan = compile_plan(lowered)
    print(f"compiled in {duration(time.monotonic() - began)}", file=sys.stderr, flush=True)
    return plan


def _rows(plan: Plan, efficiency: float, price: float) -> list[tuple[str, str]]:
    """The lines that are printed for a plan, each a name and a value."""
    rows = [("hardware", f"{plan.topology}, {plan.num_devices} device(s)")]
    rows.append(("mesh", " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())))
    for name, parts in (
        ("parameters, trained", plan.parameters),
        ("parameters, frozen", plan.frozen),
    ):
        listed = ", ".join(f"{part} {count / 1e6:,.1f}M" for part, count in parts.items())
        rows.append((name, f"{sum(parts.values()) / 1e6:,.1f}M ({listed})" if parts else "none"))
    rows += [(name, str(value)) for name, value in plan.chosen.items()]
    rows.append(("tokens a step", f"{plan.tokens:,}"))
    again = f", and {plan.recomputed:.3g} recomputed" if plan.recomputed else ""
    rows.append(("FLOPs a step", f"{plan.flops:.4g}{again}"))
    if not math.isnan(plan.xla_flops):
        counted = f"{plan.xla_flops:.4g}, as if each loop ran its body once"
        rows.append(("FLOPs by XLA, a device", counted))
    rows += [(f"memory: {kind}", _size(size)) for kind, size in plan.memory.items()]
    left = plan.available - plan.needed
    rows.append(("memory a device", f"{_size(plan.needed)} of {_size(plan.available)}"))
    rows.append(("memory left", _size(left) if plan.fits else f"none, {_size(-left)} missing"))
    if not plan.fits:
        return rows
    for kind, traffic in sorted(plan.collectives.items()):
        rows.append(
            (kind, f"{traffic.count:,} a step, {traffic.bytes / 1e9:,.3f} GB received per device")
        )
    if plan.ideal_traffic:
        ratio = plan.traffic / plan.ideal_traffic
        rows.append(("all collectives", f"{plan.traffic / 1e9:,.3f} GB, {ratio:.2f} x ideal FSDP"))
    if plan.unknown_loops:
        rows.append(
            ("loops of unknown length", f"{', '.join(plan.unknown_loops)}: taken as one run")
        )
    rows.append(("memory traffic", f"{plan.memory_traffic / 1e9:,.3f} GB a step and device"))
    seconds = plan.seconds(efficiency)
    hours = plan.hours(efficiency)
    limits = ", ".join(f"{name} {least:.3f} s" for name, least in plan.limits.items())
    rows += [
        ("limits at peak rates", f"{limits}: {plan.limit} is the limit"),
        ("MFU at most", f"{plan.utilisation(1):.1%}"),
        (
            "a step",
            f"{seconds:.3f} s, MFU {plan.utilisation(efficiency):.1%}, at efficiency {efficiency}",
        ),
        ("tokens a second", f"{plan.tokens / seconds:,.0f}"),
        (
            "all steps",
            f"{plan.num_steps:,} in {hours:,.1f} h, {hours * plan.num_devices:,.0f} device hours",
        ),
    ]
    if price:
        cost = hours * plan.num_devices * price
        rows.append(("cost", f"{cost:,.0f} at {price:g} a device and hour"))
    return rows


def show(plan: Plan, efficiency: float, price: float) -> None:
    """Prints a plan.

    Args:
      plan: the plan.
      efficiency: share of the hardware's peak rates that training reaches.
      price: the price of one device for an hour; no cost is shown if it is 0.
    """
    table = rich.table.Table(show_header=False, box=None)
    for name, value in _rows(plan, efficiency, price):
        table.add_row(name, value)
    console().print(table, highlight=False)


def record(plan: Plan, efficiency: float, price: float) -> dict:
    """The plan as it is written to --output."""
    hours = plan.hours(efficiency) * plan.num_devices
    return dataclasses.asdict(plan) | {
        "fits": plan.fits,
        "traffic": plan.traffic,
        "limits": plan.limits,
        "limit": plan.limit,
        "efficiency": efficiency,
        "seconds": plan.seconds(efficiency),
        "utilisation": plan.utilisation(efficiency),
        "utilisation_bound": plan.utilisation(1),
        "device_hours": hours,
        "cost": hours * price,
    }


def _write(output: pathlib.Path | None, plans: list[dict]) -> None:
    """Writes several plans to --output, if it is given."""
    if output is not None:
        write_result(output, json.dumps(nan_to_none({"plans": plans}), indent=2) + "\n")


def plan_evaluation(config: Config, topology: Topology, output: pathlib.Path | None) -> int:
    """Plans the evaluations of a recipe, prints a line for each, and returns the exit status."""
    table = rich.table.Table("evaluation", "blocks", "tokens", "GiB", "available", "", box=None)
    plans = []
    print(f"compiling evaluations for {topology} ...", file=sys.stderr, flush=True)
    for plan in plan_evaluations(config, topology):
        plans.append(plan)
        sizes = (plan.needed / 2**30, plan.available / 2**30)
        fits = "fits" if plan.fits else "does not fit: a smaller --config.eval.batch_size"
        table.add_row(
            plan.name, str(plan.rows), f"{plan.block_tokens:,}", *map("{:.2f}".format, sizes), fits
        )
    console().print(table, highlight=False)
    _write(output, [dataclasses.asdict(plan) | {"fits": plan.fits} for plan in plans])
    return 0 if all(plan.fits for plan in plans) else 1


def plan_generation(config: Config, topology: Topology, output: pathlib.Path | None) -> int:
    """Plans generation, prints a line for each batch and temperature, and returns the exit status."""
    table = rich.table.Table(box=None)
    # With the line breaks the table fits into 120 columns.
    headings = (
        "prefill\nGiB",
        "decode\nGiB",
        "available\nGiB",
        "weights +\ncache GB",
        "moved by\nprogram GB",
    )
    for heading in ("batch", "T", "draws", *headings, "ms a\nchunk", "limit", "tokens/s"):
        table.add_column(heading, justify="right")
    plans = []
    for batch in planned_batches(mesh_of(config, topology)):
        for temperature in TEMPERATURES:
            print(f"compiling batch {batch}, T {temperature:g} ...", file=sys.stderr, flush=True)
            plan = plan_decode(config, topology, batch, temperature)
            plans.append(plan)
            memory = (plan.prefill, plan.needed, plan.available)
            table.add_row(
                str(plan.batch),
                f"{plan.temperature:g}",
                str(plan.draws),
                *(f"{size / 2**30:.2f}" for size in memory),
                f"{plan.one_pass / 1e9:.2f}",
                "" if math.isnan(plan.moved) else f"{plan.moved / 1e9:.2f}",
                f"{1e3 * plan.limits[plan.limit]:.3f}",
                plan.limit,
                f"{plan.tokens_per_second:,.0f}" if plan.fits else "does not fit",
            )
    console().print(table, highlight=False)
    print(
        "ms a chunk is a lower bound and tokens/s an upper bound: at the hardware's peak rates, with weights and cache read "
        "once and every draw decoded completely"
    )
    evaluations = flops.head_evaluations(config)
    if evaluations > 1:
        print(
            f"the head's weights are read {evaluations} times, once for each evaluation of its network: a chip whose own memory "
            "keeps them may be faster"
        )
    records = [
        dataclasses.asdict(plan)
        | {"fits": plan.fits, "limit": plan.limit, "tokens_per_second": plan.tokens_per_second}
        for plan in plans
    ]
    _write(output, records)
    return 0 if all(plan.fits for plan in plans) else 1
