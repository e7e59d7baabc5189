"""Fine-tunes the language model of a workdir, trained or converted, on prompts and completions.

    python -m calm_jax.main --config=configs/finetune.py:runs/calm_m --workdir=runs/mine \\
        --config.data.train_files=records.jsonl

Each line of the file is {"prompt": ..., "completion": ...}; the loss is on the completions only. Architecture, parameters,
tokenizer and autoencoder come from the workdir. To keep what the model knows, mix old text in (docs/checkpoints.md).
--config=configs/finetune.py:DIR,text trains on plain text, with the losses and the token prior of the workdir.
"""

import os

from ml_collections import ConfigDict

from calm_jax.cli.files import refuse_url
from calm_jax.errors import UserError
from configs import workdir


def get_config(argument: str = "") -> ConfigDict:
    folder = argument.removesuffix(",text")
    has_prompts = folder == argument
    if not folder:
        raise UserError("configs/finetune.py needs a workdir: --config=configs/finetune.py:DIR")
    refuse_url(folder, f"--config=configs/finetune.py:{folder}")
    try:
        config = workdir.get_config(folder)
    except UserError as error:
        if not os.path.exists(os.path.join(folder, "config.json")):
            raise
        raise UserError(f"{error}; convert a published checkpoint first") from error
    # A trailing slash must not make a resumed run differ from the stored config.
    config.init_from = os.path.normpath(folder)
    config.stage = "lm"
    config.autoencoder.checkpoint = ""

    config.data.train_files = ""
    config.data.mixture = ()
    config.data.autoencoder_files = ""
    config.data.validation_files = ""
    config.data.min_characters = 0
    config.data.max_words = 0
    config.data.prompt_field = "prompt" if has_prompts else ""
    config.data.text_field = "completion" if has_prompts else "text"
    data = config.lm.data
    data.append_eos = True
    data.align_documents_to_chunks = True

    if has_prompts:
        _set_for_records(config)

    # All available devices, whatever mesh the model was trained on.
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, -1, 1

    # A tenth of the paper's learning rate.
    optimizer = config.lm.optimizer
    optimizer.learning_rate = 3e-5
    optimizer.warmup_steps = 20
    optimizer.schedule = "cosine"
    optimizer.final_learning_rate = 0.0
    training = config.lm.training
    training.num_steps = 500
    training.batch_size = 16
    training.accumulation_steps = 0
    config.lm.model.remat = "auto"
    training.log_every = 10
    training.eval_every = 100
    training.checkpoint_every = 100
    return config


def _set_for_records(config: ConfigDict) -> None:
    """Samples of the records; token prior and temperature for answers that are to be exact."""
    config.sample.prompts = ()
    if config.lm.token_prior_weight:
        # The token predictor learns new answers in a few hundred steps. Generation follows it more closely than scores do, so that
        # the head's draws need not be exact (docs/single_spaces.md).
        config.sample.token_prior_scale = max(4.0, config.sample.token_prior_scale)

    # An answer is wanted that is likely, and not one of many.
    config.sample.temperature = min(0.33, config.sample.temperature)
