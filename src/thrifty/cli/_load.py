"""Finding a study: in a user's file, or in the file that a database says it comes from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from thrifty.core import ThriftyError, UsageError, error_text, is_from_user
from thrifty.store import Store
from thrifty.study import Study


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


def load_stored_study(name: str, *, storage: str) -> Study:
    """The study of this name in a database, from the file that defined it.

    Raises:
        StudyNotFoundError: there is no such database or study.
        UsageError: the file is not known or gone.
    """
    with Store.open(storage, create=False) as store:
        file = store.studies.get(name).spec.get("file")
    if file is None or not Path(file).exists():
        raise UsageError(
            f"the file that defined study {name!r} is not known or gone ({file}); "
            "go on with: thrifty run FILE"
        )
    study = load_study(Path(file), name=name)
    # the file may say the same by a path from another folder
    study.storage = replace(study.storage, url=storage)
    return study
