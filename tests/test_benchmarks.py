"""`python -m benchmarks`: medians, ratios to earlier results, the published code in turn, and the command itself."""

import dataclasses
import json
import math
import os
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, known_text, measure, peer, results
from benchmarks.known_text import KnownText
from benchmarks.measure import Options
from benchmarks.suites import evaluate, generate, startup, train
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.errors import UserError
from calm_jax.planning.topology import GPU_MEMORY_SHARE
from configs import ar_s, bench_small
from tests import workdirs
from tests.tiny_model import tiny
from tests.workdirs import run

TINY = "--config=tests/tiny_recipe.py:nothing"


def options(**changes: Any) -> Options:
    """The command's defaults, with changes."""
    return dataclasses.replace(
        Options(
            tree=bench_small.get_config(),
            stage="",
            repeats=3,
            seconds=60.0,
            rounds=1,
            samplers=("pooled", "published"),
            batches=(1, 8),
            new_tokens=256,
            workdir="",
        ),
        **changes,
    )


# --- Timing


def test_calls_end_with_the_repeats_or_with_the_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.timed(lambda: None, 4) == [1, 1, 1, 1]
    assert measure.timed(lambda: None, 4, limit=1.5) == [1, 1]
    assert measure.timed(lambda: None, 4, limit=0) == [1]


def test_a_record_has_the_median_and_the_range():
    one = measure.record("train", "calm", [0.004, 0.001, 0.002], tokens_per_s=5.0)
    assert (one["ms"], one["fastest_ms"], one["slowest_ms"], one["runs"]) == (2, 1, 4, 3)
    assert (one["suite"], one["case"], one["tokens_per_s"]) == ("train", "calm", 5)


def test_the_first_call_is_apart(monkeypatch):
    """The clock: 10 s for the first call, 2 s for each later one; the product has its own test."""
    monkeypatch.setattr(measure, "product_rate", lambda dtype: 1e9)
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 2 if now[0] else 10

    one = measure.measured("train", "calm", call, options(), tokens=100, dtype="float32")
    assert (one["ms"], one["runs"], one["compile_s"], one["tokens_per_s"]) == (2000, 3, 8, 50)
    assert now[0] == 10 + 2 + 3 * 2
    # Two devices share 4 GFLOP; each would compute 2 GFLOP in the two seconds.
    counted = measure.with_flops(one | {"devices": 2}, 4e9)
    assert counted["flops_per_s"] == 2e9 and counted["share"] == 1
    assert math.isnan(counted["mfu"])


def test_random_tokens_are_all_but_the_pad():
    tokens = measure.random_tokens(Vocabulary(7, 3), 10, 100)
    assert tokens.shape == (10, 100) and tokens.dtype == np.int32
    assert set(tokens.flatten()) == {0, 1, 2, 4, 5, 6}


def test_the_rate_of_a_product_is_its_flops_over_the_median_time(monkeypatch):
    monkeypatch.setattr(measure, "timed", lambda run, repeats, limit=0: [0.5, 0.25, 1.0])
    assert measure.product_rate("float32") == 2 * 2048 * 256 * 688 / 0.5


# --- The suites' cases


def test_train_has_every_task_and_head():
    assert list(train.cases(options())) == ["calm", "calm-diffusion", "calm-flow", "ae", "ar"]
    assert list(train.cases(options(stage="autoencoder"))) == ["autoencoder"]
    assert list(train.cases(options(tree=ar_s.get_config()))) == ["ar"]


def test_every_variant_of_a_recipe_is_valid():
    """Also of one with settings that the baseline refuses."""
    tree = bench_small.get_config()
    tree.eval.skip_last_start, tree.stage = True, "lm"
    tree.autoencoder.checkpoint = "elsewhere"
    for head in ("energy", "diffusion", "flow", "softmax"):
        config = resolve(train.variant(tree, f"head={head}"))
        assert config.lm.head.name == head and config.lm.model == resolve(tree).lm.model
    assert tree.lm.head.name == "energy" and tree.chunk_size == 4


