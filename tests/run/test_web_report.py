"""The report of a run: its numbers, its text as it was, one small file without network or scripts."""

import dataclasses
import html.parser
import json
import logging
import math
import re
import uuid

import numpy as np
import pytest

from calm_jax import brier
from calm_jax.cli.files import nan_to_none
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.run import charts, report, web_comparison, web_report
from calm_jax.run.charts import Series, chart
from calm_jax.run.run_files import RunFiles
from calm_jax.run.workdir import Workdir
from calm_jax.training.log import MetricsLog
from tests import tiny_recipe
from tests.workdirs import run

BYTES = ByteTokenizer(b"")
HOSTILE = "</pre></title><script>alert('x')</script>&amp;\"<img src=http://x onerror=y>"
# These have no end tag.
VOID = {"meta"}


class Reader(html.parser.HTMLParser):
    """Reads a page: the text of each element, in order, as `(tag, classes, text)`. Fails for tags that do not match."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, str, str]] = []
        self._open: list[list] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href"), (name, value)
        if tag not in VOID:
            self._open.append([tag, dict(attrs).get("class", ""), ""])

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        element = self._open.pop()
        assert element[0] == tag
        self.elements.append(tuple(element))
        if self._open:
            self._open[-1][2] += element[2]

    def handle_data(self, data):
        if self._open:
            self._open[-1][2] += data

    def texts(self, tag: str, kind: str = "") -> list[str]:
        return [text for name, classes, text in self.elements if name == tag and kind in classes]


def write_lines(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def train_record(stage: str, step: int) -> dict:
    """Two seconds a step."""
    return {
        "stage": stage,
        "split": "train",
        "step": step,
        "loss": 100 / step,
        "seconds": 2 * step,
    } | {
        "tokens_per_second": 5.0,
        "tokens_per_step": 120.0,
        "unheard_of": 3.0,
    }


def scored(value: float) -> dict:
    values = {"brierlm": value, "brierlm_error": 0.5}
    return values | {f"brier_{n}{e}": 0.1 for n in range(1, 5) for e in ("", "_error")}


SAMPLE = {
    "prompt": HOSTILE,
    "text": "",
    "tokens": list("añ<b>日本".encode()),
    "chunk_ends": [2, 4, 8, 12],
}


@pytest.fixture
def workdir(tmp_path) -> Workdir:
    """A finished run with hostile text everywhere, made of its files alone."""
    tree = tiny_recipe.get_config(f"{HOSTILE}/*.txt")
    workdir = Workdir(tmp_path / "a run")
    workdir._create(resolve(tree), BYTES, "corpus.json", {"train": {"name": HOSTILE}})
    records = [train_record(stage, step) for stage in ("autoencoder", "lm") for step in (4, 8, 12)]
    records += [
        {"stage": "lm", "split": split, "step": step, "loss": 2.0} | scored(10.0 + step)
        for split, step in (("validation_part", 6), ("validation", 12))
    ]
    write_lines(workdir.metrics_path, records)
    lm = {"step": 12, "loss": 2.0} | scored(22.0)
    workdir.results_path.write_text(json.dumps({"lm": lm, "floor": scored(3.0)}))
    write_lines(workdir.samples_jsonl_path, [SAMPLE])
    points = [
        {
            "sampler": sampler,
            "temperature": t,
            "candidates": 0,
            "collision": 50.0 / t,
            "accuracy": 9.0,
        }
        | {"accuracy_error": None}
        for sampler, t in (("model", 1.0), (HOSTILE, 0.5), (HOSTILE, 0.25))
    ]
    evaluation = {"lm": lm | scored(23.0), "floor": scored(3.0)}
    evaluation |= {"plane": {"points": points, "contexts": 5}}
    evaluation |= {"changed": {"lm.token_prior_weight": 0.5, "sample.prompts": [HOSTILE]}}
    write_lines(workdir.evaluations_path, [evaluation, evaluation])
    return workdir


def test_a_page_has_every_part_and_the_text_as_it_was(workdir):
    page = web_report.page(workdir)
    reader = Reader(page)
    assert not re.search(r"<script|https?://x\"|@import|url\(", page.replace(HOSTILE, ""))
    assert reader.texts("h2") == [
        "Results",
        "Autoencoder",
        "Language model",
        "Samples",
        "Accuracy and diversity",
        "Evaluations",
        "Config and text",
    ]
    captions = reader.texts("figcaption")
    assert {"BrierLM", "training loss", "unheard of (train)"} <= set(captions)
    cells = reader.texts("td")
    assert "23.00 ± 0.50" in cells and "3.00 ± 0.50" in cells
    assert f"lm.token_prior_weight=0.5, sample.prompts={[HOSTILE]}" in cells
    config = next(text for text in reader.texts("pre") if '"chunk_size"' in text)
    assert json.loads(config)["data"]["train_files"] == f"{HOSTILE}/*.txt"
    assert HOSTILE in reader.texts("b")
    assert HOSTILE in " ".join(reader.texts("div", "legend"))


def test_the_results_are_of_the_text_and_the_windows_of_the_latest_evaluation(workdir):
    """Of training, the results have another floor and other windows."""
    evaluation = {"lm": {"step": 12, "loss": 2.0} | scored(23.0)}
    evaluation["equal_context"] = {"ngrams": 7.0} | scored(24.0)

    def shown(sizes: dict) -> str:
        write_lines(workdir.evaluations_path, [evaluation | {"eval": sizes}])
        page = web_report.page(workdir)
        assert "frequencies (the floor)" not in page
        return re.search(r"tokens (\d+ to \d+) of windows", page)[1]

    assert shown({"context_tokens": 11, "block_tokens": 33}) == "11 to 33"
    own = workdir.config.eval
    for edited in ({}, {"context_tokens": "a"}, {"context_tokens": 9, "block_tokens": 3}):
        assert shown(edited) == f"{own.context_tokens} to {own.block_tokens}"


@pytest.mark.parametrize("most, option", [(128, " --max_tokens=32"), (48, "")])
def test_the_next_command_asks_for_text_that_fits_into_the_context(workdir, capsys, most, option):
    lm = dataclasses.replace(
        workdir.config.lm, data=dataclasses.replace(workdir.config.lm.data, block_tokens=64)
    )
    sample = dataclasses.replace(workdir.config.sample, max_tokens=most)
    config = dataclasses.replace(workdir.config, lm=lm, sample=sample)
    values = {"step": 12, "loss": 2.0, "ngrams": 2.0} | scored(0.0) | {"brierlm_error": math.nan}
    report.print_results({"lm": values}, config, workdir, are_evaluated=False)
    printed = capsys.readouterr().out
    assert f"--prompt=TEXT{option}\n" in printed
    # A score without an error says of how little it is.
    assert "0.00, from 2 n-grams" in printed


@pytest.mark.parametrize(
    "first_on_path, shown",
    [
        ("a b/.venv/bin/python", "python"),
        ("/usr/bin/python", "'a b/.venv/bin/python'"),
        (None, "'a b/.venv/bin/python'"),
    ],
)
def test_the_next_command_names_this_python(first_on_path, shown, tmp_path, monkeypatch):
    """As a shell in this folder finds it: by its path, in quotes where it needs them, unless it is the first on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.sys, "executable", str(tmp_path / "a b/.venv/bin/python"))
    found = first_on_path and str(tmp_path / first_on_path)
    monkeypatch.setattr(report.shutil, "which", lambda name: found)
    assert report._python() == shown


