"""The start of a run: `begin` checks all that can be checked before long work, then makes or opens the workdir.

A run may take over parts of other workdirs: initial parameters (`init_from`), or a whole autoencoder
(`autoencoder.checkpoint`, or that of `init_from`). Their config and tokenizer must fit.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import Mesh

from calm_jax.build import check_attention
from calm_jax.cli.files import local_path, read_json
from calm_jax.config import NO_PARAMETER_KEYS, Config, as_dict, leaves
from calm_jax.data.corpus import STANDARD_LIBRARY, Corpus
from calm_jax.data.tokenizers import Tokenizer, check_path, make_tokenizer
from calm_jax.errors import UserError
from calm_jax.parallel import multihost
from calm_jax.planning import fitting
from calm_jax.run.dataset import Dataset, read_corpus, reads_train_files
from calm_jax.run.run_files import STAGES
from calm_jax.run.workdir import Workdir, describe
from calm_jax.training import checkpoint_files
from calm_jax.training.log import read_records
from calm_jax.training.step import check_batches


def _check_fits(
    key: str, config: Config, tokenizer: Tokenizer, source: Workdir, with_lm: bool
) -> None:
    """Raises `UserError` unless the models in `source`, the workdir that the config key `key` names, are those of this recipe.

    with_lm: whether to compare the language model, too; else only the autoencoder is compared.
    """
    theirs = source.config
    ours_and_theirs: dict[str, tuple[Any, Any]] = {
        "chunk_size": (config.chunk_size, theirs.chunk_size),
        "tokenizer.kind": (config.tokenizer.kind, theirs.tokenizer.kind),
        "tokenizer": (tokenizer.fingerprint, source.tokenizer.fingerprint),
    }

    def compare(name: str, ours: Any, other: Any) -> None:
        ours, other = dataclasses.asdict(ours), dataclasses.asdict(other)
        for field in ours | other:
            if f"{name}.{field}" not in NO_PARAMETER_KEYS:
                ours_and_theirs[f"{name}.{field}"] = (ours.get(field), other.get(field))

    if config.has_autoencoder:
        compare("autoencoder.model", config.autoencoder.model, theirs.autoencoder.model)
    if with_lm:
        compare("lm.head", config.lm.head, theirs.lm.head)
        compare("lm.model", config.lm.model, theirs.lm.model)
        weights = config.lm.token_loss_weight, theirs.lm.token_loss_weight
        # Two positive weights may differ. If one is 0, only the other model has the auxiliary network.
        if not all(weights):
            ours_and_theirs["lm.token_loss_weight"] = weights
    for name, (ours, other) in ours_and_theirs.items():
        if ours == other:
            continue
        hint = (
            f"; --config.tokenizer.path={source.path}/tokenizer/model takes its tokenizer"
            if name == "tokenizer"
            else ""
        )
        raise UserError(
            f"{key}={str(source.path)!r} has {name}={other!r}, this recipe has {ours!r}{hint}"
        )


def _open_source(key: str, name: str, stages: Sequence[str], workdir: Workdir) -> Workdir:
    """The workdir `name`, the value of `key`. Raises `UserError` unless it has trained parameters of these stages."""
    source = Workdir(local_path(name, key))
    if source.path.resolve() == workdir.path.resolve():
        raise UserError(f"{key}={name!r} is the workdir itself")
    if not source.exists:
        raise UserError(f"{key}={name!r} is no workdir")
    for stage in stages:
        if not source.has_checkpoint(stage):
            raise UserError(f"{key}={name!r} has no trained {STAGES[stage].lower()}")
    return source


def _find_sources(
    config: Config, workdir: Workdir, fresh: bool, tokenizer: Tokenizer | None
) -> tuple[Workdir | None, Workdir | None]:
    """The workdirs to copy from: `(that of the initial parameters, that of the autoencoder)`.

    Either is None if the config names none, or if `workdir` has its copy already.

    Args:
      fresh: whether `workdir` is new, or to be overwritten.
      tokenizer: this run's; None if it is not known yet, which leaves out the check that configs and tokenizers fit.
    """

    initial = autoencoder = None
    to_begin = [stage for stage in config.stages if fresh or not workdir.has_parameters(stage)]
    if config.init_from and to_begin:
        if not config.data.train_files:
            raise UserError(
                f"data.train_files is empty, and init_from={config.init_from!r} needs text to go on with: name files, or "
                f"--config.data.train_files={STANDARD_LIBRARY} for Python's standard library"
            )
        initial = _open_source("init_from", config.init_from, to_begin, workdir)
    if config.autoencoder_source and (fresh or not workdir.has_checkpoint("autoencoder")):
        key = "autoencoder.checkpoint" if config.autoencoder.checkpoint else "init_from"
        autoencoder = _open_source(key, config.autoencoder_source, ["autoencoder"], workdir)
        if tokenizer is not None:
            _check_fits(key, config, tokenizer, autoencoder, with_lm=False)
    if initial is not None and tokenizer is not None:
        _check_fits("init_from", config, tokenizer, initial, with_lm="lm" in to_begin)
    return initial, autoencoder


def check_scored(config: Config, workdir: Workdir) -> None:
    """Raises `UserError` if the config does not fit the workdir's models, or names no text to score converted weights on."""
    workdir.check_config(config, training=False)
    if workdir.is_converted and not (config.data.validation_files or config.data.train_files):
        raise UserError(
            "data.validation_files is empty: name text to score the converted weights on, with "
            "--config.data.validation_files=GLOB"
        )


