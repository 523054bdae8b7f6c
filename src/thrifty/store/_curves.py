"""The pack curves of a store: measured once for a device and a structure, used by all studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select

from thrifty.core import Clock

from . import _schema as schema
from ._engine import user_errors
from ._writer import keep_last


class Curves:
    """Curves as plain data, by a key of all that they depend on."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def get(self, key: str) -> list[dict[str, Any]] | None:
        """The curves of a key; None if there are none, or they are damaged: then they are measured again."""
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
        """All curves that are whole, by key."""
        query = select(schema.curves.c.key)
        with user_errors(self._engine), self._engine.connect() as connection:
            keys = connection.execute(query).scalars().all()
        return {key: curves for key in keys if (curves := self.get(key)) is not None}

    def put(
        self, key: str, *, device: str, structure: str, curves: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps curves under a key, in the place of older ones.

        ``device`` and ``structure`` say to a person what was measured.

        Raises:
            StoreWriteError: full disk, read-only place.
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
