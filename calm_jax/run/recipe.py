"""A whole recipe in one workdir: trains the autoencoder and the language model, scores both, and writes samples."""

import dataclasses
import datetime
import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from calm_jax import brier
from calm_jax.build import check_attention, make_autoencoder_task, make_lm_task, stage_of
from calm_jax.cli.files import nan_to_none, write_atomically
from calm_jax.cli.progress import counted
from calm_jax.cli.signals import ignore_the_next
from calm_jax.config import Config, as_dict, differences
from calm_jax.cost import flops
from calm_jax.data.corpus import Corpus
from calm_jax.errors import UserError
from calm_jax.evaluation import tradeoff
from calm_jax.evaluation.evaluator import Evaluator
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import adapted, make_mesh, make_training_mesh
from calm_jax.planning import fitting
from calm_jax.run import generator, preflight, report, web_report
from calm_jax.run.continuation import as_line
from calm_jax.run.dataset import Dataset
from calm_jax.run.run_files import as_float, is_complete
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.config import SamplerConfig
from calm_jax.tasks import AutoencoderTask, LmTask, Params
from calm_jax.training import checkpoint_files
from calm_jax.training.checkpoint import Checkpointer
from calm_jax.training.log import MetricsLog
from calm_jax.training.loop import Profile, Stage, Trainer, training_key

# How many held-out records are sampled at the end of training.
_SAMPLED_RECORDS = 4


