"""Proofs that a narrower model, padded with zeros, has its own results in a wider one's program.

Comparing numbers cannot show that: in most batches, a maximum over the width is not that of the
padding, and most texts have no word that a smaller vocabulary lacks. So the narrower model is
recorded, too, and its program is followed call by call beside the wider one's. A value is *the
same* in both, or it is *padded*: the narrower model's value is the leading corner of the wider
one's. A rule says what a function gives for such arguments. What has no rule proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack.task._task import Task

from ._packed import corner
from ._record import CREATIONS, Call, Program, Ref, named_arguments, rule_for


aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """A value whose leading corner is the narrower model's.

    Attributes:
        zero: Whether everything outside of the corner is zero.
    """

    zero: bool


Kind = Padded | None
"""What a value is; None: the same in both programs."""
Proof = Sequence[Kind]
"""What each result of a call is."""


class _NoProofError(Exception):
    """Error raised where nothing is proved; its text says what was met."""


def not_proved(wide: Program, own: Program) -> str:
    """Return which call of a wider model's program may see the padding; "" if none does.

    Args:
        wide: The program of the wider model, recorded on the narrower model's tensors, which are
            padded with zeros at their ends.
        own: The program of the narrower model on the same batch.
    """
    try:
        _prove(wide, own)
    except _NoProofError as error:
        return str(error)
    return ""


def reads_outputs_alone(task: Task) -> bool:
    """Return whether a task's metrics are known to depend on the outputs of a model alone.

    That is so for metrics of thrifty's own. Others may read the model itself, such as the share of
    its weights above some size.
    """
    home = next((kind for kind in type(task).__mro__ if "metrics" in vars(kind)), None)
    return (
        home is not None
        and "metrics" not in vars(task)
        and bool(vars(home).get("_metrics_of_outputs", False))
    )


def _prove(wide: Program, own: Program) -> None:
    if len(wide.calls) != len(own.calls) or wide.num_inputs != own.num_inputs:
        raise _NoProofError("another number of calls")
    kinds: dict[int, Kind] = {}
    for number in range(wide.num_inputs):
        kinds[number] = _by_shape(wide, own, number, zero=True)
    _look_at_constants(wide, own, kinds)
    for of_wide, of_own in zip(wide.calls, own.calls, strict=True):
        at = _Pair(of_wide, of_own, wide, own, kinds)
        found = _kinds_of(at)
        for place, (number, kind) in enumerate(zip(of_wide.outputs, found, strict=True)):
            shapes = at.out_shapes(place)
            if (kind is None) != (shapes[0] == shapes[1]):
                raise _NoProofError(str(of_wide.function))
            kinds[number] = kind
    _look_at_outputs(wide, own, kinds)


def _look_at_constants(wide: Program, own: Program, kinds: dict[int, Kind]) -> None:
    if wide.constants.keys() != own.constants.keys() or wide.draws != own.draws:
        raise _NoProofError("other constants")
    for number, constant in wide.constants.items():
        other = own.constants[number]
        is_drawn = number in wide.draws
        if constant.shape != other.shape or not (is_drawn or constant.equal(other)):
            raise _NoProofError("another constant")
        kinds[number] = None


def _look_at_outputs(wide: Program, own: Program, kinds: Mapping[int, Kind]) -> None:
    """Refuse padded results, besides gradients of what is padded."""
    if wide.outputs != own.outputs:
        raise _NoProofError("other results")
    padded = {wide.meta[n][0] for n in range(wide.num_inputs) if kinds[n] is not None}
    for number in wide.outputs:
        if number is not None and kinds[number] is not None and wide.meta[number][0] not in padded:
            raise _NoProofError("a padded result")


def _by_shape(wide: Program, own: Program, number: int, *, zero: bool) -> Kind:
    return None if wide.meta[number][0] == own.meta[number][0] else Padded(zero=zero)


class _Pair:
    """A call of both programs, and what its arguments are.

    Attributes:
        wide: The wider model's call.
        own: The narrower model's call.
    """

    def __init__(
        self, wide: Call, own: Call, of: Program, beside: Program, kinds: Mapping[int, Kind]
    ) -> None:
        if wide.function != own.function or wide.refs != own.refs or wide.places != own.places:
            raise _NoProofError(f"{wide.function} and {own.function}")
        if wide.outputs != own.outputs:
            raise _NoProofError(f"other results of {wide.function}")
        self.wide, self.own = wide, own
        self.kinds = kinds
        self._wide_meta, self._own_meta = of.meta, beside.meta
        self._values = named_arguments(wide)
        self._own_values = named_arguments(own)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    @property
    def packet(self) -> Any:
        return self.wide.function.overloadpacket

    def kind(self, name: str) -> Kind:
        ref = self[name]
        return self.kinds[ref.value] if isinstance(ref, Ref) else None

    def shapes_of(self, number: int) -> tuple[torch.Size, torch.Size]:
        """Return the shape of a value in both programs."""
        return self._wide_meta[number][0], self._own_meta[number][0]

    def dtype_of(self, number: int) -> torch.dtype:
        return self._wide_meta[number][2]

    def out_shapes(self, place: int = 0) -> tuple[torch.Size, torch.Size]:
        return self.shapes_of(self.wide.outputs[place])

    def padded(self, number: int) -> set[int]:
        """Return the dimensions in which a value is padded."""
        wide, own = self.shapes_of(number)
        if len(wide) != len(own):
            raise self.unknown()
        return {dim for dim, (n, m) in enumerate(zip(wide, own, strict=True)) if n != m}

    def padded_in(self, name: str) -> set[int]:
        """Return the dimensions in which an argument is padded, if it is a tensor."""
        ref = self[name]
        return self.padded(ref.value) if isinstance(ref, Ref) else set()

    def num_dims(self, name: str) -> int:
        return len(self.shapes_of(self[name].value)[0])

    def same_arguments(self, *besides: str) -> bool:
        """Return whether all arguments are equal, besides the named ones."""
        return all(
            _equal(value, self._own_values.get(name))
            for name, value in self._values.items()
            if name not in besides
        )

    def laid_out(self, elements: torch.Tensor, number: int, *, of_own: bool) -> torch.Tensor:
        """Return elements with the strides that a value has in one of the programs."""
        strides = (self._own_meta if of_own else self._wide_meta)[number][1]
        if 0 in strides:
            return elements.contiguous()
        return torch.empty_strided(elements.shape, strides, dtype=elements.dtype).copy_(elements)

    def unknown(self) -> _NoProofError:
        return _NoProofError(str(self.wide.function))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


Rule = Callable[[_Pair], Proof]
_RULES: dict[Any, Rule] = {}
_rule = partial(rule_for, _RULES)


def _kinds_of(at: _Pair) -> Proof:
    function = at.wide.function
    if function in CREATIONS:
        return _created(at)
    shapes = [at.out_shapes(place) for place in range(len(at.wide.outputs))]
    if all(at.kinds[ref] is None for ref in at.wide.refs):
        if all(one == other for one, other in shapes) and at.same_arguments():
            return [None] * len(shapes)
        if at.packet not in _MOVES:
            raise at.unknown()
    if function._schema.is_mutable or function.namespace != "aten":
        raise at.unknown()
    rule = _RULES.get(at.packet)
    if rule is None and torch.Tag.pointwise in function.tags:
        rule = _pointwise
    if rule is None:
        raise at.unknown()
    return rule(at)


_ZEROS = frozenset({aten.zeros, aten.zeros_like, aten.new_zeros})


def _created(at: _Pair) -> Proof:
    """Judge functions whose result depends on shapes and plain arguments alone."""
    if not at.same_arguments("size", "end", "n", "m"):
        raise at.unknown()
    if at.packet is aten.linspace and not at.same_arguments():
        raise at.unknown()
    wide, own = at.out_shapes()
    if at.packet is aten.arange and (wide == own) != at.same_arguments():
        raise at.unknown()
    return [None if wide == own else Padded(zero=at.packet in _ZEROS)]


# -- functions of each element -------------------------------------------------------------


def _pointwise(at: _Pair) -> Proof:
    if len(at.wide.outputs) != 1 or not at.same_arguments():
        raise at.unknown()
    wide, own = at.out_shapes()
    for ref in at.wide.refs:
        for dim, pair in _of_output(at, ref).items():
            if pair not in ((1, 1), (wide[dim], own[dim])):
                raise at.unknown()  # the narrower one is repeated where the wider one is not
    if wide == own:
        raise at.unknown()  # what is padded has gone
    return [Padded(zero=_is_zero(at, at.padded(at.wide.outputs[0])))]


def _of_output(at: _Pair, number: int) -> dict[int, tuple[int, int]]:
    """Return an argument's two sizes by dimension of the result that it is broadcast to."""
    lead = len(at.out_shapes()[0]) - len(at.shapes_of(number)[0])
    if lead < 0:
        raise at.unknown()  # a reduction
    wide, own = at.shapes_of(number)
    return {dim + lead: pair for dim, pair in enumerate(zip(wide, own, strict=True))}


