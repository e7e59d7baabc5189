"""Checkpoints of the published PyTorch code."""
