"""Plans a recipe's training or generation on accelerators that this machine lacks: whether it fits, how long it takes, what it costs.

python -m calm_jax.plan --config=configs/calm_xl.py --topology=v5e:16x16 --config.mesh.data=16 --config.mesh.fsdp=16
python -m calm_jax.plan --config=configs/calm_m.py --fit=v5e --price_per_hour=1.2
python -m calm_jax.plan --config=configs/calm_m.py --topology=h100:1 --stage=generate

Needs pip install -e '.[plan]' for TPUs (v4, v5e, v5p, v6e) and '.[plan-cuda]' for NVIDIA (h100). No accelerator is used.
The exit status is 1 if it does not fit.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys
import time

# Before jax is imported: everything runs on the CPU, and libtpu, which only compiles, must not look for TPUs.
os.environ["JAX_PLATFORMS"] = "cpu"

import rich.console
import rich.table
from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path, nan_to_none, write_atomically
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.cli.progress import console, duration
from calm_jax.config import Config, resolve
from calm_jax.errors import UserError
from calm_jax.planning.generation import BATCHES, TEMPERATURES, plan_decode
from calm_jax.planning.planner import Lowered, Try, compile_plan, fit, plan_for
from calm_jax.planning.result import Plan, advice
from calm_jax.planning.topology import Topology, of_family, parse

_CONFIG = define_recipe("recipe: a file with get_config()")
_TOPOLOGY = flags.DEFINE_string("topology", "", "hardware, such as v5e:4x4, v5p:2x2x1 or h100:8")
_FIT = flags.DEFINE_string("fit", "", "family, such as v5e: finds the smallest size that fits")
_STAGE = flags.DEFINE_enum(
    "stage", "lm", ["lm", "autoencoder", "generate"], "the stage to plan, or generation"
)
_PRICE = flags.DEFINE_float(
    "price_per_hour", 0.0, "price of one device for an hour, in any currency; 0: no cost is shown"
)
# An assumption, not a measurement: well-tuned training of dense transformers reaches 0.4 to 0.6 of the peak, as published for
# TPUs and GPUs.
_EFFICIENCY = flags.DEFINE_float(
    "efficiency", 0.5, "share of the hardware's peak rates that training reaches", 0.01, 1
)
_OUTPUT = flags.DEFINE_string("output", "", "file to write the plan to, as JSON")


def _size(number: float) -> str:
    """A number of bytes in a unit of its size."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} B"


def _compile(lowered: Lowered) -> Plan:
    """Compiles, which takes minutes, and shows on stderr that it is going on."""
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
        counted = f"{plan.xla_flops:.4g}, each loop's body counted once"
        rows.append(("FLOPs by XLA, a device", counted))
    rows += [(f"memory: {kind}", _size(size)) for kind, size in plan.memory.items()]
    left = plan.available - plan.needed
    rows.append(("memory a device", f"{_size(plan.needed)} of {_size(plan.available)}"))
    rows.append(("left", _size(left) if plan.fits else f"none, {_size(-left)} too much"))
    if not plan.fits:
        return rows
    for kind, traffic in sorted(plan.collectives.items()):
        rows.append((kind, f"{traffic.count:,} a step, {traffic.bytes / 1e9:,.3f} GB to a device"))
    if plan.ideal_traffic:
        ratio = plan.traffic / plan.ideal_traffic
        rows.append(("all collectives", f"{plan.traffic / 1e9:,.3f} GB, {ratio:.2f} x ideal FSDP"))
    if plan.unknown_loops:
        rows.append(("loops counted once", ", ".join(plan.unknown_loops)))
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


def _record(plan: Plan, efficiency: float, price: float) -> dict:
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


def _generation(config: Config, topology: Topology, output: pathlib.Path) -> int:
    """Plans generation, prints a line for each batch and temperature, and returns the exit status."""
    table = rich.table.Table(box=None)
    headings = ("batch", "T", "draws", "prefill GiB", "decode GiB", "of", "one pass GB", "moved GB")
    for heading in (*headings, "ms a chunk", "limit", "tokens/s"):
        table.add_column(heading, justify="right")
    plans = []
    for batch in BATCHES:
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
        "ms and tokens/s are bounds at the peak rates: weights and cache read once, every draw decoded whole"
    )
    if output.name:
        records = [
            dataclasses.asdict(plan)
            | {"fits": plan.fits, "limit": plan.limit, "tokens_per_second": plan.tokens_per_second}
            for plan in plans
        ]
        write_atomically(output, json.dumps(nan_to_none({"plans": records}), indent=2) + "\n")
    return 0 if all(plan.fits for plan in plans) else 1


def _show(plan: Plan) -> None:
    table = rich.table.Table(show_header=False, box=None)
    for name, value in _rows(plan, _EFFICIENCY.value, _PRICE.value):
        table.add_row(name, value)
    console().print(table, highlight=False)


def _fit(config: Config) -> tuple[list[Try], Plan | None]:
    """The sizes of --fit that were tried, and the plan for the last one that was compiled for."""

    def note(text: str) -> None:
        print(text, flush=True)

    family = of_family(_FIT.value)
    family[0].check_compiler()
    tries = fit(config, _STAGE.value, family, _compile, note)
    plans = [one.plan for one in tries if one.plan is not None]
    return tries, plans[-1] if plans else None


@command
def main(argv: list[str]) -> int:
    if _CONFIG.value is None:
        raise UserError("give a recipe: --config=configs/calm_m.py")
    if bool(_TOPOLOGY.value) == bool(_FIT.value):
        raise UserError("give --topology=v5e:4x4, or --fit=v5e for the smallest size that fits")
    if not 0 <= _PRICE.value < math.inf:
        raise UserError(f"--price_per_hour={_PRICE.value:g} must be a number from 0 on")
    if not 0 < _EFFICIENCY.value <= 1:
        raise UserError(f"--efficiency={_EFFICIENCY.value:g} must be in (0, 1]")
    output = local_path(_OUTPUT.value, "--output")
    if _OUTPUT.value and not output.absolute().parent.is_dir():
        raise UserError(f"--output={_OUTPUT.value} cannot be written: there is no such folder")
    config = resolve(_CONFIG.value)
    if _STAGE.value == "generate":
        if _FIT.value:
            raise UserError("--stage=generate needs --topology=h100:1 or another one, not --fit")
        return _generation(config, parse(_TOPOLOGY.value), output)
    tries: list[Try] = []
    plan: Plan | None
    if _FIT.value:
        tries, plan = _fit(config)
    else:
        plan = plan_for(config, _STAGE.value, parse(_TOPOLOGY.value), _compile)
    if plan is not None:
        _show(plan)
    if _OUTPUT.value:
        record: dict = {"tries": {str(one.topology): one.why_not for one in tries}}
        if plan is not None:
            record |= _record(plan, _EFFICIENCY.value, _PRICE.value)
        write_atomically(output, json.dumps(nan_to_none(record), indent=2) + "\n")
    if plan is None:
        raise UserError(
            f"--fit={_FIT.value}: no size could be compiled; {tries[-1].topology}: {tries[-1].why_not}. A family with more memory, "
            "mesh.tensor, or a batch that divides over more devices may help"
        )
    if plan.fits:
        return 0
    print("It does not fit. What may help:")
    for idea in advice(config, _STAGE.value, plan):
        print(f"  {idea}")
    return 1


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
