"""Rules of narrowing: which rows of its arguments a function reads to compute some of its results.

A rule also says where a result is zero if a gradient among the arguments is zero outside some rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._record import Call, Program, Ref, named_arguments


aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Evenly spaced entries of one dimension of a value.

    Attributes:
        dim: The dimension.
        start: The first of them.
        step: Their distance.
        num: Their number.
    """

    dim: int
    start: int
    step: int = 1
    num: int = 1

    def at(self, dim: int) -> Rows:
        """Return the same entries of another dimension."""
        return replace(self, dim=dim)

    def shape(self, whole: Sequence[int]) -> list[int]:
        """Return the shape that is left of a whole one."""
        return [*whole[: self.dim], self.num, *whole[self.dim + 1 :]]

    def slice_args(self) -> tuple[int, int, int, int]:
        """Return dimension, begin, end and step, as slices take them."""
        return self.dim, self.start, self.start + (self.num - 1) * self.step + 1, self.step


RowsOrAll = Rows | None
"""The rows of a value that are computed; None: not a part of them, but all."""


class Given:
    """A recorded call for which a rule has to say which rows of its arguments it needs.

    It knows the arguments by name, and in which rows gradients among them are zero.

    Attributes:
        wanted: For each output the rows to compute; outputs that nothing reads are not in it.
    """

    def __init__(self, call: Call, program: Program, zeros: Mapping[int, Rows]) -> None:
        self.call = call
        self._meta = program.meta
        self._zeros = zeros
        self._values = named_arguments(call)
        self.packet = call.function.overloadpacket
        self.wanted: dict[int, RowsOrAll] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def shape(self, name: str) -> torch.Size:
        return self.shape_of(self[name].value)

    def shape_of(self, number: int) -> torch.Size:
        return self._meta[number][0]

    def out_shape(self, place: int = 0) -> torch.Size:
        return self._meta[self.call.outputs[place]][0]

    def nonzero(self, name: str) -> RowsOrAll:
        """Return the rows outside of which an argument is zero."""
        ref = self[name]
        return self._zeros.get(ref.value) if isinstance(ref, Ref) else None

    def only_wanted(self) -> RowsOrAll:
        """Return the rows that are wanted of all outputs alike; None if they differ."""
        found = set(self.wanted.values())
        return found.pop() if len(found) == 1 else None

    def reads(self, /, **rows: RowsOrAll) -> dict[int, RowsOrAll] | None:
        """Return what is read of each argument: the given rows, and all of others.

        The result is None if a value is two arguments of which different rows are read.
        """
        out: dict[int, RowsOrAll] = {}
        named = {value.value for name in rows if isinstance(value := self[name], Ref)}
        for name, value in self._values.items():
            if isinstance(value, Ref):
                if out.setdefault(value.value, rows.get(name)) != rows.get(name):
                    return None
            elif isinstance(value, list | tuple) and any(
                isinstance(each, Ref) and each.value in named for each in value
            ):
                return None
        return {ref: out.get(ref) for ref in self.call.refs}


Zeros = Callable[[Given], Sequence[RowsOrAll]]
"""A rule that returns for each output the rows outside of which it is zero."""
Reads = Callable[[Given], "dict[int, RowsOrAll] | None"]
"""A rule that returns what is read of each argument, by its number; None: do not narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What narrowing knows about a function.

    Attributes:
        zeros: Where its results are zero.
        reads: What it reads to compute the wanted rows.
        changes: Arguments that are not tensors, for the narrowed call.
        is_view: Whether its result is a view, so that computing all of it costs nothing.
        needs_dense: Whether it may take the memory of its arguments for dense. PyTorch's derivative
            of a layer normalisation does, and returns wrong numbers for slices.
    """

    reads: Reads
    zeros: Zeros | None = None
    changes: Callable[[Given, RowsOrAll], Mapping[str, Any]] | None = None
    is_view: bool = False
    needs_dense: bool = False


def rule_of(call: Call) -> Rule | None:
    """Return the rule of a function; None if it has none."""
    packet = call.function.overloadpacket
    rule = _RULES.get(packet)
    if rule is not None:
        return rule
    return _POINTWISE if packet in _FINITE and len(call.outputs) == 1 else None


# Functions of elements.


def _pointwise_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows = at.only_wanted()
    if rows is None:
        return None
    out: dict[int, RowsOrAll] = {}
    num_dims = len(at.out_shape())
    for ref in at.call.refs:
        dim = rows.dim - (num_dims - len(at.shape_of(ref)))
        is_spread = dim < 0 or at.shape_of(ref)[dim] == 1
        out[ref] = None if is_spread else rows.at(dim)
    return out


