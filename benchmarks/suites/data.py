"""The suite `data`: the recipe's text is read, tokenised and packed for stage 2 as when a run begins, and batches are taken.

`python -m benchmarks.data` measures the preparation of large text.
"""

import collections
import functools
import statistics
from collections.abc import Callable
from typing import TypeVar

from benchmarks.measure import Cases, Options, Record, record, timed
from calm_jax.config import resolve
from calm_jax.data.corpus import load_corpus
from calm_jax.data.loader import training_batches
from calm_jax.data.tokenizers import Tokenizer, make_tokenizer
from calm_jax.run.dataset import Dataset

# A batch takes less time than a clock resolves well, so one measurement is the mean of so many.
_BATCHES = 100
T = TypeVar("T")


def cases(options: Options) -> Cases:
    """One case with four records: `data:read`, `data:tokenizer`, `data:pack` and `data:batch`."""
    return {"data": functools.partial(_measure, options)}


def _timed_last(make: Callable[[], T], repeats: int, seconds: float) -> tuple[list[float], T]:
    """`timed`, and what the last call returned."""
    made: collections.deque[T] = collections.deque(maxlen=1)
    return timed(lambda: made.append(make()), repeats, seconds), made[0]


def _measure(options: Options) -> list[Record]:
    config, often = resolve(options.tree), (options.repeats, options.seconds)

    def find_tokenizer() -> Tokenizer:
        if corpus.prepared:
            return corpus.prepared[0].tokenizer
        return make_tokenizer(config.tokenizer, (document.text for document in corpus.train))

    def take() -> None:
        for _ in range(_BATCHES):
            next(batches)

    reading, corpus = _timed_last(lambda: load_corpus(config.data, with_autoencoder=False), *often)
    # A SentencePiece model is trained once, because that takes a while.
    finding, tokenizer = _timed_last(find_tokenizer, 1, options.seconds)
    packing, text = _timed_last(lambda: Dataset(config, corpus, tokenizer).training("lm"), *often)
    size = config.lm.training.batch_size
    batches = training_batches(
        text.rows(config.seed), size, 0, range(size), config.data.read_threads
    )
    take()
    taking = [seconds / _BATCHES for seconds in timed(take, *often)]
    block = config.lm.data.block_tokens
    tokens = block * sum(len(source) for source in text.sources)
    return [
        record("data", "data:read", reading),
        record("data", "data:tokenizer", finding),
        record("data", "data:pack", packing, tokens_per_s=tokens / statistics.median(packing)),
        record("data", "data:batch", taking, tokens_per_s=size * block / statistics.median(taking)),
    ]