def test_chunks_of_samples_make_up_their_text(workdir):
    """Also where a character has bytes of two chunks: it is shown with the second."""
    reader = Reader(web_report.page(workdir))
    spans = [
        text for tag, kind, text in reader.elements if tag == "span" and kind in ("odd", "even")
    ]
    assert spans == ["a", "ñ<", "b>", "日本"]


@pytest.mark.slow
def test_a_long_run_has_a_small_page(workdir):
    records = [train_record("lm", step) for step in range(1, 30_001)]
    write_lines(workdir.metrics_path, records)
    write_lines(workdir.samples_jsonl_path, [SAMPLE | {"prompt": "long " * 20_000}] * 50)
    assert len(web_report.page(workdir).encode()) < 2e6


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "results.json", "samples.jsonl", "evaluations.jsonl"]
)
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"\xff{",
        b"[1]\n",
        b"{}\n",
        b'{"lm": {}, "autoencoder": {}, "floor": {}, "plane": {}}\n',
        b'{"lm": 1, "floor": [], "plane": {"points": [{}]}}\n',
        b'{"stage": "lm", "split": "train", "step": 3}\n',
    ],
)
def test_a_missing_or_damaged_file_leaves_its_part_out(workdir, name, content):
    path = workdir.path / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "Config and text" in Reader(web_report.page(workdir)).texts("h2")
    assert "Runs compared" in web_comparison.comparison({"run": [workdir]})


