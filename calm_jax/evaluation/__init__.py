"""Scores over a split of text.

evaluator.py adds up a task's sums; tradeoff.py measures the accuracy and the diversity of samples at each temperature;
samples.py scores the samples of any system, and causal_lm.py draws those of a Hugging Face model.

May import tasks and everything below them.
"""
