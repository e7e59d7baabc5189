"""CALM, Continuous Autoregressive Language Models, in JAX and Flax (arXiv 2510.27688)."""
