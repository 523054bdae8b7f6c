"""Finding the study in a user's file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from thrifty.core import UsageError
from thrifty.study import Study


def load_study(path: Path, *, name: str | None = None) -> Study:
    """The study that a Python file defines at its top level; ``name`` picks one of several.

    Raises:
        UsageError: the file defines none, or several and no name was given.
    """
    # worker processes find the module by its name along the same path
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
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