def read_scored(
    config: Config, workdir: Workdir, stages: Collection[str]
) -> tuple[Dataset, Corpus]:
    """The text on which a workdir's models are scored; prints a line if the run was trained on other text.

    stages: as of `read_corpus`.
    """
    corpus = read_corpus(config, stages)
    change = "" if workdir.is_converted else workdir.change_of_text(corpus)
    if change:
        print(f"data: this is not the text that the run was trained on. {change}")
    return Dataset(config, corpus, workdir.tokenizer), corpus


def _new_tokenizer(
    config: Config, corpus: Corpus, initial: Workdir | None, named: Tokenizer | None
) -> Tokenizer:
    """The tokenizer of a new run: that of the initial parameters, else that of the prepared text, else the config's.

    named: the one of the config's file, if it has been opened.
    """
    if initial is not None:
        return initial.tokenizer
    if corpus.prepared:
        text = corpus.prepared[0]
        theirs = text.tokenizer
        if theirs.kind != config.tokenizer.kind:
            raise UserError(
                f"{text.folder} was prepared with a tokenizer of tokenizer.kind={theirs.kind!r}, this recipe has "
                f"{config.tokenizer.kind!r}: give --config.tokenizer.kind={theirs.kind}"
            )
        return theirs
    if named is not None:
        return named
    documents = corpus.train or corpus.autoencoder_train
    return make_tokenizer(config.tokenizer, (document.text for document in documents))


def _check_tokenizer_file(config: Config, tokenizer: Tokenizer, fresh: bool) -> None:
    """Raises `UserError` if `tokenizer.path` is another tokenizer than the one that is used. A file that is gone is no error."""
    path = config.tokenizer.path
    if path and pathlib.Path(path).exists():
        named = make_tokenizer(config.tokenizer, ())
        if named.fingerprint != tokenizer.fingerprint:
            whose, others = "this run's", ", give another --workdir, or --overwrite"
            if fresh:
                # A new run gets its tokenizer from one of the two.
                whose, others = "that of init_from or of the prepared text", ""
            raise UserError(
                f"tokenizer.path={path!r} is another tokenizer ({named.fingerprint}) than {whose} "
                f"({tokenizer.fingerprint}): leave tokenizer.path out{others}"
            )


