"""The suite `costs`: where the time of a training step goes, from a trace of the compiled program.

A case is `costs:calm`, `costs:ae` or `costs:ar`, with a record for the step and one for each of its parts. A part whose FLOPs a
formula counts also has their rate as a share of that of one matrix product. The operations of XLA's CPU backend are assigned
to the parts by the names of the modules that they come from; on other devices the suite finds none.
"""

import collections
import functools
import pathlib
import re
import tempfile

import jax

from benchmarks.measure import Cases, Options, Record, measured, record, timed, with_flops
from benchmarks.suites.train import CASES, Trained, fresh, variant, whole_batches
from calm_jax.config import resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import vocabulary

# The parts of a step: a name, and a pattern of the HLO op_names that belong to it. The first match counts.
_PARTS = (
    ("random numbers", r"_normal|_uniform|_bernoulli|_randint|_shuffle|threefry|erf_inv"),
    ("token predictor", r"token_predictor|CALM\.token_loss"),
    ("decoder", r"/decode|unfold|_refine"),
    ("encoder", r"/encode|Autoencoder\.encode"),
    ("head", r"head/head"),
    ("energy score", r"CALM\.loss"),
    ("attention", r"layers/(.*/)?attention\b"),
    ("MLP", r"layers/(.*/)?mlp\b"),
    ("embedding", r"/embed"),
    ("rest of the backbone", r"backbone|LM\.hidden|CALM\.hidden"),
    ("vocabulary", r"head\.loss|LM\.loss|Autoencoder\.loss"),
)
REST = "optimizer, checks, and what has no name"
# Operations that run others, whose time would count twice.
_OUTER = re.compile(r"^(while|call|conditional)[.\d]*$")


def part_of(op_name: str) -> str:
    """The part of a step that an operation of this op_name belongs to."""
    return next((name for name, pattern in _PARTS if re.search(pattern, op_name)), REST)


def op_names(hlo: str) -> dict[str, str]:
    """The op_name of each instruction of a compiled program; of a fusion without one, the name of an operation in it."""
    names: dict[str, str] = {}
    inner: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        opened = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if opened:
            computation = opened[1]
            continue
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line)
        if not found:
            continue
        named = re.search(r'op_name="([^"]*)"', line)
        called = re.search(r"calls=%?([\w.-]+)", line)
        name = named[1] if named else inner.get(called[1], "") if called else ""
        names[found[1]] = name
        if "/" in name:
            inner[computation] = name
    return names


def parts_of(trained: Trained, num_steps: int) -> dict[str, float]:
    """The seconds of each part of a step."""
    with jax.set_mesh(trained.mesh):
        compiled = trained.step.lower(trained.state, trained.frozen, trained.batch).compile()
    trained.step, names = compiled, op_names(compiled.as_text())
    timed(trained.advance, 2)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    seconds: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            timed(trained.advance, num_steps)
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name in names and not _OUTER.match(event.name):
                        part = part_of(names[event.name])
                        seconds[part] += event.duration_ns / 1e9 / num_steps
    return dict(seconds)


def cases(options: Options) -> Cases:
    """The steps of CALM, of the autoencoder and of the baseline."""
    return {
        f"costs:{case}": functools.partial(_costs, options, case) for case in ("calm", "ae", "ar")
    }


def _costs(options: Options, case: str) -> list[Record]:
    stage, head = CASES[case]
    config = resolve(whole_batches(variant(options.tree, f"head={head}" if head else "")))
    words = vocabulary(config.tokenizer)
    trained = fresh(config, stage, words)
    tokens = trained.batch["tokens"].size
    size = trained.mesh.size
    whole = measured(
        "costs", f"costs:{case}", trained.advance, options, tokens, config.compute_dtype, size
    )
    if stage == "autoencoder":
        counted = flops.autoencoder_training(config, words.vocab_size)
    else:
        counted = flops.lm_training(config, words.vocab_size, flops.Count.OURS)
    counted = {name: tokens * each for name, each in counted.items()}
    records = [with_flops(whole, sum(counted.values()))]
    parts = parts_of(trained, options.repeats)
    for name, seconds in sorted(parts.items(), key=lambda pair: -pair[1]):
        one = record("costs", f"costs:{case}: {name}", [seconds])
        one["of_step"] = seconds / sum(parts.values())
        if name in counted:
            one |= {
                "flops": counted[name],
                "share": counted[name] / seconds / size / whole["product_flops_per_s"],
            }
        records.append(one)
    return records
