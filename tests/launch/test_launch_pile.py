"""launch/prepare_pile.sh: its dry run, and what it refuses."""

import shlex
import subprocess

import pytest

from calm_jax.config import resolve
from configs import ar_m, calm_m
from tests.workdirs import ROOT

SCRIPT = ROOT / "launch" / "prepare_pile.sh"


def prepare_pile(pile_folder, *flags: str) -> subprocess.CompletedProcess:
    given = ["--pile=pile", "--tokenizer=tokenizer.model", "--validation=wikitext.json"]
    command = ["bash", str(SCRIPT), *given, *flags]
    return subprocess.run(command, cwd=pile_folder, capture_output=True, text=True, check=False)


def test_a_dry_run_prints_the_commands_and_changes_nothing(pile_folder):
    # A dry run needs no inputs, and says that it did not look for them.
    (pile_folder / "tokenizer.model").unlink()
    before = sorted(pile_folder.rglob("*"))
    result = prepare_pile(pile_folder, "--dry_run", "--workers=3")
    assert (
        "# not checked: whether pile, tokenizer.model and wikitext.json are there" in result.stdout
    )
    assert result.returncode == 0, result.stderr
    assert sorted(pile_folder.rglob("*")) == before
    commands = [shlex.split(line) for line in result.stdout.splitlines()]
    prepared = [
        dict(arg[2:].partition("=")[::2] for arg in c[3:]) for c in commands if c[0] == "python"
    ]
    assert [flags["output"] for flags in prepared] == [
        f"prepared/pile/{part}" for part in ("autoencoder", "lm", "ar")
    ]
    assert all(flags["workers"] == "3" and flags["max_words"] == "10000" for flags in prepared)
    files = [
        [
            number
            for glob in flags["input"].split(",")
            for number in sorted((pile_folder).glob(glob))
        ]
        for flags in prepared
    ]
    assert [len(found) for found in files] == [2, 28, 30]


def test_prepared_text_is_what_the_recipes_read(pile_folder):
    """Output folders, block size, end-of-text tokens, alignment and packing."""
    lines = [
        shlex.split(line) for line in prepare_pile(pile_folder, "--dry_run").stdout.splitlines()
    ]
    flags = {}
    for line in (line for line in lines if line[0] == "python"):
        (output,) = (arg for arg in line if arg.startswith("--output="))
        flags[output.rpartition("/")[2]] = line
    calm, ar = resolve(calm_m.get_config()), resolve(ar_m.get_config())
    asked = {
        "autoencoder": (calm.autoencoder.data, calm.data.autoencoder_files),
        "lm": (calm.lm.data, calm.data.train_files),
        "ar": (ar.lm.data, ar.data.train_files),
    }
    for name, (data, files) in asked.items():
        assert files == f"prepared/pile/{name}"
        assert data.packing == "published" and "--packing=published" in flags[name]
        assert f"--block_tokens={data.block_tokens}" in flags[name]
        assert ("--append_eos" if data.append_eos else "--noappend_eos") in flags[name]
        assert ("--align_documents_to_chunks" in flags[name]) == data.align_documents_to_chunks
    assert calm.data.validation_files == ar.data.validation_files == "prepared/wikitext.jsonl"


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--pile=", "give --pile=DIR"),
        ("--pile=nowhere", "there is no nowhere/00.jsonl.zst"),
        ("--output=gs://b/prepared", "--output=gs://b/prepared must be a path of a file system"),
        ("--parts=lm,all", "'all' is none of autoencoder, lm, ar"),
        ("--parts=,", "--parts=, names none of autoencoder, lm, ar"),
        ("--tokenizer=none.model", "there is no file none.model"),
        ("--validation=tokenizer.model", "its first line has no field"),
    ],
)
def test_missing_inputs_are_refused_before_anything_is_done(pile_folder, flag, message):
    result = prepare_pile(pile_folder, flag)
    assert result.returncode == 2 and result.stderr.startswith("error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not (pile_folder / "prepared").exists()


def test_a_missing_file_that_the_parts_read_is_named(pile_folder):
    for name in ("01", "07"):
        (pile_folder / "pile" / f"{name}.jsonl.zst").unlink()
    for parts, name in {"autoencoder": "01", "lm": "07", "ar": "01"}.items():
        result = prepare_pile(pile_folder, f"--parts={parts}")
        assert result.returncode == 2 and f"there is no pile/{name}.jsonl.zst" in result.stderr
