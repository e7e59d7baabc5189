"""The suites of `python -m benchmarks`. Each has `cases(options)`: from the name of a case to a function that measures it."""
