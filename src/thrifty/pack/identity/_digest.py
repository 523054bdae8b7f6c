"""The identity of a task: a digest for each function, class and value that it reaches."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
from abc import ABC
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from thrifty.core import TaskError

from ._contents import CACHED, Names, digest, is_a, short_text, versions
from ._own import (
    has_init_vars,
    import_name,
    is_importable,
    is_installed,
    is_own,
    is_own_module,
    members_of,
    module_name,
    positional_of,
)
from ._place import MISSING, MOVES, Code, Key, Place, PlaceText, Texts, referred, slots_of, vars_of
from ._reach import Reach, reach
from ._settings import matmul_precision, unusual_precisions
from ._syntax import code_digest, extension_digest, mentions
from ._unnamed import planted_in, registered
from ._values import HOOK, Values


def class_digest(kind: type, *, names: Names, values: Values) -> str:
    """Return the digest of a class; its functions and attributes have digests of their own.

    Raises:
        TaskError: A member of an enumeration has no content.
    """
    name = names.of(kind)
    parts: list[Any] = [[names.of(base) for base in kind.__bases__], names.of(type(kind))]
    if "__dataclass_fields__" in vars(kind):
        told = vars(kind)["__dataclass_params__"]
        parts.append([(option, getattr(told, option)) for option in _OPTIONS])
        parts.append([
            (field.name, field.init, field.repr, field.hash, field.compare, field.kw_only)
            for field in dataclasses.fields(kind)
        ])
        if has_init_vars(kind):
            parts.append(("positional", positional_of(kind)))
    if issubclass(kind, tuple) and "_fields" in vars(kind):
        parts.append((vars(kind)["_fields"], dict(vars(kind).get("_field_defaults", {}))))
    if issubclass(kind, enum.Enum):
        members = vars(kind)["_member_map_"]
        parts.append([(key, member._value_) for key, member in members.items()])
        boundary = getattr(kind, "_boundary_", None)
        if boundary is not getattr(kind.__mro__[1], "_boundary_", boundary):
            parts.append(("boundary", str(boundary)))
    module = module_name(kind)
    if is_own_module(module):
        parts.append(extension_digest(module))
    return digest(values.digest(parts, path=name))


_OPTIONS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
"""The options of ``dataclass`` that every supported version of Python has."""


Components = Mapping[str, str]
"""Digests by name, such as ``"function helpers.scale"``; short values stand for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdentity:
    """The identity of a task, by content.

    Attributes:
        training: Everything that training depends on, by name.
        evaluation: What only the metrics depend on.
        places: What the task read when it was identified, to see later what a run has changed.
    """

    training: Components
    evaluation: Components
    places: Texts = field(default_factory=dict, repr=False, compare=False)

    @property
    def training_digest(self) -> str:
        """A digest that is equal for tasks that train the same."""
        return _digest_of(self.training)

    @property
    def evaluation_digest(self) -> str:
        """A digest that is equal for tasks that evaluate the same, if they train the same."""
        return _digest_of(self.evaluation)

    def joined(self) -> TaskIdentity:
        """Return the identity with evaluation as a part of training.

        Use it if the metrics change what is trained.
        """
        return replace(self, training={**self.training, **self.evaluation}, evaluation={})

    def to_json(self) -> dict[str, Any]:
        """Return plain data, to be stored with a study."""
        return {"training": dict(self.training), "evaluation": dict(self.evaluation)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskIdentity:
        """Return the identity that ``to_json`` has written."""
        return cls(training=data["training"], evaluation=data["evaluation"])


def identify(
    task: Any, *, evaluation: Collection[str] = (), contract: Collection[str] = ()
) -> TaskIdentity:
    """Identify a task by the content of everything that it reaches.

    Args:
        task: An object; its class may be the user's own or installed.
        evaluation: The members that only evaluation calls, unless training code names them.
        contract: The members that are called from outside.

    Raises:
        TaskError: A value has no content, such as an open file; the message names it.
    """
    one = _Identification(task)
    whole = one.reach()
    one.tell_apart(whole)
    if one.ignores_moves_of_earlier_code(whole):
        whole = one.reach()
        one.tell_apart(whole)
    apart = only_evaluated(
        task, whole=whole, evaluation=evaluation, contract=contract, reach_without=one.reach
    )
    training = one.components(one.reach(apart) if apart else whole)
    both = one.components(whole)
    return TaskIdentity(
        training=training,
        evaluation={name: text for name, text in both.items() if training.get(name) != text},
        places=one.texts(whole),
    )


def note_moves(task: Any, before: TaskIdentity) -> None:
    """Record what a run has changed: in this process, the values from before still count."""
    if not before.places:
        return
    one = _Identification(task)
    found = one.reach()
    one.tell_apart(found)
    made_by = one.code_of({**before.training, **before.evaluation})
    MOVES.note(before.places, one.texts(found), made_by=made_by)
    MOVES.note_filled(one.cached(found), made_by=made_by)


def places_of(task: Any) -> Texts:
    """Return the current values of all places that a task reads."""
    one = _Identification(task)
    found = one.reach()
    one.tell_apart(found)
    return one.texts(found)


_OF_CODE = ("function ", "class ", "global ", "closure ")


class _Identification:
    """The state of identifying one task, in which each function and place is read once."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._names = Names(home=import_name(module_name(type(task))))
        self._values = Values(self._names)
        self._codes: dict[int, tuple[FunctionType, str]] = {}
        self._texts: dict[Key, str] = {}
        self._registered = registered()
        self._planted_in: dict[frozenset[str], tuple[Place, ...]] = {}
        self._earlier_code: set[Key] = set()
        """Places that code has changed which was edited since."""
        self._stale_caches: set[int] = set()
        """Functions whose caches such code has filled, by id."""

    def reach(self, without: Collection[str] = ()) -> Reach:
        """Return what the task reaches, including user code inside the packages that it uses."""
        found, known = self._reach(without, planted=()), frozenset[str]()
        while True:
            packages = known | found.packages | {"torch"}
            planted = () if packages == known else self._planted(packages)
            if not planted:
                return found
            found, known = self._reach(without, planted=planted), packages

    def _planted(self, packages: frozenset[str]) -> tuple[Place, ...]:
        if packages not in self._planted_in:
            self._planted_in[packages] = planted_in(packages)
        return self._planted_in[packages]

    def _reach(self, without: Collection[str], *, planted: Iterable[Place]) -> Reach:
        return reach(
            {self._names.of(type(self._task)): self._task},
            home=self._names.home,
            without=without,
            instead=stand_in_for,
            values_at=self._values_at,
            places=planted,
            values=self._registered,
        )

    def tell_apart(self, found: Reach) -> None:
        """Note the names that several classes have; a name alone does not tell them apart."""
        names = Counter(kind.name for kind in found.classes)
        self._values.ambiguous = frozenset(name for name, num in names.items() if num > 1)
        if self._values.ambiguous:
            self._texts.clear()

    def code_of(self, components: Components) -> Code:
        """Return the part of a task's identity that its objects do not share with others.

        Attributes of a task are left out: other tasks of the same code may have other ones.
        """
        digests = {k: text for k, text in components.items() if k.startswith(_OF_CODE)}
        return Code(home=self._names.home, digests=digests)

    def cached(self, found: Reach) -> list[Any]:
        """Return the functions with caches that the task's code reads."""
        held = (place.get() for place in found.places)
        return [each for each in held if is_a(each, CACHED)]

    def ignores_moves_of_earlier_code(self, found: Reach) -> bool:
        """Let values count that earlier code has left, and return whether there are some.

        What a task itself has changed counts as what it was before, because a fresh process begins
        with that. A cache that code has filled which was edited since is not what a fresh process
        would fill: it counts as it is.
        """
        moved = [place for place in found.places if MOVES.known(place)]
        cached = self.cached(found)
        if not (moved or cached):
            return False
        now = self.code_of(self.components(found))
        self._earlier_code |= {
            (id(place.holder), place.key) for place in moved if MOVES.is_of_earlier_code(place, now)
        }
        self._stale_caches |= {
            id(each) for each in cached if MOVES.is_filled_by_earlier_code(each, now)
        }
        return bool(self._earlier_code or self._stale_caches)

    def components(self, found: Reach) -> Components:
        parts: dict[str, list[str]] = {}
        for function in found.functions:
            code = f"#{self._code(function.value)}"
            parts.setdefault(f"function {function.name}", []).append(code)
        for kind in found.classes:
            text = class_digest(kind.value, names=self._names, values=self._values)
            parts.setdefault(f"class {kind.name}", []).append(f"#{text}")
        for place in found.places:
            name = self._component(place)
            first = self._first(place, self._text(place)) if name else None
            if first is not None:
                parts.setdefault(name, []).append(first)
        for package, version in versions({*found.packages, "torch"}).items():
            parts[f"package {package}"] = [version]
        parts["torch default dtype"] = [str(torch.get_default_dtype())]
        parts["torch matmul precision"] = [str(matmul_precision())]
        for name, value in unusual_precisions():
            parts[f"torch precision {name or 'of all'}"] = [value]
        for name, entries in self._registered.items():
            parts[f"registered {name}"] = [f"#{self._values.digest(entries, path=name)}"]
        for name, names in found.subclasses.items():
            parts[f"subclasses of {name}"] = [", ".join(names)]
        for name, operator in found.operators.items():
            parts[f"operator {name}"] = [f"#{self._values.digest(operator, path=name)}"]
        parts.update(self._of_task())
        parts.update({
            f"results kept by {place.name}": ["of earlier code"]
            for place in found.places
            if id(place.get()) in self._stale_caches
        })
        return {name: _together(texts) for name, texts in sorted(parts.items())}

    def texts(self, found: Reach) -> Texts:
        out = {}
        for place in found.places:
            if self._component(place):
                text: str | None = self._text_if_any(place)
            elif place.own and self._counts_by_itself(place):
                text = None
            else:
                continue
            code = tuple(map(referred, found.code_in(place.get())))
            out[id(place.holder), place.key] = PlaceText(place=place, text=text, code=code)
        return out

    def _of_task(self) -> dict[str, list[str]]:
        kind = type(self._task)
        out = {"task": [self._names.of(kind)]}
        if getattr(self._task, "version", ""):
            out["version"] = [str(self._task.version)]
        stand_in = stand_in_for(self._task)
        if stand_in is MISSING:
            return out
        where = f"{kind.__qualname__}.{HOOK}()"
        named = is_a(stand_in, dict) and all(isinstance(key, str) for key in stand_in)
        for key, value in stand_in.items() if named else [(HOOK, stand_in)]:
            text = short_text(value) or f"#{self._values.digest(value, path=f'{where}[{key!r}]')}"
            out[f"attribute {key}"] = [text]
        return out

    def _code(self, function: FunctionType) -> str:
        if id(function) not in self._codes:
            self._codes[id(function)] = (function, code_digest(function))
        return self._codes[id(function)][1]

    # -- places ------------------------------------------------------------------------

    def _component(self, place: Place) -> str:
        """Return the name under which a place counts; empty if it counts as part of another one."""
        holder, of_task = place.holder, place.holder is self._task
        if not place.own or place.kind == "item" or self._counts_by_itself(place):
            return ""
        if place.kind in ("attribute", "slot"):
            if of_task and not _is_cached(self._task, place.key):
                # what the hook of a base class cannot know must not be taken for what it returns
                own = f"{place.key} of {type(self._task).__qualname__}"
                hooked = hasattr(type(self._task), HOOK)
                return _attribute(place.key, own if hooked else place.key)
            counts = is_a(holder, FunctionType | dataclasses.Field)
            return f"attribute {place.name}" if counts else ""
        if place.kind == "class attribute":
            of_task = holder in type(self._task).__mro__  # a protocol has no subclass checks
            return _attribute(place.key if of_task else "", place.name)
        return place.name if place.kind == "default" else f"{place.kind} {place.name}"

    def _counts_by_itself(self, place: Place) -> bool:
        """Return whether a place only holds a function, class or module under its own name."""
        value = place.get()
        if is_a(value, ModuleType):
            return place.kind == "global"
        return is_a(value, type | FunctionType) and (
            is_own(value) and self._names.of(value) == place.name
        )

    def _values_at(self, place: Place) -> Sequence[Any]:
        """Return what to search at a place: its value, unless the task itself has put it there.

        Then it is the code that the first value led to, as it is now.
        """
        if MOVES.known(place):
            text = self._text(place)
            if self._first(place, text) != text:
                return MOVES.code(place)
        return (place.get(),)

    def _first(self, place: Place, text: str) -> str | None:
        """Return what a place held before the task itself has changed it, as ``Moves.first``."""
        if (id(place.holder), place.key) in self._earlier_code:
            return text
        return MOVES.first(place, text)

    def _text_if_any(self, place: Place) -> str:
        try:
            return self._text(place)
        except TaskError:
            return _NO_CONTENT

    def _text(self, place: Place) -> str:
        """Return the value of a place: the value itself if it is short, else its digest."""
        key = (id(place.holder), place.key)
        if key not in self._texts:
            self._texts[key] = self._new_text(place)
        return self._texts[key]

    def _new_text(self, place: Place) -> str:
        value = place.get()
        if value is MISSING:
            return "missing"
        short = self._name_if_enough(value) or short_text(value)
        if short is not None:
            return short
        try:
            return f"#{self._values.digest(value, path=place.name, known_as=place.name)}"
        except TaskError:
            if MOVES.known(place):  # the task itself has put it there
                return _NO_CONTENT
            raise

    def _name_if_enough(self, value: Any) -> str | None:
        """Return the name of a function or class that has a digest of its own or is installed."""
        if not is_a(value, type | FunctionType) or not is_importable(value):
            return None
        # a package's wrapper around one of the user's functions has the name of that function
        return f"<{self._names.of(value)}>" if is_own(value) or is_installed(value) else None


def stand_in_for(value: Any) -> Any:
    """Return what an object's identity hook returns; ``MISSING`` if it has none."""
    hook = getattr(type(value), HOOK, None)
    return hook(value) if callable(hook) else MISSING


def _attribute(key: Any, name: str) -> str:
    # ``version`` has its own entry, ``not_state`` changes no result
    if key in ("version", "not_state"):
        return ""
    return "optimizer" if key == "optimizer" else f"attribute {name}"


def _is_cached(task: Any, key: Any) -> bool:
    kinds = type(task).__mro__
    return any(is_a(vars(kind).get(key), functools.cached_property) for kind in kinds)


def _together(texts: list[str]) -> str:
    """Return one text for all parts that have the same name."""
    return texts[0] if len(texts) == 1 else f"#{digest(*sorted(texts))}"


def _digest_of(components: Components) -> str:
    return digest(*(part for item in sorted(components.items()) for part in item))


_NO_CONTENT = "no content"


def only_evaluated(
    task: Any,
    *,
    whole: Reach,
    evaluation: Collection[str],
    contract: Collection[str],
    reach_without: Callable[[Collection[str]], Reach],
) -> frozenset[str]:
    """Return the members that evaluation code names, but training code never does.

    The result is empty if evaluation assigns to the task, the model or a global, because then it
    is a part of training.

    Args:
        task: The task.
        whole: What the whole task reaches.
        evaluation: The members that only evaluation calls from outside.
        contract: All members that are called from outside.
        reach_without: Returns what the task reaches without some members.
    """
    members = _members(task)
    apart = frozenset(evaluation) & members
    rest = reach_without(apart)
    while apart & rest.mentioned:
        apart -= rest.mentioned
        rest = reach_without(apart)
    if not apart:
        return apart
    if not rest.mentioned & _COMPUTED:
        others = members - frozenset(contract)
        apart, rest = _grown(apart, rest, others=others, whole=whole, reach_without=reach_without)
    return frozenset() if _assigns(task, whole, rest) else apart


def _grown(
    apart: frozenset[str],
    rest: Reach,
    *,
    others: frozenset[str],
    whole: Reach,
    reach_without: Callable[[Collection[str]], Reach],
) -> tuple[frozenset[str], Reach]:
    """Add the helpers and settings that only these members name."""
    while True:
        named: set[str] = set()
        for function in _evaluating(whole, rest):
            named |= mentions(function.__code__).attributes
        more = (named & others) - apart - rest.mentioned
        if not more:
            return apart, rest
        apart |= more
        rest = reach_without(apart)


def _assigns(task: Any, whole: Reach, rest: Reach) -> bool:
    """Return whether evaluation changes what may outlive it.

    A class that only evaluation uses may change its own objects.
    """
    training = {id(each.value) for each in rest.classes}
    helpers = {
        id(member)
        for kind in whole.classes
        if id(kind.value) not in training and not isinstance(task, kind.value)
        for _, member in members_of(kind.value)
    }
    return any(
        mentions(function.__code__).assigns
        for function in _evaluating(whole, rest)
        if id(function) not in helpers
    )


def _evaluating(whole: Reach, rest: Reach) -> list[FunctionType]:
    training = {id(each.value) for each in rest.functions}
    return [each.value for each in whole.functions if id(each.value) not in training]


def _members(task: Any) -> frozenset[str]:
    names = {*map(str, vars_of(task)), *slots_of(type(task))}
    for base in type(task).__mro__:
        if is_own(base):
            names |= {name for name, _ in members_of(base)}
    return frozenset(n for n in names if not (n.startswith("__") and n.endswith("__")))


_COMPUTED = frozenset({
    "getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "locals", "globals", "dir",
    "attrgetter", "methodcaller", "asdict", "astuple", "getmembers",
})  # fmt: skip
"""Names by which training code may read members that it does not name."""


_ASKED = contextvars.ContextVar("thrifty_legacy_identity", default=False)


def is_legacy_asked() -> bool:
    """Return whether ``identity`` is called to recognise an old study."""
    return _ASKED.get()


@contextlib.contextmanager
def asking_legacy() -> Iterator[None]:
    """Make ``identity`` return what it did up to version 4; a user's override sees this as well."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def legacy_identity(task: Any) -> Mapping[str, str]:
    """Return the class, the source of it and its bases, its attributes and its version."""
    kind = type(task)
    return {
        "class": f"{_module_of(kind)}.{kind.__qualname__}",
        "source": _source_digest(kind),
        "attributes": repr(sorted((k, repr(v)) for k, v in vars(task).items())),
        "version": task.version,
    }


def _module_of(kind: type) -> str:
    """Return the module of a class; for the running script, the name that would import it."""
    if kind.__module__ != "__main__":
        return kind.__module__
    script = Path(getattr(sys.modules["__main__"], "__file__", ""))
    return script.stem if script.is_file() else "__main__"


def _source_digest(kind: type) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for base in kind.__mro__:
        if base.__module__.startswith("thrifty.") or base in (object, ABC):
            continue
        try:
            digest.update(inspect.getsource(base).encode())
        except (OSError, TypeError):  # typed at a prompt: use the compiled code
            for name, member in sorted(vars(base).items()):
                digest.update(name.encode() + _compiled(member) if name not in _NOT_CODE else b"")
    return digest.hexdigest()


_NOT_CODE = frozenset({
    "__abstractmethods__", "__dict__", "__doc__", "__module__", "__slotnames__", "__weakref__",
    "_abc_impl",
})  # fmt: skip
"""What Python itself adds to a class, in part only when the class is first pickled."""


def _compiled(member: Any) -> bytes:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    code = getattr(function, "__code__", None)
    return repr(member).encode() if code is None else _code(code)


def _code(code: CodeType) -> bytes:
    """Return the instructions with the names and constants that they refer to."""
    constants = [_constant(each) for each in code.co_consts]
    return b"\0".join((code.co_code, repr(code.co_names).encode(), *constants))


def _constant(value: Any) -> bytes:
    if isinstance(value, CodeType):
        return _code(value)
    # a set's order differs from process to process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()
