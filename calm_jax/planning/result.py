"""The finished plan of a training step, and advice for one that does not fit into memory."""

import dataclasses
from collections.abc import Mapping

from calm_jax.config import Config
from calm_jax.parallel.devices import Accelerator


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in a step: their number, and the bytes that each device receives (`Collective.moved`)."""

    count: int
    bytes: float


def limits(
    accelerator: Accelerator, computed: float, moved: float, received: float
) -> dict[str, float]:
    """Lower bounds on a program's time in seconds, one for each resource that may limit it, at the device's peak rates.

    Args:
      accelerator: one device's rates.
      computed: FLOPs of one device.
      moved: bytes that one device reads from and writes to its memory.
      received: bytes that one device receives from others.
    """
    return {
        "compute": computed / accelerator.flops,
        "memory bandwidth": moved / accelerator.bandwidth,
        "network": received / accelerator.interconnect,
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Time, memory and traffic of one training step on given hardware.

    Attributes:
      topology: the hardware, such as "v5e:4x4".
      mesh: sizes of the mesh's axes.
      stage: "autoencoder" or "lm".
      parameters: number of trained parameters by part of the model.
      frozen: number of frozen parameters by part of the model.
      state_bytes: bytes over all devices, by kind (`calm_jax.cost.sizes.state_bytes`).
      chosen: the keys that decide what a step keeps in memory, with their values.
      tokens: tokens in a step's batch.
      flops: FLOPs of the step over all devices, counted from the recipe's sizes (`calm_jax.cost.flops.training`).
      recomputed: additional FLOPs that the backward pass spends on recomputing activations.
      xla_flops: FLOPs of one device by XLA's cost analysis, which counts a loop's body once; NaN if unknown.
      memory: bytes of one device by kind.
      needed: the sum of `memory`; also known for a step that does not fit.
      available: bytes of one device that a program may use.
      memory_traffic: bytes that each device reads from and writes to its memory in a step (`calm_jax.planning.memory_traffic`);
        NaN for a step that does not fit.
      collectives: by kind; empty for a step that does not fit.
      ideal_traffic: bytes that a device would receive in ideal FSDP (`calm_jax.cost.sizes.fsdp_traffic`).
      unknown_loops: loops whose number of iterations was not found and was taken as 1 for `collectives` and `memory_traffic`.
      num_steps: steps of the whole stage.
      accelerator: the devices' peak rates.
      num_devices: number of devices.
    """

    topology: str
    mesh: dict[str, int]
    stage: str
    parameters: Mapping[str, int]
    frozen: Mapping[str, int]
    state_bytes: dict[str, int]
    chosen: dict[str, int | str]
    tokens: int
    flops: float
    recomputed: float
    xla_flops: float
    memory: dict[str, float]
    needed: float
    available: float
    memory_traffic: float
    collectives: dict[str, Traffic]
    ideal_traffic: float
    unknown_loops: tuple[str, ...]
    num_steps: int
    accelerator: Accelerator
    num_devices: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def traffic(self) -> float:
        """Bytes that each device receives in a step."""
        return sum(kind.bytes for kind in self.collectives.values())

    @property
    def limits(self) -> dict[str, float]:
        """Lower bounds on a step's time in seconds, one for each resource, at the peak rates (see the function `limits`)."""
        computed = (self.flops + self.recomputed) / self.num_devices
        return limits(self.accelerator, computed, self.memory_traffic, self.traffic)

    @property
    def limit(self) -> str:
        """The one of `limits` that takes longest."""
        return max(self.limits, key=lambda name: self.limits[name])

    def seconds(self, efficiency: float) -> float:
        """Duration of a step in seconds at `efficiency` times the peak rates, if compute, memory and network overlap fully."""
        return self.limits[self.limit] / efficiency

    def hours(self, efficiency: float) -> float:
        """Duration of all steps in hours."""
        return self.num_steps * self.seconds(efficiency) / 3600

    def utilisation(self, efficiency: float) -> float:
        """Model FLOPs utilisation (MFU); with efficiency 1 an upper bound for this program."""
        peak = self.num_devices * self.accelerator.flops
        return self.flops / (self.seconds(efficiency) * peak)


def advice(config: Config, stage: str, plan: Plan) -> list[str]:
    """Changes of the config that may make a plan fit, in one line each, the cheapest first."""
    section = getattr(config, stage)
    steps = int(plan.chosen[f"{stage}.training.accumulation_steps"])
    rows = section.training.batch_size // steps
    ways = plan.mesh["data"] * plan.mesh["fsdp"]
    ideas = []
    state = sum(plan.memory[kind] for kind in ("parameters", "optimizer", "frozen"))
    if state > plan.available / 2:
        ideas.append(
            f"parameters and optimizer take {state / 2**30:.1f} GiB: more devices along mesh.fsdp (now "
            f"{plan.mesh['fsdp']}) or mesh.tensor (now {plan.mesh['tensor']})"
        )
    if rows > ways:
        most = section.training.batch_size // ways
        ideas.append(
            f"--config.{stage}.training.accumulation_steps={min(most, 2 * steps)} or more, up to "
            f"{most} here (now {steps}): temporaries shrink, traffic grows"
        )
    if stage == "lm" and plan.chosen["lm.model.remat"] != "full":
        ideas.append(
            "--config.lm.model.remat=full: the backward pass recomputes the layers' activations instead of keeping them"
        )
    if stage == "lm" and config.lm.model.attention == "xla":
        positions = section.data.block_tokens // config.chunk_size
        scores = 4.0 * rows / ways * config.lm.model.num_heads * positions**2
        if scores > plan.available / 10:
            ideas.append(
                f"--config.lm.model.attention=auto: with xla, a layer's attention scores take {scores / 2**30:.1f} GiB; fused kernels "
                "do not store them"
            )
    if not ideas:
        ideas.append("more devices, or devices with more memory: nothing else is left to shrink")
    return ideas
