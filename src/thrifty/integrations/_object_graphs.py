"""Objects compared with all that they refer to: is a copy the same as another one made alike?"""

from __future__ import annotations

import copy
import copyreg
import gc
import inspect
import sys
import time
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from thrifty.core import thaw_heap
from thrifty.pack._frozen import bytes_of


def made_again(
    of: Any,
    *,
    make: Callable[[], Any],
    instead: Mapping[int, Any] | None = None,
    copied: Callable[[Any, dict[int, Any]], Any] = copy.deepcopy,
) -> tuple[Any, bool]:
    """Make an object again, and find out whether a deep copy is certain to behave as it does.

    A copy of ``of`` and another made object must have equal values everywhere, and refer to one
    object in the same places. What two made objects share, such as a list of a module, the copy
    must share, too; and it must share nothing else with what it is a copy of. Nothing else may
    refer to what was made, such as a global list of models, since it would go on to refer to that
    and not to the copy. What cannot be compared, such as an open file, is taken to be different.

    Args:
        of: What ``make`` has returned before.
        make: Makes the object.
        instead: What copies refer to instead of some objects that ``of`` refers to, by their ids.
        copied: Copies it, given a copy of ``instead``.

    Returns:
        What ``make`` has returned, and whether copies of ``of`` will do as well.

    >>> def make():
    ...     return {"weights": torch.zeros(2), "names": ["a"]}
    >>> made_again(make(), make=make)
    ({'weights': tensor([0., 0.]), 'names': ['a']}, True)
    >>> names = ["a"]
    >>> made_again({"names": names}, make=lambda: {"names": names})
    ({'names': ['a']}, False)
    """
    another = make()
    instead = instead or {}
    for _ in range(_NUM_LOOKS):
        try:
            mine = copied(of, dict(instead))
            is_alike = _is_alike(of, mine, another, instead=instead)
            return another, is_alike  # written apart: a tuple begun earlier would refer to one
        except _HeldElsewhere:
            # Perhaps for a moment only, such as by a thread that goes through all objects.
            time.sleep(_BETWEEN_LOOKS_S)
        except Exception:  # noqa: BLE001 (classes say how they are copied and compared)
            break
    return another, False


_NUM_LOOKS = 3
_BETWEEN_LOOKS_S = 0.02


def _is_alike(of: Any, mine: Any, another: Any, *, instead: Mapping[int, Any]) -> bool:
    """Return whether a copy, ``mine``, is like another made object, as ``made_again`` says."""
    # Cycles that a constructor has left would count as other references. They are young, and to
    # look at old objects takes a quarter of a second.
    gc.collect(1)
    try:
        if _is_alike_now(of, mine, another, instead=instead):
            return True
    except _Different:
        pass
    gc.collect()
    return _is_alike_now(of, mine, another, instead=instead)


def _is_alike_now(of: Any, mine: Any, another: Any, *, instead: Mapping[int, Any]) -> bool:
    made, copies = _Pairs(instead=instead), _Pairs(count=True)
    # First, because `made` refers to objects, too. As many variables refer to one as to the other.
    copies.compare(mine, another)
    made.compare(of, another)
    return (
        copies.shared.keys() <= made.shared.keys()
        and not copies.right.keys() & made.shared.keys()
        and not copies.left.keys() & made.left.keys()
        and not made.memory[0] & made.memory[1]
        and not copies.memory[0] & (made.memory[0] | made.memory[1])
    )


def are_only_inside(values: Collection[Any], of: Any, *, holders: Collection[Any]) -> bool:
    """Return whether nothing refers to some values besides an object and what it refers to.

    What it refers to does not include modules, classes and the globals of functions.

    Args:
        values: The values.
        of: The object.
        holders: Other objects that may refer to the values.
    """
    at_work: list[Any] = [values, *holders]
    frame = inspect.currentframe()
    while frame is not None:  # functions at work refer to what they work with
        at_work.append(frame)
        if frame.f_locals is not frame.f_globals:
            at_work.append(frame.f_locals)
        frame = frame.f_back
    places = {*map(id, at_work), *_reachable(of)}
    thaw_heap()  # frozen objects would not be looked at
    for generation in (1, 2):  # frames that a constructor has looked at have dicts of variables
        gc.collect(generation)
        is_held = False
        for value in values:
            for holder in gc.get_referrers(value):
                # Some versions of Python count the generator of a frame as a holder, too.
                frame = getattr(holder, "gi_frame", getattr(holder, "cr_frame", None))
                if id(holder) not in places and (frame is None or id(frame) not in places):
                    is_held = True
        if not is_held:
            return True
    return False


