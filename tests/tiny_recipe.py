"""A recipe that trains in seconds: `--config=tests/tiny_recipe.py:GLOB[,head=...,k=...]` or `GLOB,token_predictor` reads GLOB."""

from ml_collections import ConfigDict

from configs import common, quickstart


def get_config(arguments: str) -> ConfigDict:
    train_files, _, changes = arguments.partition(",")
    config = quickstart.get_config("head=energy,k=4")
    # On every CPU, so that tests are the same everywhere.
    config.compute_dtype = "float32"
    config.data.train_files = train_files
    config.data.holdout_every = 3
    config.tokenizer.kind = "bytes"
    config.autoencoder.min_accuracy = 0.0
    model = config.autoencoder.model
    model.hidden_size, model.intermediate_size = 16, 24
    model = config.lm.model
    model.hidden_size, model.intermediate_size, model.num_layers = 16, 24, 2
    model.num_heads, model.num_kv_heads = 2, 2
    model.remat = "none"
    config.lm.head.noise_size = 4
    config.lm.head.num_target_samples = 4
    # Small, so that compiling is fast: the paper's loss alone, but with the argument "token_predictor".
    config.lm.token_loss_weight = config.lm.token_prior_weight = 0.0
    config.lm.data.block_tokens = 32
    config.autoencoder.data.block_tokens = 32
    for stage in (config.autoencoder, config.lm):
        stage.optimizer.warmup_steps = 2
        stage.training.num_steps = 12
        stage.training.batch_size = 4
        stage.training.log_every = 4
        stage.training.eval_every = 6
        stage.training.checkpoint_every = 5
        # Given, so that nothing is compiled to choose it.
        stage.training.accumulation_steps = 1
    # Low, so that texts differ: a decoder that has learnt only a little writes the most frequent byte for every latent.
    config.autoencoder.optimizer.learning_rate = 0.001
    config.lm.optimizer.learning_rate = 0.02
    config.eval.part_blocks = 3
    # The model's own law, whose draws and exactness tests look at.
    config.sample.sampler, config.sample.temperature = "pooled", 1.0
    # Small, so that compiling is fast.
    config.sample.num_candidates = 8
    config.sample.max_draws = 48
    config.sample.draws_at_once = 16
    config.sample.max_tokens = 8
    config.eval.context_tokens = 16
    config.eval.block_tokens = 32
    if changes == "token_predictor":
        config.lm.token_loss_weight, config.lm.token_prior_weight = 0.5, 2.0
        changes = ""
    common.variant(config, changes)
    config.autoencoder.model.latent_size = 2 * config.chunk_size
    if config.lm.head.name == "diffusion":
        config.lm.head.num_steps = 4
    return config