@pytest.mark.parametrize(
    "name, content, warning",
    [
        ("metrics.jsonl", None, " is missing: no curves are shown"),
        ("metrics.jsonl", "", " has no records: no curves are shown"),
        ("metrics.jsonl", '{"stage": "lm", "spl', " has no records: no curves are shown"),
        ("metrics.jsonl", "{}\n", ": ignoring 1 line(s) that are not metrics records; the first"),
        ("results.json", '{"lm": {"lo', ": incomplete or damaged entries are not shown"),
    ],
)
def test_what_is_not_shown_is_one_warning(workdir, caplog, name, content, warning):
    path = workdir.path / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with caplog.at_level(logging.WARNING, logger="absl"):
        notes = Reader(web_report.page(workdir)).texts("p")
    assert any(note.startswith(name) for note in notes)
    (message,) = caplog.messages
    assert message.startswith(f"{path}{warning}")


def test_other_line_ends_in_a_text_and_an_unfinished_record_are_no_damage(workdir):
    """A model of bytes may write U+2028, which JSON strings hold unescaped; the record that is being written is not complete yet."""
    other = SAMPLE | {"prompt": "a\u2028b\x85c"}
    text = json.dumps(other, ensure_ascii=False) + "\n"
    workdir.samples_jsonl_path.write_text(text, encoding="utf-8")
    with workdir.metrics_path.open("a") as file:
        file.write('\n{"stage": "lm", "spl')
    files = RunFiles(workdir)
    assert files.samples == [other] and not files.left_out
    assert len(files.records) == 8 and len(files.evaluations) == 2


def test_steps_without_a_finite_update_do_not_count_for_the_tokens_of_a_step(workdir):
    """Where all updates of a log interval were skipped, `tokens_per_step` is null."""
    records = [
        train_record("lm", step) | {"tokens_per_step": n} for step, n in ((4, 60.0), (8, None))
    ]
    write_lines(workdir.metrics_path, records)
    assert RunFiles(workdir).tokens_per_step["lm"] == 60


def test_tables_name_scores_of_nothing():
    """Results hold NaN before they are written, and None after they are read."""
    nothing = brier.score(brier.block_sums(np.zeros((1, 2, 4)), np.zeros((1, 2, 4), bool)))
    for values in (brier.as_values(nothing), nan_to_none(brier.as_values(nothing))):
        assert set(report.brier_columns(values)) == {"no positions to score"}


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        yield *path, key
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


def changed(value, path, new):
    value = json.loads(json.dumps(value))
    within = value
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = new
    return value


WRONG = ("x", ["x"], {"x": 1}, True, None, -1, 10**400, math.inf, math.nan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "results.json", "samples.jsonl", "evaluations.jsonl"]
)
def test_a_value_of_the_wrong_type_is_left_out_and_the_rest_is_shown(workdir, name):
    """Every value of a record in turn becomes each of several that a run does not write there."""
    path = workdir.path / name
    lines = path.read_text().splitlines()
    # The last record; those before it are whole.
    record, noted = json.loads(lines[-1]), 0
    for place in places(record):
        for wrong in WRONG:
            whole = [*lines[:-1], json.dumps(changed(record, place, wrong))]
            path.write_text("".join(f"{line}\n" for line in whole))
            page = web_report.page(workdir)
            assert "Config and text" in page
            noted += f"{name}: " in page
            assert "Runs compared" in web_comparison.comparison({"run": [workdir]})
    # What is not needed may have any value.
    assert noted > 10
    path.write_text("\n".join(lines))
    assert f"{name}: " not in web_report.page(workdir)


def test_a_run_resumes_from_records_of_which_some_are_none(workdir, caplog):
    """Lines of another form are dropped where the records are read, not kept to fail later."""
    good = [train_record("lm", step) for step in (4, 8)]
    bad = [good[0] | {"step": "4"}, good[0] | {"stage": []}, good[0] | {"loss": {}}, [1], 3]
    write_lines(workdir.metrics_path, [*bad, *good])
    with caplog.at_level(logging.WARNING, logger="absl"):
        log = MetricsLog(workdir.path)
        assert log.records == good and log.seconds("lm") == 16
        log.cut_back("lm", 4)
        log.close()
        assert log.records == good[:1]
        # What is left ends with the beginning of a line, as a killed run may leave it.
        with open(workdir.metrics_path, "a") as lines:
            lines.write('{"stage": "l')
        assert MetricsLog(workdir.path).records == good[:1]
    (warning,) = caplog.messages
    assert (
        "metrics.jsonl: ignoring 5 line(s) that are not metrics records; the first is line 1"
        in warning
    )


