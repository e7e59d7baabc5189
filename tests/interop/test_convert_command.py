"""The commands convert and export as processes: dry run, devices, refusals, full disk, use of the workdir, memory."""

import json
import os
import re
import resource

import numpy as np
import pytest

from calm_jax.cli.ownership import is_foreign
from calm_jax.run.workdir import Workdir
from tests.interop.checkpoints import assert_same, listing
from tests.interop.conversions import checkpoint_rows, params, random_workdir
from tests.interop.weight_files import SAFE, write_safetensors
from tests.workdirs import run, run_program, start


@pytest.mark.slow
def test_a_dry_run_prints_every_name_and_writes_nothing(golden, tokenizer_file, tmp_path):
    arguments = (f"--source={golden / 'energy_k4'}", f"--tokenizer={tokenizer_file}", "--dry_run")
    shown = run("calm_jax.interop.convert", *arguments, f"--workdir={tmp_path / 'w'}")
    assert listing(tmp_path) == []
    assert run("calm_jax.interop.convert", *arguments) == shown
    for stage, (rows, _) in checkpoint_rows(golden / "energy_k4").items():
        for row in rows:
            (line,) = re.findall(rf"^{stage}/{re.escape(row.parameter)} .*$", shown, re.M)
            assert row.published in line and "float32" in line
    assert "2 x 32 x 4 x 8" in shown


