"""The main program of a worker process: ``python -m thrifty.run._worker_main FD``."""

from __future__ import annotations

import pickle
import signal
import sys
from multiprocessing.connection import Connection

from thrifty.core import StoreWriteError
from thrifty.run._processes import Through
from thrifty.run._worker import Worker
from thrifty.store import CheckpointFolder


def main(fd: int) -> None:
    """Serves assignments until the other end goes away."""
    # Ctrl-C reaches the whole terminal; the study decides what becomes of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the study is gone: nobody is left to train for


def _serve(connection: Connection) -> None:
    spec = connection.recv()
    sys.path[:] = (
        connection.recv()
    )  # before the task: its module is found where the study found it
    task = pickle.loads(connection.recv_bytes())
    stopping = False

    def should_stop() -> bool:
        nonlocal stopping
        while not stopping and connection.poll(0):
            stopping = connection.recv() == "stop"
        return stopping

    worker = Worker(
        task,
        name=spec.name,
        checkpoints=CheckpointFolder(spec.checkpoints),
        folder=spec.folder,
        device=spec.device,
        threads=spec.threads,
        should_stop=should_stop,
    )
    while True:
        assignment = connection.recv()
        if assignment == "stop":
            stopping = True
            continue
        through = Through()
        try:
            for event in worker.run(assignment):
                connection.send(event)
        except StoreWriteError as error:
            through = Through(write_error=str(error))
        connection.send(through)


if __name__ == "__main__":
    main(int(sys.argv[1]))
