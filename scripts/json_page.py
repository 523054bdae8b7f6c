"""Writes docs/reference/json.md and its schemas: ``python scripts/json_page.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from thrifty.agents import DOCUMENTS, documents as all_documents


ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
<!-- Made by scripts/json_page.py from the documents.
Do not edit: run `python scripts/json_page.py`. -->

# JSON documents

With `--json`, a command prints one JSON object on standard output, and nothing else there.
Progress, log lines and what your own code prints go to standard error.
All of them have a field `schema_version`, which is 1.
It rises when a field changes its meaning or goes.
New fields may come without that, so ignore those that you do not know.
[json-schemas.json](json-schemas.json) has the JSON schema of each command's document.

- Numbers that are not finite are `null`, because JSON has no NaN.
- A hyper-parameter is a number, a text or a list; a schedule is an object with `schedule`, its
  class, and its arguments.
- The exit code is 0, 2 for an error that you can correct, 1 for a defect of thrifty (or a failed
  check of `thrifty doctor`), 130 after Ctrl-C and 143 after SIGTERM.
  With the codes 1 and 2, the object is an [error](#errors), but for `thrifty doctor`, and for
  `thrifty try` if all of its trials failed.
  After Ctrl-C it is the result so far, or an error if there is none yet.
  A process that is killed prints nothing.
"""


def documents() -> dict[str, type]:
    """All commands with their documents; ``""`` is the document of an error."""
    return {"": all_documents.ErrorDocument, **DOCUMENTS}


def schema(document: type) -> dict[str, Any]:
    """The JSON schema of a document, in which no other fields are allowed."""
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    for kind in vars(all_documents).values():
        if isinstance(kind, type) and hasattr(kind, "__total__"):
            with_config(config)(kind)
    found = TypeAdapter(document).json_schema(mode="serialization")
    for name, part in found.get("$defs", {}).items():
        _describe_inherited(part, getattr(all_documents, name))
    return found


def _describe_inherited(part: dict[str, Any], kind: Any) -> None:
    """Describe the fields that a document has from another one, as they are described there."""
    for base in getattr(kind, "__orig_bases__", ()):
        if hasattr(base, "__total__"):
            own = TypeAdapter(base).json_schema(mode="serialization")["properties"]
            for name, field in part["properties"].items():
                if "description" not in field and "description" in own.get(name, {}):
                    field["description"] = own[name]["description"]


def page() -> str:
    """The page: a section for each document and for each part of several."""
    lines = [HEAD]
    commands: dict[type, list[str]] = {}
    for command, document in documents().items():
        commands.setdefault(document, []).append(command)
    parts: dict[str, dict[str, Any]] = {}
    for document, names in commands.items():
        found = schema(document)
        title = ", ".join(f"`thrifty {name}`" for name in names) if names != [""] else "Errors"
        lines += [f"## {title}", "", *_section(found)]
        parts |= found.get("$defs", {})
    lines += ["## Parts of documents", ""]
    for name, part in sorted(parts.items()):
        lines += [f"### {name}", "", *_section(part)]
    return "\n".join(lines).rstrip() + "\n"


def schemas() -> str:
    """The JSON schemas of all documents, by command, as the text of a file."""
    found = {command or "error": _open(schema(kind)) for command, kind in documents().items()}
    return json.dumps(found, indent=1) + "\n"


def _section(found: dict[str, Any]) -> list[str]:
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for name, field in found["properties"].items():
        if name != "schema_version":
            rows.append(f"| `{name}` | {_kind(field)} | {_text(field)} |")
    return [_text(found), "", *rows, ""]


def _text(found: dict[str, Any]) -> str:
    return " ".join(found.get("description", "").replace("``", "`").split())


def _kind(field: dict[str, Any]) -> str:
    """The type of a field, in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{json.dumps(each)}`" for each in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_kind(field['items'])}"
    if kind == "object":
        values = field.get("additionalProperties", True)
        return "object" if values is True else f"object of {_kind(values)}"
    return str(kind)


def _open(found: Any) -> Any:
    """A schema in which new fields may come."""
    if isinstance(found, dict):
        return {
            key: _open(value)
            for key, value in found.items()
            if (key, value) != ("additionalProperties", False)
        }
    return [_open(each) for each in found] if isinstance(found, list) else found


if __name__ == "__main__":
    for name, content in (("json.md", page()), ("json-schemas.json", schemas())):
        (ROOT / "docs" / "reference" / name).write_text(content, encoding="utf-8")
