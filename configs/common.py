"""Every key of a recipe, with its unit and source. The values are those of the published recipe for CALM-M.

The other recipes start from this `get_config` and change some values. Most take arguments for another head or chunk size
(see `variant`): `--config=configs/calm_m.py:head=flow,k=8`. A flag overrides any key:
`--config.lm.training.batch_size=64`. As in the published recipe, there is no moving average (EMA) of the parameters and
no selection of a best checkpoint: the parameters after the last step are the model.
"""

from ml_collections import ConfigDict

from calm_jax.errors import UserError


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Seed of training and of the samples at its end: initial parameters, order of the data, noise. Evaluation has `eval.seed`.
    config.seed = 0
    # Stages to train: "autoencoder"; "lm", the language model alone, which needs a trained autoencoder (in the workdir, in
    # `autoencoder.checkpoint` or in `init_from`); or "all", both in this order.
    config.stage = "all"
    # Workdir of a trained or converted model, from whose parameters training starts instead of from random ones. With
    # stage="lm" the autoencoder is taken from there, too. Empty: random parameters.
    config.init_from = ""
    # K, the number of tokens that one latent vector stands for, in both stages (paper: 4). A softmax head needs 1.
    config.chunk_size = 4
    # Precision of activations and matrix products: "bfloat16" or "float32". Parameters, losses, the statistics of norms and
    # softmax are always float32. On CPUs with AMX "bfloat16" trains faster (docs/benchmarks.md).
    config.compute_dtype = "bfloat16"

    # --- Text -----------------------------------------------------------------------------------
    config.data = ConfigDict()
    # Training text: comma-separated globs, local or remote (gs://bucket/*.jsonl.zst). Files may be .txt (each file is one
    # document), .jsonl or .json (each line is one document), .parquet (each row is one document), and .gz or .zst of the
    # first three. An entry may also be "stdlib:", the source code of the running Python's standard library, or a folder made by
    # `python -m calm_jax.data.prepare`, whose tokenizer the run then uses. Empty: the standard library.
    config.data.train_files = ""
    # Sampling weights of the comma-separated entries of train_files, such as (0.7, 0.3): the share of training blocks that
    # come from each. Empty: no weights, every block is read once an epoch. With a prompt_field, entries that have no fields
    # (.txt files, prepared folders, "stdlib:") are mixed in as running text.
    config.data.mixture = ()
    # Training text of the autoencoder, given like train_files. Empty: the same text as train_files.
    config.data.autoencoder_files = ""
    # Validation text: globs like train_files, but no prepared folders. Empty: some training documents are held out (see
    # `holdout_every`). With validation files, --mode=eval needs no training text.
    config.data.validation_files = ""
    # Name of the field that holds a document's text in .jsonl, .json and .parquet files.
    config.data.text_field = "text"
    # Name of the field that holds a prompt, for training on prompts and completions (the text field). The loss is on the
    # completion only, which begins on a chunk boundary. Every record has its own block; with lm.data.isolate_documents a
    # block holds as many records as fit, and attention is masked between them. Empty: no prompts.
    config.data.prompt_field = ""
    # Filters of training text that is not in a prepared folder. Documents with fewer characters are left out.
    config.data.min_characters = 0
    # Documents with more space-separated words are cut into pieces of this many (published: 10,000). 0: they are not cut.
    config.data.max_words = 0
    # Whether to keep only the first of documents with equal text.
    config.data.deduplicate = False
    # Without validation_files, one document in this many is held out for validation, chosen by a hash of its file's
    # name (with its folders, where other files have the same name) and line number. Pieces of a text stay together. If there is only one
    # document, its last characters are held out: one in this many.
    config.data.holdout_every = 20
    # What to do with a malformed record: "raise" ends the run with its file and line; "skip" leaves it out and reports how
    # many there were.
    config.data.on_bad_record = "raise"
    # Threads that prefetch batches from prepared shards. 0, no prefetching, is fastest on a local disk; about 16 suit a
    # remote file system.
    config.data.read_threads = 0

    config.tokenizer = ConfigDict()
    # Kind of tokenizer: "llama3" (paper), "huggingface", "sentencepiece" or "bytes".
    config.tokenizer.kind = "llama3"
    # The tokenizer's file: Llama 3's tokenizer.model (tiktoken ranks) or tokenizer.json; any byte-level tokenizer.json with
    # "huggingface"; or a SentencePiece model. Empty with "sentencepiece": one is trained on the training text.
    config.tokenizer.path = ""
    # Vocabulary size of a SentencePiece model that is trained here, at least 300. Characters that find no room in it are
    # encoded as bytes. Other tokenizers have a fixed vocabulary (Llama 3: 128,257 with the pad token) and ignore it.
    config.tokenizer.vocab_size = 512
    # Whether pieces of a SentencePiece model that is trained here may consist of white space only, so that an indentation of up
    # to 16 spaces is usually one token, as with Llama 3's tokenizer. Without them nearly half of the tokens of Python code are single
    # spaces, and a model's score is mostly that of predicting them (docs/experiments.md). Other tokenizers ignore it.
    config.tokenizer.whitespace_pieces = True

    # --- Stage 1: the autoencoder (paper, section 2); not used with a softmax head ------------------
    config.autoencoder = ConfigDict()
    # Workdir with a trained autoencoder to use. Empty: train one in stage 1.
    config.autoencoder.checkpoint = ""
    # Stage 2 refuses to start if the autoencoder reconstructs a smaller fraction of validation tokens from sampled latents
    # (published autoencoder: over 0.999).
    config.autoencoder.min_accuracy = 0.98
    # Share of the chunks of a training batch that are replaced by random ones (paper: 0). Three kinds are equally frequent: tokens
    # of the block in random order, uniformly random tokens, and uniformly random tokens with pads from a random place on. An
    # autoencoder that is trained on one kind of text then reconstructs any text (docs/single_spaces.md).
    config.autoencoder.random_chunks = 0.0
    config.autoencoder.model = _autoencoder_model()
    # Published: eos ends each document, and pads fill its last chunk.
    config.autoencoder.data = _blocks(2048, append_eos=True, align_documents_to_chunks=True)
    config.autoencoder.optimizer = _optimizer()
    config.autoencoder.optimizer.warmup_steps = 1000
    config.autoencoder.training = _training(num_steps=30_000, batch_size=256)

    # --- Stage 2: the language model (paper, section 3) -------------------------------------------
    config.lm = ConfigDict()
    config.lm.model = _transformer()
    config.lm.head = _energy_head()
    # Weight of an auxiliary loss, which makes the backbone learn faster (docs/training.md): the cross-entropy of the next
    # chunk's K tokens, each predicted from the hidden state by a small network, the token predictor (paper: 0;
    # at most 1e6). A run cannot change it later, since the network has parameters. Not for a softmax head.
    config.lm.token_loss_weight = 0.0
    # What the token predictor's logits are multiplied by before they are added to the decoder's, wherever draws of the head are
    # decoded: in scores and in generation (paper: 0; at most 1e6). A small model then writes more words
    # (docs/training.md). Needs the token loss.
    config.lm.token_prior_weight = 0.0
    # Published: documents have no eos, and a chunk may contain the end of one document and the start of the next.
    config.lm.data = _blocks(8192, append_eos=False, align_documents_to_chunks=False)
    config.lm.optimizer = _optimizer()
    config.lm.training = _training(num_steps=250_000, batch_size=256)

    # --- Evaluation -------------------------------------------------------------------------------
    config.eval = ConfigDict()
    # Blocks per evaluation batch, over all devices.
    config.eval.batch_size = 8
    # S, samples per position for BrierLM, at least 2 (published: 2). More samples take longer and lower the variance.
    config.eval.num_samples = 2
    # Evaluations during training use this many evenly spaced validation blocks. The evaluation after the last step always
    # uses the whole split.
    config.eval.part_blocks = 64
    # For K > 4: whether to score all n-grams inside a chunk, not only its first four tokens (published: False).
    config.eval.inner_starts = False
    # For K < 4: whether to leave out the last n-gram of each block, as the published code does for CALM.
    config.eval.skip_last_start = False
    # The equal-context protocol of --mode=eval compares models of different K, and the autoregressive baseline, on the same
    # n-grams after the same context. Documents are cut into windows of `block_tokens` tokens, which overlap by
    # `context_tokens`. In each window, the tokens after the first `context_tokens` are scored, so that each token is scored
    # once. n-grams start at multiples of `start_every` tokens: with 4 they are the same for K = 1, 2, 4, 8 and 16, with 12
    # also for K = 3.
    config.eval.context_tokens = 1024
    config.eval.block_tokens = 2048
    config.eval.start_every = 4
    # The accuracy-diversity plane of --mode=eval (paper, section 5): at these temperatures, it measures how often a sample is
    # correct and how often two samples are equal. Empty: it is not measured.
    config.eval.temperatures = ()
    # Samplers to measure (see `sample.sampler`).
    config.eval.samplers = ("pooled", "batch", "published", "rejection", "growing", "noise")
    # Values of `sample.num_candidates` to measure the samplers "batch" and "published" with.
    config.eval.candidates = (200,)
    # Number of contexts from the validation text.
    config.eval.plane_contexts = 512
    # Seed of all random numbers of evaluation; `seed` has no influence on them.
    config.eval.seed = 0

    # --- Generation ---------------------------------------------------------------------------------
    config.sample = ConfigDict()
    # T, in (0, 1]; for the samplers of p^(1/T) a rounded 1/n such as 0.33 counts as 1/n. With a softmax head any T >= 0,
    # where 0 is greedy decoding. The paper's author advises at most 0.5 for fluent text.
    config.sample.temperature = 0.5
    # Nucleus sampling, for a softmax head only: sample from the likeliest tokens whose probabilities sum to this. 1: from all.
    config.sample.top_p = 1.0
    # How chunks are sampled at T < 1; docs/single_spaces.md compares the samplers. Not used with a softmax head.
    #   "pooled"     draws fresh pools of growing size until one emits a chunk; exact, unless it needs more than max_draws
    #   "rejection"  the paper's exact algorithm; approximate only beyond max_draws
    #   "batch"      approximate, any T: chooses by weight from one pool of num_candidates draws
    #   "published"  the same with the paper's weights, for T = 1/n only
    #   "growing"    approximate: one pool that doubles until it holds enough equal draws
    #   "noise"      one draw with the head's noise multiplied by T
    config.sample.sampler = "pooled"
    # N, draws per chunk of "batch" and "published" (paper: 200). "rejection", and "pooled" where 1/T is not a whole number,
    # reserve up to this many of their max_draws, but at most half of them, for an approximate choice when the others are
    # used up.
    config.sample.num_candidates = 200
    # Maximum draws per chunk of the other samplers. A chunk that would need more is chosen approximately, and is counted as
    # "not exact". 216 = 16 + 200 costs at most about as much as the paper's 200 draws; with 1360 = 16 + 64 + 256 + 1024 fewer
    # chunks are approximate.
    config.sample.max_draws = 216
    # Draws that are computed together, over all prompts: enough to fill the device, but not many more, because a group that is
    # filled in part costs as much as a full one.
    config.sample.draws_at_once = 256
    # How many candidates are kept beside each chunk: the most frequent chunks of the pool that it was chosen from, with their
    # counts. The server's page shows them. They cost decoding, and change no text.
    config.sample.shown_candidates = 0
    # Multiplies lm.token_prior_weight in generation. Above 1 the text has likelier words, and fewer different ones.
    config.sample.token_prior_scale = 1.0
    # Maximum tokens to generate for each prompt.
    config.sample.max_tokens = 128
    # Stop strings: a text ends before the first of them.
    config.sample.stop = ()
    # How to bring a prompt to whole chunks.
    #   "left"   pads before the prompt; lm.data.front_fill="random" trains the model on such chunks
    #   "match"  samples the last chunk until a draw begins with the prompt's last tokens; "left" if none does in max_draws
    #   "pad"    pads after the prompt, as the published code does
    config.sample.prompt_alignment = "left"
    # Prompts and texts longer than the context, lm.data.block_tokens tokens: "refuse" ends with an error; "slide" attends to
    # the last chunks only.
    config.sample.long_context = "refuse"
    # Prompts continued together, at most; rounded up so that each device that generation uses has as many.
    config.sample.batch_size = 8
    # Prompts of the samples that are written at the end of training. Empty: those of the first held-out records, whose completions
    # are shown beside them; without records, the start of a document.
    # (They do not end with a space: in the training text a space begins the token of the next word.)
    config.sample.prompts = ("The", "In the year")

    # --- The run ------------------------------------------------------------------------------------
    config.checkpoint = ConfigDict()
    # Number of latest checkpoints to keep, per stage; older ones are deleted.
    config.checkpoint.keep = 2

    # Number of devices along each axis of the mesh; one axis may be -1: all remaining devices. Batches are sharded over
    # data x fsdp; parameters, optimizer state and the frozen autoencoder over fsdp x tensor.
    config.mesh = ConfigDict()
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    return config