def is_finished(config: Config, workdir: Workdir) -> bool:
    """Whether results.json shows that every stage of the config was trained to its last step and scored."""
    try:
        done = read_json(workdir.results_path)
    except (OSError, ValueError):
        return False

    def latest(name: str) -> int | None:
        return checkpoint_files.latest_step(workdir.checkpoints(name))

    if not isinstance(done, dict) or (config.has_autoencoder and latest("autoencoder") is None):
        return False
    for name in config.stages:
        scored, step = done.get(name), latest(name)
        if not isinstance(scored, dict) or step is None or step != scored.get("step"):
            return False
        if step < getattr(config, name).training.num_steps:
            return False
    return True


def _check_autoencoder_stage(config: Config, workdir: Workdir, fresh: bool) -> None:
    """Raises `UserError` where stage 2 lacks an autoencoder, or stage 1 would change it under a trained language model."""
    if config.autoencoder_source or not config.has_autoencoder:
        return
    step = None if fresh else checkpoint_files.latest_step(workdir.checkpoints("autoencoder"))
    if config.stage == "lm" and step is None:
        found = "--overwrite deletes that of" if workdir.exists and fresh else "there is none in"
        raise UserError(
            f"stage='lm' needs an autoencoder, and {found} {workdir.path}: train it with --config.stage=all, or name "
            "a workdir that has one with --config.autoencoder.checkpoint=DIR"
        )
    if fresh or not workdir.has_lm:
        return
    num_steps = config.autoencoder.training.num_steps
    # Where the autoencoder is gone, `_check_checkpoints` has refused already.
    if "autoencoder" in config.stages and step is not None and step < num_steps:
        raise UserError(
            f"autoencoder.training.num_steps={num_steps}: the language model in {workdir.path} was trained on the "
            f"autoencoder of step {step}, which must not change under it: give another --workdir"
        )


def _check_checkpoints(config: Config, workdir: Workdir) -> None:
    """Raises `UserError` if a stage had checkpoints that are gone: to train it anew would drop its metrics and results."""
    has_lm = workdir.has_lm
    for name in ("autoencoder", "lm") if config.has_autoencoder else ("lm",):
        folder = workdir.checkpoints(name)
        if checkpoint_files.latest_step(folder) is not None:
            continue
        what = "the language model was trained on it"
        if name == "lm" or not has_lm:
            # A copied autoencoder is copied again as long as no language model was trained on it.
            is_copied = name == "autoencoder" and config.autoencoder_source
            records = [] if is_copied else read_records(workdir.metrics_path)
            ours = [one for one in records if one["stage"] == name]
            if not (ours and _had_checkpoint(name, folder, ours, config, workdir.config)):
                continue
            last = max(one["step"] for one in ours)
            what = f"{workdir.metrics_path} has records of it up to step {last}"
        anew = "another --workdir, or --overwrite"
        if name == "lm" and config.has_autoencoder:
            anew = (
                f"another --workdir with --config.autoencoder.checkpoint={workdir.path} (--overwrite would delete the "
                "autoencoder as well)"
            )
        raise UserError(
            f"{folder} holds no checkpoint, but {what}: move the checkpoints back, or mount their disk; to begin anew, give {anew}"
        )


def _had_checkpoint(name: str, folder: pathlib.Path, records: list[dict], *configs: Config) -> bool:
    """Whether the records of a stage, of which there are some, show that it had a complete checkpoint.

    The folder is made before the first record is written. The second checkpoint is begun when the first is complete, and the whole
    split is scored after the last. A stage that was killed earlier has records, but may have no checkpoint yet.
    """
    every = max(getattr(config, name).training.checkpoint_every for config in configs)
    return not folder.exists() or any(
        one["split"] == "validation" or one["step"] > 2 * every for one in records
    )


def _refuse_converted(workdir: Workdir) -> None:
    """Raises `UserError` for a workdir of converted parameters: it has no optimizer state to resume from."""
    if not workdir.is_converted:
        return
    has_lm = workdir.has_lm
    way_out = (
        f"--config=configs/finetune.py:{workdir.path}"
        if has_lm
        else f"--config.autoencoder.checkpoint={workdir.path}"
    )
    raise UserError(
        f"{workdir.path} holds converted parameters: to train from them, give another folder: {way_out} --workdir=DIR"
    )


