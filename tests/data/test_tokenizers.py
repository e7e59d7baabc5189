"""Tokenizers are lossless, never make a special token from text, and load as they were saved."""

import base64
import io
import itertools
import json
import os
import pathlib
import random
from collections.abc import Callable

import numpy as np
import pytest
import sentencepiece
import tokenizers

from calm_jax.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Llama3Tokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerConfig,
    load_tokenizer,
    make_tokenizer,
    open_tokenizer,
    vocabulary,
)
from calm_jax.errors import UserError
from tests.workdirs import run, train

TEXTS = [
    "def f(x):\n    return x + 1\n\tif x:  # comment\n        pass\n" * 30,
    "The quick brown fox jumps over the lazy dog. " * 30,
]
NASTY = [
    "",
    " ",
    "   leading and trailing   ",
    "runs     of  spaces",
    "\ttabs\t\tand \t mixed\t",
    "\n",
    "\r\nCRLF\r\n\r\nand \rlone\r",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "日本語と中文、한국어",
    "a\0b\0",
    "combining e\u0301 o\u0308\u0323 and composed \u00e9",
    "\ufeffbyte order mark, \u200bzero width, \u2028line\u2029paragraph, \xa0no-break",
    "control \x01\x07\x1b[0m\x7f\x85",
    "\ufffd replacement and ⁇ unknown",
    "ligature \ufb01, full width \uff21\uff22, circled \u2460, \u212a kelvin",
    "<|begin_of_text|><|end_of_text|><|eot_id|><|reserved_special_token_0|>[PAD]",
    "<s>x</s> <unk><pad> <0x41><0x00>",
    "\U0010ffff\ue000 last and private",
    "word" * 300,
    "12345678901234567890 1 22 333 4444",
]


def random_texts(number: int, avoid: str = "") -> list[str]:
    """Random text over all of Unicode, with combining marks, punctuation and white space more often."""
    rng = random.Random(0)
    ranges = [(0, 0x7F), (0x80, 0x2FF), (0x300, 0x36F), (0x2000, 0x2FFF), (0x3000, 0x9FFF)]
    ranges += [(0xE000, 0xFFFF), (0x10000, 0x10FFFF), (0x9, 0x20)]
    texts = [
        "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(60)) for _ in range(number)
    ]
    return ["".join(letter for letter in text if letter not in avoid) for text in texts]


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    return make_tokenizer(TokenizerConfig("sentencepiece", "", 380, True), TEXTS).model


def llama3_file() -> pathlib.Path:
    if "CALM_DATA" not in os.environ:
        pytest.skip("needs CALM_DATA, a folder with Llama 3's llama3_tokenizer.model")
    return pathlib.Path(os.environ["CALM_DATA"]) / "llama3_tokenizer.model"


def wikitext_file() -> pathlib.Path:
    return llama3_file().with_name("wikitext_document_level-test.json")


@pytest.fixture(scope="module")
def llama3() -> Tokenizer:
    return make_tokenizer(TokenizerConfig("llama3", str(llama3_file()), 0, True), ())


def tiny_json(*special: str, eos: str = "<|end_of_text|>") -> bytes:
    """A tokenizer.json as Llama 3's: byte-level BPE with special tokens after the vocabulary."""
    vocabulary = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary += ["th", "the", "Ġthe"]
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: place for place, piece in enumerate(vocabulary)},
            merges=[("t", "h"), ("th", "e"), ("Ġ", "the")],
        )
    )
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<|begin_of_text|>", eos, *special])
    return bpe.to_str().encode()