def _reachable(of: Any) -> set[int]:
    """Return the ids of an object and all that it refers to."""
    found, looking = {id(of)}, [of]
    while looking:
        for each in gc.get_referents(looking.pop()):
            if id(each) not in found and not isinstance(each, _BORDERS):
                found.add(id(each))
                looking.append(each)
    return found


_BORDERS = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType)


class _Different(Exception):  # noqa: N818 (caught where it is raised)
    """Two objects differ, or it cannot be said whether they do."""


class _HeldElsewhere(_Different):
    """More references lead to one of two objects than to the other."""


class _Pairs:
    """Compares two objects and all that they refer to, and notes which are in one place.

    Attributes:
        left: Objects of the first by id, except for those that cannot change.
        right: The same of the second.
        shared: Objects that both refer to.
        memory: Addresses of the tensors and arrays of each.
    """

    def __init__(self, *, count: bool = False, instead: Mapping[int, Any] | None = None) -> None:
        """Make an empty record.

        Args:
            count: Whether as many references must lead to an object as to its partner.
            instead: What to compare instead of some objects of the first, by their ids.
        """
        self._count = count
        self._instead = instead or {}
        self.left: dict[int, Any] = {}
        self.right: dict[int, Any] = {}
        self.shared: dict[int, Any] = {}
        self.memory: tuple[set[int], set[int]] = (set(), set())
        self._partner: dict[int, int] = {}
        self._places: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def compare(self, one: Any, other: Any) -> None:
        """Compare two objects.

        Raises:
            _Different: They differ, or cannot be compared.
        """
        one = self._instead.get(id(one), one)
        kind = type(one)
        _require(kind is type(other))
        if kind in _VALUES:
            _require(repr(one) == repr(other) if kind in (float, complex) else one == other)
        elif issubclass(kind, tuple | frozenset):
            # They cannot change, and a copy of them may be the same object.
            _require(not getattr(one, "__dict__", None))
            self._compare_all(one, other)
        elif one is other:
            if not isinstance(one, _CONSTANT):
                self.shared[id(one)] = one
        elif kind is types.FunctionType and one.__closure__ is None:
            # One function each time that a `def` or `lambda` runs.
            self._compare_functions(one, other)
        elif self._is_new(one, other):
            self._compare_contents(one, other)

    def _is_new(self, one: Any, other: Any) -> bool:
        known = id(one) in self.left
        _require(known == (id(other) in self.right))
        _require(not known or self._partner[id(one)] == id(other))
        if self._count and not known:
            counts = [(sys.getrefcount(x), _num_weak(x)) for x in (one, other)]
            if counts[0] != counts[1]:
                raise _HeldElsewhere
        self.left[id(one)], self.right[id(other)] = one, other  # kept, so that ids stay theirs
        self._partner[id(one)] = id(other)
        return not known

    def _compare_all(self, one: Any, other: Any) -> None:
        if isinstance(one, set | frozenset) and all(type(each) is str for each in one):
            # Their order differs between processes, so that nothing can depend on it.
            _require(one == other)
            return
        _require(len(one) == len(other))
        for mine, theirs in zip(one, other, strict=True):
            self.compare(mine, theirs)

    def _compare_functions(self, one: Any, other: Any) -> None:
        _require(one.__code__ is other.__code__ and one.__globals__ is other.__globals__)
        self.compare(one.__defaults__, other.__defaults__)
        self.compare(one.__kwdefaults__, other.__kwdefaults__)
        if vars(one) or vars(other):  # an empty one comes into being when it is looked at
            self.compare(vars(one), vars(other))

    def _compare_contents(self, one: Any, other: Any) -> None:
        kind = type(one)
        if isinstance(one, torch.Tensor):
            self._compare_tensors(one, other)
        elif kind is np.ndarray:
            self._compare_arrays(one, other)
        elif kind is types.FunctionType:
            self._compare_functions(one, other)
            cells = (one.__closure__, other.__closure__)
            self._compare_all(*([cell.cell_contents for cell in each] for each in cells))
        elif kind is types.MethodType:
            self.compare((one.__func__, one.__self__), (other.__func__, other.__self__))
        elif kind is dict:
            self._compare_all(list(one), list(other))
            self._compare_all(list(one.values()), list(other.values()))
        elif kind is list or kind is set:
            self._compare_all(one, other)
        else:
            self._compare_objects(one, other)

    def _compare_objects(self, one: Any, other: Any) -> None:
        for name in copyreg._slotnames(type(one)):  # type: ignore[attr-defined]
            self.compare(getattr(one, name, _UNSET), getattr(other, name, _UNSET))
        if type(one).__module__.partition(".")[0] in _IN_ANY_ORDER:
            _require(vars(one).keys() == vars(other).keys())
            self._compare_all(*([vars(each)[key] for key in vars(one)] for each in (one, other)))
        elif hasattr(one, "__dict__"):
            self.compare(vars(one), vars(other))
        # What pickle would keep is all that an object knows: objects of compiled classes that
        # pickle does not know raise an error.
        self.compare(*(_reduced(each) for each in (one, other)))

    def _compare_tensors(self, one: torch.Tensor, other: torch.Tensor) -> None:
        _require(type(one) in _TENSORS and one.layout is torch.strided)
        _require(not (one.is_quantized or one.is_meta or one.is_conj() or one.is_neg()))
        for each in (one, other):
            _require(each.is_leaf and each.grad is None and each.device.type == "cpu")
            _require(not (each._backward_hooks or each._post_accumulate_grad_hooks))
        _require(_layout(one) == _layout(other))
        self._compare_places(*(each.untyped_storage().data_ptr() for each in (one, other)))
        _require(_bytes(one) == _bytes(other))
        self.compare(vars(one), vars(other))

    def _compare_arrays(self, one: np.ndarray, other: np.ndarray) -> None:
        for each in (one, other):
            _require(each.base is None and not each.dtype.hasobject)
        _require((one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides))
        _require(one.flags.writeable == other.flags.writeable and one.tobytes() == other.tobytes())
        if one.nbytes:
            self._compare_places(one.ctypes.data, other.ctypes.data)

    def _compare_places(self, one: int, other: int) -> None:
        """Check that memory that belongs to several objects here does so there."""
        if one == other == 0:
            return
        of_one, of_other = self._places
        _require(of_one.setdefault(one, other) == other and of_other.setdefault(other, one) == one)
        self.memory[0].add(one)
        self.memory[1].add(other)


