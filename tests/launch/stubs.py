"""Stubs of the commands that the scripts of launch/ call; they record their calls."""

import pathlib
import shlex
import signal
import subprocess

from tests.workdirs import ROOT, wait_until

FOLDER = ROOT / "launch"
RECIPE = "--config=configs/calm_m.py"
ON_PODS = (
    RECIPE,
    "--workdir=/mnt/calm/runs/m",
    "--config.data.autoencoder_files=/mnt/a",
    "--config.data.validation_files=/mnt/v.jsonl",
    "--config.data.train_files=/mnt/a 'b'/*",
)
POD = ("--name=calm", "--zone=z", "--project=p")
SLICE = ("--accelerator=v5litepod-256", "--runtime=v2-alpha-tpuv5-lite", "--spot")
CLUSTER = ("--cluster=c", "--zone=z", "--project=p")

# The beginning of every stub, which appends its command line to the file `calls`; the test gives the rest.
# A line is one write: stubs that run at the same time must not write into each other's lines.
STUB = """#!/bin/bash
printf -v line '%q ' "${0##*/}" "$@"; printf '%s\\n' "$line" >> "$STUBS/calls"
# Prints and removes the first line of a file, but does not remove its last line.
next() { head -n 1 "$STUBS/$1"; if (($(wc -l < "$STUBS/$1") > 1)); then sed -i 1d "$STUBS/$1"; fi; }
"""
# A run that saves and ends with 75 when it gets SIGTERM; it lasts a minute at most.
SAVES = """
trap 'echo "saved" >> "$STUBS/calls"; exit 75' TERM
echo $$ > "$STUBS/pid"
for ((i = 0; i < 3000; i++)); do /bin/sleep 0.02; done
"""


def _heed_signals() -> None:
    """Bash cannot trap a signal that was ignored when it began, as nohup and jobs in the background of a script have some."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Stubs:
    """Stubs in a folder that is first on PATH."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.environment = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "STUBS": str(folder),
            "HOME": str(folder),
        }

    def add(self, name: str, body: str) -> None:
        """Makes the command `name`, which runs the Bash code `body`."""
        path = self.folder / name
        path.write_text(STUB + body)
        path.chmod(0o755)

    def answers(self, name: str, *lines: str) -> None:
        """Sets the lines that `next NAME` prints, one for each call."""
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def calls(self) -> list[list[str]]:
        """The words of every call so far, the command's name first."""
        path = self.folder / "calls"
        return (
            [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def named(self, name: str) -> list[list[str]]:
        """The arguments of the calls of `name`."""
        return [call[1:] for call in self.calls() if call[0] == name]

    def start(
        self, script: str, *flags: str, new_session: bool = False, **environment: str
    ) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(FOLDER / script), *flags],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
            preexec_fn=_heed_signals,
        )

    def run(self, script: str, *flags: str, **environment: str) -> tuple[int, str]:
        """The exit status and stderr of a script of launch/."""
        process = self.start(script, *flags, **environment)
        _, err = process.communicate(timeout=60)
        return process.returncode, err


def wait_for(path: pathlib.Path) -> None:
    """Returns when the file exists and is not empty."""
    wait_until(lambda: path.exists() and path.read_text().strip(), path)
