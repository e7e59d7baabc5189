"""The text of a run: read, tokenised once, and packed for training and scoring of each stage."""

import dataclasses
import math
from collections.abc import Collection, Iterator

import numpy as np

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.cli.progress import counted
from calm_jax.config import Config
from calm_jax.data.corpus import Corpus, Source, load_corpus
from calm_jax.data.documents import Document
from calm_jax.data.loader import TrainingText
from calm_jax.data.packing import (
    MASKED,
    BlockConfig,
    Blocks,
    BlockSource,
    IsolatedBlocks,
    document_windows,
    encode_documents,
    pack,
)
from calm_jax.data.records import pack_completions, pack_records
from calm_jax.data.shards import PreparedText, prepared_blocks
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# The frequency floor counts at most about this many training n-grams, which takes about 1 GB of memory. Of a larger text, it
# counts those of evenly spaced blocks, or evenly spaced ones of evenly spaced documents.
_FLOOR_NGRAMS = 2**23
# At least this many documents are read, where there are so many; further n-grams are left out within them.
_FEW_DOCUMENTS = 1000


def reads_train_files(config: Config, stages: Collection[str]) -> bool:
    """False if only the autoencoder is trained or scored, and has text of its own (`data.autoencoder_files`)."""
    return "lm" in stages or not config.data.autoencoder_files


def read_corpus(config: Config, stages: Collection[str]) -> Corpus:
    """Reads the text that a command needs, and prints what was left out or held out, and why.

    Args:
      config: the whole config.
      stages: the stages whose training text is read besides the validation text: those that are trained; for scores "lm", whose
        training text gives the frequency floors.

    Raises:
      UserError: for files that are missing, bad or empty.
    """
    corpus = load_corpus(
        config.data,
        with_train=reads_train_files(config, stages),
        with_autoencoder="autoencoder" in stages,
    )
    if not config.data.train_files and corpus.train:
        count = len(corpus.train)
        print(f"data: {count:,} files of Python's standard library, as data.train_files is empty")
    for reason, count in corpus.skipped.items():
        if count:
            print(f"data: {counted(count, 'record')} left out: {reason}")
    for text in corpus.cut:
        print(
            f"data: {text.name} is the only document: the last {text.held_out:,} of its {text.characters:,} characters are "
            "held out for validation"
        )
    for split in corpus.uneven:
        print(
            f"data: held out for validation: {split.held_out_documents:,} of {counted(split.documents, 'document')}, with "
            f"{split.held_out:,} of {split.characters:,} characters, more than one in data.holdout_every="
            f"{config.data.holdout_every}; if text is named to score on (--config.data.validation_files=GLOB), nothing is held out"
        )
    return corpus


class _InMemory:
    """Documents and their token ids, without bos or eos. Either all documents have prompts, or none has (running text).

    Attributes:
        documents, num_documents: the documents, and how many there are.
        encoded: token ids of each text.
        prompts: token ids of each prompt; empty arrays for running text.
        are_records: whether the documents have prompts.
    """

    def __init__(self, documents: list[Document], tokenizer: Tokenizer):
        self.documents, self.num_documents = documents, len(documents)
        self.encoded = encode_documents([document.text for document in documents], tokenizer)
        prompts = [document.prompt for document in documents if document.prompt is not None]
        self.are_records = bool(prompts)
        no_prompt = np.zeros(0, np.int32)
        self.prompts = encode_documents(prompts, tokenizer) or [no_prompt] * len(documents)


