"""From text to batches of token ids. Importing it imports no JAX, so that preparing text starts fast.

Begin with packing.py: the special tokens around documents, and how documents are cut into blocks.
  files, documents   documents from files of several formats, compressed or not, local or remote
  records            prompts with completions into blocks
  tokenizers/        text to token ids and back
  corpus             the training and validation documents of a run
  loader             blocks to batches
  shards             prepared text: shards of tokens on disk; `python -m calm_jax.data.inspect` shows them
  prepare/           the command that makes shards: `python -m calm_jax.data.prepare`
May import cli and errors.
"""