_VALUES = frozenset({
    *(bool, int, float, complex, str, bytes, type(None), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, inspect.Signature),
})
"""Types whose objects never change, of which no two that are equal can be told apart."""

_CONSTANT = (type, types.ModuleType, types.BuiltinFunctionType, types.EllipsisType)
"""Types of objects that stay the same object in a copy."""

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_IN_ANY_ORDER = frozenset({"torchmetrics"})
"""Packages whose objects have their attributes in another order once they are copied."""

_UNSET = "<not set>"


def _num_weak(value: Any) -> int:
    """Return how many weak references there are to an object.

    PyTorch's compiler has one to each module that is made by ``__init__``, and to some copies only:
    classes such as those of torchmetrics have a ``__setstate__`` of their own. It is not counted.
    """
    found = weakref.getweakrefcount(value)
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is None or not isinstance(value, torch.nn.Module):
        return found
    return found - (value in guard.GenerationTracker.generation_values)


def _require(condition: object) -> None:
    if not condition:
        raise _Different


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    offset, size = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    kind = (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
    return (*kind, tensor.shape, tensor.stride(), offset, size)


def _bytes(tensor: torch.Tensor) -> bytes:
    return b"".join(bytes_of(tensor))


def _reduced(value: Any) -> Any:
    """Return what pickle would keep of an object."""
    parts = value.__reduce_ex__(4)
    _require(not isinstance(parts, str))  # the name of a global object, which cannot be two
    make, args, state, items, pairs = (*parts, None, None, None)[:5]
    return (make, args, state, *(None if each is None else tuple(each) for each in (items, pairs)))
