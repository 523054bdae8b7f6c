"""Models that are made once for a trial and copied for each of its epochs.

What is frozen in a fresh model is not kept in checkpoints."""

from __future__ import annotations

import contextlib
import copy
import dis
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from thrifty.core import plain_logger
from thrifty.pack import HyperParameters, borrowed_streams
from thrifty.pack._frozen import digest_of
from thrifty.pack._state import fill_in as filled_state, leave_out as state_without, seed_everything
from thrifty.pack.identity._own import is_own_file
from thrifty.pack.task._task import count_text_as_read, is_same_value, unread, values_of
from thrifty.pack.verify import Watch

from ._object_graphs import are_only_inside, made_again


logger = plain_logger(__name__)

_LIBRARIES = frozenset({"torch", "transformers", "peft"})


class ModelCopies:
    """Calls ``make(hp)`` a few times for a trial, and again if something that it reads has changed.

    That may be a value of ``hp``, a global or something in a closure. What it reads from files is
    noticed late, or not at all.

    Each epoch gets a new model: a copy of one that has not been trained, if the copy is certain to
    be the same as what ``make`` would return, and otherwise what ``make`` returns. Models of
    libraries are certain to be (``is_copyable``). Others are compared in the third epoch, with all
    that they refer to (``made_again``).

    ``make`` may keep a number in such a model that changes from epoch to epoch, such as a learning
    rate with a schedule, if it does nothing else with it: the model to copy is made with a
    ``Placeholder``, and each copy gets the number of its epoch.

    After 8, 16, 32 ... copies, such a model is made and compared again.

    >>> copies = ModelCopies(lambda hp: torch.nn.Linear(hp.width, 1))
    >>> first = copies.get(HyperParameters({"width": 3, "lr": 0.1}), seed=0)
    >>> second = copies.get(HyperParameters({"width": 3, "lr": 0.2}), seed=0)
    >>> second is first, bool((second.weight == first.weight).all())
    (False, True)
    """

    def __init__(self, make: Callable[[HyperParameters], torch.nn.Module]) -> None:
        self._make = make
        self._read: Mapping[str, Any] = {}
        self._changing: frozenset[str] = frozenset()
        """Names whose values have differed between the models that are counted."""
        self._num_made = 0
        """How many models in turn read equal values, or numbers that change."""
        self._watch: Watch | None = None
        """What ``make`` read besides ``hp`` when the first of them was made."""
        self._original: _Original | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: ``make`` alone, since a watch cannot be copied."""
        return vars(ModelCopies(self._make))

    def get(self, hp: HyperParameters, *, seed: int) -> torch.nn.Module:
        """Return an untrained model for these hyper-parameters.

        Args:
            hp: The hyper-parameters.
            seed: Seed of what ``make`` draws at random.
        """
        if self._original is not None:
            if self._original.serves(hp, read=self._read):
                hp.names_read |= self._read.keys()
                return self._original_again(hp, seed=seed)
            # Free the memory of the original before another one is made.
            self._original, self._num_made = None, 0
        if self._num_made == _NUM_BEFORE_COMPARED - 1:
            return self._compared(hp, seed=seed)
        model = self._made(hp, seed=seed)
        if is_copyable(model):
            with suppress(Exception):  # classes say how they are copied
                self._keep(_Original(copy.deepcopy(model), compared=False))
        return model

    def _original_again(self, hp: HyperParameters, *, seed: int) -> torch.nn.Module:
        original = self._original
        assert original is not None
        if not original.is_due():
            return original.copy(hp)
        model: torch.nn.Module
        model, is_same = made_again(
            original.model, make=partial(self._made, hp, seed=seed), instead=original.instead(hp)
        )
        if not is_same:
            logger.warning(
                "%s makes another model now than for the first epochs of this trial, from the same "
                "hyper-parameters. The last epochs trained copies of the first one; from now on, "
                "it is called for each epoch. Let it read nothing besides hp that changes, such as "
                "a file or the time",
                getattr(self._make, "__qualname__", repr(self._make)),
            )
            self._original, self._num_made = None, _NUM_BEFORE_COMPARED
        return model

    def _compared(self, hp: HyperParameters, *, seed: int) -> torch.nn.Module:
        """Make two models, and keep one as the original if copies of it are like the other."""
        changing = self._changing_with(hp)
        if changing is None or self._is_unsteady():
            # One call more than epochs might change what the next one makes.
            return self._made(hp, seed=seed)
        placeholders = {n: placeholder(number) for n, number in values_of(hp, changing).items()}
        stand_in = HyperParameters({**unread(hp), **placeholders})
        of = self._made_from(stand_in, placeholders, seed=seed)
        if of is None or is_copyable(of) or _num_bytes(of) > _MOST_BYTES:
            return self._made(hp, seed=seed)
        model: torch.nn.Module
        original = _Original(of, stand_in=stand_in, placeholders=placeholders)
        # Classes also say how they are copied, and may look at a number then.
        with borrowed_streams(), watched(placeholders.values()) as is_kept:
            # The one made last is trained: user code may have noted down which one that is.
            model, is_same = made_again(
                of, make=partial(self._made, hp, seed=seed), instead=original.instead(hp)
            )
            is_same = is_same and is_kept()
        reads_the_same = self._num_made == _NUM_BEFORE_COMPARED and self._changing == changing
        if is_same and reads_the_same and not self._is_unsteady():
            self._keep(original)
        return model

    def _made_from(
        self, stand_in: HyperParameters, numbers: Mapping[str, Placeholder], *, seed: int
    ) -> torch.nn.Module | None:
        """Make a model from placeholders; None if that did more than keep them in the model."""
        dtype, grad, folder = torch.get_default_dtype(), torch.is_grad_enabled(), _folder()
        with borrowed_streams(), watched(numbers.values()) as is_kept:
            try:
                seed_everything(seed)
                model = self._make(stand_in)
            except (Exception, SystemExit):  # noqa: BLE001 (whatever user code makes of it)
                # A library has refused the placeholder. Undo what would have been undone later.
                torch.set_default_dtype(dtype)
                torch.set_grad_enabled(grad)
                if folder is not None:
                    os.chdir(folder)
                return None
            inside = are_only_inside(
                [*numbers.values(), stand_in], model, holders=(numbers, stand_in._values)
            )
            return model if inside and is_kept() else None

    def _is_unsteady(self) -> bool:
        """Return whether something besides ``hp`` that ``make`` reads changes, or may do so."""
        return self._watch is None or bool(self._watch.unwatchable or self._watch.changed())

    def _keep(self, original: _Original) -> None:
        original.watch = Watch({"make": self._make})
        if not original.watch.unwatchable:  # an iterator cannot be compared with what it was
            self._original = original

    def _made(self, hp: HyperParameters, *, seed: int) -> torch.nn.Module:
        """Make a model, and note what was read for it."""
        before = set(hp.names_read)
        hp.names_read.clear()
        try:
            seed_everything(seed)
            model = self._make(hp)
            count_text_as_read(hp)
            read = values_of(hp, hp.names_read)
        finally:
            hp.names_read |= before
        changing = self._changing_with(hp) if read.keys() == self._read.keys() else None
        self._num_made = 1 if changing is None else self._num_made + 1
        self._changing = changing or frozenset()
        if self._num_made == 1:
            self._watch = Watch({"make": self._make})
        self._read = read
        return model

    def _changing_with(self, hp: HyperParameters) -> frozenset[str] | None:
        """Return the names of numbers that have changed up to now; None if another value has."""
        now = values_of(hp, self._read)
        changed = frozenset(
            n for n, value in now.items() if not is_same_value(value, self._read[n])
        )
        for name in changed:
            if type(now[name]) not in (int, float) or type(now[name]) is not type(self._read[name]):
                return None
        return self._changing | changed


class _Original:
    """A model that has not been trained, of which epochs get copies.

    Args:
        model: The model.
        stand_in: The hyper-parameters that it was made from, with placeholders; None: any.
        placeholders: Placeholders for numbers that change, by name.
        compared: Whether it can be compared with another one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stand_in: HyperParameters | None = None,
        placeholders: Mapping[str, Placeholder] | None = None,
        compared: bool = True,
    ) -> None:
        self.model = model
        self.watch: Watch | None = None
        """What ``make`` reads besides ``hp``."""
        self._stand_in = stand_in
        self._placeholders = placeholders or {}
        self._compared = compared
        self._num_copies = 0

    def serves(self, hp: HyperParameters, *, read: Mapping[str, Any]) -> bool:
        """Return whether a copy is what would be made from these hyper-parameters.

        Args:
            hp: The hyper-parameters.
            read: What was read from them for the original, or for one like it.
        """
        now = values_of(hp, read)
        for name, value in now.items():
            changes = name in self._placeholders
            if not (
                type(value) is type(read[name]) if changes else is_same_value(value, read[name])
            ):
                return False
        return self.watch is not None and not self.watch.changed()

    def is_due(self) -> bool:
        """Count a copy, and return whether it is time to compare again."""
        self._num_copies += 1
        n = self._num_copies
        return self._compared and n >= _COPIES_BEFORE_COMPARED and n & (n - 1) == 0

    def copy(self, hp: HyperParameters) -> torch.nn.Module:
        """Return a copy with these hyper-parameters."""
        return copy.deepcopy(self.model, self.instead(hp))

    def instead(self, hp: HyperParameters) -> dict[int, Any]:
        """Return what a copy has instead of some objects, by their ids."""
        numbers = values_of(hp, self._placeholders)
        instead = {id(each): numbers[name] for name, each in self._placeholders.items()}
        return instead if self._stand_in is None else {**instead, id(self._stand_in): hp}


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return None


