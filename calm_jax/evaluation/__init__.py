"""Scores over a split of text.

evaluator.py adds up a task's sums; tradeoff.py measures the accuracy and the diversity of samples at each temperature.

May import tasks and everything below them.
"""
