"""Networks: arrays in, arrays out.

Begin with calm.py, the language model, and heads/energy.py, its head. autoencoder.py maps chunks of tokens to latents
and back; autoregressive.py is the baseline. transformer.py is the backbone of both language models, with attention.py,
attention_in_blocks.py (for CPUs), kv_cache.py and layers.py. stack.py is the loop over equal layers, vocabulary.py the output layer
and its loss. May import `calm_jax.losses` and everything below it.

Capital suffixes name the axes of an array: `h_BLD`. The letters are in docs/architecture.md, "Shapes in names".
"""
