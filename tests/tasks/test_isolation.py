"""`data.isolate_documents`: a packed block has the loss and the scores of its documents, each on its own."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax import brier
from calm_jax.brier import Protocol
from calm_jax.build import make_lm_task
from calm_jax.config import resolve
from calm_jax.data.packing import MASKED, BlockConfig, pack
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.models.kv_cache import SegmentIds
from calm_jax.run.dataset import Dataset, read_corpus
from calm_jax.tasks.base import split_keys
from tests import tiny_recipe
from tests.data.test_shards import prepared
from tests.tiny_model import tiny
from tests.workdirs import evaluate, train

BYTES = ByteTokenizer(b"")
# The number of chunks in each document of a block.
LENGTHS = (6, 1, 6)


# --- Blocks -------------------------------------------------------------------------------------


def blocks_of(packing, front_fill="none", block=24):
    rng = np.random.default_rng(0)
    encoded = [rng.integers(0, 200, size) for size in rng.integers(0, 40, 60)]
    config = BlockConfig(block, packing, True, True, front_fill, isolate_documents=True)
    return encoded, pack(encoded, BYTES, config, 4, 0, True, "the text")


@pytest.mark.parametrize("front_fill", ["none", "random"])
@pytest.mark.parametrize("packing", ["windows", "documents", "published"])
def test_segment_ids_change_at_each_documents_first_chunk_which_is_no_target(packing, front_fill):
    """The first chunk is the one with bos; isolation changes nothing else in a block."""
    encoded, isolated = blocks_of(packing, front_fill)
    config = BlockConfig(24, packing, True, True, front_fill, isolate_documents=False)
    plain = pack(encoded, BYTES, config, 4, 0, True, "the text")
    assert len(isolated) == len(plain) > 40
    begun = 0
    for index in range(len(plain)):
        ours, theirs = isolated[index], plain[index]
        np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
        segment_LK = ours["segments"].reshape(-1, 4)
        assert ours["segments"].dtype == np.int32 and (segment_LK == segment_LK[:, :1]).all()
        begins_L = (ours["tokens"].reshape(-1, 4) == BYTES.bos_id).any(1)
        is_text_L = theirs["targets"].reshape(-1, 4)[:, 0] != MASKED
        changes_L = np.diff(segment_LK[:, 0]) != 0
        np.testing.assert_array_equal((changes_L == begins_L[1:])[is_text_L[1:]], True)
        begins_L[0] = False
        expected = np.where(np.repeat(begins_L, 4), MASKED, theirs["targets"])
        np.testing.assert_array_equal(ours["targets"], expected)
        begun += begins_L.sum()
    assert begun > 10
    np.testing.assert_array_equal(
        isolated.targets(np.arange(len(plain))), [isolated[i]["targets"] for i in range(len(plain))]
    )


@pytest.mark.parametrize("packing", ["windows", "documents", "published"])
def test_prepared_text_gives_the_same_segments_as_raw_text(packing, tmp_path):
    """From several shards; from one for packing="documents", as its blocks never cross the end of a shard."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "x" * int(size)}) for size in rng.integers(1, 90, 2100)]
    for name, part in (("train", lines), ("held_out", lines[:20])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    options = {"append_eos": True, "align_documents_to_chunks": True}
    if packing == "published":
        options |= {"packing": "published", "block_tokens": 32}
    shard_characters = 10**6 if packing == "documents" else 2000
    prepared(
        tmp_path / "prepared",
        [tmp_path / "train.jsonl"],
        shard_characters=shard_characters,
        **options,
    )

    def training(train_files):
        tree = tiny_recipe.get_config(str(train_files))
        tree.data.validation_files = str(tmp_path / "held_out.jsonl")
        tree.lm.data.front_fill, tree.lm.data.packing = "none", packing
        tree.lm.data.append_eos = tree.lm.data.align_documents_to_chunks = True
        tree.lm.data.isolate_documents = True
        config = resolve(tree)
        return Dataset(config, read_corpus(config, config.stages), BYTES).training("lm").sources[0]

    raw, shards = training(tmp_path / "train.jsonl"), training(tmp_path / "prepared")
    assert len(raw) == len(shards) > 1000
    for index in range(0, len(raw), 7):
        ours, theirs = shards[index], raw[index]
        assert ours.keys() == theirs.keys() == {"tokens", "targets", "segments"}
        for name, row in ours.items():
            np.testing.assert_array_equal(row, theirs[name])


# --- Models -------------------------------------------------------------------------------------


@functools.cache
def packed_block(chunk_size):
    """A batch of one block, and the first and last (exclusive) chunk of each of its documents."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 200, (1, sum(LENGTHS) * chunk_size)).astype(np.int32)
    stops = np.cumsum(LENGTHS)
    places = list(zip(stops - LENGTHS, stops, strict=True))
    segments, targets = np.zeros_like(tokens), tokens.copy()
    for number, (first, stop) in enumerate(places):
        segments[:, first * chunk_size : stop * chunk_size] = number
        targets[:, first * chunk_size : (first + 1) * chunk_size] = MASKED
    return {"tokens": tokens, "targets": targets, "segments": segments}, places


def without(batch, *names):
    return {name: row for name, row in batch.items() if name not in names}


def model_of(variant, choice="auto", remat="none"):
    """The task, parameters and frozen parameters of a tiny model, with an attention implementation and a remat policy."""
    one = tiny(variant)
    model = dataclasses.replace(one.config.lm.model, attention=choice, remat=remat)
    config = dataclasses.replace(one.config, lm=dataclasses.replace(one.config.lm, model=model))
    task = dataclasses.replace(make_lm_task(config, BYTES), protocol=Protocol(num_samples=3))
    return task, one.params, one.frozen


def total_and_gradient(loss, params):
    return jax.jit(jax.value_and_grad(loss))(params)


def loss_of_documents(task, params, frozen, batch, places, key_B):
    """The sum of the losses of each document alone, with the random numbers of its positions in the block."""
    size = task.chunk_size
    total = 0.0
    for first, stop in places:
        if stop - first < 2:
            continue
        tokens = batch["tokens"][:, first * size : stop * size]
        if task.chunk_size == 1:
            alone = {"tokens": tokens, "targets": tokens}
            total += task.loss(params, frozen, alone, key_B)["loss"][0]
            continue
        tokens_1LK = tokens.reshape(1, -1, size)
        h_PD = task.hidden(params, tokens_1LK)[0]
        posterior = task.posterior(frozen, tokens_1LK[0, 1:])
        key_P = split_keys(key_B, sum(LENGTHS) - 1)[0, first : stop - 1]
        total += task.model.apply({"params": params}, h_PD, posterior, key_P, method="loss").sum()
    return total


def assert_close(ours, expected, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - b).max() <= tolerance * max(np.abs(b).max(), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "choice", "remat"),
    [
        ("head=softmax", "xla", "none"),
        pytest.param("k=4", "xla", "none", marks=pytest.mark.slow),
        pytest.param("k=2", "splash", "dots", marks=pytest.mark.slow),
        pytest.param("head=flow,k=2", "xla", "full", marks=pytest.mark.slow),
        pytest.param("head=softmax", "splash", "none", marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_a_packed_block_is_the_sum_over_its_documents(variant, choice, remat):
    """Also the gradient. A control: without isolation the loss differs."""
    task, params, frozen = model_of(variant, choice, remat)
    plain, _, _ = model_of(variant)
    batch, places = packed_block(task.chunk_size)
    key_B = jax.random.split(jax.random.key(3), 1)

    expected = total_and_gradient(
        lambda p: loss_of_documents(plain, p, frozen, batch, places, key_B), params
    )
    ours = total_and_gradient(lambda p: task.loss(p, frozen, batch, key_B)["loss"][0], params)
    assert_close(ours, expected)
    mixed = jax.jit(lambda p: task.loss(p, frozen, without(batch, "segments"), key_B)["loss"])(
        params
    )
    assert abs(mixed[0] / expected[0] - 1) > 1e-3
    assert mixed[1] == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("head=softmax", marks=pytest.mark.slow),
        pytest.param("k=4", marks=pytest.mark.slow),
        pytest.param("k=2", marks=pytest.mark.slow),
    ],
)
def test_brier_terms_of_a_packed_block_equal_those_of_its_documents(variant):
    """For n-grams inside a document and after its first chunk, including those that continue in forks of the cache."""
    task, params, frozen = model_of(variant)
    size, protocol = task.chunk_size, task.protocol
    batch, places = packed_block(size)
    tokens = batch["tokens"].reshape(1, -1, size)
    key_BLJ = split_keys(jax.random.split(jax.random.key(5), 1), tokens.shape[1] - 1)
    key_BLJ = jax.vmap(lambda key: split_keys(key, brier.chunks_of(size)))(key_BLJ)

    @functools.partial(jax.jit, static_argnames="isolated")
    def terms(tokens, key_BLJ, segment_BL, isolated):
        documents = SegmentIds(segment_BL) if isolated else None
        model = task.bind(params, frozen)
        reading = brier.read(model, tokens, documents)
        return brier.brier_terms(model, tokens, reading, key_BLJ, protocol, 64, 64)

    segment_BL = jnp.asarray(batch["segments"][:, ::size])
    block = {
        isolated: np.asarray(terms(tokens, key_BLJ, segment_BL, isolated))[0]
        for isolated in (True, False)
    }
    starts_P = protocol.starts(tokens.shape[1] * size, size)
    compared, differ = 0, 0
    for first, stop in places:
        own_P = first * size + protocol.starts((stop - first) * size, size)
        if not len(own_P):
            continue
        alone = terms(
            tokens[:, first:stop], key_BLJ[:, first : stop - 1], segment_BL[:, first:stop], False
        )[0]
        place_P = np.searchsorted(starts_P, own_P)
        np.testing.assert_allclose(block[True][place_P], alone, rtol=1e-3, atol=1e-5)
        compared += len(own_P)
        differ += (np.abs(block[False][place_P] - alone) > 1e-3).any()
    assert compared >= 4 and differ


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["k=4", "head=softmax"])
def test_scored_n_grams_lie_in_one_document_after_its_first_chunk(variant):
    """Counts of the loss and of BrierLM are the sums over the documents."""
    task, params, frozen = model_of(variant)
    batch, places = packed_block(task.chunk_size)
    key_B = jax.random.split(jax.random.key(3), 1)
    sums = jax.jit(task.evaluate)(params, frozen, batch, key_B)
    size = task.chunk_size
    each = [len(task.protocol.starts((stop - first) * size, size)) for first, stop in places]
    assert sums["brier"].total[-1] == sum(each) > 0
    assert sums["loss"][1] == sum(LENGTHS) - len(LENGTHS)


# --- Configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"lm.data.isolate_documents": True, "lm.data.align_documents_to_chunks": False},
            "lm.data.isolate_documents=True needs data.align_documents_to_chunks=True",
        ),
        (
            {"autoencoder.data.isolate_documents": True},
            "autoencoder.data.isolate_documents=True: an autoencoder's chunks never see each other",
        ),
    ],
)
def test_isolation_without_its_preconditions_is_refused(changes, expected):
    tree = tiny_recipe.get_config("nowhere/*.txt")
    tree.autoencoder.data.align_documents_to_chunks = True
    tree.update_from_flattened_dict(changes)
    with pytest.raises(UserError) as raised:
        resolve(tree)
    assert expected in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("k=2", ["lm.data.packing=documents", "lm.training.accumulation_steps=2"]),
        ("head=softmax", ["lm.data.packing=windows"]),
    ],
)
def test_a_run_of_isolated_documents_trains_scores_and_samples(variant, changes, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(24):
        words = rng.choice(["fox ", "dog ", "jumps ", "over "], size=20 + 5 * number)
        (tmp_path / f"{number}.txt").write_text("".join(words))
    text_glob = f"{tmp_path}/*.txt"
    changes = [*changes, "lm.data.isolate_documents=True", "lm.model.remat=dots"]
    options = [f"--config.{change}" for change in changes]
    train(f"{text_glob},{variant}", tmp_path / "run", *options)
    record = evaluate(
        tmp_path / "run",
        "--config.eval.temperatures=(1.0,)",
        "--config.eval.plane_contexts=8",
        "--config.eval.candidates=(8,)",
    )
    assert np.isfinite(record["lm"]["loss"]) and record["plane"]["points"]
    line = train(
        f"{text_glob},{variant}",
        tmp_path / "run",
        *options,
        "--config.lm.data.isolate_documents=False",
        status=2,
    )
    assert "was made with lm.data.isolate_documents=True, not False" in line