def _zeros_of(at: _Pair, number: int) -> set[int]:
    """Return the dimensions of the result in which an argument is padded with zeros."""
    kind = at.kinds[number]
    if kind is None or not kind.zero:
        return set()
    return {dim for dim, (wide, own) in _of_output(at, number).items() if wide != own}


def _is_zero(at: _Pair, padded: set[int]) -> bool:
    """Return whether a function of each element gives zero outside of the corner."""
    packet, refs = at.packet, at.wide.refs
    if packet in (aten.mul, aten.div):
        numbers = refs if packet is aten.mul else [r.value for r in [at["self"]] if _is_ref(r)]
        return padded <= set().union(*(_zeros_of(at, number) for number in numbers))
    if str(packet).endswith("_backward") and _is_ref(at["grad_output"]):
        return padded <= _zeros_of(at, at["grad_output"].value)
    if not all(padded <= _zeros_of(at, number) for number in refs):
        return False
    return _is_zero_at_zero(at)


def _is_zero_at_zero(at: _Pair) -> bool:
    """Return whether the function of a call gives zero if its tensors are zero."""

    def zero(arg: Any) -> Any:
        return torch.zeros((), dtype=at.dtype_of(arg.value)) if isinstance(arg, Ref) else arg

    args, kwargs = pytree.tree_map(zero, (at.wide.args, at.wide.kwargs), is_leaf=_is_ref)
    try:
        with torch.no_grad():
            return bool((at.wide.function(*args, **kwargs) == 0).all())
    except (RuntimeError, TypeError):
        return False


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