def test_records_without_a_time_do_not_count_for_the_time_of_a_run(workdir):
    timeless = {name: x for name, x in train_record("lm", 12).items() if name != "seconds"}
    write_lines(workdir.metrics_path, [train_record("lm", 8), timeless])
    assert MetricsLog(workdir.path).seconds("lm") == 16
    write_lines(workdir.metrics_path, [timeless, timeless | {"seconds": None}])
    assert MetricsLog(workdir.path).seconds("lm") == 0


def test_a_report_that_fails_is_a_line_and_keeps_the_old_one(workdir, monkeypatch, capsys):
    web_report.try_to_write(workdir)
    before = workdir.report_path.read_bytes()

    def fail(workdir, results):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(web_report, "page", fail)
    web_report.try_to_write(workdir)
    assert workdir.report_path.read_bytes() == before
    (line,) = capsys.readouterr().out.splitlines()
    assert "report.html was not written (ZeroDivisionError: two lines)" in line


def test_a_page_before_results_json_is_that_after_it(workdir):
    page, text = web_report.page(workdir), workdir.results_path.read_text()
    workdir.results_path.unlink()
    assert web_report.page(workdir) != page
    assert web_report.page(workdir, text) == page


def test_axes_of_a_comparison(workdir):
    config: Config = workdir.config
    loaded = RunFiles(workdir)
    values = {axis.label: axis.of(loaded, "lm", 6) for axis in web_comparison._AXES}
    # Tokens with a loss by the log, and FLOPs of whole blocks.
    block = config.lm.data.block_tokens * config.lm.training.batch_size
    assert values["steps"] == 6 and values["tokens"] == 6 * 120
    assert values["FLOPs"] == 6 * block * flops.training(config, "lm", BYTES.vocab_size)
    # Between the records of steps 4 and 8, and before the first.
    assert values["seconds of training"] == 12
    assert (
        web_comparison._seconds(loaded, "lm", 2) == 4
        and web_comparison._seconds(loaded, "lm", 12) == 24
    )


def test_a_comparison_shows_every_run(workdir, tmp_path):
    (tmp_path / "b").mkdir()
    other = Workdir(tmp_path / "b" / "a run")
    other._create(workdir.config, BYTES, "corpus.json", {})
    reader = Reader(web_comparison.comparison(web_comparison.by_name([workdir, other])))
    # Equal names are told apart by their paths; the second run has no records yet.
    assert {str(workdir.path), str(other.path)} <= set(reader.texts("td"))
    assert reader.texts("figcaption").count("over FLOPs") == 4


def test_seeds_of_an_arm_are_one_line_of_means_with_standard_errors(workdir, tmp_path):
    other = Workdir(tmp_path / "other")
    other._create(workdir.config, BYTES, "corpus.json", {})
    write_lines(
        other.metrics_path,
        [train_record("lm", step) | {"loss": 1.0, "seconds": 4.0 * step} for step in (4, 8)],
    )
    other.results_path.write_text(json.dumps({"lm": {"step": 8, "loss": 2.0} | scored(25.0)}))
    arm = web_comparison._arms({"arm": [workdir, other]})[0]
    seconds = web_comparison._AXES[-1]
    first, second, third = arm.line("lm", "train", "loss", seconds)
    # The losses are 100 / step and 1: of two values the standard error is half their difference.
    assert first[1:] == pytest.approx((13.0, 12.0)) and second[1:] == pytest.approx((6.75, 5.75))
    assert third[1] == 100 / 12 and math.isnan(third[2])
    assert first[0] == (2 * 4 + 4 * 4) / 2
    [row] = web_comparison.summary({"arm": [workdir, other]})
    row = dict(zip(web_comparison.SUMMARY, row, strict=True))
    # 23 and 25.
    assert (row["seeds"], row["steps"], row["BrierLM"]) == ("2", "10", "24.00 ± 1.00")
    assert row["floor"] == "3.00 ± 0.50"
    # Text without a whole n-gram to score.
    for one in (workdir, other):
        results = json.loads(one.results_path.read_text())
        results["lm"] |= {"brierlm": None, "brierlm_error": None}
        one.results_path.write_text(json.dumps(results))
    [row] = web_comparison.summary({"arm": [workdir, other]})
    row = dict(zip(web_comparison.SUMMARY, row, strict=True))
    assert row["BrierLM"] == "no positions to score"