def published_text(config: ConfigDict, name: str) -> None:
    """Sets the text of the published models, as prepared by `launch/prepare_pile.sh`.

    name: the folder of the language model's text in prepared/pile: "lm" for CALM, "ar" for the autoregressive baseline.
    """
    config.data.train_files = f"prepared/pile/{name}"
    config.data.validation_files = "prepared/wikitext.jsonl"
    # The autoencoder is trained on the Pile's shards 00 and 01, CALM on 02 to 29, the baseline on all.
    config.data.autoencoder_files = "prepared/pile/autoencoder" if name == "lm" else ""
    config.data.max_words = 10_000
    config.autoencoder.data.packing = config.lm.data.packing = "published"


def _autoencoder_model() -> ConfigDict:
    model = ConfigDict()
    # Z, size of a chunk's latent vector (paper: 32 K, 128 for K = 4).
    model.latent_size = 128
    # D and F, widths of the residual stream and of the MLPs' hidden layer.
    model.hidden_size = 512
    model.intermediate_size = 1280
    # Even numbers: half of the layers work on single tokens, the other half on whole chunks.
    model.num_encoder_layers = 2
    model.num_decoder_layers = 2
    # The term added to the variance in RMSNorms, from 1e-20 to 1.
    model.norm_epsilon = 1e-6
    # In training, the probability of replacing an input token by id 0, and of dropping a latent dimension (paper: 0.15).
    model.dropout = 0.15
    # Lower bound at which the KL divergence of each latent dimension is clamped, in nats (paper: 0.5; at most 1e6).
    model.kl_clamp = 0.5
    # Weight of the KL term in the loss (paper: 0.001; at most 1e6).
    model.kl_weight = 1e-3
    return model


