"""Where a study keeps its records."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import UsageError
from thrifty.store import redact_url
from thrifty.store._address import redact_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A database for the records and a folder for the checkpoints.

    Args:
        url: The address of an SQLite or PostgreSQL database in SQLAlchemy's format.
        checkpoints: A folder, or any fsspec address (default: beside the database).
        disk_budget_bytes: How much the checkpoints of a plan may take, including the files that
            killed runs have left (default: no limit). Over the budget, the states that are cheapest
            to train again are deleted first, including those of trials that are done. Three kinds
            of states stay: those from which a trial may go on, those from which pending work
            starts, and those of the best trials. If these alone are over the budget, one warning
            says so. ``load_model`` trains a deleted state again.
        shared: Whether several processes may run studies of one task and seed at the same time.
            Together they train each stage only once (default: True on PostgreSQL).
    """

    url: str = "sqlite:///thrifty.db"
    checkpoints: str | None = None
    disk_budget_bytes: float = float("inf")
    shared: bool | None = None

    def __repr__(self) -> str:
        parts = [f"url={redact_url(self.url)!r}"]
        if self.checkpoints is not None:
            parts.append(f"checkpoints={redact_root(self.checkpoints)!r}")
        if self.disk_budget_bytes != float("inf"):
            parts.append(f"disk_budget_bytes={self.disk_budget_bytes!r}")
        if self.shared is not None:
            parts.append(f"shared={self.shared!r}")
        return f"Storage({', '.join(parts)})"

    @classmethod
    def of(cls, value: Storage | str) -> Storage:
        """Return a storage unchanged, or the storage for an address.

        Raises:
            UsageError: The value is neither a storage nor an address.
        """
        if not isinstance(value, Storage | str):
            raise UsageError(
                f"storage is {value!r}; give an address such as 'sqlite:///thrifty.db', or a "
                "Storage"
            )
        return value if isinstance(value, Storage) else cls(url=value)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may train for the same plan at the same time."""
        return self.url.startswith("postgresql") if self.shared is None else self.shared
