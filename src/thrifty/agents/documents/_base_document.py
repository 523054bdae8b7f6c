"""What all JSON documents share, the document of an error, and how documents are written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on only


SCHEMA_VERSION: Literal[1] = 1
"""Version of all documents; it rises when a field changes its meaning or goes."""


class Document(TypedDict):
    """The fields that all documents have."""

    schema_version: Literal[1]
    """Version of the schema."""


# -- errors ---------------------------------------------------------------------------------


class ErrorMessage(TypedDict):
    """What went wrong."""

    kind: str
    """Name of the exception, such as "UsageError"."""
    message: str
    """What is wrong, and how to mend it."""


class ErrorDocument(Document):
    """Printed by any command that fails; the exit code is 2, or 1 for a defect of thrifty."""

    error: ErrorMessage
    """The error."""


def error_document(error: Exception, message: str) -> ErrorDocument:
    """Return an error as a document."""
    found: ErrorMessage = {"kind": type(error).__name__, "message": message}
    return {"schema_version": SCHEMA_VERSION, "error": found}


def to_json(document: Mapping[str, Any]) -> str:
    r"""Return a document as JSON, in ASCII; numbers that are not finite become ``null``.

    >>> to_json({"schema_version": 1, "value": float("nan"), "name": "\u00e9"})
    '{"schema_version": 1, "value": null, "name": "\\u00e9"}'
    """
    return json.dumps(finite(document), allow_nan=False)


def finite(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are None, and tuples are lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(each) for each in value]
    return value
