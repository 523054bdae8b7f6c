"""Recording of one run of a computation as a flat list of ATen calls, backward pass included.

The tape also needs facts about ATen functions: which can write into a given buffer, and which are
views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from thrifty.pack._frozen import address

from ._fusable import UnfusableError, none_caught, note_refusal


aten: Any = torch.ops.aten


def _relu(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(x, 0, out=out)


def _clone(x: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """Copy ``x`` into the buffer, whose layout and dtype were chosen when it was made."""
    return out.copy_(x)


NARROW, MANY = 32, 64
"""Bounds for many short rows: at most ``NARROW`` long, at least ``MANY`` of them.

torch computes softmax row by row, so it cannot vectorise such input.
"""


def _log_softmax(x: torch.Tensor, dim: int, *half: Any, out: torch.Tensor) -> None:
    """Compute ``aten::_log_softmax`` bit for bit, taking many short rows side by side."""
    if _is_narrow(x, dim):
        out.copy_(aten._log_softmax(x.t().contiguous(), 0, *half).t())
    else:
        aten._log_softmax.out(x, dim, *half, out=out)


def _is_narrow(x: torch.Tensor, dim: int) -> bool:
    return not x.is_cuda and x.dim() == 2 and dim == 1 and len(x) >= MANY and x.shape[1] <= NARROW


_QUICK: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    aten._log_softmax.default: (_log_softmax, ("out",)),
    aten.abs.default: (torch.abs, ("out",)),
    aten.add.Tensor: (torch.add, ("out",)),
    aten.addcmul.default: (torch.addcmul, ("out",)),
    aten.addmm.default: (torch.addmm, ("out",)),
    aten.baddbmm.default: (torch.baddbmm, ("out",)),
    aten.bmm.default: (torch.bmm, ("out",)),
    aten.cat.default: (torch.cat, ("out",)),
    aten.clamp_min.default: (torch.clamp_min, ("out",)),
    aten.clone.default: (_clone, ("out",)),
    aten.div.Tensor: (torch.div, ("out",)),
    aten.exp.default: (torch.exp, ("out",)),
    aten.gather.default: (torch.gather, ("out",)),
    aten.index_select.default: (torch.index_select, ("out",)),
    aten.mean.dim: (torch.mean, ("out",)),
    aten.mm.default: (torch.mm, ("out",)),
    aten.mul.Tensor: (torch.mul, ("out",)),
    aten.neg.default: (torch.neg, ("out",)),
    aten.pow.Tensor_Scalar: (torch.pow, ("out",)),
    aten.relu.default: (_relu, ("out",)),
    aten.rsqrt.default: (torch.rsqrt, ("out",)),
    aten.sigmoid.default: (torch.sigmoid, ("out",)),
    aten.sqrt.default: (torch.sqrt, ("out",)),
    aten.sub.Tensor: (torch.sub, ("out",)),
    aten.sum.dim_IntList: (torch.sum, ("out",)),
    aten.tanh.default: (torch.tanh, ("out",)),
    aten._to_copy.default: (_clone, ("out",)),
}
"""Faster functions to call instead of ATen overloads, with the names of their buffers.

Calling torch's own functions costs half as much as calling their ATen overloads. Some functions are
better computed in another way.
"""

_NO_BUFFERS = frozenset({aten.cudnn_batch_norm.default})
"""Functions whose variant for buffers must not be used.

That of ``cudnn_batch_norm`` frees tensors that are still in use (torch 2.11: the process crashes at
the next garbage collection).
"""

OutVariant = tuple[Callable[..., Any], tuple[str, ...]]


@cache
def out_variant(function: Any, device_type: str) -> OutVariant | None:
    """Return the variant of a function that writes into buffers, and the names of these arguments.

    The result is None if no variant has its own kernel, since generated variants only copy.
    """
    if function in _QUICK:
        return _QUICK[function]
    if function in _NO_BUFFERS:
        return None
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    key = "CUDA" if device_type == "cuda" else "CPU"
    for name in function._overloadpacket.overloads():
        other = getattr(function._overloadpacket, name)
        inputs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = tuple(a.name for a in other._schema.arguments if a.is_out)
        if inputs == wanted and len(outs) == len(function._schema.returns):
            # variants without a native kernel are generated: they call the function and copy
            native = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), key)
            return (other, outs) if native else None
    return None


IN_PLACE_SAFE = frozenset({
    aten.abs.default, aten.add.Tensor, aten.clamp.default, aten.clamp_min.default, aten.cos.default,
    aten.div.Tensor, aten.exp.default, aten.gelu.default, aten.gelu_backward.default,
    aten.log.default, aten.mul.Tensor, aten.neg.default, aten.pow.Tensor_Scalar,
    aten.reciprocal.default, aten.relu.default, aten.rsqrt.default, aten.sigmoid.default,
    aten.sigmoid_backward.default, aten.silu.default, aten.silu_backward.default, aten.sin.default,
    aten.sqrt.default, aten.sub.Tensor, aten.tanh.default, aten.tanh_backward.default,
    aten.threshold_backward.default, aten.leaky_relu.default, aten.leaky_relu_backward.default,
    aten.elu.default,
})  # fmt: skip
"""Element-wise functions, which may overwrite an argument of the same shape."""

VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default, aten._reshape_alias.default})
"""Functions whose result shares memory with their argument although their schema is silent."""

CREATIONS = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default,
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.new_ones.default,
    aten.new_zeros.default, aten.ones.default, aten.ones_like.default, aten.scalar_tensor.default,
    aten.zeros.default, aten.zeros_like.default, aten.linspace.default,
})  # fmt: skip
"""Functions whose result depends only on shapes and plain arguments."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A placeholder for a tensor among the arguments of a call, with the number of its value."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call ``function(*args, **kwargs)``, with ``Ref`` in place of tensors.

    Attributes:
        function: The ATen function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        refs: Numbers of the values that go in.
        outputs: Numbers of the values that come out.
        places: Position of each output among the results, some of which may be None.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    refs: tuple[int, ...]
    outputs: tuple[int, ...]
    places: tuple[int, ...]


