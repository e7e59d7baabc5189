"""Fine-tuning: training from the parameters of another run, on prompts and completions."""

import dataclasses
import json
import os
import re
import shutil

import jax
import numpy as np
import pytest

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.corpus import STANDARD_LIBRARY, DataConfig, load_corpus
from calm_jax.data.documents import Document
from calm_jax.data.packing import MASKED, BlockConfig, encode_documents
from calm_jax.data.records import pack_completions, pack_records
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.parallel.mesh import make_mesh
from calm_jax.run.preflight import _find_sources
from calm_jax.run.workdir import Workdir, fingerprint
from calm_jax.tasks.language_model import counted_chunks
from calm_jax.training.checkpoint_files import latest_step
from configs import common
from configs import finetune as finetune_recipe
from tests import tiny_recipe
from tests.interop.conversions import random_workdir
from tests.tiny_model import tiny
from tests.workdirs import run

BYTES = ByteTokenizer(b"")
PAD, BOS, EOS = BYTES.pad_id, BYTES.bos_id, BYTES.eos_id


def records(prompts, completions, chunk_size, block_tokens=64, isolate=False, is_mixed=False):
    names = [str(number) for number in range(len(prompts))]
    config = BlockConfig(block_tokens, "windows", True, True, "none", isolate)
    encoded = (encode_documents(texts, BYTES) for texts in (prompts, completions))
    return pack_records(names, *encoded, BYTES, config, chunk_size, is_mixed)


# --- The recipe


@pytest.mark.parametrize("weight, scale, after", [(0, 1, 1), (3, 1, 4), (3, 16, 16)])
def test_answers_follow_a_token_prior_that_the_model_has(weight, scale, after, tmp_path):
    tree = tiny_recipe.get_config("x,token_predictor")
    tree.lm.token_prior_weight, tree.sample.token_prior_scale = float(weight), float(scale)
    workdir = Workdir(tmp_path / "run")
    workdir._create(resolve(tree), BYTES, "corpus.json", {})
    tuned = finetune_recipe.get_config(str(workdir.path))
    assert tuned.lm.token_prior_weight == weight
    assert tuned.sample.token_prior_scale == after
    assert tuned.lm.token_loss_weight == tree.lm.token_loss_weight
    tuned.data.train_files = "records.jsonl"
    resolve(tuned)


@pytest.mark.parametrize("before, after", [(1.0, 0.33), (0.5, 0.33), (0.25, 0.25)])
def test_answers_are_drawn_at_a_low_temperature(before, after, tmp_path):
    tree = tiny_recipe.get_config("x,token_predictor")
    tree.sample.temperature = before
    workdir = Workdir(tmp_path / "run")
    workdir._create(resolve(tree), BYTES, "corpus.json", {})
    assert finetune_recipe.get_config(str(workdir.path)).sample.temperature == after
    assert finetune_recipe.get_config(f"{workdir.path},text").sample.temperature == before


def test_on_plain_text_the_losses_and_the_token_prior_stay_as_they_were(tmp_path):
    tree = tiny_recipe.get_config("x,token_predictor")
    workdir = Workdir(tmp_path / "run")
    workdir._create(resolve(tree), BYTES, "corpus.json", {})
    tuned = finetune_recipe.get_config(f"{workdir.path},text")
    assert (tuned.data.prompt_field, tuned.data.text_field) == ("", "text")
    assert tuned.lm.token_prior_weight == tree.lm.token_prior_weight == 2
    assert tuned.lm.token_loss_weight == tree.lm.token_loss_weight
    assert tuned.lm.head == tree.lm.head
    assert tuned.init_from == str(workdir.path)


# --- Records


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 8])
def test_the_targets_of_a_record_are_its_completion_eos_and_the_pads_after_it(chunk_size):
    prompts = ["p" * length for length in range(10)]
    completions = ["c" * (1 + 3 * length % 7) for length in range(10)]
    blocks, too_long = records(prompts, completions, chunk_size)
    assert not too_long and len(blocks) == 10
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens, targets = blocks[index]["tokens"].tolist(), blocks[index]["targets"].tolist()
        given = tokens.index(BOS) + 1 + len(prompt)
        assert tokens[: tokens.index(BOS)] == [PAD] * tokens.index(BOS)
        assert BYTES.decode(tokens[:given]) == prompt
        # The prompt fills whole chunks, as in generation.
        assert given % chunk_size == 0 and tokens.index(BOS) < chunk_size
        learnt = [token for token in targets if token != MASKED]
        pads = -(len(completion) + 1) % chunk_size
        assert learnt == [*completion.encode(), EOS, *[PAD] * pads]
        assert targets[given : given + len(learnt)] == learnt
        assert tokens[given : given + len(learnt)] == learnt


