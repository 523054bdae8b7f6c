"""Finding a study: in a user's file, or in the file that a database says it comes from."""

from __future__ import annotations

import importlib
import importlib.util
import os
import stat
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from thrifty.core import ThriftyError, UsageError, error_text, is_from_user, plain_text
from thrifty.store import Store
from thrifty.study import Study

from ._say import say


_DEMO = Path(__file__).resolve().with_name("_demo.py")


def load_study(path: Path, *, name: str | None = None) -> Study:
    """The study that a Python file defines at its top level; ``name`` picks one of several.

    Raises:
        UsageError: the file cannot be loaded, defines none, or several and no name was given.
    """
    module = _module(path)
    studies = [value for value in vars(module).values() if isinstance(value, Study)]
    if name is not None:
        studies = [study for study in studies if study.name == name]
    if not studies:
        which = f"study {name!r}" if name else "a study"
        raise UsageError(
            f"{path} does not define {which}; write `study = thrifty.Study(...)` at its top level"
        )
    if len(studies) > 1:
        names = ", ".join(study.name for study in studies)
        raise UsageError(f"{path} defines several studies ({names}); pick one with --name")
    studies[0].file = path
    return studies[0]


def _module(path: Path) -> ModuleType:
    if path.resolve() == _DEMO:
        # a part of a package, which its studies know by its full name
        return importlib.import_module("thrifty.cli._demo")
    # worker processes find the module by its name along the same path
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ThriftyError:
        raise
    except BaseException as error:
        if is_from_user(error):
            raise
        raise UsageError(
            f"{path} cannot be loaded: {_where(error, path)}{error_text(error)}; "
            f"mend it (python {path} shows the whole traceback)"
        ) from error
    return module


def _where(error: BaseException, path: Path) -> str:
    """The line of the file that the error comes from."""
    if isinstance(error, SyntaxError):
        return ""  # its message names file and line
    frames = traceback.extract_tb(error.__traceback__)
    mine = path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == mine]
    return f"line {lines[-1]}: " if lines else ""


def load_stored_study(name: str, *, storage: str, trust_file: bool = False) -> Study:
    """Load a study of a database from the file that defined it. The file is named before it is run.

    Args:
        name: The study.
        storage: The address of the database, which says which file it is.
        trust_file: Whether to run a file of another user, or one that everybody may change.

    Raises:
        StudyNotFoundError: There is no such database or study.
        UsageError: The file is not known or gone, or somebody else may have written it.
    """
    with Store.open(storage, create=False) as store:
        file = store.studies.get(name).spec.get("file")
    if not _is_file(file):
        raise UsageError(
            f"the file that defined study {name!r} is not known or gone ({file!r}); "
            "go on with: thrifty run FILE"
        )
    path = Path(file)
    if path.resolve() != _DEMO:
        say(
            f"loading {plain_text(path)}, which the database names for study {name!r}", err=True
        )
        if not trust_file:
            _check_owner(path)
    study = load_study(path, name=name)
    # the file may say the same by a path from another folder
    study.storage = replace(study.storage, url=storage)
    return study


def _is_file(file: object) -> bool:
    """Say whether a database names a file that is there."""
    try:
        return isinstance(file, str) and Path(file).is_file()
    except (OSError, ValueError):
        return False


def _check_owner(path: Path) -> None:
    """Refuse a file that another user may have written.

    Raises:
        UsageError: It, or its folder, belongs to another user (root may), or can be changed by everybody.
    """
    if not hasattr(os, "geteuid"):
        return
    mine = {os.geteuid(), 0}
    real = path.resolve()
    for part in (path, real, real.parent):
        found = part.stat()
        if found.st_uid not in mine:
            why = f"{_what(part)} belongs to {_name_of(found.st_uid)}"
        elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            why = f"everybody can change {_what(part)}"
        else:
            continue
        raise UsageError(
            f"the database says that {plain_text(path)} defines this study, and {why}, so somebody else may have written "
            "what would be run; look at it, and give --trust-file if it is as it should be"
        )


def _what(part: Path) -> str:
    return "its folder" if part.is_dir() else "it"


def _name_of(uid: int) -> str:
    try:
        # not on every system
        return f"user {importlib.import_module('pwd').getpwuid(uid).pw_name}"
    except (ImportError, KeyError):
        return f"user {uid}"
