"""Trains the language model of a workdir, a run's or a converted one, on prompts and completions.

    python -m calm_jax.main --config=configs/finetune.py:runs/calm_m --workdir=runs/mine \\
        --config.data.train_files=records.jsonl

Each line of the file is {"prompt": ..., "completion": ...}; only completions are learnt. The model, its tokenizer and
its autoencoder are those of the workdir. For plain text give --config.data.prompt_field= --config.data.text_field=text.
"""

from ml_collections import ConfigDict

from calm_jax.errors import UserError
from configs import workdir


def get_config(folder: str = "") -> ConfigDict:
    if not folder:
        raise UserError("configs/finetune.py needs a workdir: --config=configs/finetune.py:DIR")
    config = workdir.get_config(folder)
    config.init_from = folder
    config.stage = "lm"
    config.autoencoder.checkpoint = ""

    config.data.train_files = ""
    config.data.validation_files = ""
    config.data.prompt_field = "prompt"
    config.data.text_field = "completion"
    data = config.lm.data
    # A record is a block for itself, so this is what the longest may have.
    data.block_tokens = min(data.block_tokens, 512 - 512 % config.chunk_size)
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
