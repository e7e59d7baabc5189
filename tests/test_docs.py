"""The documentation names what exists: files, modules, functions, flags, links, commits."""

import ast
import importlib
import importlib.util
import pathlib
import re
import runpy
import shlex
import subprocess
import tomllib

import pytest

from tests.test_readme import PAGES, README, defined_flags
from tests.workdirs import ROOT

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
# Of the published PyTorch code, not of this repository.
PUBLISHED_COMMIT = "c556310"


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one.

    A module is not imported for its own sake: two commands in one process would define a flag twice.
    """
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.util.find_spec(".".join(parts[:size]))
        except ModuleNotFoundError:
            # A class in place of a package.
            found = None
        if found:
            break
    else:
        return False
    if size == len(parts):
        return True
    value = importlib.import_module(".".join(parts[:size]))
    for part in parts[size:]:
        # Fields of a NamedTuple or a dataclass without a default are annotations alone.
        if not hasattr(value, part):
            return part in getattr(value, "__annotations__", {})
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_package_exists(page):
    """In backticks; of the changelog's table of moves, the new names."""
    text = (
        re.sub(r"^\| .*? \| ", "", PAGES[page], flags=re.MULTILINE)
        if "CHANGE" in page
        else PAGES[page]
    )
    names = re.findall(r"`(?:from )?((?:calm_jax|benchmarks)(?:\.\w+)+)`", text)
    assert names or page != "docs/architecture.md"
    for name in names:
        # benchmarks.NAME stands for each of them.
        assert name.endswith(".NAME") or exists(name), f"{page}: {name}"


def test_names_are_told_from_what_does_not_exist():
    assert exists("calm_jax.models.calm.CALM.hidden") and exists("calm_jax.Generator")
    assert exists("calm_jax.data.prepare") and exists("benchmarks.data")
    for name in (
        "calm_jax.nothing",
        "calm_jax.models.calm.CALM.seek",
        "calm_jax.losses.Posterior.x",
    ):
        assert not exists(name)


# Old names of other modules, which notebooks of users import (tests/test_old_names.py).
FORMER_NAMES = {"calm_jax.text", "calm_jax.samplers", "calm_jax.temperature"}


def test_the_floors_are_those_that_the_linter_holds():
    text = PAGES["docs/architecture.md"]
    lines = re.search(r"<!-- floors -->\n```\n(.*?)```", text, re.DOTALL)[1].splitlines()
    shown = [re.split(r" \| ", re.split(r"\s{2,}", line)[0]) for line in lines]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [one["layers"] for one in contracts["contracts"] if one["type"] == "layers"]
    held = [
        [name.removeprefix("calm_jax.") for name in re.split(r" [|:] ", layer)]
        for layer in layers
        if not set(layer.split(" | ")) <= FORMER_NAMES
    ]
    assert shown == held


# --- Links


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert path.is_relative_to(ROOT), f"{page}: {target}"
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), (
            f"{page}: {target}"
        )


def test_the_readme_links_every_page():
    for page in PAGES:
        assert page == "README.md" or f"]({page})" in README, page


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_place_of_one_machine(page):
    assert not re.search(r"(?<![\w.:/~-])/(?:work|root|home|Users|tmp)/", PAGES[page])


# --- Commands


def commands(text: str, *first: str) -> list[list[str]]:
    """The words of each command that begins with one of `first`: lines of bash, and commands of Python in backticks."""
    lines = [
        line
        for code in code_blocks(text, "bash")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [code.replace("\n", " ") for code in re.findall(r"`(python -m [^`]+)`", prose)]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        ends = [place for place, word in enumerate(words) if word in ("&&", ">")] + [len(words)]
        starts = [0, *(place + 1 for place in ends)]
        found += [words[start:end] for start, end in zip(starts, ends, strict=False)]
    return [words for words in found if words and words[0] in first]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_the_flags_that_it_is_given(page):
    shared = defined_flags("calm_jax.parallel.startup")
    for _, _, module, *words in commands(PAGES[page], "python"):
        # Those of other packages, and the placeholder for all benchmarks.
        is_ours = module == "benchmarks" or module.startswith(("calm_jax.", "benchmarks."))
        # The flags of this one are lm-evaluation-harness's.
        if not is_ours or module.endswith(".NAME") or module == "calm_jax.lm_eval":
            continue
        assert exists(module), f"{page}: {module}"
        known = defined_flags(module) | shared
        for word in words:
            name = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and not name.startswith("config."):
                assert name in known or name.removeprefix("no") in known, f"{page}: {module} {word}"


def test_the_pages_have_commands_to_check():
    found = [words[2] for text in PAGES.values() for words in commands(text, "python")]
    assert {"calm_jax.main", "calm_jax.generate", "calm_jax.data.prepare"} <= set(found)
    assert len(found) > 40


@pytest.mark.parametrize("page", PAGES)
def test_every_script_has_the_flags_that_it_is_given(page):
    """A script's own, or those of the command that it hands them to."""
    handed_on = defined_flags("calm_jax.main") | defined_flags("calm_jax.data.prepare")
    handed_on |= defined_flags("calm_jax.parallel.startup")
    for words in commands(PAGES[page], "sbatch", *(f"launch/{path.name}" for path in SCRIPTS)):
        [place] = [place for place, word in enumerate(words) if word.startswith("launch/")]
        text = (ROOT / words[place]).read_text(encoding="utf-8")
        common = (ROOT / "launch" / "common.sh").read_text(encoding="utf-8")
        own = set(re.findall(r"^ +--(\w+)(?:=\*)?\)", text + common, re.MULTILINE))
        for word in words[place + 1 :]:
            name = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and not name.startswith("config."):
                assert name in own | handed_on, f"{page}: {words[place]} {word}"


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_import_what_there_is(page):
    for code in code_blocks(PAGES[page], "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("calm_jax"):
                assert all(exists(f"{node.module}.{name.name}") for name in node.names)


def test_every_test_that_a_page_names_exists():
    named = [
        one.split("::")
        for text in PAGES.values()
        for one in re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)
    ]
    assert named
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES)
def test_every_commit_that_a_page_names_is_in_the_history(page):
    def git(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no checkout with its history")
    words = set(re.findall(r"\b[0-9a-f]{7}\b", PAGES[page]))
    commits = {word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)}
    for commit in commits - {PUBLISHED_COMMIT}:
        assert git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, f"{page}: {commit}"


# --- Pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, name", [("README.md", "two_stages"), ("docs/training.md", "training_curves")]
)
def test_the_picture_is_what_its_script_draws(tmp_path, page, name):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (in the extra 'plot')")
    script = ROOT / "docs" / "pictures" / f"{name}.py"
    kept = script.with_suffix(".svg")
    assert f"]({kept.relative_to((ROOT / page).parent)})" in PAGES[page]
    drawn = tmp_path / "drawn.svg"
    runpy.run_path(str(script))["draw"](drawn)

    def shape(path: pathlib.Path) -> list[str]:
        """Its elements; their coordinates depend on the version of matplotlib."""
        return re.findall(r"<(\w+)", path.read_text(encoding="utf-8"))

    assert shape(drawn) == shape(kept)
