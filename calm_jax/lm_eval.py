"""EleutherAI's lm-evaluation-harness with the models of calm_jax (`pip install -c constraints.txt -e '.[eval]'`).

    python -m calm_jax.lm_eval --model calm_jax --model_args workdir=runs/calm_m --tasks gsm8k

This is the harness's command `lm_eval`, with its flags, and one more model. `--model_args` takes the arguments of
`calm_jax.run.harness.HarnessModel`, such as `workdir=runs/calm_m,temperature=0.5,seed=1`. Only generative tasks can be scored,
as CALM has no likelihoods.
"""

import sys
import traceback

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.errors import UserError, installation
from calm_jax.parallel.compilation_cache import set_up_compiler
from calm_jax.parallel.host_memory import keep_freed_memory


def _is_of_the_harness(error: BaseException) -> bool:
    """Whether an error was raised by the harness's own code, as for an unknown task."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith("lm_eval.")


@command
def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        # The harness's own help knows nothing of calm_jax.
        print(__doc__)
    try:
        # Registers the harness's own models. The harness does not do so itself once another model is registered.
        import lm_eval.models  # noqa: F401
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UserError(f"this command needs {error.name}: {installation('eval')}") from error
    model_registry.register("calm_jax", target="calm_jax.run.harness:HarnessModel")
    set_up_compiler()
    try:
        cli_evaluate()
    except (ValueError, OSError) as error:
        if not _is_of_the_harness(error):
            raise
        raise UserError(" ".join(str(error).split())) from error


if __name__ == "__main__":
    keep_freed_memory()
    # The harness parses its flags itself, from sys.argv.
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv[:1]))
