"""Checks parity with the published PyTorch code: feeds its recorded random draws in, and compares every result.

    python -m calm_jax.interop.verify tests/golden [--verbose]

The folder holds an npz file of recorded inputs, draws and results for each case, and checkpoint folders in the
published format (tests/golden/README.md). A case that cannot be read, or lacks an array, fails and the others go on. Exit
status: 0 if all quantities agree, 1 if some do not, 2 if there is no such folder or no known case in it.
"""

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import parse_flags_and_arguments
from calm_jax.errors import UserError

_VERBOSE = flags.DEFINE_bool(
    "verbose", False, "show every array, not only the worst gradient of each case"
)


@command
def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError("usage: python -m calm_jax.interop.verify DIR [--verbose]")
    folder = local_path(argv[1], "DIR")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.interop.parity.comparison import TOLERANCE, print_table, verify, worst_of_kind

    rows, unknown = verify(folder)
    print_table(rows if _VERBOSE.value else worst_of_kind(rows), unknown)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} quantities agree to {TOLERANCE:g} relative")
    return 1 if failed else 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_arguments)