_NUM_BEFORE_COMPARED = 3
"""Making models twice for a comparison does not pay in a trial of few epochs."""

_COPIES_BEFORE_COMPARED = 8
"""A power of two."""

_MOST_BYTES = 2**30
"""Three models are compared, in memory at once."""


def _num_bytes(model: Any) -> int:
    if not isinstance(model, torch.nn.Module):
        return _MOST_BYTES + 1
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def is_copyable(model: Any) -> bool:
    """Return whether a copy of a model is certain to be the same as another one made like it.

    All its modules must be classes of torch, transformers or peft. A class of the user may share
    an object with other code, and a function in a hook may refer to the model itself. Copies of
    tensors on a GPU would need too much of its memory.

    >>> is_copyable(torch.nn.Linear(1, 1))
    True
    """
    if not isinstance(model, torch.nn.Module):
        return False
    own = (value for module in model.modules() for value in vars(module).values())
    tensors = (
        *model.parameters(),
        *model.buffers(),
        *(value for value in own if isinstance(value, torch.Tensor)),
    )
    if not all(tensor.is_leaf and tensor.device.type == "cpu" for tensor in tensors):
        return False
    return all(
        _is_of_library(type(module))
        and _is_named(type(module))
        and all(map(_is_plain, vars(module).values()))
        for module in model.modules()
    )


