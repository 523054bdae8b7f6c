"""Double precision beside a frozen base in single precision, which is never held twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.pack._frozen import storage_address

from ._record import VIEWS
from ._tape import writes_into


_to_copy: Any = torch.ops.aten._to_copy.default


def upcast(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Compute in double precision with some tensors that are stored in a lower one.

    Within the context, a call that reads one of them gets copies in double precision of all that it
    reads, which are freed after the call. So a whole model may be compared in double precision,
    with little more memory than its largest tensor takes.

    Raises:
        RuntimeError: Within the context, a call writes into one of them.
    """
    lower = [t for t in tensors if t.dtype.is_floating_point and t.dtype != torch.float64]
    return _Upcast(lower) if lower else nullcontext()


def doubled(model: torch.nn.Module, *, besides: Collection[str]) -> torch.nn.Module:
    """Convert a model to double precision in place, besides some of its tensors."""
    if not besides:
        return model.double()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in besides and tensor.dtype.is_floating_point:
            tensor.data = tensor.data.double()
    return model


def named(model: torch.nn.Module, names: Collection[str]) -> list[torch.Tensor]:
    """Return some parameters and buffers of a model."""
    own = (*model.named_parameters(), *model.named_buffers())
    return [tensor for name, tensor in own if name in names]


class _Upcast(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that knows the tensors by their memory, so that it knows views of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tuple(tensors)  # kept, so that no other tensor gets their memory
        self._places = {storage_address(tensor) for tensor in self._tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS or func.is_view or func is _to_copy:
            return func(*args, **kwargs)
        if not any(map(self._is_lower, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        written = writes_into(func, args, kwargs)
        if any(map(self._is_lower, written)):
            raise RuntimeError(f"{func.name()} writes into a tensor that is to stay as it is")
        stays = set(map(id, written))

        def up(value: Any) -> Any:
            """Copy in double precision: a product, say, takes no two precisions."""
            if not _is_single(value) or id(value) in stays:
                return value
            # `double` would be recorded as `to`, which counts as a view, since it may be one.
            return _to_copy(value, dtype=torch.float64)

        return func(*pytree.tree_map(up, args), **pytree.tree_map(up, kwargs))

    def _is_lower(self, value: Any) -> bool:
        if not _is_single(value):
            return False
        if storage_address(value) not in self._places:
            # A call that takes a shared tensor's address for writing gives it memory of its own.
            self._places = {storage_address(tensor) for tensor in self._tensors}
        return storage_address(value) in self._places


def _is_single(value: Any) -> bool:
    """Return whether a value is a tensor of real numbers in less than double precision."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
    )