def test_the_command_writes_a_page_and_refuses_what_is_no_run(workdir, tmp_path):
    assert "kB" in run("calm_jax.report", str(workdir.path))
    assert workdir.report_path.read_text() == web_report.page(workdir)
    assert "is no workdir" in run("calm_jax.report", str(tmp_path), status=2)
    assert "give the folders" in run("calm_jax.report", status=2)


def test_the_command_replaces_no_file_unasked_but_the_page_of_its_run(workdir, tmp_path):
    folder = str(workdir.path)
    page = f"--output={workdir.report_path}"
    for _ in range(2):
        run("calm_jax.report", folder)
        run("calm_jax.report", folder, page)
    config = workdir.path / "config.json"
    before = config.read_bytes()
    line = run("calm_jax.report", folder, f"--output={config}", status=2)
    assert line == f"error: --output={config} already exists: give another name, or --overwrite"
    # It is not the page of both.
    assert "already exists" in run("calm_jax.report", folder, folder, page, status=2)
    assert config.read_bytes() == before
    other = tmp_path / "other.html"
    run("calm_jax.report", folder, f"--output={other}")
    assert "already exists" in run("calm_jax.report", folder, f"--output={other}", status=2)
    run("calm_jax.report", folder, f"--output={other}", "--overwrite")
    assert {one.name for one in tmp_path.iterdir()} == {workdir.path.name, "other.html"}


def points_of(svg: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'class="line c0" d="M([^"V]+)"', svg)
    return [tuple(map(float, point.split())) for point in path.split("L")]


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, 4.0, 9.0], [1e-3, 1.0, 1e3, 1e4]], ids=["linear", "log"]
)
def test_places_are_affine_in_the_value_or_its_logarithm(values):
    """To the rounding of a tenth of a pixel."""
    svg = chart("t", [Series("s", [(i, value, math.nan) for i, value in enumerate(values)])], "x")
    ys = [y for _, y in points_of(svg)]
    of = [math.log10(value) if values[0] < 1 else value for value in values]
    slope = (ys[-1] - ys[0]) / (of[-1] - of[0])
    assert slope < 0
    for y, value in zip(ys, of, strict=True):
        assert y == pytest.approx(ys[0] + slope * (value - of[0]), abs=0.2)


def test_many_points_are_means_of_neighbours_and_infinite_ones_are_left_out():
    points = [(float(i), float(i % 2), math.nan) for i in range(10_200)] + [(1.0, math.inf, 0.0)]
    thinned = charts._thinned(points)
    assert len(thinned) <= 300 and all(abs(y - 0.5) < 0.02 for _, y, _ in thinned)
    assert sum(x for x, _, _ in thinned) / len(thinned) == pytest.approx(5099.5)


def test_a_chart_without_points_is_empty():
    assert chart("t", [Series("s", []), Series("n", [(1.0, math.nan, 0.0)])], "x") == ""


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (9999.0, "9999"),
        (math.nan, "nan"),
        (9999.9, "10k"),
        (12_345.0, "12.3k"),
        (999_499.0, "999k"),
        (999_936.0, "1M"),
        (-2e6, "-2M"),
        (999_999_488.0, "1G"),
        (9.996e14, "1e+15"),
        (3e20, "3e+20"),
    ],
)
def test_short_numbers(value, text):
    assert charts.short(value) == text


def test_overwrite_knows_kept_metrics_and_what_a_killed_report_leaves(workdir):
    left = f"report.html.{uuid.uuid4().hex}.tmp"
    for name in ("metrics.jsonl.damaged", "metrics.jsonl.damaged-2", left, "results.json.tmp"):
        (workdir.path / name).touch()
    workdir.check_deletable()
    for name in ("report.html.mine.tmp", "metrics.jsonl.damaged.txt"):
        (workdir.path / name).touch()
        with pytest.raises(UserError, match=f"would delete .*/{name}, which is no file of a run"):
            workdir.check_deletable()
        (workdir.path / name).unlink()


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no workdir"):
        web_report.page(Workdir(tmp_path))