def test_the_loss_counts_all_chunks_of_a_completion_and_no_others():
    blocks, _ = records(["", "abc", "abcdefg"], ["x", "hello", "yz"], chunk_size=4)
    targets_BLK = blocks.targets(np.arange(3)).reshape(3, -1, 4)
    counted_BL = counted_chunks(0, targets_BLK)
    # Numbers of chunks of the prompt, with bos, and of the completion, with eos.
    for row, (first, size) in zip(counted_BL, [(1, 1), (1, 2), (2, 1)], strict=True):
        expected = np.zeros(targets_BLK.shape[1] - 1, bool)
        expected[first - 1 : first - 1 + size] = True
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("chunk_size", [1, 3, 4])
def test_the_autoencoder_is_trained_on_the_chunks_that_are_targets_of_the_language_model(
    chunk_size,
):
    prompts, completions = ["a", "bcd", "", "ef"], ["x", "hello", "yzyz", "wwwwwww"]
    lm, _ = records(prompts, completions, chunk_size, block_tokens=60)
    targets_NK = lm.targets(np.arange(len(lm))).reshape(-1, chunk_size)
    expected_NK = targets_NK[(targets_NK != MASKED).all(1)]
    config = BlockConfig(2 * chunk_size, "windows", True, True, "none", False)
    encoded = encode_documents(completions, BYTES)
    blocks = pack_completions(encoded, BYTES, config, chunk_size, True, "the text")
    ours_NK = blocks.targets(np.arange(len(blocks))).reshape(-1, chunk_size)
    np.testing.assert_array_equal(ours_NK[(ours_NK != MASKED).all(1)], expected_NK)


def test_blocks_of_records_are_as_long_as_the_longest_record():
    blocks, _ = records(["ab", "a"], ["c" * 20, "c"], chunk_size=2, block_tokens=1000)
    # A pad, bos and 2 tokens; 20 tokens, eos and a pad.
    assert blocks.tokens.shape == (2, 26)


def test_blocks_of_records_are_as_long_as_those_of_text_that_is_mixed_with_them():
    blocks, _ = records(["ab", "a"], ["c" * 20, "c"], chunk_size=2, block_tokens=40, is_mixed=True)
    assert blocks.tokens.shape == (2, 40)
    assert (blocks.targets(np.arange(2))[:, 26:] == MASKED).all()


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_records_that_share_a_block_are_those_of_blocks_of_their_own(chunk_size):
    prompts = ["p" * (length % 7) for length in range(20)]
    completions = ["c" * (1 + 3 * length % 8) for length in range(20)]
    alone, _ = records(prompts, completions, chunk_size, block_tokens=40)
    shared, too_long = records(prompts, completions, chunk_size, block_tokens=40, isolate=True)
    assert not too_long and len(shared) < len(alone) / 2
    found = []
    for block in (shared[index] for index in range(len(shared))):
        assert len(block["tokens"]) == 40
        # Filler has the segment id of the record before it, or one of its own.
        for segment in np.unique(block["segments"]):
            is_in_it = block["segments"] == segment
            tokens, targets = block["tokens"][is_in_it], block["targets"][is_in_it]
            if (targets != MASKED).any():
                size = np.flatnonzero(targets != MASKED)[-1] + 1
                found.append((tokens[:size].tolist(), targets[:size].tolist()))
    expected = [
        (alone[index]["tokens"][:size].tolist(), alone[index]["targets"][:size].tolist())
        for index, size in enumerate(alone.num_valid)
    ]
    assert found == expected


def test_the_fingerprint_of_a_text_whose_name_is_not_valid_utf8():
    documents = [Document(os.fsdecode(name), "text") for name in (b"a\xff.txt", b"a\xfe.txt")]
    assert len({fingerprint([document]) for document in documents}) == 2


def test_the_fingerprint_of_a_text_depends_on_its_prompts():
    document = Document("a", "text", "prompt")
    fingerprints = {
        fingerprint([other])
        for other in (
            document,
            dataclasses.replace(document, prompt="Prompt"),
            dataclasses.replace(document, prompt=""),
            dataclasses.replace(document, prompt="", text="textprompt"),
        )
    }
    assert len(fingerprints) == 4


def test_records_longer_than_a_block_are_left_out_and_named():
    # bos, 3 and 4 tokens and eos are 9 tokens, or 12 in whole chunks.
    blocks, too_long = records(["abc", "abc"], ["wxyz", "xyz"], chunk_size=4, block_tokens=8)
    assert too_long == ["0"]
    assert len(blocks) == 1 and BYTES.decode(blocks.tokens[0]) == "abcxyz"


def read(path, **changes):
    keys = common.get_config().data.to_dict()
    keys |= {"text_field": "completion", "prompt_field": "prompt", "holdout_every": 2}
    keys |= {"train_files": str(path)}
    return load_corpus(DataConfig(**keys | changes))


