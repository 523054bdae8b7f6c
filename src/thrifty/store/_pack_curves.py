"""Pack curves, measured once for each device and structure and used by all studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select

from thrifty.core import Clock

from . import _schema as schema
from ._engine import user_errors
from ._writer import keep_last


class Curves:
    """Pack curves as plain data, by a key that identifies everything they depend on."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def get(self, key: str) -> list[dict[str, Any]] | None:
        """Return the curves of a key; None if they are missing or damaged and must be measured."""
        query = select(schema.curves.c.curves).where(schema.curves.c.key == key)
        with user_errors(self._engine), self._engine.connect() as connection:
            try:
                found = connection.execute(query).scalar()
            except ValueError:
                return None
        if isinstance(found, list) and all(isinstance(curve, dict) for curve in found):
            return found
        return None

    def all(self) -> dict[str, list[dict[str, Any]]]:
        """Return all undamaged curves, by key."""
        query = select(schema.curves.c.key)
        with user_errors(self._engine), self._engine.connect() as connection:
            keys = connection.execute(query).scalars().all()
        return {key: curves for key in keys if (curves := self.get(key)) is not None}

    def put(
        self, key: str, *, device: str, structure: str, curves: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store curves under a key, and replace older ones.

        ``device`` and ``structure`` describe for people what was measured.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        row = {
            "key": key,
            "device": device,
            "structure": structure,
            "curves": [dict(curve) for curve in curves],
            "created_at": self._clock.now(),
        }
        with user_errors(self._engine), self._engine.begin() as connection:
            keep_last(connection, schema.curves, [row])
