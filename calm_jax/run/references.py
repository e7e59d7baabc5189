"""The places of a workdir's equal-context evaluation, for other systems to be sampled at."""

import numpy as np

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.evaluation.evaluator import part_of
from calm_jax.evaluation.samples import Reference
from calm_jax.run.dataset import Dataset

# Tokens of a reference's text. Other tokenizers, or its own where the text is cut, may make other tokens of its end.
_TEXT_TOKENS = 16


def references(
    config: Config, text: Dataset, tokenizer: Tokenizer, most: int
) -> tuple[list[Reference], int]:
    """The places that `--mode=eval` scores at equal context, with the context that the model has there.

    Args:
        config: whose section `eval` has the protocol.
        text: the text of the run.
        tokenizer: its tokenizer.
        most: the number of places to give, evenly spaced among all; 0 for all.

    Returns:
        The references, and the number of all places. Those of one window are a block, as in `--mode=eval`.
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