def test_prompts_and_completions_are_read_from_their_fields(tmp_path):
    pairs = [("two and two is", " four"), ("", "alone"), ("naïve?", " 日本"), ("no answer", "")]
    lines = [json.dumps({"prompt": a, "completion": b, "id": 1}) for a, b in pairs]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = read(tmp_path / "a.jsonl")
    documents = sorted([*corpus.train, *corpus.validation], key=lambda document: document.name)
    assert documents == [
        Document(f"a.jsonl:{number}", text, prompt)
        for number, (prompt, text) in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"completion": "x"}', "no field 'prompt'"),
        ('{"prompt": "x"}', "no field 'completion'"),
        ('{"prompt": 3, "completion": "x"}', "field 'prompt' is int"),
        ('{"prompt": "\\ud800", "completion": "x"}', "field 'prompt' has a lone surrogate"),
    ],
)
def test_a_bad_record_raises_an_error_with_its_line_or_is_counted(line, reason, tmp_path):
    good = '{"prompt": "a", "completion": "b"}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=f"a.jsonl, line 2: {reason}"):
        read(tmp_path / "a.jsonl")
    corpus = read(tmp_path / "a.jsonl", on_bad_record="skip")
    assert sum(corpus.skipped.values()) == 1
    assert len(corpus.train) + len(corpus.validation) == 2


def test_a_text_file_is_refused_where_prompts_are_needed(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"a.txt has no field 'prompt'"):
        read(tmp_path / "a.txt")


@pytest.mark.slow
def test_text_that_is_mixed_with_records_has_no_prompts_and_is_not_scored(tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    files = f"{tmp_path}/a.jsonl,{tmp_path}/*.txt,{STANDARD_LIBRARY}"
    corpus = read(files, mixture=(3.0, 1.0, 1.0))
    sums, text, library = corpus.sources
    assert len(sums) + len(corpus.validation) == 40
    assert {document.prompt for document in (*text, *library)} == {None}
    assert all(document.prompt.endswith(" + 1 =") for document in (*sums, *corpus.validation))
    # Of the text, too, a share is held out: the one that a run on the text alone holds out.
    own = read(f"{tmp_path}/*.txt", prompt_field="", text_field="text")
    assert text == own.train and len(text) < 10
    with pytest.raises(UserError, match=r"stdlib: has no field 'prompt'.*data\.mixture"):
        read(f"{tmp_path}/a.jsonl,{STANDARD_LIBRARY}")


# --- The command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with random parameters; its blocks are longer than the records below."""
    workdir = tmp_path_factory.mktemp("source") / "run"
    tiny(block_tokens=128).save(workdir)
    return workdir


@pytest.fixture(scope="module")
def record_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetune(source, workdir, record_file, *args, status=0):
    return run(
        "calm_jax.main",
        f"--config=configs/finetune.py:{source}",
        f"--workdir={workdir}",
        f"--config.data.train_files={record_file}",
        "--config.data.holdout_every=4",
        "--config.lm.training.batch_size=4",
        *args,
        status=status,
    )


def params_of(path, stage):
    workdir = Workdir(path)
    task = (
        make_autoencoder_task(workdir.config, workdir.tokenizer)
        if stage == "autoencoder"
        else make_lm_task(workdir.config, workdir.tokenizer)
    )
    return workdir.load_params(stage, task, make_mesh(workdir.config.mesh))


@pytest.mark.slow
def test_fine_tuning_starts_from_the_given_parameters(trained, record_file, text_glob, tmp_path):
    # The learning rate of the first step is zero, so the parameters are still those of the source.
    first, given = tmp_path / "first", tmp_path / "source"
    shutil.copytree(trained, given)
    out = finetune(given, first, record_file, "--config.lm.training.num_steps=1")
    assert "BrierLM" in out
    # The samples are of held-out records.
    found = re.findall(r"^--- prompt: '(\d+) \+ 1 =', completion: ' (\d+)' ---$", out, re.MULTILINE)
    assert len(found) == 4 and all(int(b) == int(a) + 1 for a, b in found)
    sources = {stage: params_of(trained, stage) for stage in ("autoencoder", "lm")}
    for stage, source in sources.items():
        jax.tree.map(np.testing.assert_array_equal, params_of(first, stage), source)
    assert Workdir(first).tokenizer.fingerprint == Workdir(trained).tokenizer.fingerprint
    # A run has a copy of its first parameters, and does not need the source again.
    shutil.rmtree(given)
    # As it would be, had it been killed before its first checkpoint.
    shutil.rmtree(first / "lm")
    (first / "metrics.jsonl").unlink()
    run("calm_jax.main", f"--config=configs/workdir.py:{first}")
    jax.tree.map(np.testing.assert_array_equal, params_of(first, "lm"), sources["lm"])

    # With the source, the same command goes on, with more steps; it does not need the copy any more, whose disk may be gone.
    shutil.copytree(trained, given)
    shutil.rmtree(first / "init_lm")
    (first / "init_lm").symlink_to(tmp_path / "unmounted")
    more = ["--config.lm.training.num_steps=6", "--config.lm.optimizer.learning_rate=0.01"]
    out = finetune(given, first, record_file, *more)
    assert "lm: resumed at step 1" in out
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params_of(first, "lm"), sources["lm"])
    assert all(jax.tree.leaves(changed["backbone"]))
    scored = run("calm_jax.main", "--mode=eval", f"--config=configs/workdir.py:{first}")
    assert "BrierLM" in scored and "at equal context" not in scored
    # A fine-tuned run can be fine-tuned in turn, on records that are mixed with text.
    mixed = [f"--config.data.train_files={record_file},{text_glob}", "--config.data.mixture=(3,1)"]
    mixed += ["--config.lm.data.isolate_documents=True", "--config.lm.training.num_steps=1"]
    out = finetune(first, tmp_path / "second", record_file, *mixed)
    assert "BrierLM" in out