def trained_json(*special: str, change: Callable = lambda bpe: None) -> bytes:
    """A byte-level tokenizer.json as GPT-2's, trained with special tokens and then changed by a function."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(TEXTS, trainer)
    change(bpe)
    return bpe.to_str().encode()


# Files of tokenizer.kind="huggingface".
HUGGING_FACE = {
    "no special": trained_json(),
    "as GPT-2": trained_json("<|endoftext|>"),
    "as Mistral": trained_json("<unk>", "<s>", "</s>", "<pad>"),
}


def trained_model(pad_id: int, whitespace_pieces: bool = True) -> bytes:
    """The model that `make_tokenizer` trains on `TEXTS`; with a pad_id of -1 one without pad, as Llama 2's."""
    model = io.BytesIO()
    # The trainer's default is False. Given explicitly, it would be another file.
    more = {"allow_whitespace_only_pieces": True} if whitespace_pieces else {}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        max_sentence_length=16_000,
        character_coverage=0.999,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=pad_id,
        minloglevel=2,
        **more,
    )
    return model.getvalue()


def tiny_ranks() -> bytes:
    """A tokenizer.model as Llama 3's: the bytes, then merges in the order of their rank."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    return b"".join(lines)


@pytest.fixture(
    scope="module",
    params=[
        *("bytes", "sentencepiece", "no pad piece", "llama3", "tiny ranks", "tiny json"),
        *HUGGING_FACE,
    ],
)
def tokenizer(request) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer(b"")
    if request.param == "sentencepiece":
        return SentencePieceTokenizer(request.getfixturevalue("sentencepiece_model"))
    if request.param == "no pad piece":
        return SentencePieceTokenizer(trained_model(pad_id=-1))
    if request.param == "llama3":
        return request.getfixturevalue("llama3")
    if request.param in HUGGING_FACE:
        return HuggingFaceTokenizer(HUGGING_FACE[request.param])
    return Llama3Tokenizer(tiny_ranks() if request.param == "tiny ranks" else tiny_json())


# SentencePiece writes a space as U+2581.
SPACE_MARK = "\u2581"


def test_round_trip_is_lossless(tokenizer):
    texts = [*NASTY, *random_texts(100, avoid=SPACE_MARK)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids


def test_only_sentencepiece_changes_a_character(tokenizer):
    """SentencePiece encodes a space as U+2581, and so decodes a U+2581 of the text as a space."""
    text = f"a{SPACE_MARK}b {SPACE_MARK}"
    kept = text.replace(SPACE_MARK, " ") if tokenizer.kind == "sentencepiece" else text
    assert tokenizer.decode(tokenizer.encode(text)) == kept


def test_text_never_becomes_a_special_token(tokenizer):
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert len(special) == 3
    assert max(special) < tokenizer.vocab_size
    for ids in tokenizer.encode_batch([*NASTY, *random_texts(20)]):
        assert not special & set(ids)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_decoding_omits_special_tokens(tokenizer):
    ids = tokenizer.encode("the text")
    bos, eos, pad = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    assert tokenizer.decode([pad, pad, bos, *ids[:2], pad, *ids[2:], eos, pad]) == "the text"


def test_invalid_utf8_becomes_replacement_characters():
    broken = ByteTokenizer(b"").decode([ord("a"), 0xE6, 0x97, ord("b")])
    assert broken == "a\ufffdb"


def test_decoding_keeps_leading_spaces(tokenizer):
    """A continuation is decoded without its prompt, and must not lose its leading space."""
    prompt, rest = tokenizer.encode("the fox"), tokenizer.encode("  jumps over")
    assert tokenizer.decode(prompt) + tokenizer.decode(rest) == "the fox  jumps over"


def test_trained_sentencepiece_has_its_size_and_learns(sentencepiece_model):
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    assert tokenizer.vocab_size == 380
    assert len(tokenizer.encode(TEXTS[1])) < 0.5 * len(TEXTS[1])
    again = make_tokenizer(TokenizerConfig("sentencepiece", "", 380, True), iter(TEXTS))
    assert again.fingerprint == tokenizer.fingerprint


def many_characters() -> str:
    """Text of about a thousand characters, the more frequent the smaller their number."""
    rng = random.Random(3)
    letters = [chr(0x4E00 + int(rng.expovariate(0.002))) for _ in range(2000)]
    words = ["".join(letters[i : i + 2]) for i in range(0, len(letters), 2)]
    return "".join(rng.choices(words, k=20_000)) + "\n"


@pytest.mark.parametrize("whitespace_pieces", [False, True])
@pytest.mark.parametrize("vocab_size", [300, 512])
def test_sentencepiece_trains_on_more_characters_than_it_has_pieces(vocab_size, whitespace_pieces):
    text = many_characters()
    assert len(set(text)) > vocab_size
    config = TokenizerConfig("sentencepiece", "", vocab_size, whitespace_pieces)
    tokenizer = make_tokenizer(config, [text])
    assert tokenizer.vocab_size == vocab_size
    texts = [text, *NASTY, *random_texts(20, avoid=SPACE_MARK)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert len(tokenizer.encode(text)) < 0.95 * len(text.encode())


@pytest.mark.parametrize("whitespace_pieces", [False, True])
def test_sentencepiece_has_the_same_options_wherever_they_train(whitespace_pieces):
    """A model contains its options: others would give existing recipes another tokenizer."""
    config = TokenizerConfig("sentencepiece", "", 340, whitespace_pieces)
    assert make_tokenizer(config, TEXTS).model == trained_model(3, whitespace_pieces)


def test_indentation_is_one_token_with_whitespace_pieces():
    text = "def f(x):\n    if x:\n        return x\n" * 30
    ids = {}
    for whitespace_pieces in (False, True):
        config = TokenizerConfig("sentencepiece", "", 340, whitespace_pieces)
        tokenizer = make_tokenizer(config, [text, *TEXTS])
        texts = [text, *NASTY, *random_texts(20, avoid=SPACE_MARK), " " * 100_000]
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
        ids[whitespace_pieces] = tokenizer.encode(text)
        runs = [tokenizer.decode([token]) for token in set(ids[whitespace_pieces])]
        assert (" " * 8 in runs) == whitespace_pieces
    assert len(ids[True]) < 0.7 * len(ids[False])


def test_sentencepiece_learns_from_the_end_of_a_long_document():
    """SentencePiece silently drops sentences longer than its limit."""
    rng = random.Random(2)
    head = " ".join("".join(rng.choices("abcde", k=5)) for _ in range(4000))
    text = head + " zqzq" * 2000
    tokenizer = make_tokenizer(TokenizerConfig("sentencepiece", "", 300, True), [text])
    assert len(tokenizer.encode(" zqzq" * 100)) <= 300


def test_a_trained_sentencepiece_model_is_read_from_a_file(tmp_path, sentencepiece_model):
    (tmp_path / "m.model").write_bytes(sentencepiece_model)
    config = TokenizerConfig("sentencepiece", str(tmp_path / "m.model"), 0, True)
    assert make_tokenizer(config, ()).model == sentencepiece_model


def test_llama3_special_ids(llama3):
    assert llama3.vocab_size == 128257
    assert (llama3.bos_id, llama3.eos_id, llama3.pad_id) == (128000, 128001, 128256)


@pytest.mark.parametrize(
    "text, ids",
    [
        ("Hello world!", [9906, 1917, 0]),
        (" is great!", [374, 2294, 0]),
        (" The quick brown fox", [578, 4062, 14198, 39935]),
        ("12345", [4513, 1774]),
        ("<|end_of_text|>", [27, 91, 408, 3659, 4424, 91, 29]),
    ],
)
def test_llama3_known_ids(llama3, text, ids):
    assert llama3.encode(text) == ids


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    lines = [line.split() for line in llama3_file().read_bytes().splitlines()]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@pytest.mark.slow
def test_llama3_words_of_the_vocabulary_are_one_token(llama3, ranks):
    """Also words that no sequence of merges produces."""
    words = {}
    for token, rank in ranks.items():
        text = token.decode("utf-8", errors="replace")
        if text.removeprefix(" ").isalpha() and text.isascii():
            words[text] = [rank]
    assert len(words) > 50_000
    assert all(llama3.encode(word) == ids for word, ids in words.items())


def test_llama3_equals_merging_by_rank(llama3, ranks):
    """tiktoken's rule: repeatedly merge the neighbours whose concatenation has the lowest rank."""

    def encode(word: str) -> list[int]:
        parts = [bytes([byte]) for byte in word.encode()]
        while word.encode() not in ranks:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 30), default=b"")
            if best not in ranks:
                return [ranks[part] for part in parts]
            place = pairs.index(best)
            parts[place : place + 2] = [best]
        return [ranks[word.encode()]]

    rng = random.Random(1)
    words = [
        "".join(rng.choice("aeiourstlnmdcéшж語") for _ in range(rng.randint(1, 14)))
        for _ in range(400)
    ]
    words += [" antidisestablishmentarianism", " Donaudampfschifffahrt", "Geschwindigkeit"]
    assert llama3.encode_batch(words) == [encode(word) for word in words]