def _pointwise_zeros(at: Given) -> list[RowsOrAll]:
    packet = at.packet
    if packet is aten.mul:
        names = ["self", "other"]
    elif packet in (aten.add, aten.sub):
        first, second = at.nonzero("self"), at.nonzero("other")
        is_same = first == second and isinstance(at["other"], Ref)
        return [first if is_same and at.shape("self") == at.shape("other") else None]
    elif packet in _LINEAR:
        names = ["self"]
    else:
        names = ["grad_output"]  # every derivative is a multiple of it
    num_dims = len(at.out_shape())
    for name in names:
        rows = at.nonzero(name)
        if rows is not None:
            return [rows.at(rows.dim + num_dims - len(at.shape(name)))]
    return [None]


_FINITE = frozenset({
    aten._to_copy, aten.abs, aten.add, aten.addcmul, aten.alias, aten.clamp, aten.clamp_min,
    aten.clone, aten.cos, aten.detach, aten.elu, aten.elu_backward, aten.gelu, aten.gelu_backward,
    aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.mul,
    aten.neg, aten.relu, aten.sigmoid, aten.sigmoid_backward, aten.silu, aten.silu_backward,
    aten.sin, aten.softplus, aten.softplus_backward, aten.sub, aten.tanh, aten.tanh_backward,
    aten.threshold_backward,
})  # fmt: skip
"""Functions of elements that make numbers of numbers, short of an overflow.

Division, logarithms and roots do not, nor does the softmax of a row that a mask hides whole: a row
that nothing reads could be no number, and spoil the gradients of plain PyTorch.
"""
_LINEAR = (aten.neg, aten.clone, aten._to_copy, aten.detach, aten.alias)
_POINTWISE = Rule(reads=_pointwise_reads, zeros=_pointwise_zeros)


# Views.

Move = Callable[..., RowsOrAll]
"""Returns which rows of a view some rows of its argument are, or (``back``) the other way round."""


def _moved_by_view(at: Given, rows: Rows, *, back: bool) -> RowsOrAll:
    old, new = at.shape("self"), at.out_shape()
    return _reshaped(rows, *((new, old) if back else (old, new)))