class Run:
    """The objects that all stages of a run share.

    Attributes:
      config, workdir, mesh, text: the config, workdir, mesh and `Dataset` of the run.
      tokenizer: the tokenizer of the workdir.
      log: the metrics of all stages.
      check_owned: raises `UserError` if the workdir was deleted, moved or replaced since the command began.
    """

    def __init__(
        self,
        config: Config,
        workdir: Workdir,
        mesh: Mesh,
        text: Dataset,
        check_owned: Callable[[], None] | None = None,
    ):
        """Reads tokenizer and metrics of the workdir.

        Args:
          config, workdir, mesh, text: the attributes.
          check_owned: raises `UserError` if the workdir is no longer this command's (`Workdir.owned`); None on processes that
            do not write, and where nothing is trained.
        """
        self.config, self.workdir, self.mesh, self.text = config, workdir, mesh, text
        self.check_owned = check_owned or (lambda: None)
        self.tokenizer = workdir.tokenizer
        # A collective operation, which all processes must reach: process 0 broadcasts the records that it has read.
        self.log = MetricsLog(workdir.path)

    @functools.cached_property
    def autoencoder_task(self) -> AutoencoderTask:
        return make_autoencoder_task(self.config, self.tokenizer)

    @functools.cached_property
    def lm_task(self) -> LmTask:
        return make_lm_task(self.config, self.tokenizer)

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
        """Scores the language model by the equal-context protocol: same context and same n-grams for every K."""
        task = dataclasses.replace(self.lm_task, protocol=self.config.eval.equal_context)
        return Evaluator("equal_context", task, self.text.windows(), self.config.eval, self.mesh)

    def train(self, name: str, frozen: Params, evaluator: Evaluator, profile: Profile) -> Params:
        """Trains one stage from its latest checkpoint, if there is one, to its last step.

        Args:
          name: "autoencoder" or "lm".
          frozen: the parameters of the autoencoder, for stage 2.
          evaluator: the evaluator of the stage, for evaluations during training.
          profile: the steps to trace.

        Returns:
          The parameters after the last step.
        """
        recipe, compiled = self._fitted(name, frozen)
        config = getattr(recipe, name)
        task, _, _ = stage_of(recipe, name, self.tokenizer)
        stage = Stage(
            name,
            task,
            frozen,
            self._initial(name),
            self.text.training(name),
            self.config.data.read_threads,
            evaluator,
            config.training,
            config.optimizer,
            flops.training(self._packed(recipe, name), name, self.tokenizer.vocab_size),
            compiled,
        )
        about = {"config": as_dict(recipe), "tokenizer": self.tokenizer.fingerprint}
        folder, keep = self.workdir.checkpoints(name), self.config.checkpoint.keep
        checkpointer = Checkpointer(folder, keep, self.check_owned)
        try:
            if checkpointer.latest_step is not None:
                saved_with = checkpointer.about().get("tokenizer")
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
            # In a multi-process run, a process that fails exits here: `close` would wait for the others to finish a save.
            with multihost.exit_on_failure():
                return trainer.run()
        finally:
            checkpointer.close()

    def _fitted(self, name: str, frozen: Params) -> tuple[Config, jax.stages.Compiled | None]:
        """Chooses values for the automatic keys of a stage (`training.accumulation_steps=0` and `lm.model.remat="auto"`).

        A resumed run on the same devices takes the stored values, so that it computes the same numbers.

        Returns:
          The recipe with the chosen values, and the compiled training step; None in its place if the choice compiled nothing.
        """
        config, workdir, mesh = self.config, self.workdir, self.mesh
        if not fitting.is_automatic(config, name):
            return config, None
        step = multihost.broadcast(checkpoint_files.latest_step(workdir.checkpoints(name)))
        every = fitting.candidates(config, name, mesh, self.tokenizer.vocab_size, rates=None)
        if step is not None and step >= getattr(config, name).training.num_steps:
            # The stage has no step left to train, so any choice will do.
            return every[0], None
        devices = {
            "kind": jax.devices()[0].device_kind,
            "mesh": dict(mesh.shape),
            **fitting.asked(config, name),
        }
        chosen = multihost.run_on_all(lambda: workdir.memory_choice(name, devices))
        chosen = multihost.broadcast(chosen)
        if chosen is not None:
            # The file may be damaged, or changed by hand.
            for one in every:
                if fitting.chosen(one, name) == chosen:
                    return one, None
            raise multihost.AgreedError(
                f"{workdir.memory_path}: {chosen!r} for {name} is no possible choice: delete this file, and the choice is made again"
            )
        key = training_key(config.seed, name)
        packed = self._packed(config, name)
        fitted = fitting.fit_here(packed, name, self.tokenizer, frozen, key, mesh)
        stored = fitting.chosen(fitted.config, name)
        multihost.write_once(lambda: workdir.store_memory_choice(name, devices, stored))
        return fitting.with_choice(config, stored), fitted.compiled

    def _packed(self, config: Config, name: str) -> Config:
        """The recipe with the length that a stage's blocks have: blocks of records with prompts may be shorter than the recipe's."""
        section = getattr(config, name)
        data = dataclasses.replace(section.data, block_tokens=self.text.training(name).block_tokens)
        return dataclasses.replace(config, **{name: dataclasses.replace(section, data=data)})

    def _initial(self, name: str) -> Callable[[], Params] | None:
        """A function that loads the initial parameters, copied from `init_from`; None for random ones."""
        if not self.config.init_from:
            return None
        return functools.partial(self.workdir.load_initial, name, self.task(name), self.mesh)

    def validate(self, name: str, evaluator: Evaluator, params: Params, frozen: Params) -> dict:
        """A stage's metrics over the whole validation split: read from the log if all are there, else computed."""
        step = (
            multihost.broadcast(checkpoint_files.latest_step(self.workdir.checkpoints(name))) or 0
        )
        known = self.log.find(name, "validation", step)
        if known is not None and is_complete(name, known):
            return known
        began = time.monotonic()
        print(f"{name}: evaluating the whole validation split", flush=True)
        values = evaluator(params, frozen)
        self.log.write(name, "validation", step, values | {"seconds": time.monotonic() - began})
        record = self.log.find(name, "validation", step)
        assert record is not None
        return record

    def check_autoencoder(self, accuracy: float) -> None:
        """Raises `UserError` if the autoencoder is less accurate than `autoencoder.min_accuracy`: stage 2 learns its latents."""
        least = self.config.autoencoder.min_accuracy
        if not accuracy >= least:
            source = self.config.autoencoder_source
            if source:
                way_out = f"it comes from {source}, which may have other text; lower that key, or hold out more text if there is little"
                if source == self.config.init_from:
                    way_out += (
                        ", or train it on this text, too: a new --workdir with --config.stage=all"
                    )
            else:
                way_out = "train it longer (autoencoder.training.num_steps), or lower that key"
            # The curves in the report show whether more steps would help.
            multihost.write_once(lambda: web_report.try_to_write(self.workdir))
            raise multihost.AgreedError(
                f"the autoencoder gets {accuracy:.2%} of the held-out tokens right, less than autoencoder.min_accuracy="
                f"{least}: {way_out}"
            )


