"""Times training, generation, evaluation and start-up on the devices of this machine, and compares with earlier times.

    python -m benchmarks [--suite=train,generate,eval,data,startup,growth,costs] [--config=configs/bench_small.py] [--config.KEY=VALUE ...]
    python -m benchmarks --suite=train --stage=lm --config=configs/calm_m.py
    python -m benchmarks --output=FILE [--compare=EARLIER_FILE]
    python -m benchmarks --peer=DIR --peer_python=PYTHON --peer_bench=FILE [--exported=DIR --workdir=DIR]

Times are medians of `--repeats` calls, after a first call that compiles and a second one to warm up. The column "share of matmul" is
the rate of a case's FLOPs as a share of that of one matrix product, which is measured just before. The column "peak MiB" is the
peak memory of the process so far, with all earlier cases; `--case=NAME` runs one case alone. The last form runs the published
PyTorch code in turn with this one (see benchmarks/peer.py). Suite `train` also runs on several hosts, with the command on each.
"""

import pathlib
from typing import Any

import jax
from absl import app, flags
from ml_collections import config_flags

from benchmarks import measure, results
from benchmarks import peer as published
from benchmarks.measure import Cases, Options, Record
from benchmarks.suites import costs, data, evaluate, generate, growth, startup, train
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.cli.output import new_file
from calm_jax.config import as_dict, resolve
from calm_jax.errors import UserError
from calm_jax.parallel import multihost
from calm_jax.parallel.host_memory import keep_freed_memory, return_compilers_memory
from calm_jax.parallel.startup import define_flags, multihost_command

# The suites in the order in which they run. `startup` is first, because its own processes need the devices, which this process
# occupies later.
_SUITES = ("startup", "data", "train", "generate", "eval", "growth", "costs")
_RECIPE = "configs/bench_small.py"

_SUITE = flags.DEFINE_list(
    "suite", ["train", "generate"], f"what to measure, of {', '.join(_SUITES)}"
)
_CONFIG = define_recipe(f"recipe: a file with get_config(); {_RECIPE} if it is not given")
_CASE = flags.DEFINE_list("case", [], "only these cases of the suites; if empty, all")
_STAGE = flags.DEFINE_enum(
    "stage",
    "",
    ["", "lm", "autoencoder"],
    "suite train: only this stage of the recipe, with the recipe's own head; if empty, every task and head",
)
_REPEATS = flags.DEFINE_integer("repeats", 10, "calls of which medians are taken", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "case_seconds", 60.0, "no further call after so many seconds of timed calls of a case"
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "suite startup, and --peer: processes of each kind", lower_bound=1
)
_SAMPLERS = flags.DEFINE_list(
    "samplers", ["pooled", "published"], "suite generate: samplers at T = 1/2"
)
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "suite generate: prompts at once")
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 256, "suite generate: tokens after each prompt", lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "suite generate: folder of a trained model; if empty, random parameters"
)
_OUTPUT = flags.DEFINE_string("output", "", "where to write the results, as JSON")
_COMPARE = flags.DEFINE_string("compare", "", "an earlier --output to compare with")
_PEER = flags.DEFINE_string("peer", "", "folder of the published PyTorch code, to run in turn")
_PEER_PYTHON = flags.DEFINE_string("peer_python", "", "with --peer: the Python that runs it")
_PEER_BENCH = flags.DEFINE_string("peer_bench", "", "with --peer: the program that times it")
_EXPORTED = flags.DEFINE_string(
    "exported", "", "with --peer: the model of --workdir, as calm_jax.interop.export wrote it"
)
_start_processes = define_flags()


_CASES_OF = {
    "startup": startup.cases,
    "data": data.cases,
    "train": train.cases,
    "generate": generate.cases,
    "eval": evaluate.cases,
    "growth": growth.cases,
    "costs": costs.cases,
}


def _options() -> Options:
    if not all(text.isdecimal() and int(text) > 0 for text in _BATCHES.value):
        raise UserError(f"--batches={','.join(_BATCHES.value)} must be numbers of at least 1")
    return Options(
        tree=_CONFIG.value,
        stage=_STAGE.value,
        repeats=_REPEATS.value,
        seconds=_SECONDS.value,
        rounds=_ROUNDS.value,
        samplers=tuple(_SAMPLERS.value),
        batches=tuple(map(int, _BATCHES.value)),
        new_tokens=_NEW_TOKENS.value,
        workdir=_WORKDIR.value,
    )


