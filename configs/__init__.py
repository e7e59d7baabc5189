"""Recipes. `common.py` describes every key; the other files change some values."""
