"""The cost of a recipe on paper: flops.py counts operations, sizes.py parameters and bytes.

May import build, config and everything below them.
"""
