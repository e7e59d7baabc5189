"""Every key of a recipe, with units and sources; the values are the published recipe's for CALM-M.

Recipes import `get_config` from here and change what differs, and take arguments by `variant`:
`--config=configs/calm_m.py:head=flow,k=8`. Keys are overridden on the command line as
`--config.lm.training.batch_size=64`. There is no EMA of the parameters and no
best-checkpoint rule: the published recipe has neither, the last step is the model.
"""

from ml_collections import ConfigDict

from calm_jax.errors import UserError


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Every random number of a run follows from this: initial parameters, order of the data, noise.
    config.seed = 0
    # What to train: "autoencoder", "lm" (needs an autoencoder in the workdir or a checkpoint of one), or "all".
    config.stage = "all"
    # Workdir, of a run or converted, with whose parameters the stages begin that are trained; a language model that is
    # trained alone takes its autoencoder, too. Empty: fresh parameters.
    config.init_from = ""
    # K, tokens per chunk (paper: 4; 1 with a softmax head). Both stages share it.
    config.chunk_size = 4
    # Arithmetic of the networks, "bfloat16" or "float32"; parameters, losses, norms' statistics and softmax are float32.
    config.compute_dtype = "bfloat16"

    # --- Text -----------------------------------------------------------------------------------
    config.data = ConfigDict()
    # Comma-separated globs of .txt (one document a file), .jsonl or .json (one document a line), .gz or .zst of these, and
    # .parquet (one document a row); also remote ones such as gs://bucket/*.jsonl.zst.
    # Empty: the source text of the running Python's standard library.
    # An entry may also be a folder that `python -m calm_jax.data.prepare` made, whose tokenizer then is the run's.
    config.data.train_files = ""
    # How often text is of each comma-separated entry of train_files, as in (0.7, 0.3); empty: as it is, all once an epoch.
    config.data.mixture = ()
    # Other text, named in the same way, for the autoencoder. Empty: train_files.
    config.data.autoencoder_files = ""
    # The same for validation, never prepared. Empty: held out of the training files, see `holdout_every`. Alone they are
    # enough for --mode=eval.
    config.data.validation_files = ""
    # Field of a record that holds the text.
    config.data.text_field = "text"
    # Field of a record with a prompt that its text follows: read, not learnt, and the text begins a chunk of its
    # own; each record then is a block for itself. Empty: there are no prompts.
    config.data.prompt_field = ""
    # Of training text that is not prepared: documents with fewer characters are left out, longer ones than so many
    # space-separated words are cut into pieces of so many (published: 10,000; 0: never), equal ones are left out but for the first.
    config.data.min_characters = 0
    config.data.max_words = 0
    config.data.deduplicate = False
    # Without validation files, one document in this many is held out, by a hash of its file name (and line).
    config.data.holdout_every = 20
    # A malformed record: "raise" (names file and line) or "skip" (counted and reported).
    config.data.on_bad_record = "raise"
    # Threads that read prepared shards ahead. 0 is fastest on a local disk; one that is far away wants 16 or so.
    config.data.read_threads = 0

    config.tokenizer = ConfigDict()
    # "llama3" (paper), "sentencepiece" or "bytes".
    config.tokenizer.kind = "llama3"
    # File of the tokenizer: Llama 3's tokenizer.model (tiktoken ranks) or tokenizer.json, or a
    # SentencePiece model. Empty with "sentencepiece": train one on the training text.
    config.tokenizer.path = ""
    # Vocabulary of a SentencePiece model that is trained; others have their own (Llama 3: 128,257 with the pad token).
    config.tokenizer.vocab_size = 512

    # --- Stage 1: the autoencoder (paper, section 2); a softmax head has none ----------------------
    config.autoencoder = ConfigDict()
    # Workdir whose autoencoder to use instead of training one. Empty: train.
    config.autoencoder.checkpoint = ""
    # Stage 2 refuses an autoencoder that gets fewer of the held-out tokens right (from a sampled latent). Published: over 0.999.
    config.autoencoder.min_accuracy = 0.98
    config.autoencoder.model = _autoencoder_model()
    # Published: each document gets eos and is filled up to whole chunks with pads.
    config.autoencoder.data = _blocks(2048, append_eos=True, align_documents_to_chunks=True)
    config.autoencoder.optimizer = _optimizer()
    config.autoencoder.optimizer.warmup_steps = 1000
    config.autoencoder.training = _training(num_steps=30_000, batch_size=256)

    # --- Stage 2: the language model (paper, section 3) -------------------------------------------
    config.lm = ConfigDict()
    config.lm.model = _transformer()
    config.lm.head = _energy_head()
    # Published: no eos, and chunks may straddle documents.
    config.lm.data = _blocks(8192, append_eos=False, align_documents_to_chunks=False)
    config.lm.optimizer = _optimizer()
    config.lm.training = _training(num_steps=250_000, batch_size=256)

    # --- Evaluation -------------------------------------------------------------------------------
    config.eval = ConfigDict()
    # Blocks evaluated at once, over all devices.
    config.eval.batch_size = 8
    # S, samples per position of BrierLM: at least 2 (published: 2). More cost time and lower the variance.
    config.eval.num_samples = 2
    # Blocks, evenly spaced, for the evaluations during training; at the end it is always the whole split.
    config.eval.part_blocks = 64
    # Score also n-grams that start inside a chunk of more than four tokens, not its first four alone (published: False).
    config.eval.inner_starts = False
    # With K < 4, leave out each block's last n-gram (the published code does so for CALM; here all count).
    config.eval.skip_last_start = False
    # The equal-context protocol of --mode=eval, which compares models of any K and the autoregressive baseline:
    # documents in windows of `block_tokens`, of which everything after the first `context_tokens` is scored,
    # each token once. n-grams start at multiples of `start_every` tokens: 4 gives K = 1, 2, 4, 8 and 16 the
    # same ones, 12 also K = 3.
    config.eval.context_tokens = 1024
    config.eval.block_tokens = 2048
    config.eval.start_every = 4
    # --mode=eval measures the accuracy-diversity plane at these temperatures, if there are any: of these samplers,
    # those of one pool with these numbers of candidates, over so many contexts of the validation text.
    config.eval.temperatures = ()
    config.eval.samplers = ("pooled", "batch", "published", "rejection", "growing", "noise")
    config.eval.candidates = (200,)
    config.eval.plane_contexts = 512
    # Seed of the evaluation's random numbers, apart from the training's.
    config.eval.seed = 0

    # --- Generation ---------------------------------------------------------------------------------
    config.sample = ConfigDict()
    # T in (0, 1], where 0.33 means 1/3; with a softmax head any from 0, the likeliest token, on. The author advises at most 0.5 for fluent text.
    config.sample.temperature = 0.5
    # With a softmax head: sample from the likeliest tokens that together have this probability.
    config.sample.top_p = 1.0
    # How chunks are sampled below T = 1 (the README compares them); not used with a softmax head:
    # "pooled" fresh pools of growing size, exact within max_draws; "rejection" the paper's exact algorithm; "batch" one pool, any T;
    # "published" one pool, the paper's weights, T = 1/n alone; "growing" one pool that grows until it tells enough;
    # "noise" one draw with the head's noise times T.
    config.sample.sampler = "pooled"
    # N, candidates per chunk of "batch" and "published" (the paper's: 200). Up to so many, and at most half of max_draws,
    # are kept back by "rejection", and by "pooled" where 1/T is not whole, to choose from when the rest is used up.
    config.sample.num_candidates = 200
    # Most draws per chunk of the others; after them the choice is approximate, and says so. 216 = 16 + 200 costs about
    # what the paper's 200 cost at most; 1360 = 16 + 64 + 256 + 1024 leaves fewer chunks approximate.
    config.sample.max_draws = 216
    # Draws computed together, over all prompts: enough to fill the device, as what is begun is not left.
    config.sample.draws_at_once = 256
    # Tokens to generate per prompt, and strings at which its text ends before.
    config.sample.max_tokens = 128
    config.sample.stop = ()
    # A prompt that does not end on a chunk boundary: "left" puts pads before it (which
    # lm.data.front_fill="random" shows in training), "match" draws its last chunk until one begins as the prompt ends, within max_draws,
    # and else does as "left"; "pad" puts pads after it, as the published code does.
    config.sample.prompt_alignment = "left"
    # Text longer than lm.data.block_tokens: "refuse" it, or "slide": see the last chunks alone.
    config.sample.long_context = "refuse"
    # Prompts generated together.
    config.sample.batch_size = 8
    # Prompts of the samples that end a training run.
    config.sample.prompts = ("The ", "In the year ")

    # --- The run ------------------------------------------------------------------------------------
    config.checkpoint = ConfigDict()
    # How many of the latest checkpoints stay, per stage.
    config.checkpoint.keep = 2

    # Devices along each axis of the mesh; one may be -1, for those that are left. Batches lie over
    # data x fsdp, parameters over fsdp x tensor.
    config.mesh = ConfigDict()
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    return config


