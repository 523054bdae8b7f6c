"""A thrifty database for Optuna's tools: a read-only view, and a copy.

Optuna is optional and slow to import, so it is imported on the first call.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.core import UsageError, require


if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def optuna_storage(url: str) -> BaseStorage:
    """Return a read-only Optuna storage on a thrifty database.

    Use it for ``optuna.visualization``, ``optuna.importance`` and ``optuna_dashboard.run_server``.
    Hyper-parameters that are schedules or text become categorical parameters; learning curves
    become intermediate values.

    Raises:
        MissingExtraError: Optuna is not installed.
        StudyNotFoundError: There is no such database.
    """
    storage: BaseStorage = _view_module().OptunaView(url)
    return storage


def export_optuna(url: str, name: str, *, file: Path) -> None:
    """Copy a study into a new Optuna database (SQLite).

    Raises:
        MissingExtraError: Optuna is not installed.
        UsageError: The file exists already, or its folder does not exist.
        StudyNotFoundError: There is no such study.
    """
    view = _view_module()
    if file.exists():
        raise UsageError(f"{file} exists; name a file that does not")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first")
    view.copy(url, name, target=f"sqlite:///{file}")


def _view_module() -> Any:
    require("optuna", extra="optuna")
    return import_module("thrifty.integrations.optuna._view")
