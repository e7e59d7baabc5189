"""Shows the counts, document lengths and examples of a folder of prepared text, and checks it.

python -m calm_jax.data.inspect prepared/pile/lm [--examples=3] [--checksums]
"""

import itertools

import numpy as np
import rich.table
import rich.text
from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import parse_flags_and_arguments
from calm_jax.cli.progress import console, counted
from calm_jax.data.shards import PreparedText, left_out
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

_EXAMPLES = flags.DEFINE_integer("examples", 3, "documents whose beginning is shown", lower_bound=0)
_TOKENS = flags.DEFINE_integer("tokens", 64, "tokens shown of each example", lower_bound=0)
_CHUNK_SIZE = flags.DEFINE_integer(
    "chunk_size",
    0,
    "K, tokens per chunk; a bar is shown between chunks; 0 takes the chunk size of the preparation",
    lower_bound=0,
)
_ROUND_TRIPS = flags.DEFINE_integer(
    "round_trips", 100, "documents to decode and tokenise again", lower_bound=0
)
_CHECKSUMS = flags.DEFINE_bool("checksums", False, "read all shards and compare their SHA-256")
# Characters of the histogram's longest bar.
_BAR = 40


def _summary(text: PreparedText) -> None:
    index = text.index
    table = rich.table.Table(show_header=False, box=None)
    rows = {
        "documents": f"{index['documents']:,}",
        "tokens": f"{index['tokens']:,}, {index['tokens'] / max(1, index['documents']):,.1f} a document",
        "shards": f"{text.num_shards:,}",
        "tokenizer": ", ".join(f"{key} {value}" for key, value in index["tokenizer"].items()),
        "options": ", ".join(f"{key}={value}" for key, value in text.options.items()),
    }
    rows |= {f"left out: {reason}": f"{count:,}" for reason, count in left_out(index).items()}
    for name, value in rows.items():
        table.add_row(name, rich.text.Text(value))
    console().print(table)


def lengths(text: PreparedText) -> np.ndarray:
    """A histogram of documents' lengths in tokens, special ones included: entry P counts lengths from 2**P to 2**(P+1) - 1."""
    counts_P = np.zeros(64, np.int64)
    for number in range(text.num_shards):
        length_D = np.diff(text.bounds(number))
        counts_P += np.bincount(np.log2(length_D).astype(int), minlength=64)
    return counts_P


def _histogram(text: PreparedText) -> None:
    counts_P = lengths(text)
    (powers,) = np.nonzero(counts_P)
    table = rich.table.Table("tokens", "documents", "", box=None)
    for power in range(powers[0], powers[-1] + 1) if len(powers) else ():
        count = int(counts_P[power])
        bar = "█" * -(-_BAR * count // int(counts_P.max()))
        table.add_row(f"{2**power:,} to {2 ** (power + 1) - 1:,}", f"{count:,}", bar)
    console().print(table)


def with_boundaries(tokens: np.ndarray, first: int, chunk_size: int, tokenizer: Tokenizer) -> str:
    """The text of tokens, with a bar between chunks and names in place of special tokens.

    Args:
        tokens: consecutive tokens of the whole text.
        first: the place of the first of them in the whole text, whose chunks begin at multiples of `chunk_size`.
        chunk_size: K, tokens per chunk.
        tokenizer: decodes the tokens.
    """
    names = {tokenizer.bos_id: "⟨bos⟩", tokenizer.eos_id: "⟨eos⟩", tokenizer.pad_id: "⟨pad⟩"}
    shown: list[str] = []
    pending: list[int] = []
    for place, token in enumerate(tokens.tolist(), first):
        if place % chunk_size == 0 and place > first:
            shown.append("|")
        if token in names:
            shown.append((tokenizer.decode(pending) if pending else "") + names[token])
            pending = []
            continue
        pending.append(token)
        piece = tokenizer.decode(pending)
        # A character may take several tokens. After 8 the bytes are taken for invalid UTF-8 and shown as they decode.
        if not piece.endswith("\ufffd") or len(pending) > 8:
            shown.append(piece)
            pending = []
    shown.append(tokenizer.decode(pending) if pending else "")
    # Real line breaks would make the places of bars hard to see.
    return "".join(shown).replace("\n", "⏎")


def _examples(text: PreparedText, number: int, size: int, chunk_size: int) -> None:
    """Prints the first `size` tokens of `number` documents, evenly spaced over the shards."""
    shards = [text.num_shards * i // number for i in range(number)]
    for place, shard in enumerate(shards):
        starts_D = text.bounds(shard)[:-1]
        if not len(starts_D):
            continue
        first = int(starts_D[len(starts_D) * place // number])
        tokens = text.tokens(first, min(size, text.num_tokens - first))
        print(f"\nfrom token {first:,} on, a bar after each {chunk_size} tokens:")
        print(with_boundaries(tokens, first, chunk_size, text.tokenizer))


def round_trips(text: PreparedText, most: int) -> tuple[int, int]:
    """Decodes and tokenises again up to `most` documents; returns how many gave the same tokens, and how many were tried."""
    tokenizer, stride = text.tokenizer, max(1, text.num_documents // most)
    special = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    same = tried = 0
    for tokens in itertools.islice(text.documents(stride), most):
        ids = tokens[~np.isin(tokens, special)]
        same += np.array_equal(tokenizer.encode_array(tokenizer.decode(ids)), ids)
        tried += 1
    return same, tried


@command
def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise UserError("give one folder of prepared text: python -m calm_jax.data.inspect DIR")
    text = PreparedText(local_path(argv[1], "DIR"))
    _summary(text)
    _histogram(text)
    _examples(text, _EXAMPLES.value, _TOKENS.value, _CHUNK_SIZE.value or text.options["chunk_size"])
    if _ROUND_TRIPS.value:
        same, tried = round_trips(text, _ROUND_TRIPS.value)
        note = ""
        if same < tried and text.options["packing"] == "published":
            note = " (the published packing cuts documents, sometimes inside a word)"
        print(
            f"\n{same} of {tried} documents give the same tokens when their text is tokenised again{note}"
        )
    if _CHECKSUMS.value:
        for number in range(text.num_shards):
            text.check(number)
        print(f"the checksums are right: {counted(text.num_shards, 'shard')}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_arguments)
