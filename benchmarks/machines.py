"""The machines, recipes and uses of the table "which config for my machine" in docs/scaling.md, and the options of their plans."""

from typing import NamedTuple

from calm_jax.planning.topology import GPU_MEMORY_SHARE

# For each machine: the bytes of one device's memory that a program may use (None: those of the hardware to compile for), the
# hardware to compile for, the devices along data and fsdp, and the microbatches of the published batch of 256 rows for CALM-M, L
# and XL. A GPU with 24 GB is planned by compiling for an H100: its program is about the same, but not its speed.
MACHINES = {
    "1 x 24 GB": (GPU_MEMORY_SHARE * 24e9, "h100:1", 1, 1, (128, 256, 256)),
    "1 x 80 GB": (None, "h100:1", 1, 1, (32, 64, 256)),
    "8 x 80 GB": (None, "h100:8", 1, 8, (4, 8, 16)),
    "v5e-16": (None, "v5e:4x4", 1, 16, (8, 16, 16)),
    "v5e-256": (None, "v5e:16x16", 16, 16, (1, 1, 1)),
    "v6e-64": (None, "v6e:8x8", 8, 8, (1, 2, 4)),
}
RECIPES, USES = ("calm_m", "calm_l", "calm_xl"), ("training", "fine-tuning", "generation")
# The rows of a batch of configs/finetune.py. With more devices than that, a batch has one row on each.
_FINETUNING = 16


def options(recipe: str, topology: str, data: int, fsdp: int, microbatches: int) -> list[str]:
    """The options of `python -m calm_jax.plan` for one line of the table."""
    return [
        f"--config=configs/{recipe}.py",
        f"--topology={topology}",
        f"--config.mesh.data={data}",
        f"--config.mesh.fsdp={fsdp}",
        f"--config.lm.training.accumulation_steps={microbatches}",
        "--config.lm.model.remat=full",
    ]


class Cell(NamedTuple):
    """A cell of the table of machines: a recipe on a machine for one use."""

    machine: str
    recipe: str
    use: str

    @property
    def microbatches(self) -> int:
        """The microbatches of a step. Those of fine-tuning have as many rows as those of training, at least one a device."""
        *_, parts = MACHINES[self.machine]
        whole = parts[RECIPES.index(self.recipe)]
        return whole if self.use == "training" else max(1, self._rows * whole // 256)

    @property
    def _rows(self) -> int:
        """The rows of a batch."""
        _, _, data, fsdp, _ = MACHINES[self.machine]
        return 256 if self.use == "training" else max(_FINETUNING, data * fsdp)

    @property
    def options(self) -> list[str]:
        """The options of `python -m calm_jax.plan`."""
        _, topology, data, fsdp, _ = MACHINES[self.machine]
        given = options(self.recipe, topology, data, fsdp, self.microbatches)
        if self.use == "generation":
            return [*given[:4], "--stage=generate"]
        return [*given, f"--config.lm.training.batch_size={self._rows}"]

    @property
    def name(self) -> str:
        """The name of the plan's file without .json. Machines that run the same program share one file."""
        _, topology, data, fsdp, _ = MACHINES[self.machine]
        parts = (self.recipe, topology, f"{data}x{fsdp}", self.use)
        number = "" if self.use == "generation" else f"-{self.microbatches}"
        return "-".join(parts).replace(":", "-") + number

    def text(self, plan: dict | None) -> str:
        """The text of the cell; "not compiled" if there is no plan."""
        if plan is None:
            return "not compiled"
        most, *_ = MACHINES[self.machine]
        if self.use != "generation":
            available = most or plan["available"]
            size = f"{plan['needed'] / 2**30:.1f} of {available / 2**30:.1f} GiB"
            if plan["needed"] > available:
                return f"no: {size}"
            time = "" if most else f", {plan['seconds']:.2f} s a step ({plan['limit']})"
            parts = (
                "1 microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
            )
            return f"{size}, {parts}{time}"
        # The largest batch that fits, at temperature 1.
        fitting = [
            (max(one["prefill"], one["needed"]), one)
            for one in plan["plans"]
            if one["temperature"] == 1
            and one["needed"] is not None
            and max(one["prefill"], one["needed"]) <= (most or one["available"])
        ]
        if not fitting:
            return "no"
        needed, one = fitting[-1]
        rate = "" if most else f", at most {one['tokens_per_second']:,.0f} tokens/s"
        available = most or one["available"]
        return f"batch {one['batch']}: {needed / 2**30:.1f} of {available / 2**30:.1f} GiB{rate}"
