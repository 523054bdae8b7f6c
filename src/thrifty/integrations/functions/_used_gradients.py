"""Gradients of an earlier epoch that an optimizer has used, and whose values are not kept.

A usual loop clears them before it reads them, so checkpoints need not hold them. A ``UsedGradient``
stands in for such a gradient: it may be cleared, overwritten and added to, and refuses to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core import TaskError


_aten = torch.ops.aten
_CLEARING = frozenset((
    _aten.zero_.default,
    _aten._foreach_zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
    _aten._foreach_copy_.default,
))
"""Operations after which the old values no longer count."""
_ALIASES = frozenset((_aten.detach.default, _aten.alias.default))
_READING = frozenset((
    *("numpy", "__array__", "tolist", "item", "data_ptr", "storage", "untyped_storage"),
    *("__deepcopy__", "__reduce_ex__", "share_memory_"),
))
"""Methods that read values without an operation of torch."""


class UsedGradient(torch.Tensor):
    """The gradient of a parameter, whose values an optimizer has used in an earlier epoch.

    The parameter gets a plain gradient as soon as the loop clears or overwrites this one. This one
    has no memory: what is added to it in place is lost, since the sum is as unknown as its terms.
    The backward pass of a generator adds to the gradients of a discriminator, and a usual loop
    clears them later.

    Args:
        parameter: The parameter.
        name: Its name, for the message.
        is_sparse: Whether the gradient was sparse.
        reads: Gets the message when the loop reads the gradient, since its code may catch errors.
        dtype: That of the gradient; that of the parameter by default.
        device: That of the gradient; that of the parameter by default.
    """

    @staticmethod
    def __new__(
        cls: type[UsedGradient],
        parameter: torch.Tensor,
        *,
        name: str,
        is_sparse: bool,
        reads: list[str],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> UsedGradient:
        made: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=dtype or parameter.dtype,
            device=device or parameter.device,
        )
        # A parameter holds its gradient where Python's garbage collector does not see it.
        made._parameter = ref(parameter)
        made._name, made.was_sparse, made._reads = name, is_sparse, reads
        made._plain = None
        return made

    _parameter: ref[torch.Tensor]
    _name: str
    _reads: list[str]
    _plain: torch.Tensor | None
    """The gradient that has replaced this one."""
    was_sparse: bool
    """Whether the gradient was sparse."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self._name!r} that an optimizer has used in an earlier epoch>"

    @classmethod
    def __torch_function__(  # noqa: PLR0917 -- signature of torch
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle what is no operation of torch, such as attributes."""
        first = args[0] if args else None
        if isinstance(first, UsedGradient):
            if first._plain is not None:
                args, kwargs = tree_map(_replaced, (args, dict(kwargs or {})))
            elif func == _DATA.__get__:
                return first
            elif func == _IS_SPARSE.__get__:
                return first.was_sparse
            elif func == _DATA.__set__:
                first._replace(args[1])
                return None
            elif func is torch.Tensor.__setitem__ and _is_whole(args[1]):
                first._replace(None)
                args = tree_map(_replaced, args)
            elif getattr(func, "__name__", "") in _READING:
                raise first._refusal()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:  # such as from methods of sparse tensors
            if isinstance(first, UsedGradient) and first._plain is None:
                raise first._refusal() from error
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # noqa: PLR0917 -- signature of torch
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Clear the gradient, add to it, or refuse to read it."""
        if func in _CLEARING or (func is _aten.mul_.Tensor and _is_zero(args[1])):
            for each in _used_in(args[0]):
                each._replace(None)
        args, kwargs = tree_map(_replaced, (args, dict(kwargs or {})))
        used = _used_in((args, kwargs))
        if not used:
            return func(*args, **kwargs)
        first = args[0]
        if len(used) > 1 or used[0] is not first:
            raise used[0]._refusal()
        if func in _ALIASES:
            return first
        if func is _aten._to_copy.default:  # by ``module.to``
            return first._like(dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if func is _aten.add.Tensor:  # by a backward pass that creates a graph
            return first._like()
        if func._schema.name.endswith("_"):  # what changes it in place leaves it as unknown
            return first
        raise used[0]._refusal()

    def _replace(self, value: torch.Tensor | None) -> None:
        """Give the parameter another gradient.

        Args:
            value: The gradient; None for zeros.
        """
        if value is self:
            return
        if value is None:
            layout = torch.sparse_coo if self.was_sparse else torch.strided
            value = torch.zeros(self.shape, dtype=self.dtype, device=self.device, layout=layout)
        self._plain = value
        parameter = self._parameter()
        if parameter is not None and parameter.grad is self:
            parameter.grad = value

    def _like(
        self, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> UsedGradient:
        """Return a gradient that is as unknown as this one."""
        parameter = self._parameter()
        return UsedGradient(
            self if parameter is None else parameter,
            name=self._name,
            is_sparse=self.was_sparse,
            reads=self._reads,
            dtype=dtype or self.dtype,
            device=device or self.device,
        )

    def _refusal(self) -> TaskError:
        message = (
            f"the loop reads the gradient of {self._name!r} that an optimizer has used in an "
            "earlier epoch, but used gradients are not in the state, so a trial that goes on from "
            "there would not have it. Clear gradients before the first backward() of each epoch "
            "(optimizer.zero_grad()); or, if training needs them, say "
            "trial.epochs(state, keep_gradients=True)"
        )
        self._reads.append(message)
        return TaskError(message)


_DATA: Any = torch.Tensor.data
_IS_SPARSE: Any = torch.Tensor.is_sparse


def _is_whole(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _used_in(values: Any) -> list[Any]:
    return [each for each in tree_leaves(values) if isinstance(each, UsedGradient)]


def _replaced(value: Any) -> Any:
    """Return what has replaced a gradient; all else as it is."""
    while isinstance(value, UsedGradient) and value._plain is not None:
        value = value._plain
    return value