def published_text(config: ConfigDict, name: str) -> None:
    """The text of the published models, as `launch/prepare_pile.sh` prepares it; `name` is the language model's part."""
    config.data.train_files = f"prepared/pile/{name}"
    config.data.validation_files = "prepared/wikitext.jsonl"
    # Of the Pile's shards 00 and 01; the language model's are 02 to 29, the baseline's are all.
    config.data.autoencoder_files = "prepared/pile/autoencoder" if name == "lm" else ""
    config.data.max_words = 10_000
    config.autoencoder.data.packing = config.lm.data.packing = "published"


def _autoencoder_model() -> ConfigDict:
    model = ConfigDict()
    # Z, size of a chunk's latent (paper: 128 for K = 4, 32 K in general).
    model.latent_size = 128
    # D and F, width of the layers and of their MLPs.
    model.hidden_size = 512
    model.intermediate_size = 1280
    # Even: one half works on tokens, the other on chunks.
    model.num_encoder_layers = 2
    model.num_decoder_layers = 2
    model.norm_epsilon = 1e-6
    # Rate at which input tokens are replaced and latent dimensions dropped in training (paper: 0.15).
    model.dropout = 0.15
    # Nats per latent dimension below which the KL term does not push (paper: 0.5), and its weight (paper: 0.001).
    model.kl_clamp = 0.5
    model.kl_weight = 1e-3
    return model


