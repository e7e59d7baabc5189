"""The seed of a campaign, which its folder keeps."""

import pathlib

from calm_jax.cli.files import read_text, write_atomically
from calm_jax.errors import UserError


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
