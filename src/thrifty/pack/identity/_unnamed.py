"""User code that a task reaches although no name in its code leads there.

It is inside installed packages (replaced functions and classes, and hooks), or in modules that code
finds by name, as ``import_module`` and ``sys.modules`` do.

A package is identified by name and version. That determines its content only as long as the user
has not put anything else into it, such as ``torch.nn.functional.mse_loss = mine``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import operator
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from ._contents import CACHED, is_a
from ._own import is_own_file, is_own_module, is_there, is_written_in_a_file
from ._place import Place
from ._syntax import Mentions


def planted_in(packages: Collection[str]) -> tuple[Place, ...]:
    """Find the user's own code in the loaded modules of some installed packages.

    It finds functions, classes, objects of the user's classes, and what wraps them, where a module
    or a class has them as an attribute.
    """
    key = frozenset(packages)
    known = _SEARCHES.get(key)
    if known is not None and known.still_holds():
        return known.places
    search = _Search(key)
    _SEARCHES[key] = search
    for oldest in [*_SEARCHES][:-_MAX_SEARCHES]:
        _SEARCHES.pop(oldest, None)  # another thread may have removed it
    return search.places


class _Search:
    """A search of the loaded modules, which holds as long as no attribute is another object.

    Comparing all attributes takes a third of the time of searching again. Names are compared, too,
    where they name user code: an attribute may be deleted and set again under another name.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self._modules = dict(sys.modules)
        self._seen: set[int] = set()
        self._namespaces: list[Mapping[str, Any]] = []
        self._values: list[Any] = []
        self._lengths: list[int] = []
        self._named: list[tuple[Mapping[str, Any], list[str]]] = [(sys.modules, [*self._modules])]
        places: list[Place] = []
        for name, module in self._modules.items():
            if name.partition(".")[0] not in packages or not isinstance(module, ModuleType):
                continue
            if id(module) not in self._seen:
                self._seen.add(id(module))
                places += self._places_in(module, name)
        self.places = tuple(places)

    def still_holds(self) -> bool:
        # One pass over all values, 110,000 in torch: a call for each namespace takes twice as long.
        try:
            return (
                _are_same(self._modules.values(), sys.modules)
                and [*map(len, self._namespaces)] == self._lengths
                and all(map(operator.is_, self._values, _values_of(self._namespaces)))
                and all([*names] == keys for names, keys in self._named)
            )
        except RuntimeError:  # another thread has imported something meanwhile
            return False

    def _places_in(self, module: ModuleType, name: str) -> Iterator[Place]:
        found = self._scan(module)
        for key in found.own:
            yield Place(name=f"{name}.{key}", kind="global", holder=vars(module), key=key)
        for kind in found.classes:
            if id(kind) in self._seen:
                continue
            self._seen.add(id(kind))
            if not _is_of(kind, self._packages):
                continue
            for key in self._scan(kind).own:
                where = f"{kind.__module__}.{kind.__qualname__}.{key}"
                yield Place(name=where, kind="class attribute", holder=kind, key=key)

    def _scan(self, holder: ModuleType | type) -> _Found:
        found = _scan(holder)
        self._namespaces.append(vars(holder))
        self._values += found.values
        self._lengths.append(len(found.values))
        if found.own:
            self._named.append((vars(holder), [*vars(holder)]))
        return found


_SEARCHES: dict[frozenset[str], _Search] = {}
_MAX_SEARCHES = 16


def _are_same(values: Collection[Any], names: Mapping[str, Any]) -> bool:
    """Return whether the values of a namespace are still these objects, in this order."""
    return len(values) == len(names) and all(map(operator.is_, values, names.values()))


def _values_of(namespaces: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_VALUES, namespaces))


_VALUES = operator.methodcaller("values")


def _is_of(kind: type, packages: Collection[str]) -> bool:
    module = kind.__module__
    return isinstance(module, str) and module.partition(".")[0] in packages


# -- one namespace -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The findings in one namespace, valid as long as all ``values`` are the same objects."""

    values: list[Any]
    own: list[str]
    classes: list[type]


_FOUND: dict[int, tuple[Any, _Found]] = {}
"""Findings by the id of a module or class, which is kept alive.

Searching anew each time takes ten times as long.
"""


def _scan(holder: ModuleType | type) -> _Found:
    known = _FOUND.get(id(holder))
    if known is not None and not known[1].own and _are_same(known[1].values, vars(holder)):
        return known[1]
    items = list(vars(holder).items())
    possible = [(key, value) for key, value in items if type(value) not in _NO_CODE]
    found = _Found(
        values=[value for _, value in items],
        own=[key for key, value in possible if isinstance(key, str) and _is_users(value)],
        classes=[value for _, value in possible if is_a(value, type)],
    )
    _FOUND[id(holder)] = (holder, found)
    return found


def _is_users(value: Any, depth: int = 0) -> bool:
    """Return whether a value is the user's own code, or wraps some."""
    kind = type(value)
    if kind is FunctionType:
        if _is_users_function(value):
            return True
        if value.__closure__ is None or depth > _DEEPEST:
            return False
        return any(_is_users(each, depth + 1) for each in _inside_cells(value.__closure__))
    if kind in _INSIDE:
        return depth <= _DEEPEST and any(
            _is_users(each, depth + 1) for each in _INSIDE[kind](value)
        )
    if issubclass(kind, type):
        return _is_users_class(value)
    own = _is_users_class(kind)
    if not own:
        _NO_CODE.add(kind)
    return own