def hugging_face_bpe(ranks: dict[bytes, int]) -> tokenizers.Tokenizer:
    """The same BPE built with another library: vocabulary, merges in the order of their rank, word pattern."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    spell = {token: "".join(letter[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell[a], spell[b]) for a, b in pairs]
    vocabulary = {spell[token]: rank for token, rank in ranks.items()}
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    )
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    as_letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, as_letters])
    return bpe


SCRIPTS = [
    "Всё смешалось в доме Облонских, 1873.",
    "Ἄνδρα μοι ἔννεπε, Μοῦσα, πολύτροπον",
    "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "بِسْمِ ٱللَّٰهِ ٱلرَّحْمَٰنِ ٱلرَّحِيمِ ٢٠٢٦",
    "सर्वे मानवाः स्वतन्त्राः १२३",
    "ทุกคนเกิดมาอิสระ และเท่าเทียมกัน",
    "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅ",
    "모든 인간은 태어날 때부터 자유로우며",
    "人人生而自由，在尊严和权利上一律平等。𠮷𩸽",
    "ყველა ადამიანი; Բոլոր մարդիկ; ሁሉም ሰዎች; ཐམས་ཅད; ျမန္မာ",
    "👩🏽‍🚀👨‍👩‍👧‍👦🏴󠁧󠁢󠁥󠁮󠁧󠁿🇫🇷☺️ ❤️‍🔥 1️⃣",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋; E=mc² ½ ⅻ Ⅳ",
    "I'm you'RE THEY'Ve 'tis 's 'S's don't",
    "#include <stdio.h>\nint main(void)\t{ return 0x7fff'ffff; }  // ok\r\n",
    '<div class="a-b">&nbsp;{{ x | y }}</div>\n\n\n   \n\t\tSELECT * FROM t WHERE a<>1;--',
    "\\frac{\\partial^2 u}{\\partial t^2}=c^2\\nabla^2u$$  \n \n  x",
]


@pytest.mark.slow
def test_llama3_equals_an_independent_bpe_on_many_scripts_and_code(llama3, ranks):
    other = hugging_face_bpe(ranks)
    source = pathlib.Path(json.__file__).read_text(encoding="utf-8")
    documents = [json.loads(line)["text"] for line in wikitext_file().open(encoding="utf-8")]
    texts = [*NASTY, *SCRIPTS, *random_texts(300), source, *documents[:6]]
    for text, ids in zip(texts, llama3.encode_batch(texts), strict=True):
        assert ids == other.encode(text, add_special_tokens=False).ids, text[:80]
        assert llama3.encode_array(text).tolist() == ids


@pytest.mark.slow
def test_a_million_spaces_are_encoded(llama3):
    """tiktoken by itself overflows its stack on them."""
    text = "x" + " " * 1_000_000 + "y" + "\n" * 250_000 + " z"
    ids = llama3.encode(text)
    assert llama3.decode(ids) == text
    assert len(ids) < 30_000
    assert llama3.encode_batch(["a", text]) == [llama3.encode("a"), ids]


def test_encode_array_equals_encode(tokenizer):
    for text in NASTY:
        array = tokenizer.encode_array(text)
        assert array.dtype == np.int32
        assert array.tolist() == tokenizer.encode(text)


def test_ranks_are_merged_and_special_ids_follow_them():
    tokenizer = Llama3Tokenizer(tiny_ranks())
    assert tokenizer.encode("the the th") == [257, 258, ord(" "), 256]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (259, 260)
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (259 + 256, 259 + 256 + 1)


def test_tokenizer_json_without_a_pad_token_gets_one():
    tokenizer = Llama3Tokenizer(tiny_json())
    assert tokenizer.encode("the the") == [257, 258]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (259, 260, 261)
    assert tokenizer.vocab_size == 262


def test_tokenizer_json_with_a_pad_token_keeps_it():
    tokenizer = Llama3Tokenizer(tiny_json("<|other|>", "[PAD]"))
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (262, 263)
    assert tokenizer.pad_id not in tokenizer.encode("[PAD]")


def test_tokenizer_json_whose_pad_is_not_last_keeps_its_vocabulary_size():
    assert Llama3Tokenizer(tiny_json("[PAD]", "<|other|>")).vocab_size == 263


def test_tokenizer_json_whose_ids_have_gaps_has_a_vocabulary_of_its_largest_id():
    content = json.loads(tiny_json("[PAD]"))
    content["model"]["vocab"]["Ġthe"] = 1000
    tokenizer = Llama3Tokenizer(json.dumps(content).encode())
    assert tokenizer.encode(" the") == [1000]
    assert tokenizer.vocab_size == 1001


def test_tokenizer_json_does_not_truncate():
    bpe = tokenizers.Tokenizer.from_str(tiny_json().decode())
    bpe.enable_truncation(3)
    tokenizer = Llama3Tokenizer(bpe.to_str().encode())
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_tokenizer_json_does_not_pad_a_batch():
    bpe = tokenizers.Tokenizer.from_str(tiny_json().decode())
    bpe.enable_padding()
    assert len(Llama3Tokenizer(bpe.to_str().encode()).encode_batch(["a", "aaaa"])[0]) == 1


def test_save_then_load_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode_batch(NASTY) == tokenizer.encode_batch(NASTY)
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


def test_fingerprints_differ_for_different_models(sentencepiece_model):
    other = make_tokenizer(TokenizerConfig("sentencepiece", "", 301, True), TEXTS)
    all_kinds = [
        ByteTokenizer(b""),
        SentencePieceTokenizer(sentencepiece_model),
        other,
        Llama3Tokenizer(tiny_ranks()),
        Llama3Tokenizer(tiny_json()),
        HuggingFaceTokenizer(tiny_json()),
        HuggingFaceTokenizer(trained_json()),
    ]
    assert len({tokenizer.fingerprint for tokenizer in all_kinds}) == len(all_kinds)
    assert ByteTokenizer(b"").fingerprint == ByteTokenizer(b"").fingerprint


def test_damaged_model_is_refused(tmp_path):
    folder = tmp_path / "tokenizer"
    Llama3Tokenizer(tiny_ranks()).save(folder)
    model = folder / "model"
    # With one token replaced the model is still valid: only the fingerprint shows the damage.
    model.write_bytes(model.read_bytes().replace(base64.b64encode(b"th"), base64.b64encode(b"he")))
    with pytest.raises(UserError, match="damaged"):
        load_tokenizer(folder)
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(folder)
    model.unlink()
    with pytest.raises(UserError, match="no readable tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "description",
    [
        "",
        "{",
        "{}",
        '{"kind": "other", "fingerprint": ""}',
        '{"kind": "bytes"}',
        "[]",
    ],
)
def test_damaged_description_is_refused(tmp_path, description):
    ByteTokenizer(b"").save(tmp_path)
    (tmp_path / "description.json").write_text(description)
    with pytest.raises(UserError):
        load_tokenizer(tmp_path)


def test_saved_description_has_kind_fingerprint_and_ids(tmp_path):
    tokenizer = ByteTokenizer(b"")
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "description.json").read_text()) == {
        "kind": "bytes",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": 259,
        "bos_id": 256,
        "eos_id": 257,
        "pad_id": 258,
    }


@pytest.mark.parametrize(
    "kind, path, vocab_size, names",
    [
        (
            "gpt2",
            "",
            512,
            "tokenizer.kind='gpt2' is none of sentencepiece, llama3, huggingface, bytes",
        ),
        ("bytes", "file", 512, "tokenizer.path='file'"),
        ("sentencepiece", "", 299, "tokenizer.vocab_size=299"),
    ],
)
def test_bad_config_is_refused(kind, path, vocab_size, names):
    with pytest.raises(UserError, match=names):
        TokenizerConfig(kind, path, vocab_size, True)


@pytest.mark.parametrize(
    "kind, file", [("llama3", "tokenizer.model"), ("huggingface", "tokenizer.json")]
)
def test_a_kind_that_needs_a_file_is_refused_without(kind, file):
    config = TokenizerConfig(kind, "", 512, True)
    with pytest.raises(UserError, match=rf"tokenizer\.path is empty: .*{kind}.*{file}"):
        make_tokenizer(config, ())
    if kind == "huggingface":
        with pytest.raises(UserError, match=r"tokenizer\.path is empty"):
            vocabulary(config)


@pytest.mark.parametrize("kind", ["llama3", "huggingface", "sentencepiece"])
def test_missing_model_file_is_named(tmp_path, kind):
    path = str(tmp_path / "gone.model")
    with pytest.raises(UserError, match=r"gone\.model' cannot be read: No such file"):
        make_tokenizer(TokenizerConfig(kind, path, 512, True), ())


@pytest.mark.parametrize("whitespace_pieces", [False, True])
@pytest.mark.parametrize("texts", [TEXTS, [many_characters()[:3000]]], ids=["few", "many"])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_one_that_it_can(
    texts, whitespace_pieces
):
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size=50000: .*more text") as error:
        make_tokenizer(TokenizerConfig("sentencepiece", "", 50_000, whitespace_pieces), texts)
    size = int(str(error.value).partition("--config.tokenizer.vocab_size=")[2])
    config = TokenizerConfig("sentencepiece", "", size, whitespace_pieces)
    assert make_tokenizer(config, texts).vocab_size == size


@pytest.mark.parametrize("texts", [[], ["hello world"], ["\u2585" * 1000]])
def test_text_too_short_for_any_vocabulary_is_refused(texts):
    with pytest.raises(UserError, match=r"more text, or --config\.tokenizer\.kind=bytes"):
        make_tokenizer(TokenizerConfig("sentencepiece", "", 300, True), texts)


BYTE_RANKS = tiny_ranks().splitlines(keepends=True)


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"no ranks",
        b"{}",
        b'{"\xff',
        tiny_json(eos="<|eot|>"),
        b"".join(BYTE_RANKS[1:]),
        b"".join([*BYTE_RANKS, b"not/base64! 259\n"]),
        b"".join([*BYTE_RANKS, base64.b64encode(b"an") + b" 300\n"]),
        b"".join([*BYTE_RANKS, base64.b64encode(b"an") + b" x\n"]),
    ],
    ids=["empty", "words", "json", "utf8", "no eos", "no rank 0", "no base64", "gap", "no number"],
)
def test_bad_llama3_model_is_refused(model):
    with pytest.raises(UserError, match="tokenizer"):
        Llama3Tokenizer(model)


@pytest.mark.parametrize("model", [b"", b"no model", tiny_ranks()], ids=["empty", "words", "ranks"])
def test_bad_sentencepiece_model_is_refused(model):
    with pytest.raises(UserError, match="SentencePiece model"):
        SentencePieceTokenizer(model)


def test_sentencepiece_model_without_pad_gets_one_after_its_pieces():
    tokenizer = SentencePieceTokenizer(trained_model(pad_id=-1))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (340, 341)
    assert tokenizer.decode([340, *tokenizer.encode("the text"), 340]) == "the text"


def test_a_new_pad_leaves_the_models_that_have_one_as_they_are(sentencepiece_model):
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (3, 380)


@pytest.mark.parametrize("name", ["bos_id", "eos_id"])
def test_sentencepiece_model_without_bos_or_eos_is_refused(name):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=60,
        minloglevel=2,
        **{name: -1},
    )
    with pytest.raises(UserError, match=rf"no {name}, .*spm_train --{name}=N.*no file"):
        SentencePieceTokenizer(model.getvalue())


# --- tokenizer.kind="huggingface"


@pytest.mark.parametrize(
    "special, ids",
    [
        # bos, eos, pad; the file has the ids 0 to 299, or to 256 + its special tokens.
        ((), (300, 301, 302)),
        (("<|endoftext|>",), (300, 0, 301)),
        (("<unk>", "<s>", "</s>", "<pad>"), (1, 2, 3)),
        (("<|pad|>", "<|im_start|>", "<eos>", "<bos>"), (3, 2, 0)),
        (("</s>", "<|endoftext|>", "<|end_of_text|>", "[PAD]", "<|begin_of_text|>"), (4, 2, 3)),
    ],
)
def test_special_tokens_are_the_first_known_names_and_missing_ones_follow_the_last_id(special, ids):
    tokenizer = HuggingFaceTokenizer(trained_json(*special))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == ids
    assert tokenizer.vocab_size == max(300, 1 + max(ids))


def test_missing_special_tokens_follow_the_largest_id_of_a_file_with_gaps():
    content = json.loads(trained_json("<s>"))
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    content["model"]["vocab"][last] = 1000
    tokenizer = HuggingFaceTokenizer(json.dumps(content).encode())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1001, 1002)
    assert tokenizer.vocab_size == 1003
    # No token has the ids of the gap.
    assert tokenizer.decode([*tokenizer.encode("the text"), 500]) == "the text"


def test_special_tokens_that_the_file_calls_ordinary_do_not_come_from_text():
    model = trained_json(change=lambda bpe: bpe.add_tokens(["</s>", "<tool>", "<pad>"]))
    tokenizer = HuggingFaceTokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (303, 300, 302)
    ids = tokenizer.encode("x</s><tool><pad>")
    assert not {300, 302} & set(ids) and 301 in ids
    assert tokenizer.decode(ids) == "x</s><tool><pad>"


def test_a_word_of_the_vocabulary_is_no_special_token():
    """Without a pattern for words, merges can make the characters of a special token's name one token."""
    pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<s", "<s>", "</s>"]
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [("<", "s"), ("<s", ">")]
        )
    )
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = HuggingFaceTokenizer(bpe.to_str().encode())
    # "<s>" is a word and "</s>", which no merge makes, is eos.
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (259, 258, 260)
    assert tokenizer.encode("<s>") == [257]
    assert tokenizer.decode([257]) == "<s>"