def _transformer() -> ConfigDict:
    model = ConfigDict()
    # D and F, widths of the residual stream and of the MLPs' hidden layer.
    model.hidden_size = 1024
    model.intermediate_size = 2752
    model.num_layers = 16
    # Query heads. Twice their number must divide hidden_size.
    model.num_heads = 16
    # Key-value heads. Fewer than num_heads: grouped-query attention.
    model.num_kv_heads = 16
    # Base of the rotary position embedding, from 1 to 1e12. Positions count chunks, not tokens.
    model.rope_theta = 1e4
    # The term added to the variance in the transformer's RMSNorms, from 1e-20 to 1.
    model.rms_norm_epsilon = 1e-6
    # The same in the LayerNorms of chunk embedding, head and token predictor. A softmax head has none.
    model.norm_epsilon = 1e-6
    # Rematerialisation: which activations of a layer the backward pass recomputes. "none"; "full", all of them: least memory,
    # about a third more FLOPs; "dots", all but products with weights and the results of the attention "blocks" and "splash": few
    # more FLOPs, and more than half of the memory that "none" takes; "auto", "none" ("dots" on CPUs) or "full", whichever is
    # faster of those that fit into the devices' memory.
    model.remat = "auto"
    # Attention kernel of training and scoring: "xla" works everywhere; "blocks" does, too, and is the
    # fastest on CPUs; "cudnn" needs an NVIDIA GPU, bfloat16 and lm.data.isolate_documents=False; "splash" needs a TPU (on a
    # CPU it is interpreted, for tests); "auto" is "splash" on a TPU, "blocks" on a CPU, "cudnn" where that is possible,
    # else "xla". Generation, which reads a cache, does not use it.
    model.attention = "auto"
    return model


