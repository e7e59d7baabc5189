"""Damages the input of toy readers, most of them with a fault: `python -m tests.damage_toys DIR` prints the cases as JSON.

In a process of its own, as a campaign forks, and JAX does not work in a process that is forked from one that has used it.
"""

import dataclasses
import json
import os
import pathlib
import signal
import stat
import sys
import threading
import time
import zipfile

from benchmarks.damage import campaign, damages
from benchmarks.damage.readers import READERS, Reader
from calm_jax.cli.files import read_json
from calm_jax.errors import UserError

_WRITTEN = {"a": list(range(50))}


def _write(folder: pathlib.Path) -> None:
    (folder / "a.json").write_text(json.dumps(_WRITTEN))


def _careless(folder: pathlib.Path) -> object:
    return json.loads((folder / "a.json").read_text())


def _careful(folder: pathlib.Path) -> object:
    try:
        return read_json(folder / "a.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error})") from error


def _violent(folder: pathlib.Path) -> None:
    if _careful(folder) != _WRITTEN:
        os.kill(os.getpid(), signal.SIGKILL)


def _endless(folder: pathlib.Path) -> None:
    if _careful(folder) != _WRITTEN:
        time.sleep(600)


def _writing(folder: pathlib.Path) -> None:
    if _careful(folder) != _WRITTEN:
        (folder.parent / "outside" / "written").touch()


def _zip(folder: pathlib.Path) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a", b"x")


def _unzipping(folder: pathlib.Path) -> None:
    """Extracts an archive without any care, as Python's own `zipfile` would not."""
    with zipfile.ZipFile(folder / "a.zip") as archive:
        # The intact archive has one member. Reading it must not write.
        for member in archive.infolist()[1:]:
            content, path = archive.read(member), folder / member.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(member.external_attr >> 16):
                path.symlink_to(content.decode())
            else:
                path.write_bytes(content)


def _printing(folder: pathlib.Path) -> None:
    """Refuses in one line, after an error that a thread prints, as those of a library do."""
    if _careful(folder) != _WRITTEN:
        thread = threading.Thread(target=_careless, args=(folder / "missing",))
        thread.start()
        thread.join()
        raise UserError(f"{folder} cannot be read")


# By name: the reader, and the number of its cases.
TOYS = {
    "careful": (Reader(_write, _careful), 4),
    "checked": (Reader(_write, _careful, is_checked=True), 4),
    "violent": (Reader(_write, _violent), 4),
    "endless": (Reader(_write, _endless), 4),
    "writing": (Reader(_write, _writing), 4),
    "printing": (Reader(_write, _printing), 4),
    "careless": (Reader(_write, _careless), 60),
    "unzipping": (Reader(_zip, _unzipping), 60),
}


def main(root: pathlib.Path) -> None:
    READERS.update({name: reader for name, (reader, _) in TOYS.items()})
    campaign._MOST_SECONDS = 1.0
    every = damages.OF_BYTES, damages.OF_FILES
    # Values in a list, which a reader without checksums cannot miss.
    values = {"value": damages.OF_BYTES["value"]}, ()
    archives = {"archive": damages.OF_BYTES["archive"]}, ()
    for name, (_, times) in TOYS.items():
        damages.OF_BYTES, damages.OF_FILES = {"careless": every, "unzipping": archives}.get(
            name, values
        )
        for case in campaign.run(name, root, 0, list(range(times))):
            print(json.dumps(dataclasses.asdict(case)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
