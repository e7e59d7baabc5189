"""Writes the generation of a run's model as StableHLO, a program that JAX runs without calm_jax.

    python -m calm_jax.interop.stablehlo --workdir=DIR --target=OUT [--batch=1] [--prompt_chunks=16] [--new_chunks=16]
        [--temperature=T] [--platforms=cpu,cuda,tpu]

OUT gets generate.stablehlo (of `jax.export`), parameters.npz and program.json, which describes arguments and results. Shapes
are fixed: B prompts of up to L chunks of K tokens, and S new chunks. docs/checkpoints.md has a program that loads OUT. The
tokens are those of `Generator.generate` for the same seed and prompts of whole chunks. OUT gets its name only when complete.
"""

import dataclasses
import json

import flax.traverse_util
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.command import command
from calm_jax.cli.files import atomic_folder, refuse_existing
from calm_jax.cli.flags import define_fraction, given_folder, parse_flags
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError
from calm_jax.models.layers import in_compute_dtype
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.rng import named
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.decode import generate_chunks, read_prompts, with_room
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.sampling.search import Sampled
from calm_jax.tasks import LmTask

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained run")
_TARGET = flags.DEFINE_string("target", "", "folder to make")
_BATCH = flags.DEFINE_integer("batch", 1, "B, prompts of one call", lower_bound=1)
_PROMPT_CHUNKS = flags.DEFINE_integer("prompt_chunks", 16, "L, room for a prompt", lower_bound=1)
_NEW_CHUNKS = flags.DEFINE_integer("new_chunks", 16, "S, chunks to generate", lower_bound=1)
_TEMPERATURE = define_fraction("temperature", None, "that of the run's config unless given")
_PLATFORMS = flags.DEFINE_list("platforms", ["cpu", "cuda", "tpu"], "where the program shall run")


def _flat(tree: dict) -> dict[str, Array]:
    return flax.traverse_util.flatten_dict(tree, sep="/")


def export_generation(
    task: LmTask,
    config: Config,
    tokenizer: Tokenizer,
    shapes: dict[str, jax.ShapeDtypeStruct],
    prompt: tuple[int, int],
    new_chunks: int,
    platforms: list[str],
) -> jax.export.Exported:
    """The generation of `config.sample` as an exported function.

    Args:
      task: the language model.
      config: the config of the run.
      tokenizer: the tokenizer of the run.
      shapes: shapes and dtypes of the parameters, by path: "lm/..." and "autoencoder/...".
      prompt: B and L.
      new_chunks: S.
      platforms: JAX's names of the platforms to lower for.

    Returns:
      The function `(parameters, prompt int32 [B, L, K], length int32 [B], seed uint32) -> (tokens int32 [B, S, K], number
      of chunks int32 [B])`. Chunks of a prompt after its first `length` are ignored; a row's tokens after its last chunk,
      which holds eos if it is not the S-th, are undefined.
    """
    batch, prompt_chunks = prompt
    size, context = prompt_chunks + new_chunks, config.max_chunks
    sampler = config.sample.sampler_config

    def generate(
        flat: dict[str, Array], prompt_BLK: Array, length_B: Array, seed: Array
    ) -> tuple[Array, Array]:
        tree = flax.traverse_util.unflatten_dict(flat, sep="/")
        frozen = {"params": tree["autoencoder"]} if config.has_autoencoder else {}
        model = task.bind(in_compute_dtype(tree["lm"], config.compute_dtype), frozen)
        key_B = jax.vmap(
            lambda row: jax.random.fold_in(named(jax.random.key(seed), "generate"), row)
        )(jnp.arange(batch))

        def next_chunk(h_BD: Array, step: Array, active_B: Array) -> Sampled:
            step_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, step)
            return sample_chunk(model, h_BD, step_key_B, active_B, sampler)

        state = read_prompts(model, prompt_BLK, length_B, prompt_chunks, context, prompt_chunks)
        state = with_room(state, batch, size)
        _, chunks = generate_chunks(
            model, state, new_chunks, new_chunks, tokenizer.eos_id, next_chunk
        )
        return chunks.tokens, (chunks.draws > 0).sum(1, dtype=jnp.int32)

    int32 = jnp.int32
    return jax.export.export(jax.jit(generate), platforms=platforms)(
        shapes,
        jax.ShapeDtypeStruct((batch, prompt_chunks, config.chunk_size), int32),
        jax.ShapeDtypeStruct((batch,), int32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )


@command
def main(argv: list[str]) -> None:
    workdir = Workdir(given_folder(_WORKDIR, "the folder of a trained run"))
    target = given_folder(_TARGET, "the folder to make")
    refuse_existing(target)
    known = {"cpu", "cuda", "rocm", "tpu"}
    if not _PLATFORMS.value or not set(_PLATFORMS.value) <= known:
        raise UserError(
            f"--platforms={','.join(_PLATFORMS.value)} must be some of {', '.join(sorted(known))}"
        )
    config, tokenizer = workdir.config, workdir.tokenizer
    if _TEMPERATURE.value is not None:
        sample = dataclasses.replace(config.sample, temperature=_TEMPERATURE.value)
        config = dataclasses.replace(config, sample=sample)
    size = _PROMPT_CHUNKS.value + _NEW_CHUNKS.value
    if size > config.max_chunks:
        raise UserError(
            f"--prompt_chunks={_PROMPT_CHUNKS.value} and --new_chunks={_NEW_CHUNKS.value} make {size} chunks, and the model's "
            f"context is {config.max_chunks}"
        )
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    lm = make_lm_task(config, tokenizer)
    params = {"lm": workdir.load_params("lm", lm, mesh)}
    if config.has_autoencoder:
        autoencoder = make_autoencoder_task(config, tokenizer)
        params["autoencoder"] = workdir.load_params("autoencoder", autoencoder, mesh)
    arrays = {path: np.asarray(x) for path, x in _flat(params).items()}
    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in arrays.items()}
    prompt = _BATCH.value, _PROMPT_CHUNKS.value
    exported = export_generation(
        lm, config, tokenizer, shapes, prompt, _NEW_CHUNKS.value, _PLATFORMS.value
    )
    about = {
        "arguments": ["parameters", "prompt [B, L, K]", "length [B]", "seed"],
        "results": ["tokens [B, S, K]", "chunks [B]"],
        "B": _BATCH.value,
        "L": _PROMPT_CHUNKS.value,
        "S": _NEW_CHUNKS.value,
        "K": config.chunk_size,
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "pad": tokenizer.pad_id,
        "sampler": dataclasses.asdict(config.sample.sampler_config),
        "platforms": _PLATFORMS.value,
    }
    with atomic_folder(target, "--target") as folder:
        (folder / "generate.stablehlo").write_bytes(exported.serialize())
        np.savez(folder / "parameters.npz", **arrays)  # type: ignore[arg-type]
        (folder / "program.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{target} is ready: {sum(x.size for x in arrays.values()):,} parameters")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
