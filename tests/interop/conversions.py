"""Conversions and exports for tests: the parameters of the workdirs that they write and read."""

import io

import flax.traverse_util
import jax
import numpy as np
import sentencepiece

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.interop import names, published
from calm_jax.interop.weights import Weights
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run.workdir import Workdir
from calm_jax.training.checkpoint import save_params
from tests import tiny_recipe
from tests.tiny_model import random_params

# The special ids of the golden checkpoints.
SPECIAL = {"bos_id": 94, "eos_id": 95, "pad_id": 96}


def sentencepiece_model(**ids):
    """A SentencePiece model of 97 tokens with the given special ids, serialised."""
    text = (
        "the cat sat on the mat and ran after a small dog 0123456789 (x) = [y]; def foo: return bar"
    )
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 50),
        model_writer=written,
        model_type="bpe",
        vocab_size=97,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        character_coverage=1.0,
        unk_id=0,
        minloglevel=2,
        **ids,
    )
    return written.getvalue()


def one_device():
    return make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def tasks(workdir):
    """The task of each stage that the workdir has parameters of."""
    made = {}
    config, tokenizer = workdir.config, workdir.tokenizer
    if config.has_autoencoder:
        made["autoencoder"] = make_autoencoder_task(config, tokenizer)
    if workdir.checkpoints("lm").exists():
        made["lm"] = make_lm_task(config, tokenizer)
    return made


def params(workdir):
    """Every parameter of a workdir, by stage/path."""
    flat = {}
    for stage, task in tasks(workdir).items():
        tree = workdir.load_params(stage, task, one_device())
        for name, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
            flat[f"{stage}/{name}"] = np.asarray(value)
    return flat


def checkpoint_rows(folder):
    """The table and the weights of each stage of a golden checkpoint, to read it without a conversion."""
    config, weights = published.PublishedConfig(folder), Weights(folder)
    kind = config.architecture
    if kind == published.AUTOENCODER:
        return {"autoencoder": (names.autoencoder_rows(config.autoencoder()), weights)}
    body = config.transformer()
    if kind == published.AUTOREGRESSIVE:
        return {"lm": (names.autoregressive_rows(body, tied=False), weights)}
    inside = published.PublishedConfig(folder.parent / config["ae_path"]).autoencoder()
    return {
        "autoencoder": (names.prefixed(names.autoencoder_rows(inside), "ae_model."), weights),
        "lm": (names.calm_rows(body, config.head()), weights),
    }


def random_workdir(folder, arguments, **changes):
    """A workdir of the tiny recipe with random parameters; `a__b=value` changes the key a.b."""
    tree = tiny_recipe.get_config(f"nowhere/*.txt,{arguments}")
    if tree.lm.head.name == "diffusion":
        tree.lm.head.num_steps = 100
    tree.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    config, tokenizer, workdir = resolve(tree), ByteTokenizer(b""), Workdir(folder)
    made = {"lm": make_lm_task(config, tokenizer)}
    if config.has_autoencoder:
        made["autoencoder"] = make_autoencoder_task(config, tokenizer)
    for seed, (stage, task) in enumerate(made.items()):
        params = random_params(task, seed)
        if stage == "lm" and config.has_autoencoder:
            embedding = params["embed"]["tokens"]["embedding"]
            # The pad token's row is zero in every model: it is initialised so and gets no gradient.
            params["embed"]["tokens"]["embedding"] = np.where(
                np.arange(len(embedding))[:, None] == tokenizer.pad_id, 0, embedding
            ).astype(np.float32)
        save_params(workdir.checkpoints(stage), jax.tree.map(jax.numpy.asarray, params), {})
    workdir.create_converted(config, tokenizer, {})
    return workdir
