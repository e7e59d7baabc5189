"""What the campaigns of faults, damage and load share: the words of their texts, their seed, and what they look at."""

import hashlib
import pathlib

import psutil

from calm_jax.cli.files import read_text, write_atomically
from calm_jax.errors import UserError

# Of these, texts that look like source code are made.
WORDS = (
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "name",
    "for",
    "in",
    "(",
    ")",
    ":",
    "\n",
)


def check_seed(root: pathlib.Path, seed: int) -> None:
    """Raises `UserError` if the cases of a folder have another seed. A new folder gets a file that says its seed."""
    path = root / "seed.txt"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{seed}\n")
    stored = read_text(str(path), "the seed").strip()
    if stored != str(seed):
        raise UserError(
            f"--seed={seed}: the cases in {root} have the seed {stored}: give that one, or another --folder"
        )


def working_children(process: psutil.Process) -> list[psutil.Process]:
    """The descendants of a process, without multiprocessing's resource tracker, which does no work.

    Raises `psutil.NoSuchProcess` if one ends meanwhile.
    """
    children = process.children(recursive=True)
    return [one for one in children if "resource_tracker" not in " ".join(one.cmdline())]


def hashes(folder: pathlib.Path) -> dict[str, str]:
    """A hash of every file of a preparation but those that name its input or its last call."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "inputs.json")
    }