def _reshaped(rows: Rows, old: Sequence[int], new: Sequence[int]) -> RowsOrAll:
    """Return the rows of a tensor that are some rows of the same tensor in another shape."""
    before, size, after = math.prod(old[: rows.dim]), old[rows.dim], math.prod(old[rows.dim + 1 :])
    lead = 1
    for dim, num in enumerate(new):
        if lead == before and num == size:
            return rows.at(dim)
        if lead == before and (rows.num == 1 or rows.step == 1):  # one block of elements
            inner = math.prod(new[dim + 1 :])
            start, num_rows = rows.start * after, rows.num * after
            if start % inner == 0 and num_rows % inner == 0:
                return Rows(dim=dim, start=start // inner, num=num_rows // inner)
        if lead == before and num == rows.num and num * rows.step == size:
            is_split = rows.start < rows.step and new[dim + 1 : dim + 2] == (rows.step,)
            return Rows(dim=dim + 1, start=rows.start) if is_split else None
        if rows.num == 1 and num % size == 0 and lead * (num // size) == before:
            return Rows(dim=dim, start=rows.start, step=size, num=num // size)
        lead *= num
    return None


def _moved_by_order(at: Given, rows: Rows, *, back: bool) -> RowsOrAll:
    num = len(at.out_shape())
    if at.packet is aten.permute:
        order = [dim % num for dim in at["dims"]]
    else:
        order = list(range(num))
        first, second = (0, num - 1) if at.packet is aten.t else (at["dim0"], at["dim1"])
        order[first % num], order[second % num] = second % num, first % num
    return rows.at(order[rows.dim] if back else order.index(rows.dim))


def _moved_by_unsqueeze(at: Given, rows: Rows, *, back: bool) -> RowsOrAll:
    dim = at["dim"] % len(at.out_shape())
    if back:
        return None if rows.dim == dim else rows.at(rows.dim - (rows.dim > dim))
    return rows.at(rows.dim + (rows.dim >= dim))


def _moved_by_expand(at: Given, rows: Rows, *, back: bool) -> RowsOrAll:
    lead = len(at.out_shape()) - len(at.shape("self"))
    dim = rows.dim - lead if back else rows.dim
    if dim < 0 or at.shape("self")[dim] != at.out_shape()[dim + lead]:
        return None
    return rows.at(dim if back else dim + lead)


def moved(at: Given, rows: Rows) -> RowsOrAll:
    """Return which rows of a view some rows of its argument are; None if they are no rows there."""
    return _MOVES[at.packet](at, rows, back=False)


def _view_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows = at.only_wanted()
    found = None if rows is None else _MOVES[at.packet](at, rows, back=True)
    return None if found is None else at.reads(self=found)


def _view_zeros(at: Given) -> list[RowsOrAll]:
    rows = at.nonzero("self")
    return [None if rows is None else _MOVES[at.packet](at, rows, back=False)]


def _sizes(at: Given, rows: RowsOrAll) -> dict[str, Any]:
    """Return the sizes of the rows of a view."""
    assert rows is not None
    return {"size": rows.shape(at.out_shape())}


_MOVES: dict[Any, Move] = {
    **dict.fromkeys([aten.view, aten._unsafe_view], _moved_by_view),
    **dict.fromkeys([aten.transpose, aten.t, aten.permute], _moved_by_order),
    aten.unsqueeze: _moved_by_unsqueeze,
    aten.expand: _moved_by_expand,
}


# Selections, and their derivatives.


def _selected(at: Given) -> RowsOrAll:
    """Return the rows that a selection takes, or those that its derivative puts."""
    is_derivative = at.packet in (aten.select_backward, aten.slice_backward)
    whole = at["input_sizes"] if is_derivative else at.shape("self")
    dim = at["dim"] % len(whole)
    if at.packet in (aten.select, aten.select_backward):
        return Rows(dim=dim, start=at["index"] % whole[dim])
    start, end, step = slice(at["start"], at["end"], at["step"]).indices(whole[dim])
    num = len(range(start, end, step))
    return Rows(dim=dim, start=start, step=step, num=num) if num else None


def _selection_reads(at: Given) -> dict[int, RowsOrAll] | None:
    return at.reads(self=_selected(at)) if set(at.wanted.values()) == {None} else None


def _selection_changes(at: Given, _rows: RowsOrAll) -> dict[str, Any]:
    """Return the arguments for a selection from the rows that it takes."""
    if at.packet is aten.select:
        return {"index": 0}
    taken = _selected(at)
    assert taken is not None
    return {"start": 0, "end": taken.num, "step": 1}


def _put_zeros(at: Given) -> list[RowsOrAll]:
    return [_selected(at)]


def _put_reads(at: Given) -> dict[int, RowsOrAll] | None:
    is_some = at.only_wanted() is not None and at.only_wanted() == _selected(at)
    return at.reads() if is_some else None


def _put_changes(at: Given, rows: RowsOrAll) -> dict[str, Any]:
    """Return the arguments for putting rows into a tensor of these rows alone."""
    assert rows is not None
    sizes = {"input_sizes": rows.shape(at["input_sizes"])}
    if at.packet is aten.select_backward:
        return {**sizes, "index": 0}
    return {**sizes, "start": 0, "end": rows.num, "step": 1}


SELECTIONS = (aten.select, aten.slice, aten.select_backward, aten.slice_backward)


# Products.


def _product_names(at: Given) -> tuple[str, str]:
    if at.packet in (aten.baddbmm, aten.addmm):
        names = [argument.name for argument in at.call.function._schema.arguments]
        return names[1], names[2]
    return "self", "mat2"


def _shared_rows(at: Given) -> RowsOrAll:
    """Return the entries of the summed dimension outside of which a factor is zero."""
    left, right = _product_names(at)
    last = len(at.out_shape()) - 1
    first, second = at.nonzero(left), at.nonzero(right)
    if first is not None and first.dim == last:
        return first
    if second is not None and second.dim == last - 1:
        return second
    return None


def _product_reads(at: Given) -> dict[int, RowsOrAll] | None:
    left, right = _product_names(at)
    if at[left] == at[right]:
        return None
    last = len(at.out_shape()) - 1
    rows = at.only_wanted()
    if rows is None:
        summed = _shared_rows(at)
        if summed is None:
            return None
        return at.reads(**{left: summed.at(last), right: summed.at(last - 1)})
    given: dict[str, RowsOrAll] = {}
    if rows.dim < last:
        given[left] = rows
    if rows.dim != last - 1:
        given[right] = rows
    if at.packet in (aten.baddbmm, aten.addmm):
        shape = at.shape("self")
        dim = rows.dim - (last + 1 - len(shape))
        given["self"] = None if dim < 0 or shape[dim] == 1 else rows.at(dim)
        if at["self"] in (at[left], at[right]):
            return None
    return at.reads(**given)


def _product_zeros(at: Given) -> list[RowsOrAll]:
    left, right = _product_names(at)
    last = len(at.out_shape()) - 1
    if at.packet in (aten.baddbmm, aten.addmm) or _shared_rows(at) is not None:
        return [None]
    first, second = at.nonzero(left), at.nonzero(right)
    if first is not None:
        return [first]
    return [second if second is not None and second.dim in (0, last) else None]


# Sums.


def _sum_dims(at: Given) -> list[int]:
    num = len(at.shape("self"))
    return sorted(dim % num for dim in at["dim"]) if at["dim"] else list(range(num))


def _before_sum(at: Given, rows: Rows) -> RowsOrAll:
    dims = _sum_dims(at)
    if at["keepdim"]:
        return None if rows.dim in dims else rows
    left = [dim for dim in range(len(at.shape("self"))) if dim not in dims]
    return rows.at(left[rows.dim])


def _sum_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows, nonzero = at.only_wanted(), at.nonzero("self")
    if rows is None:
        is_summed = nonzero is not None and nonzero.dim in _sum_dims(at)
        return at.reads(self=nonzero) if is_summed else None
    before = _before_sum(at, rows)
    return None if before is None else at.reads(self=before)


def _sum_zeros(at: Given) -> list[RowsOrAll]:
    rows, dims = at.nonzero("self"), _sum_dims(at)
    if rows is None or rows.dim in dims:
        return [None]
    return [rows if at["keepdim"] else rows.at(rows.dim - sum(dim < rows.dim for dim in dims))]


# Layer normalisation.


def _norm_dims(at: Given) -> list[int]:
    num = len(at.shape("input"))
    return list(range(num - len(at["normalized_shape"]), num))


def _norm_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows = at.only_wanted()
    if rows is None or rows.dim in _norm_dims(at) or not at["eps"] > 0:
        return None
    return at.reads(input=rows)


def _norm_backward_reads(at: Given) -> dict[int, RowsOrAll] | None:
    """Return what is read: gradients of weights are sums over rows, so only zero ones may lack."""
    rows = at.wanted.get(0, at.nonzero("grad_out"))
    is_zero = rows is not None and rows == at.nonzero("grad_out")
    if rows is None or rows.dim in _norm_dims(at) or not (is_zero or set(at.wanted) == {0}):
        return None
    return at.reads(grad_out=rows, input=rows, mean=rows, rstd=rows)


def _norm_backward_zeros(at: Given) -> list[RowsOrAll]:
    rows = at.nonzero("grad_out")
    is_first = bool(at["output_mask"][0])
    out: list[RowsOrAll] = [None] * len(at.call.outputs)
    if rows is not None and is_first and rows.dim not in _norm_dims(at):
        out[0] = rows
    return out


# Attention on a CPU; what it returns besides is made for its derivative.


def _queries(at: Given, rows: RowsOrAll) -> bool:
    """Return whether rows are queries that see all keys, or all that causal attention lets them."""
    if rows is None or rows.dim != 2 or at["attn_mask"] is not None:
        return False
    return not at["is_causal"] or (rows.num == 1 and rows.start == at.shape("key")[2] - 1)


def _attention_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows = at.only_wanted()
    return at.reads(query=rows) if _queries(at, rows) else None


def _attention_backward_reads(at: Given) -> dict[int, RowsOrAll] | None:
    rows = at.nonzero("grad_out")
    if not _queries(at, rows):
        return None
    return at.reads(grad_out=rows, query=rows, out=rows, logsumexp=rows)


def _attention_backward_zeros(at: Given) -> list[RowsOrAll]:
    rows = at.nonzero("grad_out")
    is_whole = len(at.call.outputs) == 3
    return [rows if _queries(at, rows) and is_whole else None, *[None] * (len(at.call.outputs) - 1)]


def _not_causal(_at: Given, _rows: RowsOrAll) -> dict[str, Any]:
    return {"is_causal": False}


_PRODUCT = Rule(reads=_product_reads, zeros=_product_zeros)
_VIEW = Rule(reads=_view_reads, zeros=_view_zeros, is_view=True, changes=lambda _at, _rows: {})
_RESHAPE = replace(_VIEW, changes=_sizes)
_SELECTION = Rule(reads=_selection_reads, changes=_selection_changes)
_PUT = Rule(reads=_put_reads, zeros=_put_zeros, changes=_put_changes)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys([aten.mm, aten.bmm, aten.addmm, aten.baddbmm], _PRODUCT),
    **dict.fromkeys([aten.view, aten._unsafe_view, aten.expand], _RESHAPE),
    **dict.fromkeys([aten.transpose, aten.t, aten.permute, aten.unsqueeze], _VIEW),
    **dict.fromkeys([aten.select, aten.slice], _SELECTION),
    **dict.fromkeys([aten.select_backward, aten.slice_backward], _PUT),
    aten.sum: Rule(reads=_sum_reads, zeros=_sum_zeros),
    aten.native_layer_norm: Rule(reads=_norm_reads, needs_dense=True),
    aten.native_layer_norm_backward: Rule(
        reads=_norm_backward_reads, zeros=_norm_backward_zeros, needs_dense=True
    ),
    aten._scaled_dot_product_flash_attention_for_cpu: Rule(
        reads=_attention_reads, changes=_not_causal, needs_dense=True
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: Rule(
        reads=_attention_backward_reads,
        zeros=_attention_backward_zeros,
        changes=_not_causal,
        needs_dense=True,
    ),
}
