"""The files of a workdir, and how they are read and written.

config.json            the resolved config
tokenizer/             the tokenizer and its fingerprint
memory.json            values chosen for training.accumulation_steps=0 and lm.model.remat=auto, and the devices they are for
corpus.json            size and fingerprint of the text that was trained on
converted.json         in place of corpus.json: where converted parameters come from
autoencoder/, lm/      checkpoints of the two stages
init_autoencoder/, init_lm/  copies of the parameters that the stages began with, if `init_from` was given
metrics.jsonl          training and validation metrics; the same in tensorboard/
metrics.jsonl.damaged  metrics.jsonl as it was when a resumed run found damaged lines in it, or records missing
samples.txt            text that the model wrote at the end of training; in samples.jsonl with its tokens and chunks
results.json           the final table; written when the run is finished
lock                   locked by the command that writes to the workdir, and says which process that is
evaluations.jsonl      one line for each call with --mode=eval; plane.png shows the last one with eval.temperatures
report.html            results, curves, samples and config as one page; written after training and after --mode=eval
profile/               profiler traces of --profile
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from calm_jax.cli.files import empty, os_errors, read_json, write_atomically
from calm_jax.cli.ownership import LOCK, is_foreign, owned
from calm_jax.cli.progress import counted
from calm_jax.config import (
    Config,
    as_dict,
    as_json,
    differing_keys,
    leaves,
    removed_loss,
    resolve_stored,
)
from calm_jax.data.corpus import Corpus, Source
from calm_jax.data.documents import Document
from calm_jax.data.shards import PreparedText
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError, reason_of, typed_reason_of
from calm_jax.parallel import multihost
from calm_jax.tasks import AutoencoderTask, LmTask, Params
from calm_jax.training import checkpoint, checkpoint_files

# Only a workdir of converted parameters has this file.
_ORIGIN = "converted.json"
# All files that a run writes, but those of `_OTHER_OWN_FILES`; unfinished ones have ".tmp" after the name.
OWN_FILES = {
    *("autoencoder", "lm", "init_autoencoder", "init_lm", "tokenizer", "tensorboard", "profile"),
    *("config.json", "corpus.json", _ORIGIN, "memory.json", "results.json", "metrics.jsonl"),
    *("evaluations.jsonl", "samples.jsonl", "samples.txt", "report.html", "plane.png"),
    *(LOCK, multihost.PROBE_FILE),
}
# Metrics that a resumed run kept, and what a killed `calm_jax.report` leaves.
_OTHER_OWN_FILES = re.compile(
    r"metrics\.jsonl\.damaged(-\d+)?(\.tmp)?|report\.html\.[0-9a-f]{32}\.tmp"
)


def _is_own(name: str) -> bool:
    """Whether a run writes a file of this name. --overwrite refuses to delete a folder with any other."""
    return name.removesuffix(".tmp") in OWN_FILES or bool(_OTHER_OWN_FILES.fullmatch(name))


def fingerprint(documents: Sequence[Document]) -> str:
    """A hash of documents: their names, texts and prompts, in order. 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        text = document.text.encode("utf-8")
        # The name of a file may have bytes that are not valid UTF-8.
        digest.update(f"{document.name}\0{len(text)}\0".encode("utf-8", "surrogateescape"))
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
    """Size and fingerprint of every source of text, as stored in corpus.json.

    Keys are "train", "autoencoder" (only if it has its own text) and "validation"; further sources of a text are
    "train 2", "train 3" and so on.
    """
    own = () if corpus.autoencoder_sources is corpus.sources else corpus.autoencoder_sources
    texts = {"train": corpus.sources, "autoencoder": own, "validation": (corpus.validation,)}
    described = {}
    for name, sources in texts.items():
        for number, source in enumerate(sources):
            described[name if number == 0 else f"{name} {number + 1}"] = _describe_source(source)
    return described


