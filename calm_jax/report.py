"""Writes report.html of a run, or a page that compares several over steps, tokens, FLOPs and seconds.

    python -m calm_jax.report runs/quickstart
    python -m calm_jax.report runs/k4 runs/k8 runs/baseline --output=compare.html

Training and evaluation write a run's report.html by themselves. This command makes it for a run that is still training, too.
"""

import contextlib
import pathlib
import uuid

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import parse_flags_and_arguments
from calm_jax.cli.output import owned_file, write_result
from calm_jax.errors import UserError

_OUTPUT = flags.DEFINE_string(
    "output",
    "",
    "the page; if empty, report.html in the workdir, or for more than one run, report.html in the current folder",
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite",
    False,
    "replace the page if it exists; report.html in the workdir of a single run is always replaced",
)


@command
def main(argv: list[str]) -> None:
    folders = argv[1:]
    if not folders:
        raise UserError("give the folders of one run or several: python -m calm_jax.report DIR ...")
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.run import web_comparison, web_report
    from calm_jax.run.workdir import Workdir

    workdirs = [Workdir(local_path(folder, "DIR")) for folder in folders]
    is_one = len(workdirs) == 1
    default = workdirs[0].report_path if is_one else pathlib.Path("report.html")
    path = local_path(_OUTPUT.value, "--output") if _OUTPUT.value else default
    with contextlib.ExitStack() as stack:
        if not (is_one and path.absolute() == default.absolute()):
            path = stack.enter_context(owned_file(path, "--output", _OVERWRITE.value))
        if is_one:
            text = web_report.page(workdirs[0])
        else:
            text = web_comparison.comparison(web_comparison.by_name(workdirs))
        # A training that is running may write its page at the same time.
        write_result(path, text, f".{uuid.uuid4().hex}")
    print(f"{path}: {len(text.encode()) / 1e3:,.0f} kB")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_arguments)
