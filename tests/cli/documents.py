"""The schemas of JSON documents, in which no fields but those described are allowed."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema


SCRIPT = Path(__file__).parents[2] / "scripts" / "json_page.py"


@cache
def schema(command: str) -> Any:
    """Return the schema of a command's document; "" for the one of an error."""
    found = runpy.run_path(str(SCRIPT))
    return found["schema"](found["documents"]()[command])


def check(document: Any, command: str) -> Any:
    """Compare a document with its schema, and return it."""
    jsonschema.validate(document, schema(command))
    return document
