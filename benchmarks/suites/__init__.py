"""The suites of `python -m benchmarks`. Each has `cases(options)`, which maps names of cases to functions that measure them."""