@_rule("alias", "detach", "lift_fresh", "_to_copy", "clone")
def _same(at: _Pair) -> Proof:
    if not at.same_arguments():
        raise at.unknown()
    return [at.kind("self")]


# -- functions that move elements ----------------------------------------------------------


@_rule("view", "_unsafe_view", "_reshape_alias", "expand", "permute", "transpose", "t", "squeeze",
       "unsqueeze", "slice", "select", "split", "split_with_sizes", "unbind", "narrow", "cat",
       "stack", "flip", "slice_backward", "select_backward", "repeat", "diagonal")  # fmt: skip
def _moved(at: _Pair) -> Proof:
    """Let both calls move numbers of elements, and look where these are afterwards."""
    try:
        elements = _numbered(at)
        wide = _run(at.wide, {n: at.laid_out(t, n, of_own=False) for n, t in elements.items()})
        corners = {n: corner(t, at.shapes_of(n)[1]) for n, t in elements.items()}
        own = _run(at.own, {n: at.laid_out(t, n, of_own=True) for n, t in corners.items()})
        fills = {n: _may_be_filled(at, n) for n in elements}
        filled = _run(at.wide, {n: at.laid_out(t, n, of_own=False) for n, t in fills.items()})
    except (IndexError, RuntimeError, TypeError):
        raise at.unknown() from None
    out: list[Kind] = []
    for one, other, fill in zip(wide, own, filled, strict=True):
        if one.dim() != other.dim() or not corner(one, other.shape).equal(other):
            raise at.unknown()
        corner(fill, other.shape).zero_()
        out.append(None if one.shape == other.shape else Padded(zero=not fill.any()))
    return out


_MOVES = frozenset(_RULES)
"""Functions whose arguments may say a width."""


def _numbered(at: _Pair) -> dict[int, torch.Tensor]:
    """Return the arguments of the wider call with a number of its own in place of each element."""
    out: dict[int, torch.Tensor] = {}
    begin = 1
    for number in at.wide.refs:
        shape = at.shapes_of(number)[0]
        out[number] = torch.arange(begin, begin + shape.numel()).view(shape)
        begin += shape.numel()
    return out


def _may_be_filled(at: _Pair, number: int) -> torch.Tensor:
    """Return ones where a value of the wider program may be other than zero."""
    kind, (wide, own) = at.kinds[number], at.shapes_of(number)
    out = torch.ones(wide, dtype=torch.int64)
    if kind is not None and kind.zero:
        out.zero_()
        corner(out, own).fill_(1)
    return out


