"""A whole recipe in one workdir: autoencoder, language model, their scores, and text."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from calm_jax import brier, checkpoint, flops, plane, processes, report
from calm_jax import text as text_lib
from calm_jax.atomic import write_atomically
from calm_jax.checkpoint import Checkpointer
from calm_jax.config import Config, as_dict
from calm_jax.data.corpus import Corpus
from calm_jax.data.tokenizers import Tokenizer, check_path, make_tokenizer
from calm_jax.errors import UserError
from calm_jax.evaluate import Evaluator
from calm_jax.mesh import check_batch, make_mesh
from calm_jax.metrics import MetricsLog, finite
from calm_jax.models import attention
from calm_jax.packed import Text, read_corpus
from calm_jax.tasks import AutoencoderTask, LmTask, Params
from calm_jax.train import Profile, Stage, Trainer, check_batches
from calm_jax.workdir import Workdir, make_autoencoder_task, make_lm_task


class Run:
    """A recipe's run: the pieces that its stages share."""

    def __init__(self, config: Config, workdir: Workdir, mesh: Mesh, text: Text):
        self.config, self.workdir, self.mesh, self.text = config, workdir, mesh, text
        self.tokenizer = workdir.tokenizer

    @functools.cached_property
    def log(self) -> MetricsLog:
        return MetricsLog(self.workdir.path)

    @functools.cached_property
    def autoencoder_task(self) -> AutoencoderTask:
        return make_autoencoder_task(self.config, self.tokenizer)

    @functools.cached_property
    def lm_task(self) -> LmTask:
        return make_lm_task(self.config, self.tokenizer, self.config.eval.published)

    def task(self, name: str) -> AutoencoderTask | LmTask:
        return self.autoencoder_task if name == "autoencoder" else self.lm_task

    def evaluator(self, name: str) -> Evaluator:
        return Evaluator(
            name,
            self.task(name),
            self.text.validation(name),
            self.config.eval,
            self.mesh,
        )

    def equal_context_evaluator(self) -> Evaluator:
        """The language model's, after the same context and over the same tokens for every K."""
        task = dataclasses.replace(self.lm_task, protocol=self.config.eval.equal_context)
        return Evaluator("equal_context", task, self.text.windows(), self.config.eval, self.mesh)

    def train(self, name: str, frozen: Params, evaluator: Evaluator, profile: Profile) -> Params:
        """Trains one stage to its last step."""
        config = getattr(self.config, name)
        stage = Stage(
            name,
            self.task(name),
            frozen,
            self._initial(name),
            self.text.training(name),
            self.config.data.read_threads,
            evaluator,
            config.training,
            config.optimizer,
            flops.training(self.config, name, self.tokenizer.vocab_size),
        )
        about = {"config": as_dict(self.config), "tokenizer": self.tokenizer.fingerprint}
        checkpointer = Checkpointer(self.workdir.checkpoints(name), self.config.checkpoint.keep)
        try:
            if checkpointer.latest_step is not None:
                saved_with = checkpointer.about()["tokenizer"]
                if saved_with != about["tokenizer"]:
                    raise UserError(
                        f"{checkpointer.folder} was saved with another tokenizer ({saved_with}) than the "
                        f"workdir's ({about['tokenizer']})"
                    )
            trainer = Trainer(
                stage,
                self.config.seed,
                self.tokenizer.pad_id,
                self.config.eval.part_blocks,
                self.mesh,
                checkpointer,
                self.log,
                about,
                profile,
            )
            # Closing would wait for the others to finish a save.
            with processes.ending_on_failure():
                return trainer.run()
        finally:
            checkpointer.close()

    def _initial(self, name: str) -> Callable[[], Params] | None:
        """Loads the parameters of `init_from`."""
        if not self.config.init_from:
            return None
        return functools.partial(self.workdir.load_initial, name, self.task(name), self.mesh)

    def validate(self, name: str, evaluator: Evaluator, params: Params, frozen: Params) -> dict:
        """The report over the whole validation split; read from the log if it stands there."""
        step = processes.agree(checkpoint.latest_step(self.workdir.checkpoints(name))) or 0
        known = self.log.find(name, "validation", step)
        if known is not None:
            return known
        began = time.monotonic()
        print(f"{name}: evaluating the whole validation split", flush=True)
        values = evaluator(params, frozen)
        self.log.write(name, "validation", step, values | {"seconds": time.monotonic() - began})
        return self.log.find(name, "validation", step)

    def check_autoencoder(self, accuracy: float) -> None:
        """Raises `UserError` if targets from this autoencoder would be too often wrong."""
        least = self.config.autoencoder.min_accuracy
        if not accuracy >= least:
            source = self.config.autoencoder_source
            way_out = (
                f"{source} has not learnt such text; give more of it to hold out if it is little, or lower that key"
                if source
                else "train it longer (autoencoder.training.num_steps), or lower that key"
            )
            raise processes.AgreedError(
                f"the autoencoder gets {accuracy:.2%} of the held-out tokens right, less than autoencoder.min_accuracy="
                f"{least}: {way_out}"
            )


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


def _check_attention(config: Config) -> None:
    """Raises `UserError` unless the devices of the mesh that is set can attend as `lm.model.attention` says."""
    model, isolated = config.lm.model, config.lm.data.isolate_documents
    attention.check(model.attention, model.head_size, config.compute_dtype, isolated)


def prepare(config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh) -> Run:
    """Checks everything that can be checked before long work, then makes or opens the workdir."""
    text, write = processes.together(lambda: _prepared(config, workdir, overwrite, mesh))
    processes.write(write)
    processes.check_shared(workdir.path)
    return Run(config, Workdir(workdir.path), mesh, text)


