"""Samples in files, of any system, get the score that the model's own evaluation gives."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax import brier
from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.evaluation.causal_lm import CausalLM
from calm_jax.evaluation.evaluator import Evaluator
from calm_jax.evaluation.samples import Reference, Scorer, read_references, read_samples
from calm_jax.parallel.mesh import make_mesh
from calm_jax.rng import stream
from calm_jax.run.dataset import Dataset, read_corpus
from calm_jax.run.generator import Generator
from calm_jax.run.references import references, samples_of
from calm_jax.run.workdir import describe
from calm_jax.tasks.language_model import predicted_keys
from tests import tiny_model, tiny_recipe
from tests.workdirs import run

BYTES = ByteTokenizer(b"")


def write(path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("num_samples", [2, 5])
def test_score_is_that_of_terms_counted_by_hand(num_samples):
    """Three texts as blocks, one shorter than four tokens; every pair of samples is compared."""
    rng = np.random.default_rng(0)
    lengths = [(block, place, 4 if place < 5 else 2) for block in "abc" for place in range(6)]
    given, samples, terms = {}, {}, np.zeros((3, 6, 4))
    counted = np.zeros((3, 6, 4), bool)
    for index, (block, place, length) in enumerate(lengths):
        name, true = f"{block}{place}", rng.integers(0, 2, length).tolist()
        drawn = rng.integers(0, 2, (num_samples, 4)).tolist()
        given[name], samples[name] = Reference(name, block, tokens=true), drawn
        for n in range(1, length + 1):
            match = np.mean([one[:n] == true[:n] for one in drawn])
            pairs = [(i, j) for i in range(num_samples) for j in range(num_samples) if i != j]
            collision = np.mean([drawn[i][:n] == drawn[j][:n] for i, j in pairs])
            terms[index // 6, place, n - 1] = 2 * match - collision
            counted[index // 6, place, n - 1] = True
    expected = brier.score(brier.block_sums(jnp.asarray(terms, jnp.float32), jnp.asarray(counted)))
    ours = Scorer(given, None).score(samples)
    assert ours.ngrams == expected.ngrams == 15
    np.testing.assert_allclose(ours.brier, expected.brier, rtol=1e-5)
    np.testing.assert_allclose(ours.brier_error, expected.brier_error, rtol=1e-4)


def test_texts_score_as_their_tokens():
    texts = {"a": ("Once upon", ["Once upon", "Only", "Onyx"]), "b": ("is", ["is ", "it", ""])}
    given = {n: Reference(n, n, text, list(text.encode())) for n, (text, _) in texts.items()}
    as_text = {n: drawn for n, (_, drawn) in texts.items()}
    as_tokens = {n: [list(one.encode()) for one in drawn] for n, drawn in as_text.items()}
    scorer = Scorer(given, BYTES)
    assert scorer.score(as_text) == scorer.score(as_tokens)
    assert scorer.score(as_text).brier[0] == pytest.approx(((2 - 1) + (2 * 2 / 3 - 1 / 3)) / 2)
    with pytest.raises(UserError, match="give --tokenizer"):
        Scorer(given, None).score(as_text)


@pytest.fixture(scope="module", params=["k=4", "k=2"])
def model(request, tmp_path_factory):
    """The tiny model with fresh parameters, and its text: `(config, dataset, generator, mesh)`."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(9):
        (folder / f"{number}.txt").write_text("".join(rng.choice(["ab", "a"], size=200)))
    tree = tiny_recipe.get_config(f"{folder}/*.txt,{request.param}")
    tree.eval.num_samples = 4
    config = resolve(tree)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        autoencoder = make_autoencoder_task(config, BYTES)
        task = make_lm_task(config, BYTES)
        task = dataclasses.replace(task, protocol=config.eval.equal_context)
        frozen = {"params": autoencoder.init(jax.random.key(1))}
        params = task.init(jax.random.key(0))
        # Few different chunks, so that samples agree often.
        params["head"] = jax.tree.map(lambda x: 0.3 * x, params["head"])
    dataset = Dataset(config, read_corpus(config, ("lm",)), BYTES)
    return config, dataset, Generator(task, params, frozen, BYTES, config), mesh


def own_score(model) -> dict[str, float]:
    """The score of --mode=eval at equal context."""
    config, dataset, generator, mesh = model
    with jax.set_mesh(mesh):
        evaluator = Evaluator("equal_context", generator.task, dataset.windows(), config.eval, mesh)
        return evaluator(generator.params, generator.frozen)


