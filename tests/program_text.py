"""`python -m tests.program_text PROGRAM ARGS` runs Python text with these arguments, for `tests.forked`, which runs modules."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