def test_generation_has_a_sampler_only_where_there_is_a_choice():
    assert list(generate.cases(options())) == [
        "gen:1:1",
        "gen:1:8",
        "gen:0.5:1:pooled",
        "gen:0.5:1:published",
        "gen:0.5:8:pooled",
        "gen:0.5:8:published",
    ]
    softmax = options(tree=bench_small.get_config("head=softmax"), batches=(1,))
    assert list(generate.cases(softmax)) == ["gen:1:1", "gen:0.5:1"]


def test_generation_beyond_the_context_is_refused_before_the_first_case():
    assert len(generate.cases(options(new_tokens=480))) == 6
    with pytest.raises(UserError, match=r"--new_tokens=481: .* lm\.data\.block_tokens=512"):
        generate.cases(options(new_tokens=481))


def test_evaluation_has_both_chunk_sizes_and_the_baseline():
    assert list(evaluate.cases(options())) == ["eval:k=4", "eval:k=1", "eval:softmax"]
    assert list(evaluate.cases(options(tree=ar_s.get_config()))) == ["eval:softmax"]


def test_startup_alternates_an_empty_and_a_full_cache(monkeypatch):
    seen = []

    def process(cache):
        warm = any(cache.iterdir())
        (cache / "program").touch()
        seen.append(warm)
        return 3.0 - warm, 10.0 * len(seen)

    monkeypatch.setattr(startup, "_process", process)
    found = startup.cases(options(rounds=2))["startup"]()
    assert seen == [False, True, False, True]
    times = {one["case"]: (one["ms"], one["rss_mb"]) for one in found}
    assert times == {"startup:cold": (3000, 30), "startup:warm": (2000, 40)}


def test_startup_waits_for_the_first_step_and_refuses_a_command_that_fails(tmp_path, monkeypatch):
    write = (
        "import pathlib, sys, time; workdir = pathlib.Path(sys.argv[-1].partition('=')[2]); "
        "workdir.mkdir(); time.sleep(0.5); (workdir / 'metrics.jsonl').write_text('step 1')"
    )
    program = tmp_path / "program.py"
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    monkeypatch.setattr(startup, "_COMMAND", ("program",))
    program.write_text(f"{write}; time.sleep(600)")
    seconds, peak = startup._process(tmp_path / "cache")
    assert 0.5 < seconds < 60 and 1 < peak < 1000
    program.write_text("import sys; sys.exit('no text')")
    with pytest.raises(UserError, match="startup: the command failed: no text"):
        startup._process(tmp_path / "cache")


# --- Earlier results


def result(case: str, ms: float, **values: float) -> dict[str, Any]:
    return {"suite": "train", "case": case, "ms": ms, **values}


def test_a_ratio_above_1_is_faster_and_larger():
    old = [result("calm", 30.0, rss_mb=100.0), result("ae", 5.0), result("gone", 1.0)]
    new = [result("calm", 20.0, rss_mb=50.0), result("ae", 10.0, rss_mb=50.0), result("new", 1.0)]
    assert results.ratios(new, old) == {
        "calm": {"speed": 1.5, "memory": 0.5},
        "ae": {"speed": 0.5},
    }
    # Other suites have cases of the same names.
    assert not results.ratios(new, [one | {"suite": "costs"} for one in old])


def test_results_come_back_with_null_for_what_is_not_known(tmp_path):
    path = tmp_path / "results.json"
    results.write(path, {"commit": "abc"}, [result("calm", 2.0, mfu=math.nan)])
    [one] = results.read(path)["results"]
    assert one == result("calm", 2.0) | {"mfu": None}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"results": [{"case": "a"}]}', '{"results": [{"case": "a", "ms": 0}]}']
)
def test_other_files_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--compare=.*other.json") as refusal:
        results.read(path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="cannot be read"):
        results.read(tmp_path / "missing.json")


def test_differences_name_machine_versions_and_keys():
    old = {"jax": "0.10.2", "cores": 2, "config": {"lm": {"a": 1}}, "options": {"repeats": 3}}
    new = {"jax": "0.10.3", "cores": 2, "config": {"lm": {"a": 2}}, "options": {"repeats": 3}}
    assert results.differences(old, old) == []
    assert results.differences(new, old) == ["jax: 0.10.2 -> 0.10.3", "config.lm.a: 1 -> 2"]


