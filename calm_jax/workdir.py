"""What lies in a workdir, and how to read it.

config.json            the resolved config
tokenizer/             the tokenizer and its fingerprint
corpus.json            fingerprint of the text that was trained on
autoencoder/, lm/      checkpoints of the two stages
metrics.jsonl          and tensorboard/: what was measured
samples.txt            text the model wrote at the end of training
results.json           the final table; there once the run is finished
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from calm_jax import checkpoint
from calm_jax.atomic import write_atomically
from calm_jax.brier import Protocol
from calm_jax.config import Config, as_dict, as_json, differing_keys, leaves, resolve
from calm_jax.data.corpus import Corpus, Source
from calm_jax.data.documents import Document
from calm_jax.data.shards import PreparedText
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError
from calm_jax.heads import LATENT_HEADS
from calm_jax.heads.softmax import SoftmaxHead
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.processes import MARK
from calm_jax.tasks import ArTask, AutoencoderTask, CalmTask, LmTask, Params

# What tells a workdir of converted parameters.
_ORIGIN = "converted.json"
_OWN_FILES = {
    "autoencoder",
    "autoencoder.tmp",
    "config.json",
    "config.json.tmp",
    _ORIGIN,
    "corpus.json",
    "corpus.json.tmp",
    "evaluations.jsonl",
    "init_autoencoder",
    "init_autoencoder.tmp",
    "init_lm",
    "init_lm.tmp",
    "lm",
    "metrics.jsonl",
    "metrics.jsonl.tmp",
    "plane.png",
    "plane.tmp.png",
    MARK,
    "profile",
    "results.json",
    "results.json.tmp",
    "samples.txt",
    "samples.txt.tmp",
    "tensorboard",
    "tokenizer",
}


def make_autoencoder_task(config: Config, tokenizer: Tokenizer) -> AutoencoderTask:
    """The task of stage 1."""
    model = Autoencoder(
        config.autoencoder.model,
        tokenizer.vocab_size,
        config.chunk_size,
        jnp.dtype(config.compute_dtype),
    )
    return AutoencoderTask(model, tokenizer.pad_id)


def make_lm_task(config: Config, tokenizer: Tokenizer, protocol: Protocol) -> LmTask:
    """The task of stage 2; `protocol` is how it is scored."""
    dtype, body = jnp.dtype(config.compute_dtype), config.lm.model
    if not config.has_autoencoder:
        head = SoftmaxHead(tokenizer.vocab_size, body.hidden_size, dtype)
        model = AutoregressiveLM(body, head, tokenizer.vocab_size, dtype)
        return ArTask(model, tokenizer.pad_id, protocol)
    # The frozen autoencoder computes in full precision, as its targets are the loss's ground.
    autoencoder = Autoencoder(
        config.autoencoder.model, tokenizer.vocab_size, config.chunk_size, jnp.float32
    )
    make_head, _ = LATENT_HEADS[config.lm.head.name]
    head = make_head(
        config.lm.head,
        body.hidden_size,
        config.autoencoder.model.latent_size,
        body.norm_epsilon,
        dtype,
    )
    model = CALM(body, head, tokenizer.vocab_size, tokenizer.pad_id, dtype)
    return CalmTask(model, autoencoder, protocol)


def fingerprint(documents: Sequence[Document]) -> str:
    """Equal for two lists of documents exactly when they are the same."""
    digest = hashlib.sha256()
    for document in documents:
        text = document.text.encode("utf-8")
        digest.update(f"{document.name}\0{len(text)}\0".encode())
        digest.update(text)
        if document.prompt:
            digest.update(b"\0" + document.prompt.encode("utf-8"))
    return digest.hexdigest()[:16]


def _describe_source(source: Source) -> dict:
    if isinstance(source, PreparedText):
        return {
            "documents": source.num_documents,
            "tokens": source.num_tokens,
            "fingerprint": source.fingerprint,
        }
    return {
        "documents": len(source),
        "characters": sum(len(document.text) for document in source),
        "fingerprint": fingerprint(source),
    }


def describe(corpus: Corpus) -> dict[str, dict]:
    """Of each source of each text; of a text of one source just that."""
    own = () if corpus.autoencoder_sources is corpus.sources else corpus.autoencoder_sources
    texts = {"train": corpus.sources, "autoencoder": own, "validation": (corpus.validation,)}
    described = {}
    for name, sources in texts.items():
        for number, source in enumerate(sources):
            described[name if number == 0 else f"{name} {number + 1}"] = _describe_source(source)
    return described


def _size(described: dict) -> str:
    unit = "tokens" if "tokens" in described else "characters"
    return f"{described['documents']} documents of {described[unit]} {unit}"


@dataclasses.dataclass(frozen=True)
class Workdir:
    """A folder that one recipe's run lives in."""

    path: pathlib.Path

    @property
    def _config_path(self) -> pathlib.Path:
        return self.path / "config.json"

    @property
    def exists(self) -> bool:
        return self._config_path.exists()

    @property
    def samples_path(self) -> pathlib.Path:
        return self.path / "samples.txt"

    @property
    def results_path(self) -> pathlib.Path:
        return self.path / "results.json"

    def checkpoints(self, stage: str) -> pathlib.Path:
        return self.path / stage

    @functools.cached_property
    def config(self) -> Config:
        """The stored config. Raises `UserError` if this is no workdir."""
        if not self.exists:
            raise UserError(f"{self.path} is no workdir: it has no config.json")
        try:
            stored = json.loads(self._config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self._config_path} cannot be read ({error})") from error
        return resolve(stored)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer")

    def facts(self) -> dict[str, Any]:
        """What every process has to see here: config, tokenizer, steps of the checkpoints."""
        steps = {
            f"checkpoint of {stage}": checkpoint.latest_step(self.checkpoints(stage))
            for stage in ("autoencoder", "lm")
        }
        known = dict(leaves(as_dict(self.config)))
        return known | steps | {"tokenizer": self.tokenizer.fingerprint}

    def check_config(self, config: Config, training: bool) -> None:
        """Raises `UserError` that names the first key in which `config` does not fit what is here."""
        pairs = differing_keys(as_dict(config), as_dict(self.config), training)
        if pairs:
            key, ours, stored = pairs[0]
            more = f" (and {len(pairs) - 1} more keys)" if len(pairs) > 1 else ""
            way_out = ", or --overwrite to delete what is there" if training else ""
            raise UserError(
                f"{self.path} was made with {key}={stored!r}, not {ours!r}{more}: give another --workdir, "
                f"or --config=configs/workdir.py:{self.path} for the stored config{way_out}"
            )

    def check_corpus(self, corpus: Corpus) -> None:
        """Raises `UserError` if a resumed run would read other text."""
        change = self.change_of_text(corpus)
        if change:
            raise UserError(f"{change}: give another --workdir, or --overwrite")

    def change_of_text(self, corpus: Corpus) -> str:
        """How the text differs from what this run began with; empty if it does not."""
        path = self.path / "corpus.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error
        for split, now in describe(corpus).items():
            # A text that no stage needed yet is not there.
            then = stored.get(split, now)
            if then != now:
                return (
                    f"{path}: the {split} text has changed since ({_size(then)} then, {_size(now)} now; another version "
                    "of Python has other embedded text)"
                )
        return ""

    def add_corpus(self, corpus: Corpus) -> None:
        """Writes down what text a stage begins with that the others did not need."""
        path = self.path / "corpus.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        now = describe(corpus) | stored
        if now != stored:
            write_atomically(path, json.dumps(now, indent=2) + "\n")

    def refuse_foreign(self) -> None:
        """Raises `UserError` if the folder holds something that is not a run of ours."""
        if self.path.exists() and not self.exists:
            if not self.path.is_dir():
                raise UserError(f"--workdir={self.path} is a file")
            names = {entry.name for entry in self.path.iterdir()}
            # A run that was killed while it made its workdir has left these.
            if names - {"tokenizer", "corpus.json", "corpus.json.tmp", "config.json.tmp"}:
                raise UserError(
                    f"--workdir={self.path} is not empty and no workdir of calm_jax: give another folder"
                )

    def delete(self) -> None:
        """Deletes a run of ours; `check_deletable` has to be asked first."""
        if self.exists:
            shutil.rmtree(self.path)

    def check_deletable(self) -> None:
        """Raises `UserError` if the folder holds anything that no run of ours wrote."""
        self.refuse_foreign()
        if not self.exists:
            return
        _ = self.config  # raises for a config.json that is not ours
        foreign = sorted({entry.name for entry in self.path.iterdir()} - _OWN_FILES)
        if foreign:
            raise UserError(
                f"--overwrite would delete {self.path / foreign[0]}, which is no file of a run: move it away first"
            )

    @property
    def is_converted(self) -> bool:
        """Whether its parameters come from elsewhere, with no text and no optimizer's state."""
        return (self.path / _ORIGIN).exists()

    def create(self, config: Config, tokenizer: Tokenizer, corpus: Corpus) -> None:
        """Writes what describes a new run; config.json last, which is what makes it a workdir."""
        self._create(config, tokenizer, "corpus.json", describe(corpus))

    def create_converted(self, config: Config, tokenizer: Tokenizer, origin: dict) -> None:
        """The same for parameters that come from elsewhere; `origin` says from where."""
        self._create(config, tokenizer, _ORIGIN, origin)

    def _create(self, config: Config, tokenizer: Tokenizer, name: str, description: dict) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path / "tokenizer")
        except OSError as error:
            raise UserError(
                f"--workdir={self.path} cannot be written: {error.strerror or error}"
            ) from error
        write_atomically(self.path / name, json.dumps(description, indent=2) + "\n")
        self.store_config(config)

    def store_config(self, config: Config) -> None:
        write_atomically(self._config_path, as_json(config))

    def import_autoencoder(self, source: "Workdir") -> None:
        """Copies the latest autoencoder of another workdir; it appears here only when it is whole."""
        step = checkpoint.latest_step(source.checkpoints("autoencoder"))
        whole = source.checkpoints("autoencoder") / str(step)
        self._copy(whole, self.checkpoints("autoencoder"), str(step))

    def initial(self, stage: str) -> pathlib.Path:
        """Where the parameters lie that a stage begins with, if they are given."""
        return self.path / f"init_{stage}"

    def import_initial(self, source: "Workdir", stage: str) -> None:
        """Copies a stage's latest parameters to begin with, so that the run does not depend on `source` any more."""
        step = checkpoint.latest_step(source.checkpoints(stage))
        params = source.checkpoints(stage) / str(step) / "params"
        self._copy(params, self.initial(stage), f"{step}/params")

    def _copy(self, source: pathlib.Path, folder: pathlib.Path, name: str) -> None:
        """Copies `source` to `folder`/`name`; `folder` appears only when it is whole."""
        beside = folder.with_name(f"{folder.name}.tmp")
        try:
            shutil.rmtree(beside, ignore_errors=True)
            # What a killed stage left without a whole checkpoint.
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, beside / name)
            beside.rename(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error

    def load_params(self, stage: str, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
        """The latest parameters of a stage, on the mesh."""
        return _load(self.checkpoints(stage), task, mesh)

    def load_initial(self, stage: str, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
        """The parameters that a stage begins with, on the mesh."""
        return _load(self.initial(stage), task, mesh)


def _load(folder: pathlib.Path, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
    return checkpoint.load_params(folder, jax.eval_shape(task.init, jax.random.key(0)), mesh)
