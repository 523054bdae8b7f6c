"""The main program of a worker process; ``thrifty.core._child.Child`` starts it."""

from __future__ import annotations

import gc
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from thrifty.core import StoreWriteError, error_traceback
from thrifty.core._child import parent_of
from thrifty.run._assignment import Assignment, Refusal
from thrifty.run._processes import LoadError, WriteError
from thrifty.run._worker import Worker


def main(arguments: list[str]) -> None:
    """Serves assignments until the other end goes away."""
    connection = parent_of(arguments)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the study is gone: nobody is left to train for


def _serve(connection: Connection) -> None:
    spec = connection.recv()
    # Before the task: its module is found where the study has found it.
    sys.path[:] = connection.recv()
    code = connection.recv_bytes()
    try:
        task = _load(code)
    except BaseException as error:  # noqa: BLE001 (the user's modules may do anything when they are imported)
        connection.send(LoadError(traceback=error_traceback(error)))
        return
    gc.freeze()  # torch and the task stay: no need to look through them for garbage, 0.3 s each time
    stopping = False

    def take(message: object) -> None:
        nonlocal stopping
        if message == "stop":
            stopping = True
        elif isinstance(message, Refusal):
            worker.refuse(message.key, message.reason)
        else:
            assert isinstance(message, Assignment)
            worker.submit(message)

    def should_stop() -> bool:
        while connection.poll(0):
            take(connection.recv())
        return stopping

    worker = Worker(task, spec, should_stop=should_stop)
    connection.send([])  # it is up: from now on a silence counts
    while True:
        while not worker.num_active or connection.poll(0):
            take(connection.recv())
        try:
            reports = worker.advance()
        except StoreWriteError as error:
            connection.send(WriteError(message=str(error)))
            return
        # also if there are none: it goes on
        connection.send(reports)


def _load(code: bytes) -> Any:
    return pickle.loads(code)


if __name__ == "__main__":
    main(sys.argv[1:])
