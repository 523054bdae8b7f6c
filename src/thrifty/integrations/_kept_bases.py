"""A base that is made once for the models of all trials of a task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from thrifty.pack._frozen import CAN_SHARE, FrozenTensor, has_views, is_shared, keep
from thrifty.pack.fused._activations import free_memory

from ._model_copies import is_copyable


_LARGEST_SHARE = 0.25
"""Share of the free memory that a base may take to be kept."""

Made = tuple[Any, Collection[str]]
"""A base, and the names of parameters that its folder lacks."""


class KeptBase:
    """Makes a base once, and gives each model a copy of it over the same memory.

    Whatever writes into a copy gets memory of its own first, so copies stay independent. A base is
    made anew for each model if a copy of it might be something else: if it has classes of the user,
    is on a GPU or quantised, or if one of its tensors is a view of another one. So is a base that
    takes more than a quarter of the free memory.

    It is kept as long as this object, which all copies of a task share. Another process makes its
    own.

    >>> kept = KeptBase()
    >>> make = lambda: (torch.nn.Linear(2, 1), ())
    >>> (one, _), (other, _) = (kept.copy("a", make=make) for _ in range(2))
    >>> bool((one.weight == other.weight).all())
    True
    """

    def copy(self, made_from: Hashable, *, make: Callable[[], Made]) -> Made:
        """Return a copy of the base.

        Args:
            made_from: All that ``make`` depends on. It is called again when this has changed.
            make: Makes the base.
        """
        found = _MADE.get(self)
        if found is None or found.made_from != made_from:
            _MADE.pop(self, None)  # its memory is free before another one is made
            base, missing = make()
            if not _may_be_kept(base):
                return base, missing
            tensors = [keep(tensor) for tensor in (*base.parameters(), *base.buffers())]
            found = _MADE[self] = _Kept(made_from, base, missing, tensors)
        return _lent(found.base), found.missing

    def __copy__(self) -> KeptBase:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptBase:
        return self

    def __reduce__(self) -> tuple[type[KeptBase], tuple[()]]:
        return KeptBase, ()


class _Kept(NamedTuple):
    made_from: Hashable
    base: torch.nn.Module
    missing: Collection[str]
    tensors: Sequence[FrozenTensor]


# not an attribute, so that nothing that looks at a task's attributes meets the base there
_MADE: WeakKeyDictionary[KeptBase, _Kept] = WeakKeyDictionary()


def _may_be_kept(base: Any) -> bool:
    if not CAN_SHARE or not is_copyable(base):
        return False
    tensors = (*base.parameters(), *base.buffers())
    plain = all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.layout is torch.strided
        and not each.is_meta
        for each in tensors
    )
    if not plain or any(map(has_views, tensors)):
        return False
    num_bytes = sum(each.nbytes for each in tensors)
    return bool(num_bytes <= _LARGEST_SHARE * free_memory(torch.device("cpu")))


def _lent(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model over the same memory."""
    lent: dict[int, Any] = {}
    for parameter in base.parameters():
        values = torch._lazy_clone(parameter.detach())
        copied = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(copied).update(vars(parameter))  # libraries note there what they have done
        lent[id(parameter)] = copied
    for buffer in base.buffers():
        lent[id(buffer)] = torch._lazy_clone(buffer)
    return deepcopy(base, lent)


def unlend_trained(model: torch.nn.Module) -> None:
    """Give the parameters that a trial trains memory of their own."""
    for parameter in model.parameters():
        if parameter.requires_grad and is_shared(parameter):
            parameter.data = parameter.detach().clone()


def stamps(folder: Path) -> tuple[Hashable, ...]:
    """Return what shows that a file in a folder has changed, without reading the files."""
    found = []
    for file in sorted(folder.iterdir()):
        status = file.stat()
        # no program can set the last one
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.append((file.name, status.st_ino, status.st_size, *times))
    return tuple(found)
