"""The cost of a recipe, counted without running it: flops.py counts operations, sizes.py parameters and bytes.

May import build, config and everything below them.
"""
