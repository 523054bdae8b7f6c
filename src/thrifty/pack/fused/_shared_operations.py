"""Operations that several trials compute alone, computed once where their inputs are the same.

Trials over one frozen trunk are compared with themselves alone, and alone each of them computes the
trunk again. Here each trial still runs all of its own code, but an operation of PyTorch takes over
the result that it had for an earlier trial if its inputs are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.pack._frozen import CAN_SHARE, bits, has_views, is_shared, storage_address
from thrifty.pack.identity._settings import allows_tf32, matmul_precision, unusual_precisions

from ._activations import free_memory
from ._record import CREATIONS, draws


aten: Any = torch.ops.aten

MEMORY_SHARE = 0.1
"""The share of the free memory that kept results may take."""


class SharedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of trials that compute one after the other, within ``with`` statements.

    An operation is taken over if function, plain arguments and settings of PyTorch are equal, and
    all tensors are in the same memory, which is copied as soon as anything writes into it. Frozen
    tensors are such (``FrozenTensors``), and results that are kept here become such. So code that
    changes a tensor, even through NumPy, has a tensor of its own then, which is the same as no
    other one. Operations that draw random numbers are not taken over.

    Args:
        device: Where the trials compute. Results take a tenth of its free memory at most.

    Attributes:
        num_shared: How many operations were taken over.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_shared = 0
        self._bytes_left = MEMORY_SHARE * free_memory(device)
        self._results: dict[Hashable, _Result] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        """A tensor over each memory that was compared, which keeps it as it is."""
        self._lent: dict[int, torch.Tensor] = {}

    def lend(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors of a batch over memory that all trials share.

        Args:
            tensors: The leaves of one trial's batch. Those that equal what the first trial had at
                this place, to the last bit, become the same; others are returned as they are.
        """
        out: list[Any] = []
        for place, value in enumerate(tensors):
            if not CAN_SHARE or not _is_plain(value) or not _is_whole(value):
                out.append(value)
                continue
            known = self._lent.setdefault(place, value)
            out.append(_lent(known) if _are_equal(known, value) else value)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written is None:
            return func(*args, **kwargs)
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        found = self._results.get(key)
        if found is not None:
            self.num_shared += 1
            return _taken_over(found, written)
        before = [_place(tensor) for tensor in written]
        out = func(*args, **kwargs)
        if [place[1:] for place in before] == [_place(tensor)[1:] for tensor in written]:
            self._keep(key, out, written)
        return out

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Return what the result of an operation depends on; None if that is not known."""
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, dict(kwargs)):
            return None
        tensors: list[Hashable] = []
        try:
            given = (*(self._part(arg, tensors) for arg in args), self._part(kwargs, tensors))
        except _NotComparableError:
            return None
        if not CAN_SHARE or (not tensors and func not in CREATIONS):
            return None
        return func, _settings(), given

    def _part(self, value: Any, tensors: list[Hashable]) -> Hashable:
        if isinstance(value, torch.Tensor):
            tensors.append(self._tensor_part(value))
            return tensors[-1]
        if isinstance(value, list | tuple):
            return tuple(self._part(each, tensors) for each in value)
        if isinstance(value, dict):
            return tuple((name, self._part(each, tensors)) for name, each in value.items())
        if isinstance(value, float):
            return value.hex()  # 0.0 and -0.0 are equal, and NaN is not
        if value is None or isinstance(value, bool | int | str):
            return type(value), value
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return value
        raise _NotComparableError

    def _tensor_part(self, tensor: torch.Tensor) -> Hashable:
        if not _is_plain(tensor) or not is_shared(tensor):
            raise _NotComparableError
        begin = storage_address(tensor)
        if begin not in self._inputs:
            self._inputs[begin] = torch._lazy_clone(tensor)
        return begin, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(), *_meta(tensor)

    def _keep(self, key: Hashable, out: Any, written: Sequence[torch.Tensor]) -> None:
        """Keep the result of an operation for later trials, if they can take it over."""
        values = list(out) if isinstance(out, list | tuple) else [out]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        if not tensors or not all(_is_plain(each) and _is_whole(each) for each in tensors):
            return
        if written:
            if [*map(id, values)] != [*map(id, written)] or any(map(has_views, tensors)):
                return
        elif any(map(is_shared, tensors)):
            return  # a view of an argument, which costs nothing
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > self._bytes_left:
            return
        self._bytes_left -= num_bytes
        kind = type(out) if isinstance(out, list | tuple) else None
        self._results[key] = _Result(kind=kind, values=tuple(map(_lent, values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The result of an operation, or what it has written into its arguments.

    Attributes:
        kind: The type of a list or tuple of values; None for one value.
        values: The values.
    """

    kind: type | None
    values: tuple[Any, ...]


class _NotComparableError(Exception):
    """An argument of an operation is no plain value, or in memory that anything may change."""


def _taken_over(found: _Result, written: Sequence[torch.Tensor]) -> Any:
    """Return a kept result; what the operation writes into gets the values that it had."""
    if not written:
        values = [*map(_lent, found.values)]
        return values[0] if found.kind is None else found.kind(values)
    for tensor, value in zip(written, found.values, strict=True):
        if has_views(tensor):
            tensor.copy_(value)
        else:
            aten.set_.source_Tensor(tensor, torch._lazy_clone(value))
    return written[0] if found.kind is None else found.kind(written)


def _lent(value: Any) -> Any:
    """Return a tensor over the same memory, which is copied as soon as one writes into it."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch._lazy_clone(value) if value.numel() else torch.empty_like(value)


_UNDEFINED = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
"""Functions whose results have no defined values."""

_WRITE_SILENTLY = {
    aten.native_batch_norm.default: 5,
    aten.cudnn_batch_norm.default: 5,
    aten.miopen_batch_norm.default: 5,
}
"""Functions that write into running statistics although their schema is silent.

They do so if the argument at this place, ``training``, is true.
"""


def _written(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor] | None:
    """Return the tensors that an operation writes into; None if that is not known."""
    silent = _WRITE_SILENTLY.get(func)
    if (
        func.namespace != "aten"
        or func in _UNDEFINED
        or (silent is not None and _argument(func, silent, args, kwargs))
    ):
        return None
    found = [_argument(func, place, args, kwargs) for place in _written_places(func)]
    if all(isinstance(each, torch.Tensor) for each in found):
        return found
    for each in pytree.tree_leaves(found):
        if isinstance(each, torch.Tensor) and is_shared(each):
            each.data_ptr()  # on a GPU, functions for lists write without a copy; this makes one
    return None


@cache
def _written_places(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that an operation writes into."""
    return tuple(
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _argument(func: Any, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(func._schema.arguments[place].name)


def _settings() -> Hashable:
    """Return the settings of PyTorch on which results depend, besides arguments."""
    return (
        torch.get_default_dtype(),
        matmul_precision(),
        unusual_precisions(),
        allows_tf32("cudnn.conv"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all that its memory holds."""
    with torch._C.DisableTorchFunction():
        num_bytes = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and tensor.nbytes == num_bytes


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are alike to the last bit."""
    return _meta(one) == _meta(other) and torch.equal(*map(bits, map(_dense, (one, other))))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _meta(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _place(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return storage_address(tensor), tensor.storage_offset(), *_meta(tensor)
