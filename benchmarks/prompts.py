"""Compares ways to handle a prompt that does not end on a chunk boundary, by the accuracy of the next tokens.

    python -m benchmarks.prompts --workdir=runs/quickstart [--prompts=600] [--temperature=1.0]

Prompts are pieces of validation documents whose lengths are no multiples of K. The next four tokens are sampled and compared
with the document's. "left" fills up the prompt in front with copies of a token, "pad" and "match" are values of
`sample.prompt_alignment`, and "cut" drops the first tokens of the prompt.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import rich.table
from absl import app, flags

from calm_jax.brier import ORDERS
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import define_fraction, given_folder, parse_flags
from calm_jax.data.packing import encode_documents
from calm_jax.errors import UserError
from calm_jax.run.dataset import read_corpus
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model with K >= 2")
_PROMPTS = flags.DEFINE_integer(
    "prompts", 600, "prompts; their lengths modulo K are 1 to K - 1 equally often"
)
_LONGEST = flags.DEFINE_integer("longest", 64, "largest number of tokens of a prompt")
_TEMPERATURE = define_fraction("temperature", 1.0, "temperature of the sampled tokens")
_MAX_DRAWS = flags.DEFINE_integer("max_draws", 1360, "largest number of draws of match")


def _cases(
    generator: Generator, workdir: Workdir, chunk_size: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the four tokens that follow each in its document."""
    texts = [document.text for document in read_corpus(workdir.config, ("lm",)).validation]
    if _LONGEST.value < 2 * chunk_size:
        raise UserError(f"--longest={_LONGEST.value} must be at least 2 chunks, {2 * chunk_size}")
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
        # The prompt has size + 1 tokens, bos included: whole chunks and `over` tokens more.
        over = 1 + index % (chunk_size - 1)
        size = chunk_size * int(random.integers(1, _LONGEST.value // chunk_size)) + over - 1
        first = 0 if index < len(documents) else int(random.integers(len(ids) - size - ORDERS))
        if first:
            # A piece from inside a document has no bos, and one more token of the document instead.
            first -= 1
            cases.append((ids[first : first + size + 1], ids[first + size + 1 :][:ORDERS]))
        else:
            cases.append(([generator.tokenizer.bos_id, *ids[:size]], ids[size : size + ORDERS]))
    return cases


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_WORKDIR, "the folder of a trained model")
    generator, workdir = Generator.load(str(folder)), Workdir(folder)
    chunk_size, tokenizer = workdir.config.chunk_size, generator.tokenizer
    if chunk_size < 2:
        raise UserError(
            f"--workdir={_WORKDIR.value}: with chunk_size=1 every prompt ends on a chunk boundary"
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

    def left(token: int) -> Callable[[list[int]], list[int]]:
        """Fills up a prompt in front to whole chunks."""
        return lambda ids: [token] * (-len(ids) % chunk_size) + ids

    # How each way changes the prompt, and its `prompt_alignment`.
    ways: dict[str, tuple[Callable[[list[int]], list[int]], str]] = {
        "left, pad": (left(tokenizer.pad_id), "left"),
        "left, bos": (left(tokenizer.bos_id), "left"),
        "left, eos": (left(tokenizer.eos_id), "left"),
        "left, newline": (left(tokenizer.encode("\n")[-1]), "left"),
        "cut": (lambda ids: ids[len(ids) % chunk_size :], "left"),
        "match": (list, "match"),
        "pad": (list, "pad"),
    }
    table = rich.table.Table(
        title=f"{len(cases)} prompts, temperature {_TEMPERATURE.value:g}: correct next tokens (%)"
    )
    for column in ("way", *(f"first {n}" for n in range(1, ORDERS + 1)), "matched", "draws", "ms"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, (fill, alignment) in ways.items():
        own = dataclasses.replace(options, prompt_alignment=alignment)
        prompts = [fill(ids) for ids, _ in cases]
        generator.generate(prompts, own)  # compiles
        began = time.perf_counter()
        done = generator.generate(prompts, own)
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
    progress.console().print(table, highlight=False)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