@pytest.mark.slow
def test_the_evaluations_own_draws_get_its_score_to_rounding(model):
    config, dataset, generator, _ = model
    if config.chunk_size < 4:
        pytest.skip("with K < 4 the evaluation also draws chunks after sampled ones")
    given, number = references(config, dataset, BYTES, most=0)
    tokens_BLK = dataset.windows().tokens.reshape(len(dataset.windows()), -1, 4)
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(
        stream(config.eval.seed, "evaluate/equal_context"), jnp.arange(len(tokens_BLK))
    )
    key_BLJ = predicted_keys(key_B, tokens_BLK.shape[1], 2)

    @jax.jit
    def draw(params, frozen):
        bound = generator.task.bind(params, frozen)
        h_BLD, _ = bound.advance(jnp.asarray(tokens_BLK[:, :-1]), None)
        chunks = range(h_BLD.shape[1])
        return jnp.stack([bound.draw(h_BLD[:, i], 4, key_BLJ[:, i, 0]) for i in chunks])

    sample_LBSK = np.asarray(draw(generator.params, generator.frozen))
    samples = {}
    for one in given:
        block, start = map(int, one.id.split(":"))
        assert one.context_tokens == tokens_BLK[block].reshape(-1)[:start].tolist()
        samples[one.id] = sample_LBSK[start // 4 - 1, block].tolist()
    ours, theirs = (
        brier.as_values(Scorer({r.id: r for r in given}, None).score(samples)),
        own_score(model),
    )
    assert len(given) == number >= theirs["ngrams"] == ours["ngrams"] > 50
    assert abs(ours["brier_1"]) > 0.01
    for n in range(1, 5):
        for name in (f"brier_{n}", f"brier_{n}_error"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_the_generators_samples_get_the_evaluations_score(model):
    """To four standard errors of the difference: a false alarm in ten thousand for all numbers; the seed is fixed."""
    config, dataset, generator, mesh = model
    given, _ = references(config, dataset, BYTES, most=0)
    with jax.set_mesh(mesh):
        drawn = samples_of(generator, given, False, 8, seed=3, done=lambda number: None)
    samples = dict(zip((one.id for one in given), drawn, strict=True))
    ours = brier.as_values(Scorer({r.id: r for r in given}, None).score(samples))
    theirs = own_score(model)
    for n in range(1, 5):
        error = np.hypot(ours[f"brier_{n}_error"], theirs[f"brier_{n}_error"])
        assert abs(ours[f"brier_{n}"] - theirs[f"brier_{n}"]) < 4 * error + 1e-6, n


@pytest.mark.slow
def test_floor_of_all_places_is_that_of_the_evaluation(model):
    config, dataset, _, _ = model
    given, _ = references(config, dataset, BYTES, most=0)
    scorer = Scorer({one.id: one for one in given}, BYTES)
    ours, expected = scorer.floor(dataset.training_ngrams(), False), dataset.equal_context_floor()
    np.testing.assert_allclose(ours.brier, expected.brier, rtol=1e-5)
    assert ours.brierlm == pytest.approx(expected.brierlm, rel=1e-5)
    assert ours.standard_error == pytest.approx(expected.standard_error, rel=1e-3)


@pytest.mark.slow
def test_some_places_are_evenly_spaced(model):
    config, dataset, _, _ = model
    every, number = references(config, dataset, BYTES, most=0)
    some, of = references(config, dataset, BYTES, most=7)
    assert of == number
    assert [one.id for one in some] == [every[i * number // 7].id for i in range(7)]


@pytest.mark.slow
def test_written_references_are_read_as_they_were(model, tmp_path):
    config, dataset, _, _ = model
    given, _ = references(config, dataset, BYTES, most=5)
    path = write(tmp_path / "r.jsonl", *map(dataclasses.asdict, given))
    assert list(read_references(path).values()) == given


@pytest.mark.slow
def test_the_command_refuses_before_it_samples_and_scores_texts_beside_texts(tmp_path):
    workdir, other = tmp_path / "tiny", tmp_path / "other"
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"some text, number {number}. " * 30)
    tiny = tiny_model.tiny()
    config = resolve(tiny_recipe.get_config(f"{tmp_path}/*.txt"))
    dataclasses.replace(tiny, config=config).save(workdir)
    dataclasses.replace(tiny, config=config, tokenizer=ByteTokenizer(b"x")).save(other)
    for folder in (workdir, other):
        (folder / "corpus.json").write_text(json.dumps(describe(read_corpus(config, ("lm",)))))
    given, score = tmp_path / "r.jsonl", "calm_jax.brierlm"
    floor = f"--config=configs/workdir.py:{workdir}"
    run(score, floor, f"--write_references={given}", "--positions=3")
    line = run(score, floor, f"--write_references={given}", status=2)
    assert "already exists: give another name, or --overwrite" in line
    run(score, floor, f"--write_references={given}", "--positions=3", "--overwrite")
    # The checks of --mode=eval.
    line = run(
        score,
        floor,
        f"--write_references={given}",
        "--overwrite",
        "--config.chunk_size=2",
        status=2,
    )
    assert "was made with chunk_size=4, not 2" in line
    again = ("--overwrite", "--positions=3")
    assert "not the text that the run was trained on" in run(
        score, floor, f"--write_references={given}", *again, "--config.data.holdout_every=2"
    )
    run(score, floor, f"--write_references={given}", *again)
    line = run(score, floor, f"--write_references={given}", "--overwrite", "--seed=1", status=2)
    assert "--seed has no meaning with --write_references: leave it out" in line

    model = (score, f"--references={given}", f"--model={workdir}")
    output = tmp_path / "s.jsonl"
    assert "frequencies" in run(*model, floor, f"--output={output}")
    samples = [json.loads(line)["samples"] for line in output.read_text().splitlines()]
    assert all(isinstance(one, list) for several in samples for one in several)
    for flags, message in {
        (f"--output={output}",): "already exists",
        (f"--output={tmp_path}/none/s.jsonl", "--overwrite"): "there is no such folder",
        (floor, f"--tokenizer={other}"): "is not the tokenizer of --config's run",
        (f"--model={other}",): "give --tokenizer",
        ("--model=gpt2",): "a Hugging Face model begins with hf: (hf:gpt2)",
        (f"--model={other}", f"--samples={output}"): "holds tokens",
        ("--positions=3",): "--positions has no meaning without --write_references",
    }.items():
        assert message in run(*model, *flags, status=2)
    line = run(
        score,
        f"--references={given}",
        f"--samples={output}",
        f"--config=configs/workdir.py:{other}",
        status=2,
    )
    assert "was made with tokenizer" in line
    # The model of another tokenizer gives texts, and so does the one that could give tokens.
    out = run(*model, f"--model={other}", floor, f"--output={output}", "--overwrite", status=2)
    assert "is for the samples of one --model" in out
    assert run(*model, f"--model={other}", floor).count("│") > 8 * 2
    places = list(read_references(str(given)).values())
    drawn = samples_of(tiny.generator(), places, True, 2, seed=0, done=lambda number: None)
    assert all(isinstance(one, str) for several in drawn for one in several)


GOOD = {"id": 1, "tokens": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not valid JSON"),
        ("[1]", 'no object with a field "id"'),
        ('{"id": [1], "text": "x"}', 'no object with a field "id"'),
        ('{"id": 2}', "the continuation is missing"),
        ('{"id": 2, "text": ""}', "the continuation is missing"),
        ('{"id": 2, "text": 3}', "'text' is not a string"),
        (r'{"id": 2, "text": "\ud800"}', "'text' is not a string"),
        ('{"id": 2, "tokens": [1, -1]}', "'tokens' is not a list of token ids"),
        ('{"id": 2, "tokens": [true]}', "'tokens' is not a list of token ids"),
        ('{"id": 2, "text": "x", "block": null}', "'block' is not a string or a whole number"),
        ('{"id": "1", "tokens": [1]}', "'1' appears twice in this file"),
    ],
)
def test_a_bad_reference_is_named_by_its_line(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=f"--references={path}, line 3: .*{message}"):
        read_references(str(path))


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": 3, "samples": [[1], [1]]}', "no reference has the id '3'"),
        ('{"id": 1, "samples": [[1], [1]]}', "'1' appears twice in this file"),
        ('{"id": 2, "samples": [[1]]}', "at least two samples"),
        ('{"id": 2}', "at least two samples"),
        ('{"id": 2, "samples": [[1], "x"]}', "all strings, or all lists"),
        (
            '{"id": 2, "samples": ["x", "y"]}',
            "must be of one kind, texts or lists of token ids, and earlier lines have the other kind",
        ),
    ],
)
def test_a_bad_sample_is_named_by_its_line(tmp_path, line, message):
    given = read_references(write(tmp_path / "r.jsonl", GOOD, GOOD | {"id": 2}))
    path = tmp_path / "s.jsonl"
    path.write_text('{"id": 1, "samples": [[1], [2]]}\n' + line + "\n")
    with pytest.raises(UserError, match=f"--samples={path}, line 2: .*{message}"):
        read_samples(str(path), given)