class Dataset:
    """The text of a run. It is tokenised when this object is made, and packed when a stage's split is first asked for.

    Args:
      config: the whole config.
      corpus: the documents and prepared text that `read_corpus` read.
      tokenizer: the run's tokenizer.

    Raises:
      UserError: if a folder of prepared text was made with another tokenizer.
    """

    def __init__(self, config: Config, corpus: Corpus, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        for prepared in corpus.prepared:
            _check_tokenizer(prepared, tokenizer)
        self._validation = _InMemory(corpus.validation, tokenizer)
        self._sources = [self._prepare(source) for source in corpus.sources]
        has_own_text = corpus.autoencoder_sources is not corpus.sources
        self._autoencoder_sources = (
            [self._prepare(source) for source in corpus.autoencoder_sources]
            if has_own_text
            else self._sources
        )
        self._weights = {
            "lm": config.data.mixture,
            "autoencoder": () if has_own_text else config.data.mixture,
        }
        self._training: dict[str, TrainingText] = {}
        self._scored_blocks: dict[str, BlockSource] = {}

    def _prepare(self, source: Source) -> _InMemory | PreparedText:
        if isinstance(source, PreparedText):
            return source
        return _InMemory(source, self._tokenizer)

    def held_out_records(self, most: int) -> list[Document]:
        """The first held-out documents with prompts, at most so many."""
        return self._validation.documents[:most] if self._validation.are_records else []

    @property
    def has_train(self) -> bool:
        """Whether there is training text. Scoring alone needs none."""
        return bool(self._sources)

    def training(self, name: str) -> TrainingText:
        """The training blocks of a stage, "autoencoder" or "lm", with the weight of each source.

        Raises `UserError` if the text is shorter than one block.
        """
        if name not in self._training:
            sources = self._autoencoder_sources if name == "autoencoder" else self._sources
            blocks = [self._training_blocks(name, source) for source in sources]
            self._training[name] = TrainingText(blocks, self._weights[name])
        return self._training[name]

    def validation(self, name: str) -> BlockSource:
        """The validation blocks of a stage, without random pads.

        Running text is cut into windows, and no text is dropped. Records with prompts are packed as in training.
        """
        if name not in self._scored_blocks:
            data = getattr(self._config, name).data
            data = dataclasses.replace(data, front_fill="none", packing="windows")
            self._scored_blocks[name] = self._pack(name, "validation", self._validation, data)
        return self._scored_blocks[name]

    def windows(self) -> Blocks:
        """The validation documents as the windows of the equal-context protocol (`eval.context_tokens` in configs/common.py).

        Raises `UserError` if no document is long enough to be scored.
        """
        config = self._config
        protocol = config.eval
        documents = list(self._whole_documents(self._validation, stride=1))
        blocks = document_windows(
            documents,
            self._tokenizer.pad_id,
            protocol.block_tokens,
            protocol.context_tokens,
            # A multiple of the chunk size, and of four tokens so that every K scores the same n-grams.
            math.lcm(config.chunk_size, ORDERS),
        )
        if protocol.context_tokens < config.chunk_size:
            raise UserError(
                f"eval.context_tokens={protocol.context_tokens} must be at least chunk_size={config.chunk_size}: the first "
                "chunk of a window is never predicted"
            )
        starts_P = protocol.equal_context.starts(blocks.tokens.shape[1], config.chunk_size)
        if not len(starts_P) or not len(blocks) or blocks.num_valid.max() < starts_P[0] + ORDERS:
            longest = max(len(document) for document in documents)
            raise UserError(
                f"eval.context_tokens={protocol.context_tokens}: no n-gram to score starts after this much context with chunk_size="
                f"{config.chunk_size}, eval.block_tokens={protocol.block_tokens} and eval.start_every="
                f"{protocol.start_every} (the longest validation document has {longest} tokens): give fewer "
                "context_tokens, or longer documents"
            )
        return blocks

    def floor(self) -> brier.Score:
        """BrierLM of predicting n-grams by their frequency in the training text.

        It is scored on the same n-grams of the validation blocks as the model. Frequencies are counted over the
        training n-grams that start where a chunk starts.
        """
        config = self._config
        text, size = self.training("lm"), config.chunk_size
        train_BT = text.targets(_FLOOR_NGRAMS * size // text.block_tokens)
        window_P4 = brier.windows(np.arange(0, train_BT.shape[1] - ORDERS + 1, size))
        train_W4 = train_BT[:, window_P4].reshape(-1, ORDERS)
        train_W4 = train_W4[(train_W4 != MASKED).all(1)]
        return self._floor(train_W4, self.validation("lm"), config.eval.published)

    def equal_context_floor(self) -> brier.Score:
        """The frequency floor of the equal-context protocol. It is the same for every chunk size K."""
        return self._floor(self.training_ngrams(), self.windows(), self._config.eval.equal_context)

    def training_ngrams(self) -> np.ndarray:
        """The n-grams of four tokens that start at every token of the training documents, [N, 4].

        Of a large text, evenly spaced documents are used, and evenly spaced n-grams of them.
        """
        num_tokens = sum(
            source.num_tokens if isinstance(source, PreparedText) else sum(map(len, source.encoded))
            for source in self._sources
        )
        stride = -(-num_tokens // _FLOOR_NGRAMS) or 1
        # The first is for text without any document of four tokens.
        train_W4 = [np.empty((0, ORDERS), np.int32)]
        for source in self._sources:
            skip = min(stride, max(1, source.num_documents // _FEW_DOCUMENTS))
            every = -(-stride // skip)
            train_W4 += [
                np.array(np.lib.stride_tricks.sliding_window_view(document, ORDERS)[::every])
                for document in self._whole_documents(source, skip)
                if len(document) >= ORDERS
            ]
        return np.concatenate(train_W4)

    def check_scored(self) -> None:
        """Raises `UserError` if the validation text has no n-gram to score. For text with prompts, it prints a line instead."""
        config = self._config
        _, counted_BP4 = self._scored(self.validation("lm"), config.eval.published)
        if not counted_BP4[..., -1].any():
            if config.data.prompt_field:
                print(f"lm: no held-out completion has {ORDERS} tokens: there will be no BrierLM")
                return
            raise UserError(
                f"lm: the validation text has no {ORDERS} tokens after the first chunk of {config.chunk_size} of its "
                "block, so there is nothing to score: give more of it"
            )

    def _scored(
        self, blocks: BlockSource, protocol: brier.Protocol
    ) -> tuple[np.ndarray, np.ndarray]:
        """The n-grams that a protocol scores, [B, P, 4], and for n = 1 to 4 whether the first n tokens count, bool [B, P, 4]."""
        target_BT = blocks.targets(np.arange(len(blocks)))
        starts_P = protocol.starts(target_BT.shape[1], self._config.chunk_size)
        counted_BP4 = brier.counted(target_BT, starts_P, self._tokenizer.pad_id)
        return target_BT[:, brier.windows(starts_P)], counted_BP4

    def _whole_documents(
        self, source: _InMemory | PreparedText, stride: int
    ) -> Iterator[np.ndarray]:
        """Yields the tokens of every `stride`-th document, with bos, and with eos if `lm.data.append_eos`."""
        tokenizer = self._tokenizer
        if isinstance(source, PreparedText):
            for tokens in source.documents(stride):
                yield tokens[tokens != tokenizer.pad_id]
            return
        eos = [tokenizer.eos_id] * self._config.lm.data.append_eos
        for prompt, ids in zip(source.prompts[::stride], source.encoded[::stride], strict=True):
            yield np.concatenate([[tokenizer.bos_id], prompt, ids, eos]).astype(np.int32)

    def _floor(
        self, train_W4: np.ndarray, validation: BlockSource, protocol: brier.Protocol
    ) -> brier.Score:
        target_BP4, counted_BP4 = self._scored(validation, protocol)
        return brier.frequency_floor(train_W4, np.maximum(target_BP4, 0), counted_BP4)

    def _training_blocks(self, name: str, source: _InMemory | PreparedText) -> BlockSource:
        config, data = self._config, getattr(self._config, name).data
        if not isinstance(source, PreparedText):
            return self._pack(name, "train", source, data)
        _check_prepared(source, name, data, config.chunk_size)
        blocks = prepared_blocks(source, data.block_tokens, data.packing)
        if not len(blocks):
            raise UserError(
                f"{name}: {source.folder} has {source.num_tokens} tokens, and one block needs {data.block_tokens}: give "
                f"more text, or a smaller {name}.data.block_tokens"
            )
        if data.isolate_documents:
            return IsolatedBlocks(blocks, source.starts(), blocks.first_N, config.chunk_size)
        return blocks

    def _pack(self, name: str, split: str, text: _InMemory, data: BlockConfig) -> BlockSource:
        config = self._config
        if text.are_records and name == "lm":
            return self._pack_records(split, text, data)
        keep_remainder, what = split == "validation", f"{name}: the {split} text"
        if text.are_records:
            return pack_completions(
                text.encoded, self._tokenizer, data, config.chunk_size, keep_remainder, what
            )
        return pack(
            text.encoded,
            self._tokenizer,
            data,
            config.chunk_size,
            config.seed,
            keep_remainder,
            what,
        )

    def _pack_records(self, split: str, text: _InMemory, data: BlockConfig) -> BlockSource:
        config = self._config
        names = [document.name for document in text.documents]
        num_empty = sum(not len(ids) for ids in text.encoded)
        if num_empty and split == "train":
            print(
                f"data: {num_empty} of {counted(len(names), 'training record')} with an empty completion: the model learns "
                "to answer these prompts with the end of the text"
            )
        blocks, too_long = pack_records(
            names,
            text.prompts,
            text.encoded,
            self._tokenizer,
            data,
            config.chunk_size,
            is_mixed=split == "train" and bool(config.data.mixture),
        )
        way_out = f"lm.data.block_tokens={data.block_tokens}: raise it"
        if too_long and config.data.on_bad_record == "raise":
            raise UserError(
                f"{too_long[0]}: the record is longer than {way_out}, or leave such records out with "
                "--config.data.on_bad_record=skip"
            )
        if too_long:
            print(
                f"data: {counted(len(too_long), f'{split} record')} left out: longer than {way_out}"
            )
        if not len(blocks):
            raise UserError(f"lm: the {split} text has no record that fits {way_out}")
        return blocks


def _check_tokenizer(text: PreparedText, tokenizer: Tokenizer) -> None:
    theirs = text.index["tokenizer"]["fingerprint"]
    if theirs != tokenizer.fingerprint:
        raise UserError(
            f"{text.folder} was prepared with another tokenizer ({theirs}) than this run's ({tokenizer.fingerprint}): "
            f"prepare the text with this run's, or give a new --workdir without tokenizer.path to use that of {text.folder}"
        )


def _check_prepared(text: PreparedText, name: str, data: BlockConfig, chunk_size: int) -> None:
    """Raises `UserError` if prepared text was made with other options than the stage's `data` section has."""
    asked: dict[str, object] = {
        "append_eos": data.append_eos,
        "align_documents_to_chunks": data.align_documents_to_chunks,
        "front_fill": data.front_fill,
    }
    if data.align_documents_to_chunks or data.front_fill != "none":
        asked["chunk_size"] = chunk_size
    is_published = text.options["packing"] == "published"
    asked["packing"] = "published" if data.packing == "published" else "all"
    if is_published and data.packing == "published":
        asked["block_tokens"] = data.block_tokens
    for option, ours in asked.items():
        theirs = text.options[option]
        if ours != theirs:
            key = option if option == "chunk_size" else f"{name}.data.{option}"
            value = "windows" if (option, theirs) == ("packing", "all") else theirs
            raise UserError(
                f"{text.folder} was prepared with --{option}={theirs}, and {key} asks for {ours!r}: prepare the text with "
                f"--{option}={ours}, or give --config.{key}={value}"
            )