def _chosen(found: dict[str, Any]) -> dict[str, Any]:
    """The cases of --case, or all. Raises `UserError` for a name that no suite has."""
    for name in _CASE.value:
        if name not in found:
            raise UserError(f"--case={name} is none of {', '.join(found) or '(no case)'}")
    return {name: found[name] for name in found if name in _CASE.value or not _CASE.value}


def _measure(options: Options) -> list[Record]:
    """Measures the cases of the suites, and prints a line after each."""
    found: Cases = {}
    for suite in _SUITES:
        if suite in _SUITE.value:
            if suite != "train" and multihost.is_multiprocess():
                raise UserError(f"--suite={suite} runs in one process, only train in several")
            found |= _CASES_OF[suite](options)
    records = []
    for name, case in _chosen(found).items():
        print(f"{name} ...", flush=True)
        records += case()
        # The next case compiles its own programs: this frees the memory of those of the last one.
        jax.clear_caches()
    return records


def _flags_of_our_processes() -> list[str]:
    """The flags that this command passes on to the processes that measure single cases."""
    config: Any = flags.FLAGS["config"]
    changed = config_flags.get_override_values(config)
    same = (_REPEATS, _SECONDS, _NEW_TOKENS, _WORKDIR)
    return [
        f"--config={config.config_filename}",
        *(f"--config.{key}={value}" for key, value in changed.items()),
        *(f"--{flag.name}={flag.value}" for flag in same),
        *(f"--{flag.name}={','.join(flag.value)}" for flag in (_SAMPLERS, _BATCHES)),
    ]


def _beside_the_published_code(options: Options) -> list[Record]:
    """Runs the published code and this project's in turn."""
    peer = published.Peer(_PEER.value, _PEER_PYTHON.value, _PEER_BENCH.value, _EXPORTED.value)
    found = published.cases(_SUITE.value, peer, options)
    names = _chosen({name: theirs for theirs, ours in found.items() for name in ours})
    kept = {theirs: [name for name in ours if name in names] for theirs, ours in found.items()}
    return published.alternate(
        {theirs: ours for theirs, ours in kept.items() if ours},
        options.rounds,
        published.theirs(peer, options.repeats),
        published.ours(_flags_of_our_processes()),
    )


def _check_flags() -> None:
    """Raises `UserError` for flags that are wrong or contradict each other, before long work."""
    for suite in _SUITE.value:
        if suite not in _SUITES:
            raise UserError(f"--suite={suite} is none of {', '.join(_SUITES)}")
    if not _SUITE.value:
        raise UserError(f"--suite= names none of {', '.join(_SUITES)}")
    for folder in (_WORKDIR, _EXPORTED, _PEER, _COMPARE):
        local_path(folder.value, f"--{folder.name}")
    if _OUTPUT.value:
        new_file(local_path(_OUTPUT.value, "--output"), "--output", overwrite=True)
    if _PEER.value:
        for flag in (_STAGE, _COMPARE):
            if flag.value:
                raise UserError(f"--{flag.name} has no meaning with --peer: leave it out")
    else:
        for flag in (_PEER_PYTHON, _PEER_BENCH, _EXPORTED):
            if flag.value:
                raise UserError(f"--{flag.name}={flag.value} needs --peer=DIR")


@multihost_command
def main(argv: list[str]) -> None:
    _check_flags()
    recipe: Any = _CONFIG.value
    options, config = _options(), resolve(recipe)
    about = measure.facts() | {"config": as_dict(config)}
    chosen = {name: value for name, value in vars(options).items() if name != "tree"}
    flag: Any = flags.FLAGS["config"]
    about["options"] = chosen | {"recipe": flag.config_filename}
    path = pathlib.Path(_COMPARE.value)
    earlier = results.read(path) if _COMPARE.value else None
    if _PEER.value:
        records = _beside_the_published_code(options)
        published.print_table(records)
    else:
        _start_processes()
        return_compilers_memory()
        records = _measure(options)
        about["device"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        print(f"{about['device']}, {about['cpu']}, {about['cores']} cores, jax {about['jax']}")
        measure.print_table(records)
    if _OUTPUT.value and multihost.is_primary():
        results.write(pathlib.Path(_OUTPUT.value), about, records)
    if earlier is not None:
        results.print_ratios(about | {"results": records}, earlier, path)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags. Without --config, --config.KEY=VALUE changes the default recipe."""
    is_given = any(word.partition("=")[0] in ("--config", "-config") for word in argv)
    return parse_flags(argv if is_given else [argv[0], f"--config={_RECIPE}", *argv[1:]])


if __name__ == "__main__":
    keep_freed_memory()
    app.run(main, flags_parser=_parse)