def _energy_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "energy"
    # Number of residual MLP blocks (paper: a quarter of num_layers).
    head.num_blocks = 4
    # E, size of the uniform noise vector that a sample is computed from.
    head.noise_size = 64
    # N and M of the energy score: samples of the model and of the target, the autoencoder's posterior (paper: 8 and 100). With
    # M = 0 the target is the posterior's mean, from which small models with many latent dimensions learn faster (docs/training.md).
    head.num_samples = 8
    head.num_target_samples = 100
    # Exponent of the distance in the energy score, in (0, 2]; the score is strictly proper below 2 (paper: 1).
    head.beta = 1.0
    return head


def _diffusion_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "diffusion"
    # Residual MLP blocks, as in the energy head.
    head.num_blocks = 4
    # N, training targets per position, each with its own diffusion step and noise (published: 8).
    head.num_samples = 8
    # Denoising steps when sampling, out of 1000 in training (paper: 100; samples are useless below 40).
    head.num_steps = 100
    return head


def _flow_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "flow"
    # Residual MLP blocks, as in the energy head.
    head.num_blocks = 4
    # N, training targets per position, each with its own time and noise (published: 8).
    head.num_samples = 8
    # Solver steps when sampling (paper: 10 midpoint steps).
    head.num_steps = 10
    # ODE solver: "midpoint" (two network evaluations a step) or "euler" (one).
    head.solver = "midpoint"
    return head


