"""The main program of a worker process; ``thrifty.core._child.Child`` starts it."""

from __future__ import annotations

import gc
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from thrifty.core import StoreWriteError, error_traceback
from thrifty.core._child import parent_of
from thrifty.run._executor import Assignment, Cut, Refusal
from thrifty.run._local import LoadError, WriteError
from thrifty.run._worker import Worker


def main(arguments: list[str]) -> None:
    """Serve assignments until the study closes the connection."""
    connection = parent_of(arguments)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the study's process is gone


def _serve(connection: Connection) -> None:
    spec = connection.recv()
    # Set the path before loading the task, so that its module is found where the study found it.
    sys.path[:] = connection.recv()
    code = connection.recv_bytes()
    try:
        task = _load(code)
    except BaseException as error:  # noqa: BLE001 (importing user code may raise anything)
        connection.send(LoadError(traceback=error_traceback(error)))
        return
    # Keep the garbage collector from scanning torch and the task, which takes 0.3 s each time.
    gc.freeze()
    stopping = False

    def take(message: object) -> None:
        nonlocal stopping
        if message == "stop":
            stopping = True
        elif isinstance(message, Refusal | Cut):
            worker.obey(message)
        else:
            assert isinstance(message, Assignment)
            worker.submit(message)

    def should_stop() -> bool:
        while connection.poll(0):
            take(connection.recv())
        return stopping

    worker = Worker(task, spec, should_stop=should_stop)
    connection.send([])  # the worker runs: from now on its silence counts as a hang
    while True:
        while not worker.num_active or connection.poll(0):
            take(connection.recv())
        try:
            reports = worker.advance()
        except StoreWriteError as error:
            connection.send(WriteError(message=str(error)))
            return
        # Send an empty list, too: it shows that the worker makes progress.
        connection.send(reports)


def _load(code: bytes) -> Any:
    return pickle.loads(code)


if __name__ == "__main__":
    main(sys.argv[1:])