def size_of(described: dict) -> str:
    """The size of a text that `describe` described, in words."""
    unit = "tokens" if "tokens" in described else "characters"
    return f"{counted(described['documents'], 'document')} of {described[unit]:,} {unit}"


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The folder of one run. It exists as a workdir once it has a config.json."""

    path: pathlib.Path

    @property
    def _config_path(self) -> pathlib.Path:
        return self.path / "config.json"

    @property
    def exists(self) -> bool:
        with os_errors(self._config_path, "read"):
            return self._config_path.exists()

    @property
    def samples_path(self) -> pathlib.Path:
        return self.path / "samples.txt"

    @property
    def samples_jsonl_path(self) -> pathlib.Path:
        return self.path / "samples.jsonl"

    @property
    def metrics_path(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations_path(self) -> pathlib.Path:
        return self.path / "evaluations.jsonl"

    @property
    def corpus_path(self) -> pathlib.Path:
        return self.path / "corpus.json"

    @property
    def report_path(self) -> pathlib.Path:
        return self.path / "report.html"

    @property
    def results_path(self) -> pathlib.Path:
        return self.path / "results.json"

    def checkpoints(self, stage: str) -> pathlib.Path:
        return self.path / stage

    def has_checkpoint(self, stage: str) -> bool:
        return checkpoint_files.latest_step(self.checkpoints(stage)) is not None

    def has_parameters(self, stage: str) -> bool:
        """Whether there is a checkpoint of a stage, or the initial parameters that it begins with."""
        # The initial parameters are not needed any more, and may be gone, once there is a checkpoint.
        return self.has_checkpoint(stage) or (
            checkpoint_files.latest_step(self.initial(stage)) is not None
        )

    @property
    def has_lm(self) -> bool:
        """Whether there is a checkpoint of the language model."""
        return self.has_checkpoint("lm")

    @functools.cached_property
    def _stored(self) -> dict[str, Any]:
        """The content of config.json. Raises `UserError` if the folder is no workdir."""
        if not self.exists:
            why = "it has no config.json" if self.path.exists() else "there is no such folder"
            raise UserError(f"{self.path} is no workdir: {why}; give the folder of a run")
        try:
            return read_json(self._config_path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or reason_of(error)
            raise UserError(
                f"{self.path} is no workdir: {self._config_path} cannot be read ({why}); give the folder of a run"
            ) from error

    @functools.cached_property
    def config(self) -> Config:
        """The stored config. Raises `UserError` if the folder is no workdir."""
        stored = self._stored
        try:
            return resolve_stored(stored)
        except UserError as error:
            raise UserError(f"{self._config_path}: {error}") from error

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer")

    def facts(self) -> dict[str, Any]:
        """Config, tokenizer and steps of the latest checkpoints, which must be equal on all processes."""
        steps = {
            f"checkpoint of {stage}": checkpoint_files.latest_step(self.checkpoints(stage))
            for stage in ("autoencoder", "lm")
        }
        known = dict(leaves(as_dict(self.config)))
        return known | steps | {"tokenizer": self.tokenizer.fingerprint}

    def check_config(self, config: Config, training: bool) -> None:
        """Raises `UserError` with the first key in which `config` differs from the stored config and must not.

        training: True to resume training, which fixes more keys than evaluation does (see `differing_keys`).
        """
        loss = removed_loss(self._stored) if training else ""
        if loss:
            raise UserError(
                f"{self.path} was trained with {loss}, a loss that calm_jax no longer has: begin another run from its parameters "
                f"without this loss, with --config.init_from={self.path} and another --workdir"
            )
        pairs = differing_keys(as_dict(config), as_dict(self.config), training)
        if pairs:
            key, ours, stored = pairs[0]
            others = len(pairs) - 1
            more = f" (and {counted(others, 'more key')})" if others else ""
            stored_config = f"--config=configs/workdir.py:{self.path} for the stored config"
            way_out = (
                f"give another --workdir, or {stored_config}, or --overwrite to delete the run in this folder"
                if training
                else f"give {stored_config}, without --config.{key}"
            )
            raise UserError(
                f"{self.path} was made with {key}={stored!r}, not {ours!r}{more}: {way_out}"
            )

    def check_corpus(self, corpus: Corpus) -> None:
        """Raises `UserError` if the text is not the one that the run began with."""
        change = self.change_of_text(corpus)
        if change:
            raise UserError(f"{change}: give another --workdir, or --overwrite")

    def stored_corpus(self) -> dict[str, dict[str, Any]]:
        """The content of corpus.json, as `describe` made it. Raises `UserError` if it cannot be read."""
        path = self.corpus_path
        try:
            stored = read_json(path)
            for text in stored.values():
                counts = text["documents"], text["tokens" if "tokens" in text else "characters"]
                if any(type(count) is not int for count in counts):
                    raise ValueError("a count is no whole number")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({typed_reason_of(error)})") from error
        return stored

    def change_of_text(self, corpus: Corpus) -> str:
        """Says how the text differs from the one that the run began with; empty if it does not."""
        path, stored = self.corpus_path, self.stored_corpus()
        for split, now in describe(corpus).items():
            # The text of a stage that has not begun is not in corpus.json yet.
            then = stored.get(split, now)
            if then != now:
                return (
                    f"{path}: the {split} text is not the one that the run began with ({size_of(then)} then, {size_of(now)} now). "
                    "Possible reasons: other files, other keys of data (without data.validation_files some of the train text is "
                    "held out), or another version of Python, if the text is its standard library"
                )
        return ""

    def add_corpus(self, corpus: Corpus) -> None:
        """Adds the text of stages that begin now to corpus.json."""
        path, stored = self.corpus_path, self.stored_corpus()
        now = describe(corpus) | stored
        if now != stored:
            write_atomically(path, json.dumps(now, indent=2) + "\n")

    def refuse_foreign(self) -> None:
        """Raises `UserError` if the path is a file, or a folder with files and no config.json."""
        if not self.exists and self.path.exists():
            if not self.path.is_dir():
                raise UserError(f"--workdir={self.path} is a file")
            with os_errors(f"--workdir={self.path}", "read"):
                may_be_lost = not is_foreign(self.path) and self._is_half_made()
            if not may_be_lost:
                raise UserError(
                    f"--workdir={self.path} is no workdir of calm_jax and is not empty: give another folder"
                )

    def _is_half_made(self) -> bool:
        """Whether everything in the folder looks like what a command leaves that was killed while it made its workdir."""
        names = {entry.name for entry in self.path.iterdir()}
        if names - {LOCK, "tokenizer", "corpus.json", "corpus.json.tmp", "config.json.tmp"}:
            return False
        # An empty file `lock` may be somebody else's, so that the contents count, too.
        saved = {entry.name.removesuffix(".tmp") for entry in self.path.glob("tokenizer/*")}
        if saved - {"model", "description.json"} or (self.path / "tokenizer").is_symlink():
            return False
        try:
            _ = "corpus.json" in names and self.stored_corpus()
        except UserError:
            return False
        return True

    @contextlib.contextmanager
    def owned(self) -> Iterator[Callable[[], None]]:
        """Owns the folder, by a lock, inside the `with` block. Commands write to a workdir only inside such a block. The exception
        is `calm_jax.report`, which replaces report.html atomically.

        Yields a function that raises `UserError` if the folder was deleted, moved or replaced meanwhile.

        Raises `UserError` if another process writes to the workdir, or if the folder is no workdir and not empty.
        """
        self.refuse_foreign()
        with owned(self.path, f"--workdir={self.path}") as check:
            yield check

    def delete(self) -> None:
        """Empties the folder, which this process owns. Call `check_deletable` first."""
        if self.exists:
            # config.json goes last, so that what a killed deletion leaves is still a workdir, which can be deleted.
            empty(self.path, keep={LOCK, self._config_path.name})
            self._config_path.unlink()

    def check_deletable(self) -> None:
        """Raises `UserError` if the folder holds a file that no run wrote."""
        self.refuse_foreign()
        if not self.exists:
            return
        _ = self.config  # Raises `UserError` for the config.json of another program.
        names = sorted(entry.name for entry in self.path.iterdir())
        foreign = [name for name in names if not _is_own(name)]
        if foreign:
            raise UserError(
                f"--overwrite would delete {self.path / foreign[0]}, which is no file of a run: move it away first"
            )

    @property
    def is_converted(self) -> bool:
        """Whether its parameters were converted from a published checkpoint: it has no optimizer state and no corpus.json."""
        return (self.path / _ORIGIN).exists()

    def create(self, config: Config, tokenizer: Tokenizer, corpus: Corpus) -> None:
        """Writes tokenizer, corpus.json and config.json of a new run. config.json comes last: it makes the folder a workdir."""
        self._create(config, tokenizer, "corpus.json", describe(corpus))

    def create_converted(self, config: Config, tokenizer: Tokenizer, origin: dict) -> None:
        """`create` for converted parameters: writes `origin` as converted.json, and no corpus.json."""
        self._create(config, tokenizer, _ORIGIN, origin)

    def _create(self, config: Config, tokenizer: Tokenizer, name: str, description: dict) -> None:
        with os_errors(f"--workdir={self.path}", "written"):
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path / "tokenizer")
        write_atomically(self.path / name, json.dumps(description, indent=2) + "\n")
        self.store_config(config)

    def store_config(self, config: Config) -> None:
        write_atomically(self._config_path, as_json(config))

    def memory_choice(self, stage: str, devices: dict[str, Any]) -> dict[str, Any] | None:
        """The values that `store_memory_choice` stored for a stage on these devices; None if it stored none."""
        stored = self._memory_choices().get(stage)
        return stored["chosen"] if stored is not None and stored["devices"] == devices else None

    def store_memory_choice(
        self, stage: str, devices: dict[str, Any], chosen: dict[str, Any]
    ) -> None:
        """Stores the values that were chosen for a stage, so that a resumed run takes the same ones."""
        stored = self._memory_choices() | {stage: {"devices": devices, "chosen": chosen}}
        write_atomically(self.memory_path, json.dumps(stored, indent=2) + "\n")

    @property
    def memory_path(self) -> pathlib.Path:
        return self.path / "memory.json"

    def _memory_choices(self) -> dict[str, Any]:
        if not self.memory_path.exists():
            return {}
        try:
            stored = read_json(self.memory_path)
            for choice in stored.values():
                if choice.keys() != {"devices", "chosen"}:
                    raise ValueError("it has other keys than this program writes")
            return stored
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.memory_path} cannot be read ({error}): delete it, and the choice is made again"
            ) from error

    def _warn_if_unfinished(self, stage: str) -> None:
        # The step of an autoencoder that was copied is that of another run, which may have had more steps or fewer.
        is_copied = stage == "autoencoder" and self.config.autoencoder_source
        # Converted parameters have step 0.
        step = checkpoint_files.latest_step(self.checkpoints(stage))
        num_steps = getattr(self.config, stage).training.num_steps
        if not is_copied and step and step < num_steps and multihost.is_primary():
            logging.warning(
                "%s: stage %s is at step %d of %d: its training has not ended; the training command, given again, ends it",
                self.path,
                stage,
                step,
                num_steps,
            )

    def import_autoencoder(self, source: "Workdir") -> None:
        """Copies the latest autoencoder checkpoint of another workdir. Warns if its training there has not ended."""
        source._warn_if_unfinished("autoencoder")
        checkpoint_files.copy_latest(
            source.checkpoints("autoencoder"), self.checkpoints("autoencoder"), leave_out=()
        )

    def initial(self, stage: str) -> pathlib.Path:
        """The folder of the initial parameters of a stage, copied from `init_from`."""
        return self.path / f"init_{stage}"

    def import_initial(self, source: "Workdir", stage: str) -> None:
        """Copies the latest parameters of `source` as initial ones, so that the run does not depend on that folder later.

        Warns if their training there has not ended.
        """
        source._warn_if_unfinished(stage)
        checkpoint_files.copy_latest(
            source.checkpoints(stage), self.initial(stage), leave_out=("training",)
        )

    def load_params(self, stage: str, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
        """The latest parameters of a stage, sharded over the mesh. Raises `UserError` if there is no checkpoint.

        Warns of a training that has not ended.
        """
        self._warn_if_unfinished(stage)
        return _load(self.checkpoints(stage), task, mesh)

    def load_initial(self, stage: str, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
        """The initial parameters of a stage, copied from `init_from`, sharded over the mesh."""
        return _load(self.initial(stage), task, mesh)


def _load(folder: pathlib.Path, task: AutoencoderTask | LmTask, mesh: Mesh) -> Params:
    return checkpoint.load_params(folder, jax.eval_shape(task.init, jax.random.key(0)), mesh)
