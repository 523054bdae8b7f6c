"""A thrifty database through Optuna's eyes. Optuna is optional and slow to import: it is loaded on the first call."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.core import MissingExtraError, UsageError


if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def optuna_storage(url: str) -> BaseStorage:
    """A read-only Optuna storage on a thrifty database.

    For ``optuna.visualization``, ``optuna.importance`` and ``optuna_dashboard.run_server``. Parameters
    that are schedules or text become categorical; learning curves become intermediate values.

    Raises:
        MissingExtraError: Optuna is not installed.
        StudyNotFoundError: there is no such database.
    """
    storage: BaseStorage = _view().OptunaView(url)
    return storage


def export_optuna(url: str, name: str, *, file: Path) -> None:
    """Copies a study into an Optuna database (SQLite).

    Raises:
        MissingExtraError: Optuna is not installed.
        UsageError: the file exists, or its folder does not.
        StudyNotFoundError: there is no such study.
    """
    view = _view()
    if file.exists():
        raise UsageError(f"{file} exists; name a file that does not")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first")
    view.copy(url, name, target=f"sqlite:///{file}")


def _view() -> Any:
    try:
        import_module("optuna")
    except ImportError:
        raise MissingExtraError("optuna", extra="optuna") from None
    return import_module("thrifty.store._optuna_view")
