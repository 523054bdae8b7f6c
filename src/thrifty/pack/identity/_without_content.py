"""Values without content: those that do not matter, and those that cannot be identified."""

from __future__ import annotations

import io
import logging
import multiprocessing.process
import os
import socket
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import Executor, Future
from types import ModuleType
from typing import Any

from thrifty.core import TaskError

from ._contents import is_a
from ._own import is_own


def neutral_name(value: Any) -> str | None:
    """Return the name of a value that changes no computation, such as a logger; None for others."""
    if is_a(value, logging.Logger):
        return str(value.name)
    if is_a(value, ModuleType):
        return str(value.__name__)
    if is_a(value, _NEUTRAL):
        return ""
    for stream in ("stdin", "stdout", "stderr"):
        if value is getattr(sys, stream) or value is getattr(sys, f"__{stream}__"):
            return stream
    return None


def why_no_content(value: Any) -> str:
    """Return why two such objects cannot be compared; empty if they can."""
    for kinds, what in _NO_CONTENT:
        if is_a(value, kinds):
            return f"is {what}"
    if is_iterator(value) and not is_own(type(value)):
        return "is an iterator"
    return ""


def is_iterator(value: Any) -> bool:
    """Return whether a value can be iterated over only once."""
    return hasattr(type(value), "__next__")


def no_content(path: str, value: Any, reason: str) -> TaskError:
    """Return the error for a value by which a task cannot be identified."""
    return TaskError(
        f"{path} {reason} ({type(value).__name__}), so thrifty cannot tell whether two studies "
        "train the same: keep what it is made from instead (a path, a seed, a list), or define "
        f"`__thrifty_identity__(self)` on the task or on the class of the object; it returns plain "
        "data that is used instead, such as a `version` that you change by hand"
    )


_NEUTRAL = (
    logging.Handler, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()),
    threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, threading.local,
    weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    weakref.finalize, type(os.environ),
)  # fmt: skip

_NO_CONTENT: tuple[tuple[Any, str], ...] = (
    (io.IOBase, "an open file"),
    (socket.socket, "a socket"),
    ((types.GeneratorType, types.AsyncGeneratorType), "a generator"),
    (types.CoroutineType, "a coroutine"),
    (threading.Thread, "a thread"),
    ((subprocess.Popen, multiprocessing.process.BaseProcess), "a process"),
    (Executor, "a pool of workers"),
    (Future, "a result that is being computed"),
    ((types.FrameType, types.TracebackType), "a frame of running code"),
)

BUILT_IN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType,
)  # fmt: skip
"""Types of compiled functions and descriptors, which their names identify."""
