"""The user's modules that code finds by name, as ``import_module`` and ``sys.modules`` do."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ._contents import is_a
from ._own import is_own_module, is_there
from ._syntax import Mentions


def modules_by_name(
    found: Mentions, space: Mapping[str, Any], *, homes: Collection[str]
) -> list[ModuleType]:
    """Return the user's modules that the code of a function may find by name.

    The names are texts in the code and in the globals that it reads. If a text is only the
    beginning of a name (``"nets."``), they are all modules of the package ``nets``; if it is only
    the end (``".small"``), all modules of each package that the code names. They are imported.

    Args:
        found: The names in the function.
        space: The function's globals.
        homes: Names of modules that ``__module__`` may give.
    """
    looks_up = _reads_sys_modules(found, space)
    if not (looks_up or found.imports_by_name):
        return []
    values = [space.get(each) for each in found.globals if not each.startswith("__")]
    texts = {*found.texts, *_texts_in(values)}
    if looks_up and ("__name__" in found.globals or "__module__" in found.attributes):
        texts |= {str(space.get("__name__", "")), *homes}
    named = {text: _module_named(text) for text in sorted(texts)}
    modules = [module for module in named.values() if module is not None]
    begun = [_BEGINNING.match(text) for text, module in named.items() if module is None]
    packages = {each["package"] for each in begun if each is not None}
    if any(text.startswith(".") for text in texts):
        packages |= {each.__name__ for each in (*modules, *values) if isinstance(each, ModuleType)}
        packages.add(str(space.get("__package__") or ""))
    return [*modules, *_modules_in(packages)]


_BEGINNING = re.compile(r"(?P<package>[^\W\d]\w*(\.[^\W\d]\w*)*)\.[^\s/\\]*$")
"""The beginning of the name of a module: ``"nets."``, ``"nets.{}"``, ``"nets.resnet"``."""


def imported_module(name: str) -> ModuleType | None:
    """Return a module by name; import it if it is the user's own and not imported yet."""
    found = sys.modules.get(name)
    if found is not None or not is_own_module(name):
        return found
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 (any error; training will show it again)
        return None


def _module_named(text: str) -> ModuleType | None:
    """Return the module of the user's that a text names, if it names one."""
    if not all(map(str.isidentifier, text.split("."))) or not is_own_module(text):
        return None
    found = sys.modules.get(text)
    try:
        if found is None and is_there(text):
            # importing the script that runs would run it again
            found = sys.modules["__main__"] if _is_running(text) else importlib.import_module(text)
    except (Exception, SystemExit):  # noqa: BLE001 (any error; training will show it again)
        return None
    return found if is_a(found, ModuleType) else None


def _is_running(name: str) -> bool:
    running = getattr(sys.modules["__main__"], "__file__", None)
    spec = importlib.util.find_spec(name)
    if running is None or spec is None or spec.origin is None:
        return False
    return Path(running).resolve() == Path(spec.origin).resolve()


def _modules_in(packages: Iterable[str]) -> Iterator[ModuleType]:
    """Yield the modules in some packages of the user's, those on disk and those imported."""
    names = sorted(packages)
    for name in names:  # it grows
        module = _module_named(name)
        if module is None or (name in packages and "__path__" not in vars(module)):
            continue
        yield module
        known = {*sys.modules}
        found = pkgutil.iter_modules(vars(module).get("__path__", ()), f"{name}.")
        inside = {each.name for each in found if not each.name.endswith(".__main__")}
        inside |= {each for each in known if each.startswith(f"{name}.")}
        names += sorted(inside.difference(names))


def _texts_in(values: Iterable[Any], depth: int = 0) -> Iterator[str]:
    """Yield the texts among some values and in small containers among them, without keys."""
    for value in values:
        if type(value) is str:
            yield value
        elif type(value) in (dict, list, tuple, set) and depth < 3 and len(value) <= _MOST_TEXTS:
            inside = value.values() if type(value) is dict else value
            yield from _texts_in(inside, depth + 1)


_MOST_TEXTS = 1000
"""How long a table of names of modules may be: looking for a module of each text takes time."""


def _reads_sys_modules(found: Mentions, names: Mapping[str, Any]) -> bool:
    imported = "modules" in found.attributes and any(each.module == "sys" for each in found.imports)
    return imported or any(
        names.get(name) is sys.modules or (names.get(name) is sys and rest[:1] == ["modules"])
        for name, *rest in found.chains
    )