def _transformer() -> ConfigDict:
    model = ConfigDict()
    # D and F, width of the layers and of their MLPs.
    model.hidden_size = 1024
    model.intermediate_size = 2752
    model.num_layers = 16
    model.num_heads = 16
    # Key-value heads; fewer than num_heads groups the queries.
    model.num_kv_heads = 16
    # Base of the rotary positions, which count chunks.
    model.rope_theta = 1e4
    model.norm_epsilon = 1e-6
    # What of a layer is computed again in the backward pass: "none"; "full", all of it: least memory, about a third more
    # arithmetic; "dots", all but products with weights, which are kept: little more arithmetic, and most of the memory.
    model.remat = "none"
    # How whole blocks attend, in training and scoring: "xla" works everywhere; "cudnn" needs an NVIDIA GPU, bfloat16, and
    # lm.data.isolate_documents=False; "splash" needs a TPU (a CPU interprets it, for tests). "auto" is splash on a TPU, cudnn
    # where it can be, else xla. Generation does not depend on it.
    model.attention = "auto"
    return model


def _energy_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "energy"
    # Residual MLP blocks (paper: a quarter of num_layers).
    head.num_blocks = 4
    # E, size of the uniform noise that a draw starts from.
    head.noise_size = 64
    # N and M of the energy score: draws of the model, draws of the target (paper: 8 and 100).
    head.num_samples = 8
    head.num_target_samples = 100
    # Exponent of the distance, in (0, 2]; strictly proper below 2 (paper: 1).
    head.beta = 1.0
    return head


