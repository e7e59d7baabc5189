"""Plans a recipe's training or generation on accelerators that this machine lacks: whether it fits, how long it takes, what it costs.

python -m calm_jax.plan --config=configs/calm_xl.py --topology=v5e:16x16 --config.mesh.data=16 --config.mesh.fsdp=16
python -m calm_jax.plan --config=configs/calm_m.py --fit=v5e --price_per_hour=1.2
python -m calm_jax.plan --config=configs/calm_m.py --topology=h100:1 --stage=generate

Needs, in the clone, pip install -c constraints.txt -e '.[plan]' for TPUs (v4, v5e, v5p, v6e) and '.[plan-cuda]' for NVIDIA (h100). No accelerator is used.
The exit status is 1 if it does not fit.
"""

import functools
import json
import math
import os
import pathlib

# Before jax is imported: everything runs on the CPU, and libtpu, which only compiles, must not look for TPUs.
os.environ["JAX_PLATFORMS"] = "cpu"

from absl import app, flags
from ml_collections import ConfigDict

from calm_jax.cli.command import command
from calm_jax.cli.files import nan_to_none
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.cli.output import owned_output, write_result
from calm_jax.errors import UserError, shown

_CONFIG = define_recipe("recipe: a file with get_config()")
_TOPOLOGY = flags.DEFINE_string("topology", "", "hardware, such as v5e:4x4, v5p:2x2x1 or h100:8")
_FIT = flags.DEFINE_string("fit", "", "family, such as v5e: finds the smallest size that fits")
_STAGE = flags.DEFINE_enum(
    "stage",
    "lm",
    ["lm", "autoencoder", "evaluate", "generate"],
    "the stage to plan, its evaluation, or generation",
)
_PRICE = flags.DEFINE_float(
    "price_per_hour", 0.0, "price of one device for an hour, in any currency; 0: no cost is shown"
)
# An assumption, not a measurement: well-tuned training of dense transformers reaches 0.4 to 0.6 of the peak, as published for
# TPUs and GPUs.
_EFFICIENCY = flags.DEFINE_float(
    "efficiency", 0.5, "share of the hardware's peak rates that training reaches"
)
_OUTPUT = flags.DEFINE_string("output", "", "file to write the plan to, as JSON")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the file of --output if it exists")


@command
def main(argv: list[str]) -> int:
    if _CONFIG.value is None:
        raise UserError("give a recipe: --config=configs/calm_m.py")
    if bool(_TOPOLOGY.value) == bool(_FIT.value):
        raise UserError(
            "give either --topology=v5e:4x4, or --fit=v5e for the smallest size that fits"
        )
    if not 0 <= _PRICE.value < math.inf:
        raise UserError(f"--price_per_hour={shown(_PRICE.value)} must be a number from 0 on")
    if not 0 < _EFFICIENCY.value <= 1:
        raise UserError(f"--efficiency={shown(_EFFICIENCY.value)} must be in (0, 1]")
    with owned_output(_OUTPUT, _OVERWRITE.value) as output:
        return _plan(_CONFIG.value, output)


def _plan(recipe: ConfigDict, output: pathlib.Path | None) -> int:
    """Compiles and shows the plan, and writes it to `output`. Returns 0 if it fits, 1 if not."""
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.config import resolve
    from calm_jax.planning import planner, report, topology
    from calm_jax.planning.result import advice

    config, stage = resolve(recipe), _STAGE.value
    others = {"generate": report.plan_generation, "evaluate": report.plan_evaluation}
    if stage in others:
        if _FIT.value:
            raise UserError(f"--stage={stage} needs --topology=h100:1 or another one, not --fit")
        for flag in (_PRICE, _EFFICIENCY):
            if flag.value != flag.default:
                raise UserError(
                    f"--{flag.name}={shown(flag.value)} has no meaning with --stage={stage}: leave it out"
                )
        return others[stage](config, topology.parse(_TOPOLOGY.value), output)
    tries: list[planner.Try] = []
    if _FIT.value:
        family = topology.of_family(_FIT.value)
        family[0].check_compiler()
        say = functools.partial(print, flush=True)
        tries = planner.fit(config, stage, family, report.compile_aloud, say)
        plan = next((one.plan for one in reversed(tries) if one.plan is not None), None)
    else:
        hardware = topology.parse(_TOPOLOGY.value)
        plan = planner.plan_for(config, stage, hardware, report.compile_aloud)
    if plan is not None:
        report.show(plan, _EFFICIENCY.value, _PRICE.value)
    if output is not None:
        record: dict = {"tries": {str(one.topology): one.why_not for one in tries}}
        if plan is not None:
            record |= report.record(plan, _EFFICIENCY.value, _PRICE.value)
        write_result(output, json.dumps(nan_to_none(record), indent=2) + "\n")
    if plan is None:
        raise UserError(
            f"--fit={_FIT.value}: no size could be compiled; {tries[-1].topology}: {tries[-1].why_not}. A family with more memory, "
            "mesh.tensor, or a batch that divides over more devices may help"
        )
    if plan.fits:
        return 0
    print("It does not fit. What may help:")
    for idea in advice(config, stage, plan):
        print(f"  {idea}")
    return 1


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