def rule_for(table: dict[Any, Any], *names: str) -> Callable[[_Rule], _Rule]:
    """Return a decorator that puts a rule into a table, for each of the named ATen functions."""

    def add(rule: _Rule) -> _Rule:
        for name in names:
            packet = getattr(aten, name, None)
            if packet is not None:  # not in this version of PyTorch
                table[packet] = rule
        return rule

    return add


_Rule = TypeVar("_Rule")


def named_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of its function's schema, with their defaults."""
    schema = call.function._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values.update(zip([a.name for a in schema], call.args, strict=False))
    return {**values, **call.kwargs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Program:
    """A recorded computation, in which each value (a tensor) has a number.

    Attributes:
        calls: The calls in order.
        num_inputs: Number of inputs, which are the values ``0 .. num_inputs - 1``.
        constants: Other tensors that no call made, by value.
        draws: The constants that are drawn again for each step; None for a draw that was not used.
        outputs: Values of the returned tensors; None where None was returned.
        meta: Shape, stride and dtype of each value.
    """

    calls: tuple[Call, ...]
    num_inputs: int
    constants: dict[int, torch.Tensor]
    draws: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    meta: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]

    def readers(self, number: int) -> tuple[str, ...]:
        """Return the names of the functions that compute with a value, or a view of it, in order.

        In another precision or on another device, these are the same; other functions may not be.
        """
        views, out = {number}, []
        for call in self.calls:
            if views.isdisjoint(call.refs):
                continue
            name = call.function.name()
            if name.partition(".")[0] in _MOVING:
                views.update(call.outputs)
            else:
                out.append(name)
        return tuple(out)

    def same_calls(self, other: Program) -> bool:
        """Return whether another recording has the same calls.

        If it has, neither recording depended on chance or on the step.
        """
        mine, theirs = self.calls, other.calls
        return (
            len(mine) == len(theirs)
            and all(_same_call(a, b) for a, b in zip(mine, theirs, strict=True))
            and self.outputs == other.outputs
            and self.meta == other.meta
            and self.constants.keys() == other.constants.keys()
            and all(
                torch.equal(constant, other.constants[i])
                for i, constant in self.constants.items()
                if i not in self.draws
            )
        )


_MOVING = frozenset({
    f"aten::{name}"
    for name in (
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "contiguous",
        "copy_", "detach", "expand", "movedim", "permute", "reshape", "select", "slice", "squeeze",
        "t", "transpose", "unsqueeze", "view",
    )
})  # fmt: skip


