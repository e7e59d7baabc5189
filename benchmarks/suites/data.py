"""The suite `data`: the recipe's text is read, tokenised and packed for stage 2 as when a run begins, and batches are taken.

`python -m benchmarks.data` measures the preparation of large text.
"""

import functools
import statistics

from benchmarks.measure import Cases, Options, Record, record, timed
from calm_jax.config import resolve
from calm_jax.data.corpus import Corpus, load_corpus
from calm_jax.data.loader import TrainingText, training_batches
from calm_jax.data.tokenizers import Tokenizer, make_tokenizer
from calm_jax.run.dataset import Dataset

# A batch takes less time than a clock resolves well, so one measurement is the mean of so many.
_BATCHES = 100


def cases(options: Options) -> Cases:
    """One case with four records: `data:read`, `data:tokenizer`, `data:pack` and `data:batch`."""
    return {"data": functools.partial(_measure, options)}


def _measure(options: Options) -> list[Record]:
    config = resolve(options.tree)
    training = config.lm.training

    def read() -> None:
        corpora[:] = [load_corpus(config.data, with_autoencoder=False)]

    def find_tokenizer() -> None:
        prepared = corpora[-1].prepared
        texts = (document.text for document in corpora[-1].train)
        found = prepared[0].tokenizer if prepared else make_tokenizer(config.tokenizer, texts)
        tokenizers[:] = [found]

    def pack() -> None:
        dataset = Dataset(config, corpora[-1], tokenizers[-1])
        packed[:] = [dataset.training("lm")]

    def take() -> None:
        for _ in range(_BATCHES):
            next(batches)

    # Each step keeps the last that it made for the next one.
    corpora: list[Corpus] = []
    tokenizers: list[Tokenizer] = []
    packed: list[TrainingText] = []
    # A SentencePiece model is trained once, because that takes a while.
    reading = timed(read, options.repeats, options.seconds)
    finding = timed(find_tokenizer, 1)
    packing = timed(pack, options.repeats, options.seconds)
    size, [text] = training.batch_size, packed
    batches = training_batches(
        text.rows(config.seed), size, 0, range(size), config.data.read_threads
    )
    take()
    taking = [seconds / _BATCHES for seconds in timed(take, options.repeats, options.seconds)]
    block = config.lm.data.block_tokens
    tokens = block * sum(len(source) for source in text.sources)
    return [
        record("data", "data:read", reading),
        record("data", "data:tokenizer", finding),
        record("data", "data:pack", packing, tokens_per_s=tokens / statistics.median(packing)),
        record("data", "data:batch", taking, tokens_per_s=size * block / statistics.median(taking)),
    ]
