"""The main program of a worker process: ``python -m thrifty.run._worker_main FD``."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from thrifty.core import StoreWriteError
from thrifty.run._assignment import Assignment
from thrifty.run._processes import WriteError
from thrifty.run._worker import Worker


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
    gc.freeze()  # torch and the task stay: no need to look through them for garbage, 0.3 s each time
    stopping = False

    def take(message: object) -> None:
        nonlocal stopping
        if message == "stop":
            stopping = True
        else:
            assert isinstance(message, Assignment)
            worker.submit(message)

    def should_stop() -> bool:
        while connection.poll(0):
            take(connection.recv())
        return stopping

    worker = Worker(task, spec, should_stop=should_stop)
    while True:
        while not worker.num_active or connection.poll(0):
            take(connection.recv())
        try:
            reports = worker.advance()
        except StoreWriteError as error:
            connection.send(WriteError(message=str(error)))
            return
        if reports:
            connection.send(reports)


if __name__ == "__main__":
    main(int(sys.argv[1]))
