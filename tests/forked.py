"""`python -m MODULE` in a process that is forked where JAX and the package are imported already, which saves two seconds a command.

A command runs from its `__main__` to its exit status as in a process of its own. Real ones are started for text preparation, which
imports no JAX, for programs of a test that look at a fresh process, and wherever a process has to handle a signal.
"""

import atexit
import gc
import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")
# Modules that define flags must not be here: each command defines its own.
_CONTEXT.set_forkserver_preload(
    [
        "calm_jax.interop.conversion",
        "calm_jax.planning.planner",
        "calm_jax.run.generator",
        "calm_jax.run.recipe",
        "tests.forked",
    ]
)


class Started:
    """`python -m ARGS` in a forked process, whose output goes to the files `out` and `err`, which may be the same.

    folder: the working folder. xla_flags: XLA_FLAGS in place of the caller's. XLA reads them when the forked process first
      computes; other variables may have been read before the fork.
    """

    def __init__(
        self,
        args: tuple[str, ...],
        out: pathlib.Path,
        err: pathlib.Path,
        folder: pathlib.Path = ROOT,
        xla_flags: str | None = None,
    ):
        environment = dict(os.environ)
        if xla_flags is not None:
            environment["XLA_FLAGS"] = xla_flags
        command = (args, out, err, folder, environment)
        self._process = _CONTEXT.Process(target=_run_as_main, args=command)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `TimeoutError` if the process has not ended after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status; None as long as the process runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run(
    args: tuple[str, ...], xla_flags: str | None = None, timeout: float = 500
) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of `python -m ARGS`, in the environment of the caller and the root folder."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (pathlib.Path(folder) / name for name in ("out", "err"))
        process = Started(args, out, err, xla_flags=xla_flags)
        try:
            status = process.wait(timeout)
        except TimeoutError as error:
            process.kill()
            process.wait()
            raise TimeoutError(f"{args}: {out.read_text()}{err.read_text()}") from error
        return status, out.read_text(), err.read_text()


def collect_garbage_rarely() -> None:
    """Saves a fifth of the time of tracing, which makes many objects: Python looks for cycles among them and those of JAX's modules."""
    gc.freeze()
    gc.set_threshold(50_000)


def _run_as_main(
    args: tuple[str, ...],
    out: pathlib.Path,
    err: pathlib.Path,
    folder: pathlib.Path,
    environment: dict[str, str],
) -> None:
    for number, path in ((1, out), (2, err)):
        # Appended to, for the case that both are the same file.
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    sys.argv = list(args)
    collect_garbage_rarely()
    try:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    finally:
        # A forked process ends without them.
        atexit._run_exitfuncs()