def test_references_without_samples_are_refused(tmp_path):
    given = read_references(write(tmp_path / "r.jsonl", GOOD, GOOD | {"id": 2}))
    path = write(tmp_path / "s.jsonl", {"id": 2, "samples": [[1], [2]]})
    with pytest.raises(UserError, match="1 of 2 references, the first with the id '1'"):
        read_samples(path, given)


@pytest.mark.slow
def test_a_hugging_face_models_samples_have_its_probabilities(tmp_path):
    """To four standard errors for each of the first letters: a false alarm in a thousand; the seed is fixed."""
    torch = pytest.importorskip("torch", reason="needs the extra hf: torch is not installed")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    import tokenizers

    letters = {"<s>": 0} | {letter: i for i, letter in enumerate("abcdef ", 1)}
    split = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    split.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=split, bos_token="<s>").save_pretrained(
        tmp_path
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    network = transformers.GPT2LMHeadModel(config).eval()
    network.lm_head.weight.data *= 20
    network.save_pretrained(tmp_path)
    # Longer than the model's positions less the new tokens: only the last ones are read.
    context = "abc def" * 3
    ids = [letters[letter] for letter in context][-16:]
    p_V = network(torch.tensor([ids])).logits[0, -1].softmax(-1).detach().numpy()
    (samples,) = CausalLM(str(tmp_path), seed=0).sample([context], 2000, lambda number: None)
    for letter, index in letters.items():
        share = np.mean([one.startswith(letter) if index else one == "" for one in samples])
        error = np.sqrt(p_V[index] * (1 - p_V[index]) / 2000)
        assert abs(share - p_V[index]) < 4 * error + 1e-9, letter