def _diffusion_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "diffusion"
    # Residual MLP blocks, as in the energy head.
    head.num_blocks = 4
    # N, targets per position in training, each with its own step and noise (published: 8).
    head.num_samples = 8
    # Steps of sampling, of the 1000 that are trained (paper: 100; below 40 nothing comes out).
    head.num_steps = 100
    return head


def _flow_head() -> ConfigDict:
    head = ConfigDict()
    head.name = "flow"
    # Residual MLP blocks, as in the energy head.
    head.num_blocks = 4
    # N, targets per position in training, each with its own time and noise (published: 8).
    head.num_samples = 8
    # Steps of sampling (paper: 10 midpoint steps), and "midpoint" (two network calls a step) or "euler" (one).
    head.num_steps = 10
    head.solver = "midpoint"
    return head


def _softmax_head() -> ConfigDict:
    head = ConfigDict()
    # The autoregressive baseline: probabilities of the next token, K = 1, no autoencoder.
    head.name = "softmax"
    return head


_HEADS = {
    "energy": _energy_head,
    "diffusion": _diffusion_head,
    "flow": _flow_head,
    "softmax": _softmax_head,
}


def variant(config: ConfigDict, arguments: str) -> ConfigDict:
    """A recipe with `head=...`, `k=...` or both, comma-separated; raises `UserError` for anything else.

    `head` keeps the recipe's number of blocks; "softmax" is the autoregressive baseline of the same
    transformer. `k` sets the chunk size and the latent size 32 K, and rounds blocks down to whole chunks.
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
    # T, tokens per training sequence.
    data.block_tokens = block_tokens
    # How training documents become blocks: "windows" of running text, all of it; "published", of every 1,000 documents
    # what does not fill a block is dropped; "documents", blocks begin with a document, take as many whole ones as fit,
    # and are filled up with pads that are no targets. Validation text is always windows.
    data.packing = "windows"
    # Put eos after each document.
    data.append_eos = append_eos
    # Fill each document with pads up to whole chunks, so that no chunk straddles two documents.
    data.align_documents_to_chunks = align_documents_to_chunks
    # "random" starts each training document with 0 to K-1 pads, so that the model has seen chunks
    # that are filled up in front, as a prompt's first chunk may be; "none" is the published way.
    data.front_fill = "none"
    # Of the language model's: no chunk sees another document's in its block, and none is predicted from one (published:
    # all see all). Needs align_documents_to_chunks.
    data.isolate_documents = False
    return data


def _optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    # Peak, after warm-up.
    optimizer.learning_rate = 3e-4
    # Linear from 0. The published scripts ask for 1000 (autoencoder) and 2000 steps under a scheduler that ignores them; 0 does what they do.
    optimizer.warmup_steps = 2000
    # After warm-up: "constant" (published) or "cosine", half a period down to `final_learning_rate`.
    optimizer.schedule = "constant"
    optimizer.final_learning_rate = 0.0
    # AdamW.
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.epsilon = 1e-8
    # Of matrices and embeddings; biases and norms' scales never decay.
    optimizer.weight_decay = 0.1
    # Gradients are scaled down to this global norm.
    optimizer.max_grad_norm = 1.0
    return optimizer


def _training(num_steps: int, batch_size: int) -> ConfigDict:
    training = ConfigDict()
    # Updates, and sequences per update over all devices.
    training.num_steps = num_steps
    training.batch_size = batch_size
    # Microbatches per update, one after the other: less memory, the same result.
    training.accumulation_steps = 1
    # Steps between lines of metrics, evaluations of a part of the validation split, and checkpoints.
    training.log_every = 50
    training.eval_every = 2000
    training.checkpoint_every = 1000
    # Updates with a non-finite loss or gradient are skipped; this many in a row end the run.
    training.max_nonfinite_steps = 10
    return training
