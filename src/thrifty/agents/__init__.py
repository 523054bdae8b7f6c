"""What programs read: JSON documents of commands, and tools for coding agents.

Every command of thrifty prints one of these documents with ``--json``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .documents import (
    DOCUMENTS as DOCUMENTS,
    SCHEMA_VERSION as SCHEMA_VERSION,
    Document as Document,
    error_document as error_document,
    to_json as to_json,
)


if TYPE_CHECKING:
    from thrifty.space._coordinates import read_config as read_config

    from ._store_documents import (
        act_document as act_document,
        acts_document as acts_document,
        best_document as best_document,
        deleted_document as deleted_document,
        explain_document as explain_document,
        gc_document as gc_document,
        logs_document as logs_document,
        restore_document as restore_document,
        status_document as status_document,
    )
    from ._study_documents import (
        branch_document as branch_document,
        cost_document as cost_document,
        enqueued_document as enqueued_document,
        extension_document as extension_document,
        importance_document as importance_document,
        plan_document as plan_document,
        result_document as result_document,
        tried_document as tried_document,
    )

_HOMES = {
    "act_document": "_store_documents",
    "acts_document": "_store_documents",
    "best_document": "_store_documents",
    "branch_document": "_study_documents",
    "enqueued_document": "_study_documents",
    "extension_document": "_study_documents",
    "cost_document": "_study_documents",
    "deleted_document": "_store_documents",
    "explain_document": "_store_documents",
    "gc_document": "_store_documents",
    "logs_document": "_store_documents",
    "importance_document": "_study_documents",
    "plan_document": "_study_documents",
    "read_config": "thrifty.space._coordinates",
    "restore_document": "_store_documents",
    "result_document": "_study_documents",
    "status_document": "_store_documents",
    "tried_document": "_study_documents",
}

__all__ = sorted([*_HOMES, "DOCUMENTS", "SCHEMA_VERSION", "Document", "error_document", "to_json"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported late: a database's library takes time, and torch takes seconds.
    home = _HOMES[name]
    return getattr(import_module(home if "." in home else f"{__name__}.{home}"), name)
