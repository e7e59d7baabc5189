"""Export: what it refuses, and the separate folder of the autoencoder."""

import json
import shutil

import huggingface_hub
import pytest

from calm_jax.data.tokenizers import (
    HuggingFaceTokenizer,
    Llama3Tokenizer,
    SentencePieceTokenizer,
)
from calm_jax.interop.exported import _write_tokenizer, export
from calm_jax.interop.model_card import model_card
from calm_jax.interop.source import find_tokenizer
from calm_jax.run.workdir import Workdir
from tests.data.test_tokenizers import tiny_json, tiny_ranks, trained_json, trained_model
from tests.interop.checkpoints import listing, refusal
from tests.interop.conversions import random_workdir
from tests.workdirs import run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "changes", "key"),
    [
        ("head=diffusion", {"lm__head__num_steps": 50}, "lm.head.num_steps=50"),
        ("head=energy", {"lm__model__norm_epsilon": 1e-5}, "lm.model.norm_epsilon=1e-05"),
    ],
)
def test_a_key_that_the_published_code_hard_codes_is_refused_by_name(
    arguments, changes, key, tmp_path
):
    workdir = random_workdir(tmp_path / "ours", arguments, **changes)
    assert key in refusal(export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == ["ours", *(f"ours/{name}" for name in listing(tmp_path / "ours"))]


def test_a_workdir_without_a_trained_model_is_refused(tmp_path):
    assert "no workdir" in refusal(export, Workdir(tmp_path / "no"), tmp_path / "out", "x")
    workdir = random_workdir(tmp_path / "ours", "head=softmax")
    shutil.rmtree(workdir.checkpoints("lm"))
    assert "train first" in refusal(export, workdir, tmp_path / "out", "x")


@pytest.mark.slow
def test_a_language_model_without_its_autoencoder_is_refused(tmp_path):
    workdir = random_workdir(tmp_path / "ours", "head=energy")
    shutil.rmtree(workdir.checkpoints("autoencoder"))
    before = listing(tmp_path)
    assert "autoencoder" in refusal(export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == before


@pytest.mark.slow
def test_the_command_says_when_there_is_no_language_model_to_export(tmp_path):
    workdir = random_workdir(tmp_path / "ours", "head=energy", lm__head__num_target_samples=0)
    shutil.rmtree(workdir.checkpoints("lm"))
    printed = run(
        "calm_jax.interop.export", f"--workdir={workdir.path}", f"--target={tmp_path / 'out'}"
    )
    notes = [line for line in printed.splitlines() if line.startswith("note: ")]
    assert "note: the run has no language model: the autoencoder alone was written" in notes
    assert not any("num_target_samples" in note for note in notes)
    assert sum("the byte tokenizer has no file" in note for note in notes) == 1


@pytest.mark.slow
def test_the_exported_autoencoder_folder_is_found_and_keeps_its_config(plan_of, tmp_path):
    changes = {"autoencoder__model__norm_epsilon": 1e-5, "autoencoder__model__kl_clamp": 0.25}
    workdir = random_workdir(tmp_path / "ours", "head=energy", **changes)
    out = tmp_path / "out"
    export(workdir, out, "autoencoder")
    # Whoever may read one file may read all.
    assert len({path.stat().st_mode for path in out.rglob("*") if path.is_file()}) == 1
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: calm_jax\n")
    # The autoencoder is found by ae_path, and beside the weights once the whole export has moved.
    for plan in (
        plan_of(out, out / "autoencoder", tokenizer="bytes"),
        plan_of(out, tokenizer="bytes"),
        plan_of(out.rename(tmp_path / "moved"), tokenizer="bytes"),
    ):
        assert plan.config.autoencoder.model == workdir.config.autoencoder.model
        assert plan.notes == []
    shutil.rmtree(tmp_path / "moved" / "autoencoder")
    assert "norms' epsilon" in plan_of(tmp_path / "moved", tokenizer="bytes").notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_a_model_card_tells_what_is_known(prior, tmp_path):
    """Of a run that was trained here: steps, text and scores; the front matter is what the hub reads.

    Scores with a token prior are not those of the exported weights, and are left out.
    """
    changes = {"lm__token_loss_weight": prior, "lm__token_prior_weight": prior}
    workdir = random_workdir(tmp_path / "ours", "head=energy", **changes)
    (workdir.path / "converted.json").unlink(missing_ok=True)
    text = {"train": {"documents": 7, "characters": 1234, "fingerprint": "0"}}
    workdir.corpus_path.write_text(json.dumps(text))
    scores = {"brierlm": 12.5, "brierlm_error": 0.5}
    scores |= {f"brier_{n}{end}": 0.25 for n in range(1, 5) for end in ("", "_error")}
    results = {"lm": scores | {"step": 12, "loss": 1.0}}
    workdir.results_path.write_text(json.dumps(results))
    card = model_card(workdir, True, 1234567, "my-calm")
    data = huggingface_hub.ModelCard(card, ignore_metadata_errors=False).data
    assert (data.library_name, data.pipeline_tag, data.tags) == (
        "calm_jax",
        "text-generation",
        ["calm"],
    )
    for part in ("# my-calm\n", "1,234,567 parameters", "7 documents of 1,234 characters"):
        assert part in card
    assert ("| BrierLM | 12.50 ± 0.50 |" in card) == (not prior) and "energy head" in card
    assert "K = 4 tokens" in card
    assert "convert --source=my-calm --workdir=runs/my-calm --tokenizer=bytes" in card


def test_an_exported_tokenizer_is_found_again(tmp_path):
    """The file's name depends on what the tokenizer was read from."""
    for number, (tokenizer, name) in enumerate(
        [
            (HuggingFaceTokenizer(trained_json("<s>")), "tokenizer.json"),
            (Llama3Tokenizer(tiny_json("[PAD]")), "tokenizer.json"),
            (Llama3Tokenizer(tiny_ranks()), "tokenizer.model"),
            (SentencePieceTokenizer(trained_model(pad_id=-1)), "tokenizer.model"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        _write_tokenizer(folder, tokenizer)
        assert listing(folder) == [name]
        found, _ = find_tokenizer(folder)
        assert found.fingerprint == tokenizer.fingerprint