def record(
    compute: Callable[[], Sequence[torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    *,
    draws: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> tuple[Program, Sequence[torch.Tensor | None]]:
    """Run ``compute`` once and record it.

    Args:
        compute: The computation.
        inputs: The tensors that are inputs of the program.
        draws: Called after the run; returns the tensors that hold random numbers.

    Returns:
        The program and what ``compute`` returned.

    Raises:
        UnfusableError: The computation drew random numbers, or read values of the inputs.
    """
    recorder = _Recorder(inputs)
    # On a GPU, backward passes run on a thread of their own: the order of calls would depend on it.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with recorder, _Reads(recorder), one_thread, none_caught():
        outputs = compute()
    program = Program(
        calls=tuple(recorder.calls),
        num_inputs=len(inputs),
        constants={
            number: tensor for number, tensor in recorder.foreign.items() if number >= len(inputs)
        },
        draws=tuple(recorder.known(t) for t in draws()),
        outputs=tuple(None if t is None else recorder.value_of(t) for t in outputs),
        meta=tuple(recorder.meta),
    )
    return program, outputs


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records calls and numbers their tensors.

    It identifies a tensor by object, or by memory where autograd has made another object for it. It
    keeps no result alive, so that a recording needs no more memory than a plain step.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.meta: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        self.foreign: dict[int, torch.Tensor] = {}
        self._follows: set[int] = set(range(len(inputs)))
        """Values that depend on the inputs, so that reading them may differ at the next step."""
        self._by_id: dict[int, tuple[TensorWeakRef, int]] = {}
        self._by_memory: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        for tensor in inputs:
            self.foreign[len(self.meta)] = tensor
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs or {}):
            raise note_refusal(UnfusableError(f"it draws random numbers ({func.name()})"))
        kwargs = kwargs or {}
        refs: list[int] = []
        ref_args = tuple(self._refer(a, refs) for a in args)
        ref_kwargs = {name: self._refer(a, refs) for name, a in kwargs.items()}
        follows = not self._follows.isdisjoint(refs)
        if follows and _depends_on_values(func, args, kwargs):
            raise note_refusal(UnfusableError(f"it reads the value of a tensor ({func.name()})"))
        try:
            out = func(*args, **kwargs)
        except Exception as error:  # of other values, it may not be raised
            if follows:
                note_refusal(error)
            raise
        found = out if isinstance(out, list | tuple) else (out,)
        places = tuple(i for i, t in enumerate(found) if isinstance(t, torch.Tensor))
        outputs = [found[i] for i in places]
        before = [self.known(t) for t in outputs]
        numbers = tuple(
            self._add(t) if number is None else number
            for t, number in zip(outputs, before, strict=True)
        )
        for tensor, number in zip(outputs, numbers, strict=True):
            self.meta[number] = _meta(tensor)  # a call may have changed it in place
        if follows:
            self._follows.update(numbers)
        self.calls.append(
            Call(
                function=func,
                args=ref_args,
                kwargs=ref_kwargs,
                refs=tuple(refs),
                outputs=numbers,
                places=places,
            )
        )
        return out

    def _refer(self, value: Any, refs: list[int]) -> Any:
        """Return an argument with ``Ref`` for tensors, adding their numbers to ``refs``."""
        if isinstance(value, torch.Tensor):
            refs.append(self.value_of(value))
            return Ref(refs[-1])
        if isinstance(value, list | tuple):
            return type(value)(self._refer(v, refs) for v in value)
        return value

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor; a tensor that no call made becomes a constant."""
        number = self._find(tensor)
        if number is None:
            self.foreign[len(self.meta)] = tensor
            number = self._add(tensor)
        return number

    def follows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor depends on the inputs."""
        return self._find(tensor) in self._follows

    def known(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a recorded tensor, or None for another tensor."""
        found = self._by_id.get(id(tensor))
        # another object may have had the same id before
        return found[1] if found is not None and found[0]() is tensor else None

    def _find(self, tensor: torch.Tensor) -> int | None:
        number = self.known(tensor)
        if number is not None:
            return number
        found = self._by_memory.get(_memory(tensor))
        # other tensors may have had the same memory before
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            return None
        return found[1]

    def _add(self, tensor: torch.Tensor) -> int:
        number = len(self.meta)
        self.meta.append(_meta(tensor))
        self._by_id[id(tensor)] = (TensorWeakRef(tensor), number)
        if tensor.numel():
            place = _memory(tensor)
            found = self._by_memory.get(place)
            if found is None or found[0].expired():  # type: ignore[no-untyped-call]
                self._by_memory[place] = (_storage(tensor), number)
        return number


class _Reads(TorchFunctionMode):
    """A function mode that refuses reads of input values, which the program would keep forever."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if (
            name in _READS
            and args
            and type(args[0]) in (torch.Tensor, torch.nn.Parameter)
            and self._recorder.follows(args[0])
        ):
            raise note_refusal(UnfusableError(f"it reads the value of a tensor ({name})"))
        return func(*args, **(kwargs or {}))


_READS = frozenset({
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__array__", "__format__", "__contains__", "__dlpack__", "is_nonzero", "allclose", "equal",
    "untyped_storage", "data_ptr", "storage",
})  # fmt: skip
"""Functions that hand values to Python, some of them below torch's dispatcher."""


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call gives a value to Python, or a result whose shape depends on values."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if func is torch.ops.aten.one_hot.default:
        num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return bool(num_classes < 0)
    return True


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers; attention kernels without dropout do not."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (address(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _meta(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return (tensor.shape, tensor.stride(), tensor.dtype)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a reference to a tensor's memory that does not keep it."""
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _same_call(a: Call, b: Call) -> bool:
    return (
        a.function is b.function
        and a.outputs == b.outputs
        and repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))
    )