def test_composing_normalisation_is_left_out():
    def as_qwen(bpe):
        bpe.normalizer = tokenizers.normalizers.NFC()

    tokenizer = HuggingFaceTokenizer(trained_json(change=as_qwen))
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed
    library = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    assert tokenizer.encode(composed) == library.encode(composed).ids


def test_dropout_of_merges_is_left_out():
    def with_dropout(bpe):
        bpe.model.dropout = 0.9

    tokenizer = HuggingFaceTokenizer(trained_json(change=with_dropout))
    assert tokenizer.encode(TEXTS[1]) == HuggingFaceTokenizer(trained_json()).encode(TEXTS[1])


def metaspace_json() -> bytes:
    """A tokenizer.json as those that are made from SentencePiece models."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    bpe.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Metaspace(),
        ]
    )
    special = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(
        TEXTS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, show_progress=False, special_tokens=special[:4]
        ),
    )
    bpe.add_tokens(special[4:])
    return bpe.to_str().encode()


def prefix_space(bpe: tokenizers.Tokenizer) -> None:
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)


def lower_case(bpe: tokenizers.Tokenizer) -> None:
    bpe.normalizer = tokenizers.normalizers.Lowercase()


def compatibility(bpe: tokenizers.Tokenizer) -> None:
    bpe.normalizer = tokenizers.normalizers.NFKC()


def no_decoder(bpe: tokenizers.Tokenizer) -> None:
    bpe.decoder = tokenizers.decoders.Fuse()


def stripping_token(bpe: tokenizers.Tokenizer) -> None:
    bpe.add_tokens([tokenizers.AddedToken("<tool>", lstrip=True)])


def without_a_byte() -> bytes:
    """A byte-level tokenizer.json that lacks the byte 0xF4, with which only characters of the last plane begin."""
    content = json.loads(trained_json())
    del content["model"]["vocab"]["\u00f4"]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "model",
    [
        metaspace_json(),
        without_a_byte(),
        *(
            trained_json(change=change)
            for change in (prefix_space, lower_case, compatibility, no_decoder, stripping_token)
        ),
    ],
    ids=["metaspace", "no byte", "prefix", "lower", "nfkc", "no decoder", "strip"],
)
def test_a_tokenizer_json_that_changes_text_is_refused_with_a_way_out(model):
    with pytest.raises(UserError) as error:
        HuggingFaceTokenizer(model)
    line = str(error.value)
    assert "does not reproduce text: " in line and "tokenizer.kind=sentencepiece" in line
    assert len(line) < 400


@pytest.mark.parametrize("model", [b"", b"{}", b'{"\xff', tiny_ranks(), b"{" * 9999])
def test_bad_tokenizer_json_is_refused(model):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        HuggingFaceTokenizer(model)


def test_one_id_for_two_special_tokens_is_refused():
    content = json.loads(trained_json())
    content["model"]["vocab"] |= {"<s>": 300, "</s>": 300}
    with pytest.raises(UserError, match="one id for two of bos, eos and pad"):
        HuggingFaceTokenizer(json.dumps(content).encode())


def test_kind_llama3_names_the_kind_of_another_tokenizer_json():
    with pytest.raises(UserError, match=r"no <\|begin_of_text\|>.*tokenizer\.kind=huggingface"):
        Llama3Tokenizer(trained_json())


@pytest.mark.parametrize(
    "model, kind",
    [
        (tiny_json(), "llama3"),
        (tiny_ranks(), "llama3"),
        (tiny_json(eos="<|eot|>"), "huggingface"),
        (trained_json("<s>"), "huggingface"),
        (trained_model(pad_id=-1), "sentencepiece"),
    ],
    ids=["llama3 json", "ranks", "no end of text", "json", "pieces"],
)
def test_the_flag_tells_the_kind_from_the_file(tmp_path, model, kind):
    (tmp_path / "file").write_bytes(model)
    tokenizer, config = open_tokenizer(str(tmp_path / "file"))
    assert (tokenizer.kind, config.kind) == (kind, kind)
    assert vocabulary(config) == (tokenizer.vocab_size, tokenizer.pad_id)


@pytest.mark.parametrize(
    "make", [lambda: ByteTokenizer(b""), lambda: HuggingFaceTokenizer(trained_json("<s>"))]
)
def test_the_flag_takes_a_workdir(tmp_path, make):
    with pytest.raises(UserError, match="is no file, and no workdir with a tokenizer; give one"):
        open_tokenizer(str(tmp_path))
    make().save(tmp_path / "tokenizer")
    tokenizer, config = open_tokenizer(str(tmp_path))
    assert tokenizer.fingerprint == make().fingerprint == make_tokenizer(config, ()).fingerprint


@pytest.mark.slow
def test_a_run_with_a_tokenizer_json_trains_and_generates(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number % 2])
    file, workdir = tmp_path / "tokenizer.json", tmp_path / "run"
    file.write_bytes(HUGGING_FACE["as GPT-2"])
    keys = ["--config.tokenizer.kind=huggingface", f"--config.tokenizer.path={file}"]
    train(f"{tmp_path}/*.txt", workdir, *keys)
    file.unlink()
    assert load_tokenizer(workdir / "tokenizer").model == HUGGING_FACE["as GPT-2"]
    prompt = "The quick"
    written = run("calm_jax.generate", f"--workdir={workdir}", f"--prompt={prompt}")
    assert written.startswith(prompt) and len(written) > len(prompt) + 1
