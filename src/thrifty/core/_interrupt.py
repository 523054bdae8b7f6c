"""Ctrl-C, and what only looks like it."""

from __future__ import annotations

import signal
import threading


class StopNow(KeyboardInterrupt):
    """The user has pressed Ctrl-C once more: stop at once.

    A handler that raises this and never a plain KeyboardInterrupt has an attribute ``raises_stop_now``.
    """


def is_from_user(error: BaseException) -> bool:
    """Say whether an error may be the user's Ctrl-C. If not, the code that was running has raised it.

    >>> is_from_user(SystemExit(3)), is_from_user(StopNow())
    (False, True)
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, StopNow):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False  # Python raises it in the main thread alone
    handler = signal.getsignal(signal.SIGINT)
    quiet = handler in (signal.SIG_IGN, signal.SIG_DFL)
    return not quiet and not getattr(handler, "raises_stop_now", False)