@pytest.mark.slow
def test_a_source_or_text_that_does_not_fit_is_refused_before_anything_is_written(
    trained,
    record_file,
    text_glob,
    tmp_path,
):
    cases = {
        "--config.init_from=/nowhere": "init_from='/nowhere' is no workdir",
        "--config.lm.model.rope_theta=100.0": "has lm.model.rope_theta=10000.0, this recipe has 100.0",
        "--config.lm.data.block_tokens=8": "records.jsonl:1: the record is longer than",
        "--config.autoencoder.checkpoint=x": "autoencoder.checkpoint='x': init_from=",
        "--config.data.train_files=": "data.prompt_field='prompt' needs data.train_files",
    }
    for option, message in cases.items():
        assert message in finetune(trained, tmp_path / "a", record_file, option, status=2), option
        assert not (tmp_path / "a").exists()
    assert "needs text to go on with" in run(
        "calm_jax.main",
        f"--config=configs/finetune.py:{trained},text",
        f"--workdir={tmp_path / 'a'}",
        status=2,
    )
    assert "needs data.train_files to train on" in run(
        "calm_jax.main",
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path / 'a'}",
        f"--config.data.validation_files={text_glob}",
        status=2,
    )
    assert latest_step(trained / "lm") == 0


def test_a_device_in_the_source_is_not_copied_until_the_disk_is_full(tmp_path):
    source = random_workdir(tmp_path / "source", "head=softmax")
    workdir, before = Workdir(tmp_path / "mine"), sorted(source.path.iterdir())
    folder = source.checkpoints("lm") / "12" / "params"
    folder.mkdir(parents=True)
    workdir.path.mkdir()
    (folder / "whole").write_text("whole")
    (workdir.path / "init_lm.tmp").symlink_to(source.path)
    workdir.import_initial(source, "lm")
    assert (workdir.initial("lm") / "12" / "params" / "whole").read_text() == "whole"
    assert sorted(source.path.iterdir()) == before
    (folder / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(
        UserError,
        match=r"/lm/12 is damaged \(params/elsewhere is a link to a folder, which is not copied\)",
    ):
        workdir.import_initial(source, "lm")
    (folder / "elsewhere").unlink()
    (folder / "more").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"/lm/12 is damaged \(\S+/more is no file\)"):
        workdir.import_initial(source, "lm")


def test_initial_parameters_that_were_put_aside_are_copied_again(tmp_path):
    """Also where the command was killed between making the folder and moving the copy there."""
    source, workdir = Workdir(tmp_path / "source"), Workdir(tmp_path / "mine")
    source.checkpoints("lm").joinpath("12").mkdir(parents=True)
    (source.path / "config.json").touch()
    tree = tiny_recipe.get_config("")
    tree.stage, tree.init_from = "lm", str(source.path)
    tree.data.train_files = STANDARD_LIBRARY
    shutil.copytree(source.checkpoints("lm"), workdir.checkpoints("autoencoder"))
    config, initial = resolve(tree), workdir.initial("lm")

    def to_copy():
        return _find_sources(config, workdir, fresh=False, tokenizer=None)[0]

    for name, is_missing in (("12.damaged", True), ("12", False)):
        assert to_copy().path == source.path
        (initial / name).mkdir(parents=True)
        assert (to_copy() is not None) == is_missing


@pytest.mark.slow
def test_scoring_needs_no_training_text(finished, text_glob):
    out = run(
        "calm_jax.main",
        "--mode=eval",
        f"--config=configs/workdir.py:{finished[0]}",
        "--config.data.train_files=",
        f"--config.data.validation_files={text_glob}",
    )
    assert "BrierLM" in out and "floor" not in out
