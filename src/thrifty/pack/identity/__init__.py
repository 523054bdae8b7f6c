"""What a task is, by content: the code and the values that training and evaluation depend on."""

from ._own import is_own as is_own, is_own_module as is_own_module
from ._place import MISSING as MISSING, Place as Place
from ._reach import Reach as Reach, Reached as Reached, reach as reach
from ._task import (
    Components as Components,
    TaskIdentity as TaskIdentity,
    identify as identify,
    note_moves as note_moves,
    snapshot as snapshot,
)


__all__ = [
    "MISSING",
    "Components",
    "Place",
    "Reach",
    "Reached",
    "TaskIdentity",
    "identify",
    "is_own",
    "is_own_module",
    "note_moves",
    "reach",
    "snapshot",
]
