"""Trains the language model of a workdir, a run's or a converted one, on prompts and completions.

    python -m calm_jax.main --config=configs/finetune.py:runs/calm_m --workdir=runs/mine \\
        --config.data.train_files=records.jsonl

Each line of the file is {"prompt": ..., "completion": ...}; only completions are learnt. The model, its tokenizer and
its autoencoder are those of the workdir. For plain text give --config.data.prompt_field= --config.data.text_field=text.
"""

import os

from ml_collections import ConfigDict

from calm_jax.errors import UserError
from configs import workdir


def get_config(folder: str = "") -> ConfigDict:
    if not folder:
        raise UserError("configs/finetune.py needs a workdir: --config=configs/finetune.py:DIR")
    try:
        config = workdir.get_config(folder)
    except UserError as error:
        raise UserError(
            f"{error}; a published checkpoint has to be converted first, and a run that has begun goes on with "
            "--config=configs/workdir.py:RUN"
        ) from error
    # The same folder is the same source, whether its name ends with a slash or not.
    config.init_from = os.path.normpath(folder)
    config.stage = "lm"
    config.autoencoder.checkpoint = ""

    config.data.train_files = ""
    config.data.mixture = ()
    config.data.autoencoder_files = ""
    config.data.validation_files = ""
    config.data.min_characters = 0
    config.data.max_words = 0
    config.data.prompt_field = "prompt"
    config.data.text_field = "completion"
    data = config.lm.data
    data.append_eos = True
    data.align_documents_to_chunks = True

    # A tenth of the paper's peak.
    optimizer = config.lm.optimizer
    optimizer.learning_rate = 3e-5
    optimizer.warmup_steps = 20
    optimizer.schedule = "cosine"
    optimizer.final_learning_rate = 0.0
    training = config.lm.training
    training.num_steps = 500
    training.batch_size = 16
    training.accumulation_steps = 1
    training.log_every = 10
    training.eval_every = 100
    training.checkpoint_every = 100
    return config
