"""What to do with a prompt that does not end on a chunk boundary: accuracy of the tokens that follow, by each way.

    python -m calm_jax.benchmarks.prompts --workdir=runs/quickstart [--prompts=600] [--temperature=1.0]

Prompts are beginnings of the validation documents, of lengths that are no multiple of K; the next four tokens are
sampled and compared with the document's. "left" fills the front with a token, "pad" and "match" are the
options of `sample.prompt_alignment`, and "cut" leaves out first tokens of the prompt.
"""

import dataclasses
import pathlib
import time

import numpy as np
import rich.table
from absl import app, flags

from calm_jax import metrics
from calm_jax.brier import ORDERS
from calm_jax.command import command, parse_flags
from calm_jax.data.blocks import encode_documents
from calm_jax.errors import UserError
from calm_jax.packed import read_corpus
from calm_jax.text import Generator
from calm_jax.workdir import Workdir

_WORKDIR = flags.DEFINE_string(
    "workdir", "", "folder of a trained model with chunks of several tokens"
)
_PROMPTS = flags.DEFINE_integer("prompts", 600, "prompts, of all lengths modulo K but 0 alike")
_LONGEST = flags.DEFINE_integer("longest", 64, "most tokens of a prompt")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "of the sampled tokens")
_MAX_DRAWS = flags.DEFINE_integer("max_draws", 1360, "most draws of match")


def _cases(
    generator: Generator, workdir: Workdir, chunk_size: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts with bos, and the four tokens that follow each."""
    texts = [document.text for document in read_corpus(workdir.config).validation]
    documents = [
        ids
        for ids in encode_documents(texts, generator.tokenizer)
        if len(ids) > _LONGEST.value + ORDERS
    ]
    if not documents:
        raise UserError(f"--longest={_LONGEST.value}: no validation document is that long")
    random = np.random.default_rng(0)
    cases = []
    for index in range(_PROMPTS.value):
        ids = documents[index % len(documents)].tolist()
        # With bos, `over` tokens more than whole chunks.
        over = 1 + index % (chunk_size - 1)
        size = chunk_size * int(random.integers(1, _LONGEST.value // chunk_size)) + over - 1
        first = 0 if index < len(documents) else int(random.integers(len(ids) - size - ORDERS))
        if first:
            # Anywhere in a document there is no bos.
            first -= 1
            cases.append((ids[first : first + size + 1], ids[first + size + 1 :][:ORDERS]))
        else:
            cases.append(([generator.tokenizer.bos_id, *ids[:size]], ids[size : size + ORDERS]))
    return cases


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}")
    generator, workdir = Generator.load(_WORKDIR.value), Workdir(pathlib.Path(_WORKDIR.value))
    chunk_size, tokenizer = workdir.config.chunk_size, generator.tokenizer
    if chunk_size < 2:
        raise UserError(
            f"--workdir={_WORKDIR.value}: every prompt ends on a boundary of chunks of 1"
        )
    cases = _cases(generator, workdir, chunk_size)
    options = dataclasses.replace(
        generator.options,
        temperature=_TEMPERATURE.value,
        max_tokens=ORDERS,
        max_draws=_MAX_DRAWS.value,
        stop=(),
        batch_size=32,
    )

    def left(token: int):
        return lambda ids: [token] * (-len(ids) % chunk_size) + ids

    ways = {
        "left, pad": (left(tokenizer.pad_id), "left"),
        "left, bos": (left(tokenizer.bos_id), "left"),
        "left, eos": (left(tokenizer.eos_id), "left"),
        "left, newline": (left(tokenizer.encode("\n")[-1]), "left"),
        "cut": (lambda ids: ids[len(ids) % chunk_size :], "left"),
        "match": (list, "match"),
        "pad": (list, "pad"),
    }
    table = rich.table.Table(
        title=f"{len(cases)} prompts, temperature {_TEMPERATURE.value:g}: next tokens right (%)"
    )
    for column in ("way", *(f"first {n}" for n in range(1, ORDERS + 1)), "matched", "draws", "ms"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, (fill, alignment) in ways.items():
        began = time.perf_counter()
        own = dataclasses.replace(options, prompt_alignment=alignment)
        done = generator.generate([fill(ids) for ids, _ in cases], own)
        seconds = time.perf_counter() - began
        right_P4 = np.array(
            [
                np.cumprod(
                    [a == b for a, b in zip((*one.tokens, *[-1] * ORDERS), truth, strict=False)]
                )
                for one, (_, truth) in zip(done, cases, strict=True)
            ]
        )
        error_4 = right_P4.std(0) / np.sqrt(len(cases))
        rates = [
            f"{100 * a:.1f} ± {100 * b:.1f}" for a, b in zip(right_P4.mean(0), error_4, strict=True)
        ]
        matched = sum(one.alignment == "match" for one in done) / len(done)
        draws = sum(one.match_draws for one in done) / len(done)
        table.add_row(
            name, *rates, f"{matched:.0%}", f"{draws:.0f}", f"{1e3 * seconds / len(done):.0f}"
        )
    metrics.console().print(table, highlight=False)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
