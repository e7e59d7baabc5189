"""Networks: arrays in, arrays out.

Begin with calm.py, the language model, and heads/energy.py, its head. autoencoder.py maps chunks of tokens to latents
and back; autoregressive.py is the baseline. transformer.py is the backbone of both language models, with attention.py,
kv_cache.py and layers.py. May import `calm_jax.losses` and everything below it.

Capital suffixes name the axes of an array, and are the letters of its einsums:

B batch, T tokens, L chunks, K tokens a chunk, P positions (any leading axes, flattened),
D width, F MLP width, H query heads, G key-value heads, A features per head, S cache length,
Z latent, E noise, V vocabulary, N draws, M target draws.
"""