def test_files_without_a_common_case_are_refused(tmp_path):
    ours, theirs = {"results": [result("a", 1.0)]}, {"results": [result("b", 1.0)]}
    with pytest.raises(UserError, match="has none of the cases"):
        results.print_ratios(ours, theirs, tmp_path)


# --- The published code in turn

# A program instead of the one that times the published code.
BENCH = """
import json, os, sys
print("a warning")
if sys.argv[1] == "ar": sys.exit("no ar here")
print(json.dumps({"ms": 2.5 * int(sys.argv[2]), "rss_mb": len(os.environ["PEER"]), "all": []}))
"""


def stand_in(tmp_path, **changes: str) -> peer.Peer:
    (tmp_path / "bench.py").write_text(BENCH)
    values = {"python": sys.executable, "bench": str(tmp_path / "bench.py"), "exported": ""}
    return peer.Peer(folder=str(tmp_path), **values | changes)


def test_both_sides_run_in_turn_and_their_medians_are_compared():
    calls = []
    of_theirs, of_ours = iter([4.0, 100.0, 6.0]), iter([3.0, 2.0, 1.0])

    def theirs(case):
        calls.append(f"their {case}")
        return {"ms": next(of_theirs), "rss_mb": 7.0}

    def ours(case):
        calls.append(f"our {case}")
        return {"ms": next(of_ours), "rss_mb": float(len(calls))}

    [one] = peer.alternate({"calm": ["calm"]}, 3, theirs, ours)
    assert calls == ["their calm", "our calm"] * 3
    assert (one["ms"], one["peer_ms"], one["ratio"]) == (2, 6, 3)
    assert (one["rss_mb"], one["peer_rss_mb"]) == (6, 7)
    assert one["rounds_ms"] == [3, 2, 1] and one["peer_rounds_ms"] == [4, 100, 6]


def test_the_published_program_gets_case_repetitions_and_folder(tmp_path):
    run_theirs = peer.theirs(stand_in(tmp_path), repeats=4)
    assert run_theirs("calm") == {"ms": 10, "rss_mb": len(str(tmp_path))}
    with pytest.raises(UserError, match="--peer_bench, case ar, ended with status 1: no ar here"):
        run_theirs("ar")


@pytest.mark.parametrize("printed", ["", "12 ms", "{}", '{"ms": null, "rss_mb": 1}', "[1]"])
def test_another_output_of_the_published_program_is_refused(printed):
    with pytest.raises(UserError, match="case calm: its last line must be JSON"):
        peer.parse("calm", printed)


def test_a_peer_that_is_not_there_is_refused(tmp_path):
    for name in ("python", "bench"):
        with pytest.raises(UserError, match=f"--peer_{name}=nowhere is no file"):
            stand_in(tmp_path, **{name: "nowhere"})
    with pytest.raises(UserError, match="--exported=nowhere is no folder"):
        stand_in(tmp_path, exported="nowhere")


def test_generation_is_compared_with_the_same_model(tmp_path, monkeypatch):
    both = ("train", "generate")
    chosen = peer.cases(both, stand_in(tmp_path), options())
    assert chosen == {name: [name] for name in ("calm", "ae", "ar")}
    exported = stand_in(tmp_path, exported=str(tmp_path))
    with pytest.raises(UserError, match="needs --workdir=DIR"):
        peer.cases(both, exported, options())
    monkeypatch.setattr(generate, "config_of", lambda options: resolve(options.tree))
    assert peer.cases(("generate",), exported, options(workdir="a run", batches=(8,))) == {
        f"gen:1:8:256:{tmp_path}": ["gen:1:8"],
        f"gen:0.5:8:256:{tmp_path}": ["gen:0.5:8:pooled", "gen:0.5:8:published"],
    }


