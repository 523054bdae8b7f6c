"""Where a study keeps its records."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A database for the records and a folder for the checkpoints.

    ``url`` is an address of SQLite or PostgreSQL, as SQLAlchemy writes it. ``checkpoints`` is a folder or any fsspec address (default: beside the
    database). ``disk_budget_bytes`` bounds what checkpoints may take: those nobody will go on
    from are deleted first, cheapest to train again first (default: keep all).
    ``shared`` lets several processes run studies of one task and seed at the same time: they train each stage once,
    whoever needs it (default: on PostgreSQL).
    """

    url: str = "sqlite:///thrifty.db"
    checkpoints: str | None = None
    disk_budget_bytes: float = float("inf")
    shared: bool | None = None

    @classmethod
    def of(cls, value: Storage | str) -> Storage:
        """A storage as it is, an address as the storage it names.

        Raises:
            UsageError: It is neither.
        """
        if not isinstance(value, Storage | str):
            raise UsageError(
                f"storage is {value!r}; give an address such as 'sqlite:///thrifty.db', or a Storage"
            )
        return value if isinstance(value, Storage) else cls(url=value)

    @property
    def is_shared(self) -> bool:
        """Whether others may train for the same plan meanwhile."""
        return self.url.startswith("postgresql") if self.shared is None else self.shared