def _softmax_head() -> ConfigDict:
    head = ConfigDict()
    # The autoregressive baseline: predicts probabilities of the next token; K = 1, no autoencoder.
    head.name = "softmax"
    return head


_HEADS = {
    "energy": _energy_head,
    "diffusion": _diffusion_head,
    "flow": _flow_head,
    "softmax": _softmax_head,
}


def variant(config: ConfigDict, arguments: str) -> ConfigDict:
    """Changes a recipe's head or chunk size, as in `--config=configs/calm_m.py:head=flow,k=8`, and returns it.

    Args:
      config: the recipe; is changed.
      arguments: comma-separated, empty for no change. `head=NAME` sets the head and keeps the recipe's num_blocks;
        "softmax" makes the autoregressive baseline with the same transformer. `k=K` sets the chunk size and the latent
        size, 32 K, and rounds block_tokens down to whole chunks.

    Raises:
      UserError: for any other argument or value.
    """
    given = {}
    for argument in filter(None, arguments.split(",")):
        name, _, value = argument.partition("=")
        if name not in ("head", "k") or not value or name in given:
            raise UserError(
                f"config argument {argument!r}: give head=NAME or k=TOKENS, each at most once, as in "
                "configs/calm_m.py:head=flow,k=8"
            )
        given[name] = value
    if "head" in given:
        _set_head(config, given["head"])
    is_softmax = config.lm.head.name == "softmax"
    if is_softmax and given.get("k", "1") != "1":
        raise UserError(f"k={given['k']}: head=softmax predicts single tokens, leave k out")
    if is_softmax:
        config.chunk_size = 1
    elif "k" in given:
        _set_chunk_size(config, given["k"])
    return config


def _set_head(config: ConfigDict, name: str) -> None:
    if name not in _HEADS:
        raise UserError(f"head={name!r} is none of {', '.join(_HEADS)}")
    if name != config.lm.head.name:
        head = _HEADS[name]()
        if "num_blocks" in head and "num_blocks" in config.lm.head:
            head.num_blocks = config.lm.head.num_blocks
        config.lm.head = head
    if name == "softmax":
        config.lm.token_loss_weight = config.lm.token_prior_weight = 0.0


