"""Checkpoints of the published PyTorch code: conversion to workdirs and back, and parity with recorded numbers.

The commands are `python -m calm_jax.interop.convert`, `.export` and `.verify`. published.py translates config.json, names.py
tensor names; weights.py and pickled.py read weight files; source.py finds a checkpoint and its tokenizer; conversion.py
checks a checkpoint before converted.py writes the workdir; exported.py writes a workdir's model as a published checkpoint.
parity/ compares recorded numbers. May import run and everything below it.
"""