def _prepared(
    config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh
) -> tuple[Text, Callable[[], None]]:
    """The text, and what makes or opens the workdir; changes nothing."""
    if "lm" in config.stages:
        _check_attention(config)
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

    return text, write


def run_training(config: Config, workdir: Workdir, overwrite: bool, profile: Profile) -> None:
    """Trains what the config asks for and is not trained yet, scores it, and shows what came out."""
    if processes.agree(not overwrite and workdir.exists and is_finished(config, workdir)):
        processes.together(lambda: workdir.check_config(config, training=True))
        print(
            f"{workdir.path} is finished, there is nothing to do: --mode=eval scores it again, more "
            "training.num_steps go on from here, --overwrite starts anew"
        )
        return
    mesh = processes.together(lambda: make_mesh(config.mesh))
    with jax.set_mesh(mesh):
        run = prepare(config, workdir, overwrite, mesh)
        try:
            _train_and_report(run, profile)
        finally:
            run.log.close()


def _train_and_report(run: Run, profile: Profile) -> None:
    config, workdir = run.config, run.workdir
    results: dict[str, dict] = {}
    frozen: Params = {}
    if config.has_autoencoder:
        evaluator = run.evaluator("autoencoder")
        if "autoencoder" in config.stages and not config.autoencoder_source:
            params = run.train("autoencoder", {}, evaluator, profile)
        else:
            params = workdir.load_params("autoencoder", run.autoencoder_task, run.mesh)
        results["autoencoder"] = run.validate("autoencoder", evaluator, params, {})
        frozen = {"params": params}
    if "lm" in config.stages:
        if config.has_autoencoder:
            run.check_autoencoder(results["autoencoder"]["token_accuracy_from_sample"])
        evaluator = run.evaluator("lm")
        params = run.train("lm", frozen, evaluator, profile)
        results["lm"] = run.validate("lm", evaluator, params, frozen)
        results["floor"] = brier.as_values(run.text.floor())
        samples = text_lib.samples(run.lm_task, params, frozen, run.tokenizer, config)
        processes.write(lambda: write_atomically(workdir.samples_path, samples))
        print(f"\n{samples}")
    for name in ("autoencoder", "lm"):
        # None for an autoencoder that was taken over.
        seconds = run.log.seconds(name) if name in results else 0
        if seconds:
            results[name] = {**results[name], "training_seconds": seconds}
    text = json.dumps(finite(results), indent=2) + "\n"
    processes.write(lambda: write_atomically(workdir.results_path, text))
    report.print_results(results, config, workdir)


def run_evaluation(config: Config, workdir: Workdir) -> None:
    """Scores what a workdir holds with the config's `eval` section, and appends it to evaluations.jsonl."""

    def check() -> Mesh:
        workdir.check_config(config, training=False)
        if config.eval.temperatures:
            report.check_drawable()
            plane.ways(config.eval, config.sample.sampler_config, config.has_autoencoder)
        mesh = make_mesh(config.mesh)
        check_batch("eval.batch_size", config.eval.batch_size, mesh)
        return mesh

    def read() -> tuple[Run, bool, Evaluator | None]:
        _check_attention(config)
        corpus = read_corpus(config)
        change = "" if workdir.is_converted else workdir.change_of_text(corpus)
        if change:
            print(f"data: not the text that this run was trained with. {change}")
        run = Run(config, workdir, mesh, Text(config, corpus, workdir.tokenizer))
        has_lm = checkpoint.latest_step(workdir.checkpoints("lm")) is not None
        # Refuses a context longer than the text before anything is computed.
        # Records with prompts are scored as they are: their prompts are the context.
        is_scored = has_lm and not config.data.prompt_field
        return run, has_lm, run.equal_context_evaluator() if is_scored else None

    mesh = processes.together(check)
    with jax.set_mesh(mesh):
        run, has_lm, equal_context = processes.together(read)
        results: dict[str, Mapping] = {}
        frozen: Params = {}
        if config.has_autoencoder:
            params = workdir.load_params("autoencoder", run.autoencoder_task, mesh)
            results["autoencoder"] = run.evaluator("autoencoder")(params, {})
            frozen = {"params": params}
        if has_lm:
            params = workdir.load_params("lm", run.lm_task, mesh)
            evaluators = {"lm": run.evaluator("lm")}
            if equal_context is not None:
                evaluators["equal_context"] = equal_context
            for name, evaluator in evaluators.items():
                began = time.monotonic()
                values = evaluator(params, frozen)
                results[name] = values | {"seconds": time.monotonic() - began}
            if config.eval.temperatures:
                results["plane"] = plane.measure(
                    run.lm_task,
                    params,
                    frozen,
                    run.text.validation("lm"),
                    config.eval,
                    plane.ways(config.eval, config.sample.sampler_config, config.has_autoencoder),
                    run.tokenizer.pad_id,
                    mesh,
                )
            if run.text.has_train:
                results["floor"] = brier.as_values(run.text.floor())
            if run.text.has_train and equal_context is not None:
                results["equal_context_floor"] = brier.as_values(run.text.equal_context_floor())
        for name in ("autoencoder", "lm"):
            if name in results:
                step = checkpoint.latest_step(workdir.checkpoints(name))
                results[name] = {"step": step, **results[name]}
    record = {"eval": dataclasses.asdict(config.eval), "data": dataclasses.asdict(config.data)}
    report.print_results(results, config, workdir)
    if "plane" in results:
        report.print_plane(results["plane"])

    def write() -> None:
        report.append(workdir, record | results)
        if "plane" in results:
            report.draw_plane(results["plane"], workdir.path / "plane.png")

    processes.write(write)