def _set_chunk_size(config: ConfigDict, text: str) -> None:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise UserError(f"k={text!r} must be a number of tokens, at least 1")
    chunk_size = int(text)
    config.chunk_size = chunk_size
    config.autoencoder.model.latent_size = 32 * chunk_size
    for name in ("autoencoder", "lm"):
        data = config[name].data
        rounded = data.block_tokens // chunk_size * chunk_size
        if rounded < 2 * chunk_size:
            raise UserError(
                f"k={chunk_size}: a block of {name}.data.block_tokens={data.block_tokens} must hold at least 2 chunks"
            )
        if rounded != data.block_tokens:
            print(f"k={chunk_size}: {name}.data.block_tokens={data.block_tokens} becomes {rounded}")
        data.block_tokens = rounded


def _blocks(block_tokens: int, append_eos: bool, align_documents_to_chunks: bool) -> ConfigDict:
    data = ConfigDict()
    # T, tokens per block, which is one training sequence.
    data.block_tokens = block_tokens
    # How training documents are packed into blocks. Validation text is always packed as "windows". Records with prompts
    # (`data.prompt_field`) are packed in their own way, whatever this is.
    #   "windows"    the documents are concatenated and cut into blocks; the tokens after the last whole block are dropped
    #   "published"  the same for every 1,000 documents separately; the remainder of each that fills no block is dropped
    #   "documents"  a block begins with a document and holds as many whole ones as fit; masked pads fill the rest
    data.packing = "windows"
    # Whether eos ends each document.
    data.append_eos = append_eos
    # Whether pads fill the last chunk of each document, so that no chunk contains parts of two documents.
    data.align_documents_to_chunks = align_documents_to_chunks
    # Pads before each training document: "random" puts 0 to K-1, so that the model learns chunks that begin with pads, as a
    # prompt's first chunk may (see `sample.prompt_alignment`); "none" puts none (published). Not used for records with prompts.
    data.front_fill = "none"
    # Language model only: whether attention is masked between the documents of a block; a document's first chunk is then no
    # target. Needs align_documents_to_chunks. Published: False.
    data.isolate_documents = False
    return data


def _optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    # Learning rate after warm-up, at most 1.
    optimizer.learning_rate = 3e-4
    # Steps of linear warm-up from 0. The published scripts ask for 1000 (autoencoder) and 2000 (language model), but their
    # scheduler ignores it, so that 0 reproduces what they do.
    optimizer.warmup_steps = 2000
    # Learning rate after warm-up: "constant" (published), or "cosine", which decays towards `final_learning_rate` (at most 1)
    # and would reach it one step after the last.
    optimizer.schedule = "constant"
    optimizer.final_learning_rate = 0.0
    # AdamW's decay rates of the moments, at most 0.999999, and the term added to the denominator, from 1e-20 to 1.
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.epsilon = 1e-8
    # Weight decay of matrices and embeddings; biases and scales of norms have none. At most 1000, and one divided by the highest
    # learning rate.
    optimizer.weight_decay = 0.1
    # Gradients with a larger global norm are scaled down to it; at most 1e10.
    optimizer.max_grad_norm = 1.0
    return optimizer


def _training(num_steps: int, batch_size: int) -> ConfigDict:
    training = ConfigDict()
    # Optimizer updates in all.
    training.num_steps = num_steps
    # Blocks per update, over all devices.
    training.batch_size = batch_size
    # Gradient accumulation: microbatches per update. More need less memory; the result is the same but for rounding. 0: as few
    # as fit into the devices' memory, which is found out before the first step by compiling it.
    training.accumulation_steps = 0
    # Steps between lines in metrics.jsonl.
    training.log_every = 50
    # Steps between evaluations of `eval.part_blocks` validation blocks.
    training.eval_every = 2000
    # Steps between checkpoints.
    training.checkpoint_every = 1000
    # An update whose loss or gradient is not finite is skipped; this many in a row end the run with an error.
    training.max_nonfinite_steps = 10
    return training
