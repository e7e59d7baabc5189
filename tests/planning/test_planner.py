"""The planner: topologies, memory, times, advice; and real steps where the compilers are installed."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from calm_jax.config import Config, resolve
from calm_jax.data.tokenizers import Vocabulary, vocabulary
from calm_jax.errors import UserError
from calm_jax.parallel.devices import accelerator
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.planning import planner, topology
from calm_jax.planning.fitting import too_large, with_choice
from calm_jax.planning.planner import Lowered
from calm_jax.planning.result import Plan, Traffic, advice
from configs import calm_m, calm_xl, quickstart
from tests.workdirs import ROOT

NO_TPU = importlib.util.find_spec("libtpu") is None
NO_CUDA = (
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None
    if importlib.util.find_spec("jax_plugins")
    else True
)
need_tpu = pytest.mark.skipif(
    NO_TPU, reason="no libtpu: pip install -c constraints.txt -e '.[plan]'"
)
need_cuda = pytest.mark.skipif(NO_CUDA, reason="no jax-cuda13-plugin and jax-cuda13-pjrt")


def test_a_topology_is_parsed_from_family_and_size():
    assert str(topology.parse("v5e:4x8")) == "v5e:4x8"
    assert topology.parse("v5p:2x2x4").num_devices == 16
    assert topology.parse("h100:8x4").num_devices == 32
    for name in topology.FAMILIES:
        found = [one.num_devices for one in topology.of_family(name)]
        assert found == sorted(found)
        assert all(one.accelerator.memory > 1e10 for one in topology.of_family(name))
    # GPUs of several hosts exchange over the network.
    assert topology.parse("h100:8").accelerator == accelerator("NVIDIA H100")
    assert topology.parse("h100:8x2").accelerator.interconnect < 1e11


@pytest.mark.parametrize(
    "text, names",
    [
        ("v5e:3x3", ["'v5e:3x3'", "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"]),
        ("v7:2x2", ["'v7:2x2'", "v4: 2x2x1", "v5e: 1x1", "v5p: ", "v6e: ", "h100: 1, 2, 4, 8"]),
        ("v5e", ["v5e has no size ''"]),
    ],
)
def test_an_unknown_topology_is_refused_with_the_valid_ones(text, names):
    with pytest.raises(UserError) as refusal:
        topology.parse(text)
    for name in names:
        assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_family_is_refused_with_the_valid_ones():
    with pytest.raises(UserError, match="'v9' is none of v4, v5e, v5p, v6e, h100"):
        topology.of_family("v9")


@pytest.mark.parametrize(
    "name, installation",
    [("v5e:2x2", r"'\.\[plan\]'"), ("h100:8", r"'\.\[plan-cuda\]'")],
)
def test_the_error_for_a_missing_compiler_says_how_to_install_it(monkeypatch, name, installation):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=rf"{name}: .*pip install -c constraints.txt -e {installation} in the clone"
    ):
        topology.parse(name).devices()


def test_the_sizes_of_llamas_vocabulary_need_no_file(tmp_path):
    config = resolve(calm_m.get_config())
    assert vocabulary(config.tokenizer) == Vocabulary(128257, 128256)
    tokenizer = dataclasses.replace(config.tokenizer, kind="bytes")
    assert vocabulary(tokenizer) == Vocabulary(259, 258)
    tokenizer = dataclasses.replace(tokenizer, kind="sentencepiece")
    assert vocabulary(tokenizer) == Vocabulary(512, 3)
    missing = dataclasses.replace(config.tokenizer, path=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"tokenizer\.path="):
        vocabulary(missing)


def a_plan(needed: float, available: float, **changes) -> Plan:
    values = {
        "topology": "v5e:2x2",
        "mesh": {"data": 1, "fsdp": 4, "tensor": 1},
        "stage": "lm",
        "parameters": {"all": 10},
        "frozen": {},
        "state_bytes": {},
        "chosen": {"lm.training.accumulation_steps": 1, "lm.model.remat": "none"},
        "tokens": 1000,
        "flops": 4 * 197e12,
        "recomputed": 0.0,
        "xla_flops": 1.0,
        "memory": {"parameters": needed, "optimizer": 0.0, "frozen": 0.0},
        "needed": needed,
        "available": available,
        "memory_traffic": 100e9,
        "collectives": {"all-gather": Traffic(3, 100e9)},
        "ideal_traffic": 50e9,
        "unknown_loops": (),
        "num_steps": 10,
        "accelerator": accelerator("TPU v5 lite"),
        "num_devices": 4,
    }
    return Plan(**values | changes)


def test_a_step_takes_as_long_as_its_slowest_limit():
    computing = a_plan(1, 2)
    assert computing.limit == "compute"
    assert computing.seconds(1) == pytest.approx(1)
    assert computing.seconds(0.5) == pytest.approx(2)
    assert computing.utilisation(0.5) == pytest.approx(0.5)
    exchanging = a_plan(1, 2, collectives={"all-gather": Traffic(1, 800e9)})
    assert (exchanging.limit, exchanging.seconds(1)) == ("network", pytest.approx(4))
    assert exchanging.utilisation(1) == pytest.approx(0.25)
    moving = a_plan(1, 2, memory_traffic=2 * 819e9)
    assert (moving.limit, moving.seconds(1)) == ("memory bandwidth", pytest.approx(2))
    # Recomputation takes time and does not count as utilisation.
    again = a_plan(1, 2, recomputed=4 * 197e12)
    assert (again.seconds(1), again.utilisation(1)) == pytest.approx((2, 0.5))


@pytest.mark.parametrize(
    "message, found",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (52.87G) "
            "exceeds available HBM (15.75G).",
            (52.87 * 2**30, 15.75 * 2**30, False),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.10G of "
            "15.75G hbm. Exceeded hbm capacity by 4.35G.",
            (20.1 * 2**30, 15.75 * 2**30, True),
        ),
        ("INTERNAL: something else of 3G", None),
    ],
)
def test_needed_memory_is_read_from_the_compilers_error(message, found):
    assert too_large(message) == (found and pytest.approx(found))


def given(config: Config) -> Config:
    """The config with values for its automatic keys."""
    return with_choice(config, {"lm.training.accumulation_steps": 1, "lm.model.remat": "none"})


@pytest.fixture
def fake_hardware(monkeypatch):
    """Replaces `prepare`: a step's arguments have 100 GiB over all devices, and the batch has to divide over them."""

    def prepare(config: Config, stage: str, one: topology.Topology) -> Lowered:
        training, ways = config.lm.training, one.num_devices
        if training.batch_size // training.accumulation_steps % ways:
            raise UserError(f"does not divide over {ways}")
        size = 100 * 2**30 / ways
        mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
        return Lowered(config, stage, one, mesh, Vocabulary(9, 8), {"parameters": size}, lambda: 0)

    monkeypatch.setattr(planner, "prepare", prepare)