def _is_of_library(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _LIBRARIES


def _is_named(kind: type) -> bool:
    """Return whether a class has its name in its module: it was not made for one model alone."""
    module = sys.modules.get(kind.__module__)
    return getattr(module, kind.__qualname__, None) is kind


_VALUES = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)
_CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)


def _is_plain(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Return whether an attribute of a module refers to nothing outside of libraries."""
    kind = type(value)
    if kind in _VALUES:
        return True
    if kind in _CONTAINERS or (isinstance(value, Mapping | Sequence) and _is_of_library(kind)):
        if id(value) in within:  # it contains itself
            return False
        items = value.values() if isinstance(value, Mapping) else value
        return all(_is_plain(each, (*within, id(value))) for each in items)
    if kind is types.FunctionType:
        return value.__closure__ is None and _is_of_library(value)
    if kind is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | None)
    if issubclass(kind, type):
        return True
    if isinstance(value, types.MethodType | partial):
        return False
    return issubclass(kind, Enum) or _is_of_library(kind)


Digests = Mapping[str, str]
"""Digests of tensors by name."""


def frozen_digests(
    model: torch.nn.Module, *, kept: Mapping[str, Any], make: Callable[[], torch.nn.Module]
) -> tuple[Any, Digests]:
    """Return the digests of the parameters that checkpoints of a trial may leave out.

    These are frozen parameters that a second fresh model has, too. They are looked for before the
    first epoch; later ones leave out what they have found in the checkpoint.

    Args:
        model: A fresh model.
        kept: What the last epoch left; empty before the first one.
        make: Makes another fresh model.

    Returns:
        The model to train, and the digests. It is the one that was made last: user code may have
        noted down which one that is.
    """
    if kept:
        # Older checkpoints have all parameters.
        return model, kept.get("frozen", {})
    first = _digests(model)
    if not first:
        return model, {}
    with borrowed_streams():
        model = make()
        second = _digests(model)
    return model, {name: digest for name, digest in first.items() if second.get(name) == digest}


def leave_out(state: Mapping[str, Any], digests: Digests) -> tuple[Mapping[str, Any], Digests]:
    """Leave out of a model's state what has these digests, and return their digests."""
    left_out = {
        name: digest
        for name, digest in digests.items()
        if _is_dense(state.get(name)) and digest_of(state[name]) == digest
    }
    if not left_out:
        return state, {}
    return state_without(state, left_out), left_out


def fill_in(
    state: Mapping[str, Any], digests: Digests, *, model: torch.nn.Module
) -> Mapping[str, Any]:
    """Return a model's state with what ``leave_out`` has left out.

    Args:
        state: The state.
        digests: The digests of what was left out.
        model: A fresh model.

    Raises:
        StateError: The fresh model has not what was left out.
    """
    fresh = model.state_dict() if digests else {}
    filled, _ = filled_state(
        state, digests, fresh=fresh, digest_of=lambda name: digest_of(fresh[name])
    )
    return filled


def _digests(model: torch.nn.Module) -> Digests:
    return {
        name: digest_of(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and _is_dense(parameter)
    }


def _is_dense(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized)


# -- placeholders ----------------------------------------------------------------------------------


class Placeholder:
    """Stands for a number, and records whether code does more with it than keep it.

    Any operation on it (arithmetic, a comparison, a conversion, a look at an attribute, printing)
    gives what the number gives, and is recorded while it is ``watched``. So code that ran without
    one does the same for every number of this type: it has put the number somewhere, and has not
    looked at it. ``isinstance`` answers as for the number. ``type`` cannot be kept from telling
    that this is something else, so a function of the user that may call it counts as looking.

    >>> rate = placeholder(0.1)
    >>> with watched([rate]) as is_kept:
    ...     kept = {"lr": rate}
    >>> is_kept(), kept["lr"] * 2
    (True, 0.2)
    >>> with watched([rate]) as is_kept:
    ...     small = rate < 0.5
    >>> is_kept()
    False
    """

    __slots__ = ("_is_used", "_is_watched", "_value")

    def __init__(self, value: float) -> None:
        _put(self, _value=value, _is_watched=False, _is_used=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(_get(self, "_value"))

    def __copy__(self) -> Placeholder:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self  # as a number does

    def __getattribute__(self, name: str) -> Any:
        if name in _KEPT:
            return object.__getattribute__(self, name)
        return getattr(_looked_at(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_looked_at(self), name, value)  # fails as it does for a number


_KEPT = frozenset({"__class__", "__copy__", "__deepcopy__"})
"""Attributes that tell nothing of the value."""

_get: Callable[[Any, str], Any] = object.__getattribute__


def _put(number: Placeholder, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(number, name, value)


def _looked_at(number: Placeholder) -> Any:
    """Return the number for an operation on it, and record that there was one."""
    if _get(number, "_is_watched"):
        _put(number, _is_used=True)
    return _get(number, "_value")


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Placeholder, *args: Any) -> Any:
        value = _looked_at(self)
        return getattr(value, name)(*map(_operand, args))

    operate.__name__ = name
    return operate


def _operand(value: Any) -> Any:
    return _looked_at(value) if issubclass(type(value), Placeholder) else value


_OF_TYPES = frozenset({
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__getnewargs__"),
    *("__getformat__", "__setformat__"),
})
"""Special methods that are no operation on a number, or that are defined above."""


def _kind(number: type) -> type[Placeholder]:
    """Return a class with the operations of a type of numbers, and no others."""
    names = [n for n in dir(number) if n.startswith("__") and n not in _OF_TYPES]
    return type(
        f"{number.__name__.capitalize()}Placeholder",
        (Placeholder,),
        {"__slots__": (), **{name: _operation(name) for name in names}},
    )


_KINDS = {number: _kind(number) for number in (int, float)}


def placeholder(number: float) -> Placeholder:
    """Return a placeholder for an integer or a float.

    >>> placeholder(3) + 1
    4
    """
    return _KINDS[type(number)](number)


@contextlib.contextmanager
def watched(numbers: Collection[Placeholder]) -> Iterator[Callable[[], bool]]:
    """Record operations on placeholders, and yield a function that says whether there was none.

    A function of the user's own that names ``type``, or that assigns to a global variable, counts
    as one, if it is called meanwhile. So does a profiler, since there can be only one.
    """
    asks = sys.getprofile() is not None

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal asks
        if event == "call" and _is_doubtful(frame.f_code):
            asks = True

    _put_all(numbers, _is_watched=True, _is_used=False)
    if numbers and not asks:
        sys.setprofile(note)
    try:
        yield lambda: not numbers or not (asks or any(_get(n, "_is_used") for n in numbers))
    finally:
        if sys.getprofile() is note:
            sys.setprofile(None)
        _put_all(numbers, _is_watched=False)


def _put_all(numbers: Collection[Placeholder], **attributes: Any) -> None:
    for each in numbers:
        _put(each, **attributes)


@lru_cache(maxsize=4096)
def _is_doubtful(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<frozen") or not is_own_file(file):  # Python's own, or a library's
        return False
    return "type" in code.co_names or any(
        each.opname == "STORE_GLOBAL" for each in dis.get_instructions(code)
    )