# --- The command


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        (["--suite=train,play"], "--suite=play is none of"),
        (["--suite="], "--suite= names none of"),
        (["--case=nothing"], "--case=nothing is none of calm, calm-diffusion"),
        (["--peer_bench=b.py"], "--peer_bench=b.py needs --peer=DIR"),
        (["--config.lm.nothing=1"], "--config.lm.nothing: config.lm has no key 'nothing'"),
    ],
)
def test_bad_flags_are_one_line(words, message):
    assert run("benchmarks", *words, status=2).startswith(f"error: {message}")


@pytest.mark.parametrize(
    "words, message",
    [
        (["sampling", "--collisions=0.1,many"], "--collisions=many must be a number from 0 to 1"),
        (["sampling", "--collisions=-1"], "--collisions=-1 must be a number from 0 to 1"),
        (["sampling", "--batches=65"], "--batches=65 must be a whole number from 1 to --contexts="),
        (["load"], "give the folder of a trained model"),
        (["conversion", "--recipe=ar_s"], "flag --recipe=ar_s: value should be one of <quickstart"),
    ],
)
def test_bad_flags_of_a_single_measurement_are_one_line(words, message):
    name, *flags = words
    assert run(f"benchmarks.{name}", *flags, status=2).startswith(f"error: {message}")


@pytest.mark.slow
def test_requests_at_once_are_timed_and_compared_with_texts_alone(tmp_path):
    tiny().save(tmp_path / "model")
    flags = (f"--workdir={tmp_path / 'model'}", "--requests=8", "--max_tokens=6")
    out = run("benchmarks.load", *flags)
    assert "8 requests of 6 tokens at once" in out
    assert "lost: 0; different from the text without load: 0" in out


@pytest.mark.slow
def test_a_conversion_is_timed(tmp_path):
    out = run("benchmarks.conversion", "--recipe=quickstart", f"--folder={tmp_path}")
    assert "parameters in" in out and "peak" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_training_is_timed_and_compared(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    names = ["calm", "ae", "ar"]
    cases = f"--case={','.join(names)}"
    out = run("benchmarks", "--suite=train", cases, TINY, "--repeats=2", f"--output={first}")
    found = json.loads(first.read_text())
    assert [one["case"] for one in found["results"]] == names
    assert all(name in out for name in names)
    for one in found["results"]:
        assert one["runs"] == 2 and one["fastest_ms"] <= one["ms"] <= one["slowest_ms"]
        # A batch of 4 blocks of 32 tokens.
        assert one["tokens_per_s"] == pytest.approx(128e3 / one["ms"])
        assert one["flops_per_s"] == pytest.approx(one["flops"] * 1e3 / one["ms"])
        assert one["rss_mb"] > 100 and one["mfu"] is None
    assert {"date", "commit", "python", "jax", "jaxlib", "cpu", "cores", "device"} < set(found)
    small = ["--suite=train", "--case=ae", TINY, "--repeats=1"]
    out = run("benchmarks", *small, f"--output={second}", f"--compare={first}")
    [one] = json.loads(second.read_text())["results"]
    assert "speed, new / old" in out and "differs: options.repeats: 2 -> 1" in out
    assert f"{found['results'][1]['ms'] / one['ms']:.3f}" in out


@pytest.mark.slow
def test_generation_and_evaluation_are_timed(tmp_path):
    output = tmp_path / "results.json"
    sizes = ["--config.lm.data.block_tokens=64", "--batches=2", "--new_tokens=16", "--repeats=1"]
    cases = "--case=gen:1:2,gen:0.5:2:pooled,eval:k=4"
    run("benchmarks", "--suite=generate,eval", cases, TINY, *sizes, f"--output={output}")
    at_1, at_half, evaluation = json.loads(output.read_text())["results"]
    assert (at_1["draws"], evaluation["case"]) == (1, "eval:k=4")
    assert at_half["draws"] > 1 and at_half["flops"] > at_1["flops"]
    for one in (at_1, at_half):
        assert one["tokens_per_s"] == pytest.approx(2 * 16e3 / one["ms"])
        assert one["first_chunk_ms"] > 0


@pytest.mark.slow
def test_the_beginning_of_a_run_is_timed(text_glob, tmp_path):
    output = tmp_path / "results.json"
    recipe = f"--config=tests/tiny_recipe.py:{text_glob}"
    run("benchmarks", "--suite=data", recipe, "--repeats=2", f"--output={output}")
    read, tokenizer, packed, batch = json.loads(output.read_text())["results"]
    names = [one["case"] for one in (read, tokenizer, packed, batch)]
    assert names == ["data:read", "data:tokenizer", "data:pack", "data:batch"]
    assert (read["runs"], tokenizer["runs"], packed["runs"]) == (2, 1, 2)
    assert batch["tokens_per_s"] == pytest.approx(4 * 32e3 / batch["ms"])


# --- One call on a machine with a GPU


@pytest.mark.slow
def test_a_part_for_gpus_is_repeated_until_it_has_succeeded(tmp_path):
    assert gpu._run("flag", 60, ["benchmarks.load", "--requests=x"], tmp_path).startswith("failed")
    assert "--requests=x" in (tmp_path / "flag.log").read_text()
    assert gpu._run("late", 0.01, ["benchmarks.load", "--help"], tmp_path).startswith("stopped")
    assert [path.name for path in tmp_path.glob("*.done")] == []
    assert gpu._run("flag", 60, ["calendar", "2026"], tmp_path).startswith("done in ")
    log = tmp_path / "flag.log"
    assert "2026" in log.read_text()
    log.write_text("not run again")
    assert gpu._run("flag", 60, ["calendar", "2026"], tmp_path).startswith("done in ")
    assert log.read_text() == "not run again"


def test_a_part_for_gpus_with_other_options_is_run_again(tmp_path):
    """Results of other options are gone, even if the part fails now."""
    assert gpu._run("part", 60, ["calendar", "2026"], tmp_path).startswith("done in ")
    result = tmp_path / "part.json"
    result.write_text("{}")
    assert gpu._run("part", 60, ["calendar", "2027"], tmp_path).startswith("done in ")
    assert "2027" in (tmp_path / "part.log").read_text() and not result.exists()
    first, second = (gpu._parts(tmp_path, False, one) for one in ("h100:1", "h100:8"))
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"plan_train", "plan_decode"}


