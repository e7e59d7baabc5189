"""A fresh process of the suite `startup`: imports calm_jax, makes the state of a stage of the quickstart, and runs one step.

    python -m benchmarks.suites.first_step lm

Prints a line of JSON: seconds, and the peak of the process's memory in MiB. Nothing is imported before the time of
the import is taken.
"""

import json
import sys
import time


def main(stage: str) -> None:
    """Measures the first step of `stage`, "autoencoder" or "lm"."""
    began = time.perf_counter()
    import calm_jax.main  # noqa: F401

    seconds = {"import": time.perf_counter() - began}

    import jax

    from benchmarks.measure import peak_rss
    from benchmarks.suites.train import fresh
    from calm_jax.config import resolve
    from calm_jax.data.tokenizers import vocabulary
    from configs import quickstart

    config = resolve(quickstart.get_config())
    began = time.perf_counter()
    first = fresh(config, stage, vocabulary(config.tokenizer))
    jax.block_until_ready((first.frozen, first.state))
    seconds["state"] = time.perf_counter() - began
    with jax.set_mesh(first.mesh):
        began = time.perf_counter()
        step = first.step.lower(first.state, first.frozen, first.batch).compile()
        seconds["compile"] = time.perf_counter() - began
        began = time.perf_counter()
        jax.block_until_ready(step(first.state, first.frozen, first.batch))
        seconds["step"] = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "rss_mb": peak_rss()}))


if __name__ == "__main__":
    main(sys.argv[1])
