"""The identity of a task by content: code and values that training and evaluation depend on."""

from ._arrays import parts_of
from ._contents import Unsearched, held_by, is_iterator
from ._digest import (
    Components,
    TaskIdentity,
    asking_legacy,
    identify,
    is_legacy_asked,
    legacy_identity,
    note_moves,
    places_of,
)
from ._own import is_own, is_own_module
from ._place import MISSING, Place, slots_of, vars_of
from ._reach import Reach, Reached, reach
from ._syntax import mentions
from ._values import content_digest


__all__ = [
    "MISSING",
    "Components",
    "Place",
    "Reach",
    "Reached",
    "TaskIdentity",
    "Unsearched",
    "asking_legacy",
    "content_digest",
    "held_by",
    "identify",
    "is_iterator",
    "is_legacy_asked",
    "is_own",
    "is_own_module",
    "legacy_identity",
    "mentions",
    "note_moves",
    "parts_of",
    "places_of",
    "reach",
    "slots_of",
    "vars_of",
]
