"""The recipe's text: read, tokenised once, packed for each stage and for scoring."""

import dataclasses
import math

import numpy as np

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.config import Config
from calm_jax.data.corpus import Corpus, load_corpus
from calm_jax.data.pipeline import (
    MASKED,
    BlockConfig,
    Blocks,
    document_windows,
    encode_documents,
    pack,
    pack_completions,
    pack_records,
)
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# n-grams that the floor's frequencies are counted from: about 1 GB of work space. Of a larger text, evenly
# spaced blocks or documents.
_FLOOR_NGRAMS = 2**23


def _stride(num_ngrams: int) -> int:
    return -(-num_ngrams // _FLOOR_NGRAMS) or 1


def read_corpus(config: Config) -> Corpus:
    """The config's text; says what was left out."""
    corpus = load_corpus(config.data)
    for reason, count in corpus.skipped.items():
        print(f"data: {count} records left out: {reason}")
    return corpus


class Text:
    """The recipe's text: read once, packed once for each stage and split that is asked for."""

    def __init__(self, config: Config, corpus: Corpus, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._documents = {"train": corpus.train, "validation": corpus.validation}
        self._encoded = {
            split: encode_documents([document.text for document in documents], tokenizer)
            for split, documents in self._documents.items()
        }
        nothing = np.zeros(0, np.int32)
        self._prompts = {
            split: encode_documents([document.prompt for document in documents], tokenizer)
            if config.data.prompt_field
            else [nothing] * len(documents)
            for split, documents in self._documents.items()
        }
        self._packed: dict[tuple[str, str], Blocks] = {}

    @property
    def has_train(self) -> bool:
        """Whether there is training text, which scoring can do without."""
        return bool(self._encoded["train"])

    def blocks(self, name: str, split: str) -> Blocks:
        """A stage's blocks of "train" or "validation". Raises `UserError` if there is not enough text for one training block.

        Validation text is never filled in front, and none of it is dropped.
        """
        if (name, split) not in self._packed:
            self._packed[name, split] = self._pack(name, split)
        return self._packed[name, split]

    def windows(self) -> Blocks:
        """The validation documents in windows of equal context. Raises `UserError` if none is long enough."""
        config = self._config
        data = config.eval
        documents = self._whole_documents("validation", stride=1)
        blocks = document_windows(
            documents,
            self._tokenizer.pad_id,
            data.block_tokens,
            data.context_tokens,
            # Whole chunks, and for every K the same places for n-grams of four tokens.
            math.lcm(config.chunk_size, ORDERS),
        )
        if data.context_tokens < config.chunk_size:
            raise UserError(
                f"eval.context_tokens={data.context_tokens} must be at least chunk_size={config.chunk_size}: the first "
                "chunk of a window is never predicted"
            )
        starts_P = data.equal_context.starts(blocks.tokens.shape[1], config.chunk_size)
        if not len(starts_P) or not len(blocks) or blocks.num_valid.max() < starts_P[0] + ORDERS:
            longest = max(len(document) for document in documents)
            raise UserError(
                f"eval.context_tokens={data.context_tokens}: nothing to score after so much context with chunk_size="
                f"{config.chunk_size}, eval.block_tokens={data.block_tokens} and eval.start_every={data.start_every} "
                f"(the longest validation document has {longest} tokens): give fewer context_tokens, or longer documents"
            )
        return blocks

    def floor(self) -> brier.Score:
        """The score of the training text's frequencies, over the n-grams that the model is scored on.

        Those of n-grams that start where a chunk does.
        """
        config = self._config
        blocks, size = self.blocks("lm", "train"), config.chunk_size
        step = _stride(blocks.tokens.size // size)
        train_BT = blocks.targets(np.arange(0, len(blocks), step))
        window_P4 = brier.windows(np.arange(0, train_BT.shape[1] - ORDERS + 1, size))
        train_N4 = train_BT[:, window_P4].reshape(-1, ORDERS)
        train_N4 = train_N4[(train_N4 != MASKED).all(1)]
        return self._floor(train_N4, self.blocks("lm", "validation"), config.eval.published)

    def equal_context_floor(self) -> brier.Score:
        """The same for the equal-context protocol, from all n-grams of the documents: one floor for every K."""
        stride = _stride(sum(map(len, self._encoded["train"])))
        documents = self._whole_documents("train", stride)
        train_N4 = [
            np.lib.stride_tricks.sliding_window_view(document, ORDERS)
            for document in documents
            if len(document) >= ORDERS
        ]
        return self._floor(
            np.concatenate(train_N4), self.windows(), self._config.eval.equal_context
        )

    def check_scored(self) -> None:
        """Raises `UserError` if no n-gram of the validation text is ever predicted."""
        config = self._config
        _, counted_BP4 = self._scored(self.blocks("lm", "validation"), config.eval.published)
        if not counted_BP4[..., -1].any():
            if config.data.prompt_field:
                print(f"lm: no held-out completion has {ORDERS} tokens: there will be no BrierLM")
                return
            raise UserError(
                f"lm: the validation text has no {ORDERS} tokens after the first chunk of {config.chunk_size} of its "
                "block, so there is nothing to score: give more of it"
            )

    def _scored(self, blocks: Blocks, protocol: brier.Protocol) -> tuple[np.ndarray, np.ndarray]:
        """The n-grams that a protocol scores, [blocks, P, 4], and which of them count for which n."""
        target_BT = blocks.targets(np.arange(len(blocks)))
        starts_P = protocol.starts(target_BT.shape[1], self._config.chunk_size)
        counted_BP4 = brier.counted(target_BT, starts_P, self._tokenizer.pad_id)
        return target_BT[:, brier.windows(starts_P)], counted_BP4

    def _whole_documents(self, split: str, stride: int) -> list[np.ndarray]:
        """Every `stride`-th document's tokens, with bos and, where the language model is trained on it, eos."""
        tokenizer = self._tokenizer
        eos = [tokenizer.eos_id] * self._config.lm.data.append_eos
        return [
            np.concatenate([[tokenizer.bos_id], prompt, ids, eos]).astype(np.int32)
            for prompt, ids in zip(
                self._prompts[split][::stride], self._encoded[split][::stride], strict=True
            )
        ]

    def _floor(
        self, train_N4: np.ndarray, validation: Blocks, protocol: brier.Protocol
    ) -> brier.Score:
        target_BP4, counted_BP4 = self._scored(validation, protocol)
        return brier.frequency_floor(train_N4, np.maximum(target_BP4, 0), counted_BP4)

    def _pack(self, name: str, split: str) -> Blocks:
        config, data = self._config, getattr(self._config, name).data
        if config.data.prompt_field and name == "lm":
            return self._pack_records(split, data)
        keep_remainder, what = split == "validation", f"{name}: the {split} text"
        if config.data.prompt_field:
            return pack_completions(
                self._encoded[split],
                self._tokenizer,
                data,
                config.chunk_size,
                keep_remainder,
                what,
            )
        if split == "validation":
            data = dataclasses.replace(data, front_fill="none")
        return pack(
            self._encoded[split],
            self._tokenizer,
            data,
            config.chunk_size,
            config.seed,
            keep_remainder,
            what,
        )

    def _pack_records(self, split: str, data: BlockConfig) -> Blocks:
        config = self._config
        names = [document.name for document in self._documents[split]]
        blocks, too_long = pack_records(
            names,
            self._prompts[split],
            self._encoded[split],
            self._tokenizer,
            data,
            config.chunk_size,
        )
        way_out = f"lm.data.block_tokens={data.block_tokens}: raise it"
        if too_long and config.data.on_bad_record == "raise":
            raise UserError(
                f"{too_long[0]}: the record is longer than {way_out}, or leave such records out with "
                "--config.data.on_bad_record=skip"
            )
        if too_long:
            print(f"data: {len(too_long)} {split} records left out: longer than {way_out}")
        if not len(blocks):
            raise UserError(f"lm: the {split} text has no record that fits {way_out}")
        return blocks
