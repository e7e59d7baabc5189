"""The positions in the text that a workdir's equal-context evaluation scores, and samples of a model at such positions."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.evaluation.evaluator import part_of
from calm_jax.evaluation.samples import Reference, Sample
from calm_jax.run.dataset import Dataset
from calm_jax.run.generator import Generator

# Tokens of a continuation that is scored as text. They are more than the four that are scored, because how the end of a text is
# tokenised depends on the text after it.
_TEXT_TOKENS = 16


def references(
    config: Config, text: Dataset, tokenizer: Tokenizer, most: int
) -> tuple[list[Reference], int]:
    """The positions that `--mode=eval` scores at equal context, with the context that the model has there.

    Args:
        config: the config, whose section `eval` has the protocol.
        text: the text of the run.
        tokenizer: the tokenizer of the run.
        most: the largest number of positions to return, evenly spaced among all; 0 for all.

    Returns:
        The references, and the number of all positions. The references in one window have the same `block`, because their scores
        depend on each other; `--mode=eval` groups them in the same way.
    """
    blocks, pad_id = text.windows(), tokenizer.pad_id
    target_BT = blocks.targets(np.arange(len(blocks)))
    starts_P = config.eval.equal_context.starts(target_BT.shape[1], config.chunk_size)
    counted_BP4 = brier.counted(target_BT, starts_P, pad_id)
    places = np.argwhere(counted_BP4[..., 0])
    given = []
    for index in part_of(len(places), most or len(places)):
        block, start = int(places[index][0]), int(starts_P[places[index][1]])
        ids = blocks.tokens[block].tolist()
        following = [token for token in target_BT[block, start:].tolist() if token >= 0]
        following = [token for token in following[:_TEXT_TOKENS] if token != pad_id]
        given.append(
            Reference(
                f"{block}:{start}",
                str(block),
                tokenizer.decode(following),
                following[:ORDERS],
                tokenizer.decode(ids[:start]),
                ids[:start],
                tokenizer.fingerprint,
            )
        )
    return given, len(places)


def have_tokens_of(tokenizer: Tokenizer, references: Sequence[Reference]) -> bool:
    """Whether all references have tokens of this tokenizer."""
    return all(one.tokenizer == tokenizer.fingerprint for one in references)


def samples_of(
    generator: Generator,
    references: Sequence[Reference],
    as_text: bool,
    num_samples: int,
    seed: int,
    done: Callable[[int], None],
) -> list[list[Sample]]:
    """Draws `num_samples` continuations of the context of each reference.

    Args:
        generator: the model. It reads the context tokens of the references if all of them are of its tokenizer, else their text.
        references: the positions.
        as_text: whether the samples are texts; else they are tokens of the model's tokenizer.
        num_samples: the number of samples at each position.
        seed: seed of all random numbers, in [0, 2**32).
        done: called with the number of references that are done.

    Returns:
        The samples of each reference, in the order of the references.
    """
    tokenizer = generator.tokenizer
    options = dataclasses.replace(
        generator.options,
        temperature=1.0,
        top_p=1.0,
        stop=(),
        long_context="slide",
        max_tokens=_TEXT_TOKENS if as_text else ORDERS,
        shown_candidates=0,
        token_prior_scale=1.0,
    )
    reads_tokens = have_tokens_of(tokenizer, references)
    contexts = [one.context_tokens if reads_tokens else one.context for one in references]
    prompts = [context for context in contexts for _ in range(num_samples)]
    drawn: list[list[Sample]] = [[] for _ in references]
    for finished, one in enumerate(generator.finish_each(prompts, options, seed), 1):
        end = [tokenizer.eos_id] if one.finish == "eos" else []
        drawn[one.index // num_samples].append(one.text if as_text else [*one.tokens, *end])
        done(finished // num_samples)
    return drawn
