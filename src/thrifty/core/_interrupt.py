"""Ctrl-C, and how to tell it from a KeyboardInterrupt that code raises itself."""

from __future__ import annotations

import signal
import threading


class StopNow(KeyboardInterrupt):
    """The user has pressed Ctrl-C again: stop at once.

    A signal handler that raises this, and never a plain KeyboardInterrupt, must have an attribute
    ``raises_stop_now``.
    """


def is_from_user(error: BaseException) -> bool:
    """Return whether an error may be the user's Ctrl-C; if not, the running code has raised it.

    >>> is_from_user(SystemExit(3)), is_from_user(StopNow())
    (False, True)
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, StopNow):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False  # Python delivers Ctrl-C only to the main thread
    handler = signal.getsignal(signal.SIGINT)
    quiet = handler in (signal.SIG_IGN, signal.SIG_DFL)
    return not quiet and not getattr(handler, "raises_stop_now", False)