@pytest.mark.usefixtures("fake_hardware")
def test_fit_skips_sizes_whose_memory_the_arguments_exceed_and_ends_with_the_first_that_fits():
    config, compiled, notes = given(resolve(calm_m.get_config())), [], []

    def compile_step(lowered: Lowered) -> Plan:
        assert lowered.config.mesh == MeshConfig(data=1, fsdp=-1, tensor=1)
        compiled.append(str(lowered.topology))
        needed = 3 * lowered.arguments["parameters"]
        return a_plan(needed, 15.75 * 2**30)

    tries = planner.fit(config, "lm", topology.of_family("v5e"), compile_step, notes.append)
    # 1 and 4 devices have too little for the arguments; three times as much, which the step needs, takes 32 devices.
    assert compiled == ["v5e:2x4", "v5e:4x4", "v5e:4x8"]
    assert [bool(one.why_not) for one in tries] == [True] * 4 + [False]
    assert notes[0] == "v5e:1x1: 100.0 GiB of parameters and state, of 16.0 GiB"
    assert notes[2] == "v5e:2x4: needs 37.5 GiB of 15.8 GiB"
    assert notes[-1] == "v5e:4x8: fits"


def test_a_fault_of_the_recipe_is_not_tried_on_every_size(tmp_path):
    tree, notes = calm_m.get_config(), []
    tree.tokenizer.path = f"{tmp_path}/missing"
    with pytest.raises(UserError, match="missing"):
        planner.fit(
            resolve(tree), "lm", topology.of_family("v5e"), lambda _: a_plan(2, 1), notes.append
        )
    assert not notes


@pytest.mark.usefixtures("fake_hardware")
def test_fit_skips_sizes_that_do_not_divide_the_batch():
    config = given(resolve(calm_m.get_config()))
    training = dataclasses.replace(config.lm.training, batch_size=8)
    config = dataclasses.replace(config, lm=dataclasses.replace(config.lm, training=training))
    tries = planner.fit(
        config, "lm", topology.of_family("v5e"), lambda _: a_plan(2, 1), lambda _: None
    )
    assert [str(one.topology) for one in tries if one.plan] == ["v5e:2x4"]
    assert tries[-1].why_not == "does not divide over 256"


def test_advice_names_the_config_keys_that_reduce_memory():
    tree, gib = calm_xl.get_config(), 2**30
    tree.lm.model.attention = "xla"
    config = resolve(tree)
    large = a_plan(
        30 * gib, 16 * gib, memory=dict.fromkeys(("parameters", "optimizer", "frozen"), 10 * gib)
    )
    ideas = "\n".join(advice(config, "lm", large))
    for key in ("mesh.fsdp", "accumulation_steps=2 or more, up to 64", "remat", "attention"):
        assert key in ideas
    small = dataclasses.replace(large, mesh={"data": 1, "fsdp": 256, "tensor": 1})
    assert "accumulation_steps" not in "\n".join(advice(config, "lm", small))