def text_facts(corpus: Corpus) -> dict[str, Any]:
    """Size and fingerprint of every text, which must be equal on all processes."""
    return {f"{name} text": about for name, about in describe(corpus).items()}


def check_command(config: Config, workdir: Workdir, what: str) -> None:
    """Raises `AgreedError` unless all processes were given the same command; `what` is its mode, such as "train"."""
    given = {"command": what, "workdir": str(workdir.path)}
    multihost.check_same(lambda: given | dict(leaves(as_dict(config))))


def begin(config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh) -> Dataset:
    """Checks everything that can be checked before long work, then makes or opens the workdir, and returns the text.

    Args:
      config: the recipe.
      workdir: the folder of the run; may not exist yet.
      overwrite: whether to delete a run that is already in the workdir.
      mesh: the devices, set with `jax.set_mesh`.

    Raises:
      UserError: if a check fails, before anything is written or deleted.
    """
    available = fitting.available_here()
    text, facts, write = multihost.run_on_all(
        lambda: _check(config, workdir, overwrite, mesh, available)
    )
    multihost.check_same(facts)
    multihost.write_once(write)
    multihost.check_shared(workdir.path)
    return text


def _check(
    config: Config, workdir: Workdir, overwrite: bool, mesh: Mesh, available: float
) -> tuple[Dataset, Callable[[], dict[str, Any]], Callable[[], None]]:
    """Does all the checks of `begin` and writes nothing. `available`: bytes that a step may take of a device.

    Returns `(text, facts, write)`: the run's text; a function that collects what must be equal on all processes; a
    function that makes or opens the workdir.
    """
    if "lm" in config.stages:
        check_attention(config)
    for name in config.stages:
        check_batches(name, getattr(config, name).training, mesh)
    workdir.refuse_foreign()
    if overwrite:
        workdir.check_deletable()
    fresh = overwrite or not workdir.exists
    data = config.data
    if reads_train_files(config, config.stages) and data.validation_files and not data.train_files:
        raise UserError(
            f"data.validation_files={data.validation_files!r} needs data.train_files to train on (--config.data.train_files=stdlib: "
            "names Python's standard library)"
        )
    if not fresh:
        _refuse_converted(workdir)
        workdir.check_config(config, training=True)
        _check_checkpoints(config, workdir)
    initial, _ = _find_sources(config, workdir, fresh, tokenizer=None)
    named = None
    if fresh and initial is None and not config.data.names_folders:
        check_path(config.tokenizer)
        if config.tokenizer.path:
            # Before the text is read, so that a wrong file is refused at once.
            named = make_tokenizer(config.tokenizer, ())
    _check_autoencoder_stage(config, workdir, fresh)
    print("data: reading and tokenising", flush=True)
    corpus = read_corpus(config, config.stages)
    if fresh:
        tokenizer = _new_tokenizer(config, corpus, initial, named)
    else:
        workdir.check_corpus(corpus)
        tokenizer = workdir.tokenizer
    if len(config.stages) > 1 and fitting.is_automatic(config, "lm"):
        fitting.check_backbone(config, tokenizer.vocab_size, mesh, available)
    if not fresh or initial is not None or corpus.prepared:
        _check_tokenizer_file(config, tokenizer, fresh)
    _, autoencoder = _find_sources(config, workdir, fresh, tokenizer)
    # Packing raises `UserError` for text that is too short.
    text = Dataset(config, corpus, tokenizer)
    for name in config.stages:
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
            # A call with --config.stage=lm keeps the stored stage, except that "autoencoder" becomes "all", as the run has both
            # stages now.
            stage = workdir.config.stage
            if stage == "autoencoder" and "lm" in config.stages:
                stage = "all"
            workdir.store_config(dataclasses.replace(config, stage=stage))
        if autoencoder is not None:
            workdir.import_autoencoder(autoencoder)
        if initial is not None:
            for name in config.stages:
                if not workdir.has_parameters(name):
                    workdir.import_initial(initial, name)

    def facts() -> dict[str, Any]:
        return {"tokenizer": tokenizer.fingerprint} | text_facts(corpus)

    return text, facts, write