def _run(call: Call, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    def given(arg: Any) -> Any:
        return tensors[arg.value] if isinstance(arg, Ref) else arg

    args, kwargs = pytree.tree_map(given, (call.args, call.kwargs), is_leaf=_is_ref)
    with torch.no_grad():
        found = call.function(*args, **kwargs)
    results = list(found) if isinstance(found, list | tuple) else [found]
    return [results[place].clone() for place in call.places]


# -- functions that add up or compare elements ---------------------------------------------


def _dims(at: _Pair, num: int) -> set[int]:
    dims = at["dim"]
    if dims is None or dims == []:
        return set(range(num))
    return {dim % num for dim in (dims if isinstance(dims, list | tuple) else [dims])}


@_rule("sum")
def _summed(at: _Pair) -> Proof:
    if not at.same_arguments():
        raise at.unknown()
    padded, gone = at.padded_in("self"), _dims(at, at.num_dims("self"))
    kind = at.kind("self")
    assert kind is not None
    if padded & gone and not kind.zero:
        raise at.unknown()
    return [kind if padded - gone else None]


@_rule("mean", "amax", "amin", "var", "logsumexp", "_softmax", "_log_softmax", "cumsum",
       "linalg_vector_norm")  # fmt: skip
def _along(at: _Pair) -> Proof:
    """Judge functions that work along dimensions, all others being left alone."""
    if not at.same_arguments() or at.padded_in("self") & _dims(at, at.num_dims("self")):
        raise at.unknown()
    return [Padded(zero=False)]


@_rule("_softmax_backward_data", "_log_softmax_backward_data")
def _along_backward(at: _Pair) -> Proof:
    padded = at.padded_in("grad_output")
    if not at.same_arguments() or padded != at.padded_in("output"):
        raise at.unknown()
    if padded & _dims(at, at.num_dims("grad_output")):
        raise at.unknown()
    return [Padded(zero=False)]


# -- products ------------------------------------------------------------------------------


@_rule("mm", "bmm")
def _product(at: _Pair) -> Proof:
    return [_of_product(at, "self", "mat2")]


@_rule("addmm", "baddbmm")
def _added_product(at: _Pair) -> Proof:
    names = ("mat1", "mat2") if at.packet is aten.addmm else ("batch1", "batch2")
    product = _of_product(at, *names)
    wide, own = at.out_shapes()
    number = at["self"].value
    for dim, pair in _of_output(at, number).items():
        if pair not in ((1, 1), (wide[dim], own[dim])):
            raise at.unknown()
    if product is None:
        return [None]
    padded = at.padded(at.wide.outputs[0])
    return [Padded(zero=product.zero and padded <= _zeros_of(at, number))]


def _of_product(at: _Pair, first: str, second: str) -> Kind:
    """Return what a product of two matrices is, or of matrices in turn."""
    last = at.num_dims(first) - 1
    left, right = at.padded_in(first), at.padded_in(second)
    zero = [_is_padded_with_zeros(at, name) for name in (first, second)]
    if not at.same_arguments() or left - {last - 1, last} != right - {last - 1, last}:
        raise at.unknown()
    adds_outside = (last in left, last - 1 in right)
    if any(adds_outside) and not (all(adds_outside) and any(zero)):
        raise at.unknown()
    if not at.padded(at.wide.outputs[0]):
        return None
    of_rows = last - 1 not in left or zero[0]
    of_columns = last not in right or zero[1]
    in_turn = not left - {last - 1, last} or any(zero)
    return Padded(zero=of_rows and of_columns and in_turn)


def _is_padded_with_zeros(at: _Pair, name: str) -> bool:
    kind = at.kind(name)
    return kind is not None and kind.zero


@_rule("convolution")
def _convolution(at: _Pair) -> Proof:
    given, weight = at.padded_in("input"), at.padded_in("weight")
    if not at.same_arguments() or at["transposed"] or at["groups"] != 1:
        raise at.unknown()
    if not given <= {1} or not weight <= {0, 1} or (1 in given) != (1 in weight):
        raise at.unknown()
    zero = [_is_padded_with_zeros(at, name) for name in ("input", "weight")]
    if 1 in given and not any(zero):
        raise at.unknown()
    if 0 not in weight:
        return [None]
    has_bias = _is_ref(at["bias"])
    return [Padded(zero=zero[1] and (not has_bias or _is_padded_with_zeros(at, "bias")))]


@_rule("convolution_backward")
def _convolution_backward(at: _Pair) -> Proof:
    grad, given, weight = (at.padded_in(name) for name in ("grad_output", "input", "weight"))
    if not at.same_arguments("bias_sizes") or at["transposed"] or at["groups"] != 1:
        raise at.unknown()
    if not (grad <= {1} and given <= {1} and weight <= {0, 1}):
        raise at.unknown()
    if (1 in grad) != (0 in weight) or (1 in given) != (1 in weight):
        raise at.unknown()
    zero = {n: _is_padded_with_zeros(at, n) for n in ("grad_output", "input", "weight")}
    out: list[Kind] = []
    for place in at.wide.places:
        if place == 0:  # of the input: a sum over channels of the output
            if grad and not (zero["grad_output"] or zero["weight"]):
                raise at.unknown()
            out.append(Padded(zero=zero["weight"]) if given else None)
        elif place == 1:
            is_zero = (not grad or zero["grad_output"]) and (not given or zero["input"])
            out.append(Padded(zero=is_zero) if weight else None)
        else:
            out.append(Padded(zero=zero["grad_output"]) if grad else None)
    return out
