"""Small user projects, written to a folder and imported."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from pathlib import Path
from types import ModuleType


_NUMBERS = itertools.count()


def write(folder: Path, **files: str) -> None:
    """Write modules by name. The text may be indented."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


def load(folder: Path, name: str, *, monkeypatch) -> ModuleType:
    """Import a module and everything in its folder afresh."""
    for each in folder.glob("*.py"):
        sys.modules.pop(each.stem, None)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def project(tmp_path: Path, monkeypatch, **files: str) -> ModuleType:
    """Write modules and import the first of them."""
    folder = tmp_path / f"project{next(_NUMBERS)}"
    write(folder, **files)
    return load(folder, next(iter(files)), monkeypatch=monkeypatch)
