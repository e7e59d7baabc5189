"""Networks: arrays in, arrays out.

Capital suffixes name the axes of an array, and are the letters of its einsums:

B batch, T tokens, L chunks, K tokens a chunk, P positions (any leading axes, flattened),
D width, F MLP width, H query heads, G key-value heads, A features per head, S cache length,
Z latent, E noise, V vocabulary, N draws, M target draws.
"""
