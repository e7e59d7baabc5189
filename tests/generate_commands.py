"""Many generate commands in one process, so that loading and compiling happen once: `python -m tests.generate_commands FILE`.

FILE has the arguments of each command as JSON; printed is (exit status, stdout, stderr) of each.
"""

import functools
import json
import pathlib
import sys

from absl import flags

from calm_jax import generate
from calm_jax.run.generator import Generator
from tests.captured import captured


def main(file: pathlib.Path) -> None:
    # Loading a model again would compile it again.
    Generator.load = functools.cache(Generator.load)
    results = []
    for args in json.loads(file.read_text(encoding="utf-8")):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["generate", *args])
        results.append(captured(lambda: generate.main(["generate"])))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
