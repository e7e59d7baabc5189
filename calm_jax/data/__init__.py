"""From text to batches of token ids.

files, documents     records out of files of every kind, packed or not, local or remote
tokenizers           text to ids
blocks               what stands around a document's ids, and the ways to cut them into blocks
inputs, plan,        large text to shards of tokens, by many processes: `python -m calm_jax.data.prepare`
make_shards,
cluster, prepare
shards, inspect      reading them: `python -m calm_jax.data.inspect`
corpus               the text of a run
pipeline             blocks to batches
"""