@pytest.mark.parametrize("given", [None, "0.5"])
def test_measurements_on_gpus_have_the_memory_that_the_planner_assumes(
    given, tmp_path, monkeypatch
):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    # The module prints the variable.
    (tmp_path / "shown.py").write_text(f"import os; print(os.environ[{name!r}])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu._run("memory", 60, ["shown"], tmp_path)
    assert float((tmp_path / "memory.log").read_text()) == float(given or GPU_MEMORY_SHARE)


def test_decoding_on_a_gpu_is_compared_with_its_bound(tmp_path):
    assert gpu.summary(tmp_path) == []
    train_results = [{"ms": 12.34, "mfu": 0.456}, {"ms": 1.0, "mfu": None}]
    (tmp_path / "train.json").write_text(json.dumps({"results": train_results}))
    cases = [
        {"case": "gen:1:8", "tokens_per_s": 500.0},
        {"case": "gen:0.5:64:pooled", "tokens_per_s": 10.0},
    ]
    (tmp_path / "decode.json").write_text(json.dumps({"results": cases}))
    plans = [
        {"batch": 8, "temperature": 1.0, "tokens_per_second": 1250.0},
        {"batch": 64, "temperature": 0.5, "tokens_per_second": 20.0},
    ]
    plan = {"limits": {"compute": 0.004, "network": 0.0}, "limit": "compute"}
    (tmp_path / "plan_train.json").write_text(json.dumps(plan | {"utilisation_bound": 0.75}))
    (tmp_path / "plan_decode.json").write_text(json.dumps({"plans": plans}))
    assert gpu.summary(tmp_path) == [
        "train: 12.3 ms a step, MFU 45.6% (goal 45%: reached)",
        "train: 1.0 ms a step, MFU not known for this device",
        "train, planned: at least 4.0 ms a step (compute), MFU at most 75.0%",
        "decode gen:1:8: 500 tokens/s, 2.50 times from the bound (goal 2: missed)",
        "decode gen:0.5:64:pooled: 10 tokens/s, 2.00 times from the bound (goal 2: reached)",
    ]


@pytest.mark.slow
def test_the_dry_run_of_the_measurements_for_gpus(tmp_path):
    out = run("benchmarks.gpu", f"--output={tmp_path}", "--dry_run")
    for name in ("quickstart", "train", "decode"):
        assert f"{name}: done in " in out
    assert "ms a step, MFU not known for this device" in out and "decode gen:1:1: " in out
    assert "python -m" not in run("benchmarks.gpu", f"--output={tmp_path}", "--dry_run")


# --- benchmarks.roofline


@pytest.mark.slow
def test_a_finished_comparison_with_the_planner_is_shown_again(tmp_path):
    """Of recipes whose computing takes half as long as their moving, and all of whose ratios are right but those to the first."""
    path = tmp_path / "roofline.json"
    names = json.loads(
        workdirs.run_program(
            "import json; from benchmarks import roofline; print(json.dumps([*roofline.CASES]))"
        ).stdout
    )
    cases = {
        name: {"flops": 1e9 * size, "bytes": 4e9 * size, "seconds": 3.0 * size}
        for size, name in enumerate(names, 1)
    }
    cases[names[0]]["seconds"] = 1.5
    stored = json.dumps({"rates": {"flops": 1e9, "bytes": 2e9}, "cases": cases})
    path.write_text(stored)
    out = run("benchmarks.roofline", f"--output={path}", env=dict(os.environ))
    assert f"{names[1]}: computing 2.000 s, moving 4.000 s, measured 6.000 s" in out
    # Five of fifteen pairs have the first recipe, whose measured time is half as long as predicted.
    for way in ("larger time", "sum of times"):
        assert f"ratios predicted by the {way}: wrong by 0% (median), 100% at most" in out
    assert path.read_text() == stored


def test_words_and_strings_of_the_training_text():
    """A word counts in two documents; strings of 8 characters are mostly no white space; errors are those of a ratio."""
    known = KnownText(["def alpha(beta):", "alpha = gamma", "beta"])
    assert known.words == {"alpha", "beta"}
    assert known_text.words("the_alpha2beta é") == ["the", "alpha", "beta"]
    assert list(known_text.strings("  a = bc ")) == ["  a = bc", " a = bc "]
    assert list(known_text.strings("     abcd")) == ["    abcd"]
    texts = ["def alpha(gamma", "beta    beta    ", ""]
    # The words alpha of three (def and gamma are in one document each) and beta twice; of the 8 and 9 strings, 3 are known,
    # those of "def alpha(".
    found = known.row(texts)
    for cell, numbers, right in (
        (found[0], [3, 2, 0], [1, 2, 0]),
        (found[1], [8, 9, 0], [3, 0, 0]),
    ):
        share = sum(right) / sum(numbers)
        residuals = np.array(right) - share * np.array(numbers)
        error = np.sqrt(3 / 2 * (residuals**2).sum()) / sum(numbers)
        assert cell == f"{share:.3f} ± {error:.3f}"
    assert found[2:] == ["2", "29%"]
    assert known.row(["1 + 1", "2"])[0] == "none"
    assert known.row(["beta gamma"])[0] == "0.500"


@pytest.mark.slow
def test_the_words_of_a_run(finished):
    out = run("benchmarks.words", f"--workdir={finished[0]}", "--texts=64", "--max_tokens=8")
    assert "64 texts of" in out
    held_out = next(line for line in out.splitlines() if "held out" in line)
    # So short a text need not have a string of eight characters.
    _, _, words, strings, *_ = held_out.split("│")
    assert 0 < float(words.split()[0]) <= 1
    assert strings.strip() == "none" or 0 < float(strings.split()[0]) <= 1
    error = run("benchmarks.words", f"--workdir={finished[0]}", "--sampler=best", status=2)
    assert error.startswith("error: ") and "best" in error