@pytest.mark.slow
def test_a_conversion_on_two_devices_writes_the_same_parameters(
    golden, tokenizer_file, converted, tmp_path
):
    shown = run(
        "calm_jax.interop.convert",
        f"--source={golden / 'energy_k4'}",
        f"--tokenizer={tokenizer_file}",
        f"--workdir={tmp_path / 'two'}",
        "--config.mesh.fsdp=2",
        xla_flags="--xla_force_host_platform_device_count=2",
    )
    assert "is ready" in shown
    assert_same(params(Workdir(tmp_path / "two")), params(converted(golden / "energy_k4")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Also before the weights are downloaded.
        (("--source=nobody/none", "--config.chunk_size=8"), "the checkpoint decides"),
        (("--config.chunk_size=8",), "the checkpoint decides"),
        (("--config.chunk_sighs=8",), "chunk_sighs"),
        (("--config.lm.head.solver=euler",), "solver"),
        (("--config.mesh.fsdp=2",), "does not make up 1 device"),
        (("--tokenizer=",), "--tokenizer=FILE"),
        (("--source=nobody/none", "--tokenizer=no"), "--tokenizer='no' is no file"),
        (("--autoencoder=nowhere",), "--autoencoder='nowhere'"),
        (("more",), "unexpected argument 'more'"),
    ],
)
def test_a_refusal_of_the_command_is_one_line(arguments, words, golden, tokenizer_file, tmp_path):
    given = [f"--source={golden / 'energy_k4'}", f"--tokenizer={tokenizer_file}"]
    line = run(
        "calm_jax.interop.convert", *given, f"--workdir={tmp_path / 'w'}", *arguments, status=2
    )
    assert words in line and listing(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_one_line(golden, tokenizer_file, tmp_path):
    """A limit on the size of files simulates the full disk."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = start(
        "calm_jax.interop.convert",
        f"--source={golden / 'energy_k4'}",
        f"--tokenizer={tokenizer_file}",
        f"--workdir={tmp_path / 'w'}",
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and "could not be written" in re.search(r"error: .*", err)[0]
    # What Orbax's threads write after the command has deleted everything is left to the next command.
    assert not (tmp_path / "w").exists() and not is_foreign(tmp_path / ".w.unfinished")


@pytest.mark.slow
def test_a_converted_model_can_generate_be_evaluated_and_fine_tuned(text_glob, tmp_path):
    random_workdir(tmp_path / "ours", "head=energy,k=2")
    out, workdir, tuned = tmp_path / "out", tmp_path / "workdir", tmp_path / "tuned"
    shown = run("calm_jax.interop.export", f"--workdir={tmp_path / 'ours'}", f"--target={out}")
    assert "num_target_samples=4" in shown and "is ready" in shown
    assert json.loads((out / "config.json").read_text())["ae_path"] == str(out / "autoencoder")
    shown = run(
        "calm_jax.interop.convert",
        f"--source={out}",
        f"--workdir={workdir}",
        "--tokenizer=bytes",
        "--config.lm.data.block_tokens=32",
        "--config.autoencoder.data.block_tokens=32",
        "--config.eval.context_tokens=16",
        "--config.eval.block_tokens=32",
        # Small sizes, to compile quickly.
        "--config.sample.num_candidates=8",
        "--config.sample.max_draws=48",
        "--config.sample.draws_at_once=16",
        "--config.sample.max_tokens=4",
    )
    assert "is ready" in shown and Workdir(workdir).is_converted

    text = run(
        "calm_jax.generate", f"--workdir={workdir}", "--prompt=def ", "--max_tokens=4", "--seed=1"
    )
    assert text.startswith("def ")

    stored = f"--config=configs/workdir.py:{workdir}"
    line = run("calm_jax.main", stored, f"--workdir={workdir}", status=2)
    assert "configs/finetune.py" in line
    line = run("calm_jax.main", stored, f"--workdir={workdir}", "--mode=eval", status=2)
    assert "data.validation_files is empty: name text to score the converted weights on" in line
    before = params(Workdir(workdir))
    shown = run(
        "calm_jax.main",
        stored,
        f"--workdir={workdir}",
        "--mode=eval",
        f"--config.data.validation_files={text_glob.replace('*', '0')}",
    )
    assert "converted" in shown and "BrierLM" in shown

    records = tmp_path / "records.jsonl"
    pairs = [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(60)]
    records.write_text("\n".join(map(json.dumps, pairs)))
    run(
        "calm_jax.main",
        f"--config=configs/finetune.py:{workdir}",
        f"--workdir={tuned}",
        f"--config.data.train_files={records}",
        "--config.lm.training.num_steps=2",
        "--config.lm.training.batch_size=4",
        "--config.autoencoder.min_accuracy=0.0",
    )
    assert_same(params(Workdir(workdir)), before)
    after = params(Workdir(tuned))
    for name in after:
        # Two small steps change the language model a little, and the frozen autoencoder not at all.
        np.testing.assert_allclose(after[name], before[name], atol=1e-3, err_msg=name)
        if name.startswith("autoencoder/"):
            np.testing.assert_array_equal(after[name], before[name])
    assert any((after[name] != before[name]).any() for name in after)
    assert not Workdir(tuned).is_converted


# --- Memory


# Prints the peak memory in MiB after a tiny conversion, and after a large one. Read from /proc, as getrusage's peak starts
# with that of the parent process.
_MEMORY = """
import pathlib, re, sys
from calm_jax.interop.converted import convert
from calm_jax.interop.conversion import make_plan
from calm_jax.data.tokenizers import open_tokenizer
from configs import ar_m, common

for source in sys.argv[1:]:
    source = pathlib.Path(source)
    tokenizer, config = open_tokenizer("bytes")
    plan = make_plan(source, None, tokenizer, config, {False: ar_m.get_config()}, {})
    convert(plan, source.with_name(source.name + "-converted"))
    status = pathlib.Path("/proc/self/status").read_text()
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 2**10)
"""


def llama(folder, width, inner, layers):
    """Writes a random Llama with a byte vocabulary; returns the size of its float32 parameters in bytes."""
    rng, tensors = np.random.default_rng(0), {}

    def add(name, *shape):
        tensors[name] = rng.standard_normal(shape, np.float32)

    add("model.embed_tokens.weight", 259, width)
    for layer in range(layers):
        beginning = f"model.layers.{layer}."
        for name in "qkvo":
            add(f"{beginning}self_attn.{name}_proj.weight", width, width)
        for name in ("gate", "up"):
            add(f"{beginning}mlp.{name}_proj.weight", inner, width)
        add(f"{beginning}mlp.down_proj.weight", width, inner)
        add(f"{beginning}input_layernorm.weight", width)
        add(f"{beginning}post_attention_layernorm.weight", width)
    add("model.norm.weight", width)
    add("lm_head.weight", 259, width)
    folder.mkdir()
    write_safetensors(folder / SAFE, tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 259,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return 4 * sum(tensor.size for tensor in tensors.values())


@pytest.mark.slow
def test_a_conversion_holds_one_copy_of_the_model_in_memory(tmp_path):
    llama(tmp_path / "small", 64, 96, 2)
    width, inner, layers = 768, 2048, 20
    size = llama(tmp_path / "large", width, inner, layers)
    done = run_program(_MEMORY, str(tmp_path / "small"), str(tmp_path / "large"))
    before, after = map(float, done.stdout.split())
    size, stacked = size / 2**20, 4 * width * inner * layers / 2**20
    # A second copy would need `size` more. The writer's buffers take 300 MiB, also for twice as many layers.
    slack = 400
    assert size > 1.3 * slack
    assert after - before < size + stacked + slack, (before, after, size, stacked)
