"""Files of scalars for TensorBoard."""

import pathlib
import socket
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar


class EventFile:
    """A new file of scalars in a folder that TensorBoard reads.

    The calling thread writes it. tensorboardX's `SummaryWriter` has a thread that writes, and an error such as that of a full disk
    ends only this thread: the next calls wait for it forever.
    """

    def __init__(self, folder: pathlib.Path, purge_step: int | None = None):
        """Makes the file, and the folder if it is missing. Raises `OSError` if they cannot be written.

        Args:
          folder: the folder.
          purge_step: from this step on TensorBoard leaves out what earlier files of the folder hold; None leaves out nothing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names. Nanoseconds, as a name that is taken would be written over.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = RecordWriter(str(folder / name))
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step by their names. Raises `OSError` if they cannot be written."""
        for name, value in values.items():
            self._add(Event(step=step, summary=scalar(name, value)))
        self._file.flush()

    def close(self) -> None:
        """Closes the file. Raises `OSError` if what an earlier error left unwritten still cannot be written."""
        self._file.close()
