"""The identity of a task by content: code and values that training and evaluation depend on."""

from ._arrays import parts_of as parts_of
from ._contents import held_by as held_by, is_iterator as is_iterator
from ._legacy import (
    asking_legacy as asking_legacy,
    is_legacy_asked as is_legacy_asked,
    legacy_identity as legacy_identity,
)
from ._own import is_own as is_own, is_own_module as is_own_module
from ._place import MISSING as MISSING, Place as Place, vars_of as vars_of
from ._reach import Reach as Reach, Reached as Reached, reach as reach
from ._task import (
    Components as Components,
    TaskIdentity as TaskIdentity,
    identify as identify,
    note_moves as note_moves,
    places_of as places_of,
)
from ._values import content_digest as content_digest


__all__ = [
    "MISSING",
    "Components",
    "Place",
    "Reach",
    "Reached",
    "TaskIdentity",
    "asking_legacy",
    "content_digest",
    "held_by",
    "identify",
    "is_iterator",
    "is_legacy_asked",
    "is_own",
    "is_own_module",
    "legacy_identity",
    "note_moves",
    "parts_of",
    "places_of",
    "reach",
    "vars_of",
]
