"""What a run begins with: the checks before long work, the models and the tokenizer to take over, the workdir."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from calm_jax import checkpoint, processes
from calm_jax.config import Config, as_dict, leaves
from calm_jax.data.corpus import Corpus
from calm_jax.data.tokenizers import Tokenizer, check_path, make_tokenizer
from calm_jax.errors import UserError
from calm_jax.mesh import check_batch
from calm_jax.models import attention
from calm_jax.packed import Text, read_corpus
from calm_jax.step import check_batches
from calm_jax.workdir import Workdir, describe

# Keys that say how a model is trained or sampled, not what it is.
_NOT_OF_THE_MODEL = {
    "autoencoder.model": ("dropout", "kl_clamp", "kl_weight"),
    "lm.head": ("num_samples", "num_target_samples", "beta", "num_steps", "solver"),
    "lm.model": ("remat", "attention"),
}


def _fit_source(
    key: str, config: Config, tokenizer: Tokenizer, source: Workdir, with_lm: bool
) -> None:
    """Raises `UserError` unless the models of `source`, which `key` names, are of this recipe's kind."""
    theirs = source.config
    ours_and_theirs: dict[str, tuple[Any, Any]] = {
        "chunk_size": (config.chunk_size, theirs.chunk_size),
        "tokenizer.kind": (config.tokenizer.kind, theirs.tokenizer.kind),
        "tokenizer": (tokenizer.fingerprint, source.tokenizer.fingerprint),
    }

    def compare(name: str, ours: Any, other: Any) -> None:
        ours, other = dataclasses.asdict(ours), dataclasses.asdict(other)
        for field in ours | other:
            if field not in _NOT_OF_THE_MODEL[name]:
                ours_and_theirs[f"{name}.{field}"] = (ours.get(field), other.get(field))

    if config.has_autoencoder:
        compare("autoencoder.model", config.autoencoder.model, theirs.autoencoder.model)
    if with_lm:
        compare("lm.head", config.lm.head, theirs.lm.head)
        compare("lm.model", config.lm.model, theirs.lm.model)
    for name, (ours, other) in ours_and_theirs.items():
        if ours == other:
            continue
        hint = f"; its tokenizer is {source.path}/tokenizer/model" if name == "tokenizer" else ""
        raise UserError(
            f"{key}={str(source.path)!r} has {name}={other!r}, this recipe has {ours!r}{hint}"
        )


def _source(key: str, name: str, stages: Sequence[str], workdir: Workdir) -> Workdir:
    """The workdir that `key` names. Raises `UserError` unless it has these stages' parameters."""
    source = Workdir(pathlib.Path(name))
    if source.path.resolve() == workdir.path.resolve():
        raise UserError(f"{key}={name!r} is the workdir itself")
    if not source.exists:
        raise UserError(f"{key}={name!r} is no workdir")
    for stage in stages:
        if checkpoint.latest_step(source.checkpoints(stage)) is None:
            what = "autoencoder" if stage == "autoencoder" else "language model"
            raise UserError(f"{key}={name!r} has no trained {what}")
    return source


def _sources(
    config: Config, workdir: Workdir, fresh: bool, tokenizer: Tokenizer | None
) -> tuple[Workdir | None, Workdir | None]:
    """The workdirs to take over: `(of the first parameters, of the autoencoder)`, None for what is not needed (any more).

    tokenizer: this run's; None if it is not known yet, and what depends on it is not checked.
    """

    def has(stage: str) -> bool:
        return not fresh and checkpoint.latest_step(workdir.checkpoints(stage)) is not None

    start = taken = None
    begins = [
        stage
        for stage in config.stages
        if fresh or not (has(stage) or workdir.initial(stage).exists())
    ]
    if config.init_from and begins:
        start = _source("init_from", config.init_from, begins, workdir)
    if config.autoencoder_source and not has("autoencoder"):
        key = "autoencoder.checkpoint" if config.autoencoder.checkpoint else "init_from"
        taken = _source(key, config.autoencoder_source, ["autoencoder"], workdir)
        if tokenizer is not None:
            _fit_source(key, config, tokenizer, taken, with_lm=False)
    if start is not None and tokenizer is not None:
        _fit_source("init_from", config, tokenizer, start, with_lm="lm" in begins)
    return start, taken


def _first_tokenizer(config: Config, corpus: Corpus, start: Workdir | None) -> Tokenizer:
    """A new run's: of the model that is trained on, of the prepared text, or the config's."""
    if start is not None:
        return start.tokenizer
    for text in corpus.prepared:
        theirs = text.tokenizer
        if theirs.kind != config.tokenizer.kind:
            raise UserError(
                f"{text.folder} was prepared with a tokenizer of tokenizer.kind={theirs.kind!r}, this recipe has "
                f"{config.tokenizer.kind!r}: give --config.tokenizer.kind={theirs.kind}"
            )
        return theirs
    documents = corpus.train or corpus.autoencoder_train
    return make_tokenizer(config.tokenizer, (document.text for document in documents))


def _check_tokenizer_file(config: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if the config names a tokenizer that is not the workdir's; it may be gone."""
    path = config.tokenizer.path
    if path and pathlib.Path(path).exists():
        named = make_tokenizer(config.tokenizer, ())
        if named.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"tokenizer.path={path!r} is another tokenizer ({named.fingerprint}) than the model's "
                f"({tokenizer.fingerprint}): leave tokenizer.path out, give another --workdir, or --overwrite"
            )