def _is_users_function(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    if file in _PACKAGES_FILES:
        return False
    name = function.__globals__.get("__name__")
    if name == "__main__":
        return True
    # code that a package makes with `exec` has no file
    own = isinstance(name, str) and not file.startswith("<") and is_own_module(name)
    if own and is_own_file(file):
        return True
    if isinstance(name, str) and not file.startswith("<"):
        _PACKAGES_FILES.add(file)
    return False


def _is_users_class(kind: type) -> bool:
    name = kind.__module__  # some classes of compiled packages claim to be built in
    return isinstance(name, str) and _is_users_module(name)


def _is_users_module(name: str) -> bool:
    return name == "__main__" or (name not in _PACKAGES_MODULES and _is_users_module_anew(name))


def _is_users_module_anew(name: str) -> bool:
    own = is_written_in_a_file(name) and is_own_module(name)
    if not own and name in sys.modules:
        _PACKAGES_MODULES.add(name)
    return own


_NO_CODE: set[type] = set()
"""Types of packages whose objects are not searched."""
_PACKAGES_FILES: set[str] = set()
_PACKAGES_MODULES: set[str] = set()
"""Files and modules found not to be the user's: checking again for each function is slow."""


def _inside_cells(cells: tuple[CellType, ...]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _inside_partial(value: Any) -> tuple[Any, ...]:
    return (value.func, *value.args, *value.keywords.values())


_DEEPEST = 4
"""How deep wrappers inside wrappers are searched; packages keep whole object graphs in closures."""

_INSIDE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.cached_property: lambda value: (value.func,),
    functools.partial: _inside_partial,
    functools.partialmethod: _inside_partial,
    MethodType: lambda value: (value.__func__, value.__self__),
    CACHED: lambda value: (value.__wrapped__,),
}


# -- tables ------------------------------------------------------------------------------


Tables = Mapping[str, Mapping[Any, Any]]
"""Tables of a module by their names."""


def registered() -> dict[str, list[Any]]:
    """Find the user's own code in tables of packages, which call it without naming it.

    These are hooks and handlers that PyTorch calls for all modules or objects, and what a
    configuration of transformers names: functions of attention, activations, models.

    Returns:
        The entries by the name of their table, in the order in which they are called.
    """
    out: dict[str, list[Any]] = {}
    for module, tables_in in _TABLES.items():
        tables = tables_in(vars(sys.modules[module])) if module in sys.modules else {}
        for name, table in tables.items():
            # dict's own, because tables of transformers make an object of what is read
            items = [*dict.items(table)] if isinstance(table, dict) else []
            if entries := [_entry(k, v, tables) for k, v in items if _is_users_entry(v)]:
                out[f"{module}.{name}"] = entries
    return out


def _is_users_entry(value: Any) -> bool:
    return any(map(_is_users, value)) if is_a(value, tuple) else _is_users(value)


def _entry(key: Any, value: Any, tables: Tables) -> Any:
    """Return what identifies a handler in a table.

    For a hook, the key only counts the hooks made in this process, so it is left out. Other tables
    say how the hook is called.
    """
    if not isinstance(key, int):
        return (key, value)
    return (value, [name for name, table in tables.items() if table.get(key) is True])


def _named(*names: str) -> Callable[[Mapping[str, Any]], Tables]:
    return lambda space: {name: space[name] for name in names if name in space}


def _global_hooks(space: Mapping[str, Any]) -> Tables:
    return {k: v for k, v in space.items() if k.startswith("_global_") and isinstance(v, dict)}


def _of_interface(name: str) -> Callable[[Mapping[str, Any]], Tables]:
    """Return the tables of an object of transformers that has one for all, and one of its own."""

    def tables_in(space: Mapping[str, Any]) -> Tables:
        each = space.get(name)
        tables = {
            "_global_mapping": getattr(type(each), "_global_mapping", None),
            "_local_mapping": getattr(each, "_local_mapping", None),
        }
        return {f"{name}.{key}": v for key, v in tables.items() if isinstance(v, dict)}

    return tables_in


def _added_classes(space: Mapping[str, Any]) -> Tables:
    """Return what ``AutoConfig.register`` and ``AutoModel.register`` have added."""
    added = {k: getattr(v, "_extra_content", None) for k, v in space.items() if k.isupper()}
    return {f"{name}._extra_content": v for name, v in added.items() if isinstance(v, dict)}


_TABLES: dict[str, Callable[[Mapping[str, Any]], Tables]] = {
    "torch.nn.modules.module": _global_hooks,
    "torch.optim.optimizer": _global_hooks,
    "torch.distributions.kl": _named("_KL_REGISTRY"),
    "torch.utils.data._utils.collate": _named("default_collate_fn_map"),
    "transformers.modeling_utils": _of_interface("ALL_ATTENTION_FUNCTIONS"),
    "transformers.masking_utils": _of_interface("ALL_MASK_ATTENTION_FUNCTIONS"),
    "transformers.activations": _named("ACT2CLS", "ACT2FN"),
    "transformers.modeling_rope_utils": _named("ROPE_INIT_FUNCTIONS"),
    "transformers.models.auto.configuration_auto": _added_classes,
    "transformers.models.auto.modeling_auto": _added_classes,
}
"""Modules with tables in which ``register`` and the like store code, and the tables in each."""


# -- modules found by name ----------------------------------------------------------------


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