def plan(
    *options: str, module: str = "calm_jax.plan", **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        (["--topology=v5e:3x3"], "v5e has no size '3x3'"),
        ([], "either --topology=v5e:4x4, or --fit=v5e"),
        (["--topology=v5e:4x4", "--fit=v5e"], "either --topology=v5e:4x4, or --fit=v5e"),
        (["--fit=v9"], "--fit='v9' is none of"),
        (["--topology=v5e:2x2", "--efficiency=2"], "--efficiency=2 must be in (0, 1]"),
        (
            ["--topology=v5e:2x2", "--stage=generate", "--price_per_hour=2"],
            "--price_per_hour=2 has no meaning with --stage=generate",
        ),
    ],
)
def test_invalid_flags_are_one_line_of_error(options, message):
    done = plan("--config=configs/quickstart.py", *options)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_existing_file_is_kept(tmp_path):
    (tmp_path / "plan.json").write_text("mine")
    output = f"--output={tmp_path / 'plan.json'}"
    done = plan("--config=configs/quickstart.py", "--topology=v5e:2x2", output)
    refusal = f"error: {output} already exists: give another name, or --overwrite\n"
    assert (done.returncode, done.stderr) == (2, refusal)
    assert (tmp_path / "plan.json").read_text() == "mine"


SMALL = [
    "--config=configs/quickstart.py",
    "--config.lm.model.num_layers=4",
    "--config.compute_dtype=bfloat16",
    "--config.lm.training.batch_size=32",
    "--config.lm.model.remat=full",
]


@pytest.mark.slow
@need_tpu
@pytest.mark.parametrize("stage", ["lm", "autoencoder"])
def test_a_step_is_planned_for_a_tpu(tmp_path, stage):
    options = [
        "--topology=v5e:2x4",
        "--config.mesh.data=2",
        "--config.mesh.fsdp=4",
        f"--stage={stage}",
    ]
    output = f"--output={tmp_path / 'plan.json'}"
    batch = "--config.autoencoder.training.batch_size=32"
    done = plan(*SMALL, *options, batch, output, "--price_per_hour=2")
    assert done.returncode == 0, done.stderr
    assert "compiling" in done.stderr
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["fits"] and not record["unknown_loops"]
    assert record["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    assert record["cost"] == pytest.approx(2 * record["device_hours"])
    assert 0 < record["utilisation_bound"] <= 1
    config = resolve(quickstart.get_config())
    steps = getattr(config, stage).training.num_steps
    assert record["device_hours"] == pytest.approx(8 * steps * record["seconds"] / 3600)
    assert "all-gather" in done.stdout and "cost" in done.stdout


@pytest.mark.slow
@need_tpu
@pytest.mark.parametrize(
    "options", [["--config.mesh.fsdp=3"], ["--config.lm.training.batch_size=6"]]
)
def test_a_mesh_or_batch_that_does_not_divide_is_one_line_of_error(options):
    done = plan("--config=configs/quickstart.py", "--topology=v5e:2x2", *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
@need_cuda
def test_a_step_is_planned_for_gpus(tmp_path):
    output = f"--output={tmp_path / 'plan.json'}"
    done = plan(*SMALL, "--topology=h100:8", "--config.mesh.data=1", "--config.mesh.fsdp=8", output)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["fits"] and record["collectives"]["all-gather"]["bytes"] > 0


# CALM-M with fewer layers, but so wide that the traffic of biases and activations is small.
NARROW_M = [
    "--config=configs/calm_m.py",
    "--config.lm.model.num_layers=2",
    "--config.lm.head.num_blocks=2",
    "--config.lm.training.batch_size=16",
    "--config.lm.data.block_tokens=1024",
    "--config.lm.model.remat=full",
]


@pytest.mark.slow
@need_tpu
@pytest.mark.parametrize("mesh", [("v5e:4x4", 1, 16), ("v5e:4x4", 2, 8)], ids=["fsdp", "data-fsdp"])
def test_a_sharded_step_has_at_most_1_1_times_the_traffic_of_ideal_fsdp(tmp_path, mesh):
    name, data, fsdp = mesh
    done = plan(
        *NARROW_M,
        f"--topology={name}",
        f"--config.mesh.data={data}",
        f"--config.mesh.fsdp={fsdp}",
        f"--output={tmp_path / 'plan.json'}",
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["traffic"] <= 1.1 * record["ideal_traffic"]
    assert record["traffic"] >= 0.5 * record["ideal_traffic"]


@pytest.mark.slow
def test_the_benchmark_times_a_step_on_this_machines_devices(tmp_path):
    recipe = "--config=tests/tiny_recipe.py:nothing"
    measured = [recipe, "--suite=train", "--stage=lm"]
    output = f"--output={tmp_path / 'results.json'}"
    done = plan(*measured, "--repeats=2", output, module="benchmarks")
    assert done.returncode == 0, done.stderr
    [one] = json.loads((tmp_path / "results.json").read_text())["results"]
    assert one["case"] == "lm" and one["runs"] == 2 and one["tokens_per_s"] > 0
    refused = plan(*measured, "--config.mesh.data=3", module="benchmarks")
    assert refused.returncode == 2 and refused.stderr.startswith("error: mesh: data=3")