def is_finished(config: Config, workdir: Workdir) -> bool:
    """Whether everything that the config asks for has been trained, scored and written."""
    try:
        done = json.loads(workdir.results_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(
        name in done
        and checkpoint.latest_step(workdir.checkpoints(name)) == done[name]["step"]
        and done[name]["step"] >= getattr(config, name).training.num_steps
        for name in config.stages
        if not (name == "autoencoder" and config.autoencoder_source)
    )


def _check_autoencoder_stage(config: Config, workdir: Workdir, fresh: bool) -> None:
    """Raises `UserError` if stage 2 would have no autoencoder, or lose the one that it began with."""
    if config.autoencoder_source or not config.has_autoencoder:
        return
    step = None if fresh else checkpoint.latest_step(workdir.checkpoints("autoencoder"))
    if config.stage == "lm" and step is None:
        raise UserError(
            f"stage='lm' needs an autoencoder, and {workdir.path} has none: train it with --config.stage=all, or name "
            "a workdir that has one with --config.autoencoder.checkpoint=DIR"
        )
    if fresh or checkpoint.latest_step(workdir.checkpoints("lm")) is None:
        return
    num_steps = config.autoencoder.training.num_steps
    if "autoencoder" in config.stages and (step is None or step < num_steps):
        raise UserError(
            f"autoencoder.training.num_steps={num_steps}: the language model in {workdir.path} was trained on the "
            f"autoencoder of step {step}, which must not change under it: give another --workdir"
        )


def _refuse_converted(workdir: Workdir) -> None:
    """Raises `UserError` for converted parameters, which have no optimizer's state to go on with."""
    if not workdir.is_converted:
        return
    has_lm = checkpoint.latest_step(workdir.checkpoints("lm")) is not None
    way_out = (
        f"--config=configs/finetune.py:{workdir.path}"
        if has_lm
        else f"--config.autoencoder.checkpoint={workdir.path}"
    )
    raise UserError(
        f"{workdir.path} holds converted parameters: train on from them in another folder, {way_out} --workdir=DIR"
    )


def facts_of(corpus: Corpus) -> dict[str, Any]:
    """What every process has to read."""
    return {f"{name} text": about for name, about in describe(corpus).items()}


def check_command(config: Config, workdir: Workdir, what: str) -> None:
    """Raises `AgreedError` unless all processes were given the same command; `what` is to be done."""
    given = {"command": what, "workdir": str(workdir.path)}
    processes.check_same(lambda: given | dict(leaves(as_dict(config))))


def check_attention(config: Config) -> None:
    """Raises `UserError` unless the devices of the mesh that is set can attend as `lm.model.attention` says."""
    model, isolated = config.lm.model, config.lm.data.isolate_documents
    attention.check(model.attention, model.head_size, config.compute_dtype, isolated)


def begin(config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh) -> Text:
    """Checks everything that can be checked before long work, then makes or opens the workdir; gives its text.

    Raises `UserError`; nothing is changed by then.
    """
    text, facts, write = processes.together(lambda: _prepared(config, workdir, overwrite, mesh))
    processes.check_same(facts)
    processes.write(write)
    processes.check_shared(workdir.path)
    return text


def _prepared(
    config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh
) -> tuple[Text, Callable[[], dict[str, Any]], Callable[[], None]]:
    """The text, what has to be the same on all processes, and what makes or opens the workdir; changes nothing."""
    if "lm" in config.stages:
        check_attention(config)
    for name in config.stages:
        check_batches(name, getattr(config, name).training, mesh)
    check_batch("eval.batch_size", config.eval.batch_size, mesh)
    workdir.refuse_foreign()
    if overwrite:
        workdir.check_deletable()
    fresh = overwrite or not workdir.exists
    if config.data.validation_files and not config.data.train_files:
        raise UserError("data.validation_files needs data.train_files to train on")
    if not fresh:
        _refuse_converted(workdir)
        workdir.check_config(config, training=True)
    start, _ = _sources(config, workdir, fresh, tokenizer=None)
    if fresh and start is None and not config.data.names_folders:
        check_path(config.tokenizer)
    _check_autoencoder_stage(config, workdir, fresh)
    print("data: reading and tokenising", flush=True)
    corpus = read_corpus(config)
    if fresh:
        tokenizer = _first_tokenizer(config, corpus, start)
    else:
        workdir.check_corpus(corpus)
        tokenizer = workdir.tokenizer
    if not fresh or start is not None or corpus.prepared:
        _check_tokenizer_file(config, tokenizer)
    _, autoencoder = _sources(config, workdir, fresh, tokenizer)
    text = Text(config, corpus, tokenizer)
    for name in config.stages:
        if not (name == "autoencoder" and config.autoencoder_source):
            text.training(name)
    if config.has_autoencoder:
        text.validation("autoencoder")
    if "lm" in config.stages:
        text.check_scored()

    def write() -> None:
        if overwrite:
            workdir.delete()
        if fresh:
            workdir.create(config, tokenizer, corpus)
        else:
            workdir.add_corpus(corpus)
            # One stage may be trained at a time; the recipe stays whole.
            workdir.store_config(dataclasses.replace(config, stage=workdir.config.stage))
        if autoencoder is not None:
            workdir.import_autoencoder(autoencoder)
        if start is not None:
            for name in config.stages:
                begun = checkpoint.latest_step(workdir.checkpoints(name)) is not None
                if not begun and not workdir.initial(name).exists():
                    workdir.import_initial(start, name)

    def facts() -> dict[str, Any]:
        return {"tokenizer": tokenizer.fingerprint} | facts_of(corpus)

    return text, facts, write