def run_training(config: Config, workdir: Workdir, overwrite: bool, profile: Profile) -> None:
    """Trains the stages that are not finished, scores them, writes results and samples, and prints a table.

    Args:
      config: the recipe.
      workdir: the folder of the run; may not exist yet.
      overwrite: whether to delete a run that is already in the workdir.
      profile: the steps to trace.

    Raises:
      UserError: for bad input. Errors that are found before training starts leave the workdir unchanged.
    """
    preflight.check_command(config, workdir, "overwrite" if overwrite else "train")
    if multihost.broadcast(
        not overwrite and workdir.exists and preflight.is_finished(config, workdir)
    ):
        multihost.run_on_all(lambda: workdir.check_config(config, training=True))
        changed = differences(as_dict(config), as_dict(workdir.config))
        names = ", ".join(f"{key}={ours!r}" for key, ours, _ in changed[:3])
        more = f" and {counted(len(changed) - 3, 'more key')}" if len(changed) > 3 else ""
        without_effect = f" (without effect: {names}{more})" if changed else ""
        print(
            f"{workdir.path} is finished, there is nothing to do{without_effect}: --mode=eval scores it again, a larger "
            f"--config.{config.stages[-1]}.training.num_steps continues it, --overwrite starts anew"
        )
        return
    mesh = multihost.run_on_all(lambda: _training_mesh(config))
    with jax.set_mesh(mesh), multihost.entered_once(workdir.owned()) as check_owned:
        text = preflight.begin(config, workdir, overwrite, mesh)
        # A new object, as `workdir` may know the config and the tokenizer of the run that was overwritten.
        run = Run(config, Workdir(workdir.path), mesh, text, check_owned)
        try:
            _train_and_report(run, profile)
        finally:
            run.log.close()


def _training_mesh(config: Config) -> Mesh:
    """The mesh to train on. Prints a line if the batches do not divide over all devices."""
    trained = [getattr(config, name).training for name in config.stages]
    rows = [training.fewest_rows for training in trained]
    mesh = make_training_mesh(config.mesh, rows)
    if mesh.size < jax.device_count():
        print(
            f"mesh: batches of {' and '.join(map(str, rows))} rows divide over {mesh.size} of {jax.device_count()} devices, the "
            "others stay idle: a larger training.batch_size would use them"
        )
    return mesh


def _train_and_report(run: Run, profile: Profile) -> None:
    config, workdir = run.config, run.workdir
    results: dict[str, dict] = {}
    frozen: Params = {}
    if config.has_autoencoder:
        evaluator = run.evaluator("autoencoder")
        if "autoencoder" in config.stages:
            params = run.train("autoencoder", {}, evaluator, profile)
        else:
            params = workdir.load_params("autoencoder", run.autoencoder_task, run.mesh)
        results["autoencoder"] = run.validate("autoencoder", evaluator, params, {})
        frozen = {"params": params}
    if "lm" in config.stages:
        if config.has_autoencoder:
            run.check_autoencoder(as_float(results["autoencoder"]["token_accuracy_from_sample"]))
        evaluator = run.evaluator("lm")
        params = run.train("lm", frozen, evaluator, profile)
        results["lm"] = run.validate("lm", evaluator, params, frozen)
        results["floor"] = brier.as_values(run.text.floor())
        records = run.text.held_out_records(_SAMPLED_RECORDS)
        samples, done = generator.sample_text(
            run.lm_task, params, frozen, run.tokenizer, config, records
        )
        lines = "".join(map(as_line, done))
        multihost.write_once(run.check_owned)
        multihost.write_once(lambda: write_atomically(workdir.samples_path, samples))
        multihost.write_once(lambda: write_atomically(workdir.samples_jsonl_path, lines))
        print(f"\n{samples}")
    for name in ("autoencoder", "lm"):
        # 0 for an autoencoder that was copied from another workdir.
        seconds = run.log.seconds(name) if name in results else 0
        if seconds:
            results[name] = {**results[name], "training_seconds": seconds}
    text = json.dumps(nan_to_none(results), indent=2) + "\n"
    # results.json marks the run as finished, and comes last. The log must be on the disk before it: records that a power cut
    # destroys would not be written again.
    run.log.sync()
    multihost.write_once(run.check_owned)
    multihost.write_once(lambda: web_report.try_to_write(workdir, text))
    multihost.write_once(lambda: write_atomically(workdir.results_path, text))
    report.print_results(results, config, workdir, are_evaluated=False)


