"""Recipes. `common.py` has every key; the others are deltas over it."""
