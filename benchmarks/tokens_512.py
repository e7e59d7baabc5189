"""The 512-token recipe, with which most runs of docs/single_spaces.md were made: the quickstart with K = 4 and
shorter tokens, none of them for a run of spaces, and the dropout, KL weight, random chunks and sampler of that time.

    python -m calm_jax.main --config=benchmarks/tokens_512.py[:head=NAME,k=K]

Without arguments it has K = 4 and the energy head, which scores its draws against the posterior's mean; with k=K alone, the flow
head. The runs of docs/single_spaces.md that do not say so had 16 draws of the posterior (--config.lm.head.num_target_samples=16), and
a loss that is gone (its section "The decoded Brier loss").
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(arguments: str = "head=energy,k=4") -> ConfigDict:
    config = quickstart.get_config(arguments)
    # On every CPU, as in those runs.
    config.compute_dtype = "float32"
    config.tokenizer.vocab_size, config.tokenizer.whitespace_pieces = 512, False
    if config.lm.head.name == "energy":
        config.sample.sampler, config.sample.temperature = "noise", 0.33
    else:
        config.sample.temperature = 1.0

    stage = config.autoencoder
    stage.random_chunks = 0.25
    stage.model.dropout, stage.model.kl_weight = 0.05, 2e-3
    stage.model.latent_size = 32 * config.chunk_size
    if config.chunk_size <= 4:
        stage.model.hidden_size, stage.model.intermediate_size = 128, 320
        stage.optimizer.learning_rate = 4e-3
    stage.training.num_steps, stage.training.eval_every = 3500, 1750

    stage = config.lm
    stage.token_prior_weight = 0.0
    if stage.head.name == "energy":
        stage.head.num_target_samples = 0
    elif stage.head.name == "flow":
        stage.head.num_samples, stage.head.num_steps = 8, 10
    stage.optimizer.learning_rate = 6e-4
    stage.optimizer.warmup_steps = 50
    training = stage.training
    training.num_steps, training.eval_every, training.batch_size = 1550, 775, 2
    return config