def run_evaluation(config: Config, workdir: Workdir) -> dict[str, Mapping]:
    """Scores the models of a workdir by the config's `eval` section; prints a table and appends to evaluations.jsonl.

    Returns the scores by name: those of each stage and of the equal-context protocol, the frequency floors, and the
    accuracy-diversity plane, as far as workdir and config have them. Raises `UserError` if the config does not fit the workdir.
    """

    def check() -> tuple[Mesh, list[SamplerConfig]]:
        preflight.check_scored(config, workdir)
        ways: list[SamplerConfig] = []
        if config.eval.temperatures:
            report.check_drawable()
            ways = tradeoff.ways(config.eval, config.sample.sampler_config, config.has_autoencoder)
        # The devices may differ from those of the training: the config's mesh is adapted to them.
        ours = adapted(config.mesh, jax.devices())
        mesh = make_mesh(ours)
        if ours != config.mesh:
            sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
            print(f"mesh: {sizes}, because the config's mesh does not fit {mesh.size} device(s)")
        return mesh, ways

    def read() -> tuple[Dataset, Corpus]:
        check_attention(config)
        return preflight.read_scored(config, workdir, ("lm",) if workdir.has_lm else ())

    preflight.check_command(config, workdir, "eval")
    mesh, ways = multihost.run_on_all(check)
    multihost.check_same(workdir.facts)
    # Owning the workdir refuses, before the evaluation, a folder to which its record could not be written afterwards.
    with jax.set_mesh(mesh), multihost.entered_once(workdir.owned()):
        text, corpus = multihost.run_on_all(read)
        multihost.check_same(lambda: preflight.text_facts(corpus))
        results = _score(Run(config, workdir, mesh, text), ways)
        record = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "eval": dataclasses.asdict(config.eval),
            "data": dataclasses.asdict(config.data),
            "changed": _changed(config, workdir),
        }

        def write() -> None:
            ignore_the_next()
            report.append(workdir, record | results)
            if "plane" in results:
                report.draw_plane(results["plane"], workdir.path / "plane.png")

        # The files are written first, because printing may fail: stdout may be closed.
        multihost.write_once(write)
        multihost.write_once(lambda: web_report.try_to_write(workdir))
        if "plane" in results:
            report.print_plane(results["plane"])
        report.print_results(results, config, workdir, are_evaluated=True)
    return results


def _changed(config: Config, workdir: Workdir) -> dict[str, Any]:
    """The values, by key, that differ from the run's config.json, without those of the sections "eval" and "data"."""
    return {
        key: ours
        for key, ours, _ in differences(as_dict(config), as_dict(workdir.config))
        if not key.startswith(("eval.", "data."))
    }


def _score(run: Run, ways: list[SamplerConfig]) -> dict[str, Mapping]:
    """The scores that `run_evaluation` returns. `ways`: the samplers of the accuracy-diversity plane; empty for no plane."""
    config, workdir = run.config, run.workdir
    has_lm = workdir.has_lm
    # Records with prompts have no equal-context score: the prompt is the context.
    has_equal_context = has_lm and not config.data.prompt_field
    # Both are made before anything is scored, because they refuse text that is too short.
    equal_context = run.equal_context_evaluator() if has_equal_context else None
    contexts = (
        tradeoff.contexts_of(
            run.text.validation("lm"), run.lm_task, config.eval, run.tokenizer.pad_id
        )
        if has_lm and ways
        else []
    )
    results: dict[str, Mapping] = {}
    frozen: Params = {}
    if config.has_autoencoder:
        params = workdir.load_params("autoencoder", run.autoencoder_task, run.mesh)
        results["autoencoder"] = run.evaluator("autoencoder")(params, {})
        frozen = {"params": params}
    if has_lm:
        params = workdir.load_params("lm", run.lm_task, run.mesh)
        evaluators = {"lm": run.evaluator("lm")}
        if equal_context is not None:
            evaluators["equal_context"] = equal_context
        for name, evaluator in evaluators.items():
            began = time.monotonic()
            values = evaluator(params, frozen)
            results[name] = values | {"seconds": time.monotonic() - began}
        if contexts:
            results["plane"] = tradeoff.measure(
                run.lm_task,
                params,
                frozen,
                contexts,
                config.eval,
                ways,
                run.mesh,
            )
        if run.text.has_train:
            results["floor"] = brier.as_values(run.text.floor())
        if run.text.has_train and equal_context is not None:
            results["equal_context_floor"] = brier.as_values(run.text.equal_context_floor())
    for name in ("autoencoder", "lm"):
        if name in results:
            step = checkpoint_files.latest_step(workdir.checkpoints(name))
            results[name] = {"step": step, **results[name]}
    return results
