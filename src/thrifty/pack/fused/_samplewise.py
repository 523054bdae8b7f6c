"""Proofs that a recorded operation computes each sample of a batch from that sample alone.

A value is *shared* if it does not depend on the batch at all, or *per sample* if one of its
dimensions counts the samples and each sample's part depends on that sample alone. A rule says what
the results of an ATen function are, given what its arguments are. A function without a rule proves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ._record import CREATIONS, Call, Program, Ref, named_arguments, rule_for
from .rules._layers import QUANTIZED_OPERATORS


aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that does not depend on the batch.

    Attributes:
        uniform: Dimensions along which all of its entries are equal.
    """

    uniform: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSample:
    """A value of which each sample has its own part, computed from that sample alone.

    Attributes:
        dim: The dimension that counts the samples.
        inner: Number of entries of one sample along that dimension; those of the first sample come
            first, as after merging batch and time.
    """

    dim: int
    inner: int = 1

    def at(self, dim: int) -> PerSample:
        """Return the same with another dimension."""
        return PerSample(dim=dim, inner=self.inner)


Kind = Shared | PerSample
Proof = Sequence[Kind | None] | None
"""What each result of a call is; None where nothing is proved."""


class _Arguments:
    """The arguments of one call, by the names of its schema, and what they are."""

    def __init__(
        self, call: Call, program: Program, kinds: Mapping[int, Kind | None], num_rows: int
    ) -> None:
        self.call = call
        self.num_rows = num_rows
        self._meta = program.meta
        self._kinds = kinds
        self._values = named_arguments(call)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def kind(self, ref: Any) -> Kind | None:
        return self._kinds.get(ref.value) if isinstance(ref, Ref) else Shared()

    def shape(self, ref: Ref) -> torch.Size:
        return self._meta[ref.value][0]

    def out_shape(self, place: int = 0) -> torch.Size:
        return self._meta[self.call.outputs[place]][0]

    def is_shared(self, *names: str) -> bool:
        """Return whether none of the named arguments depends on the batch."""
        return all(isinstance(self.kind(self[name]), Shared) for name in names)

    def rows_of(self, name: str) -> tuple[PerSample, torch.Size] | None:
        """Return kind and shape of an argument that is per sample; None for any other."""
        kind = self.kind(self[name])
        return (kind, self.shape(self[name])) if isinstance(kind, PerSample) else None

    def all_as(self, kind: Kind | None) -> Proof:
        """Return a proof that each result is of one kind."""
        return None if kind is None else [kind] * len(self.call.outputs)


Rule = Callable[[_Arguments], Proof]
_RULES: dict[Any, Rule] = {}
_rule = partial(rule_for, _RULES)


def kinds_of(
    call: Call, program: Program, kinds: Mapping[int, Kind | None], *, num_rows: int
) -> Proof:
    """Return what the results of a call are, given what its arguments are.

    Args:
        call: The call; none of its arguments is of unknown kind.
        program: The program that it belongs to.
        kinds: What the values before it are.
        num_rows: Number of samples in the batch.

    Returns:
        One entry for each result, or None if nothing is proved.
    """
    at = _Arguments(call, program, kinds, num_rows)
    function = call.function
    if function in CREATIONS:  # only the shape of an argument counts
        return [_created(function, at.out_shape())]
    are_shared = all(isinstance(kinds[ref], Shared) for ref in call.refs)
    if function.namespace != "aten":  # anything may be in it
        is_known = are_shared and function.overloadpacket._qualified_op_name in QUANTIZED_OPERATORS
        return at.all_as(Shared()) if is_known else None
    if are_shared:
        return _of_shared(at)
    rule = _RULES.get(function.overloadpacket)
    if rule is None and torch.Tag.pointwise in function.tags:
        rule = _pointwise
    found = None if rule is None else rule(at)
    return found if found is None or _fits(found, at) else None


def size_args(call: Call, program: Program, kind: Kind | None) -> Any:
    """Return the arguments of a call without what only says how many samples a batch has.

    Args:
        call: A call whose results ``kinds_of`` has proved to be per sample.
        program: The program that it belongs to.
        kind: What its first result is.
    """
    packet = call.function.overloadpacket
    if packet in _SIZED and isinstance(kind, PerSample):
        shape = list(program.meta[call.outputs[0]][0])
        return (call.args[0], sample_shape(shape, kind))
    if packet is aten.native_group_norm:
        return (*call.args[:3], *call.args[4:])
    return (call.args, call.kwargs)


def sample_shape(shape: Sequence[int], kind: PerSample) -> tuple[Any, ...]:
    """Return a shape with the entries of one sample in place of those of all samples."""
    return (*shape[: kind.dim], ("sample", kind.inner), *shape[kind.dim + 1 :])


def _fits(found: Sequence[Kind | None], at: _Arguments) -> bool:
    return all(
        not isinstance(kind, PerSample)
        or (
            kind.dim < len(at.out_shape(place))
            and at.out_shape(place)[kind.dim] == kind.inner * at.num_rows
        )
        for place, kind in enumerate(found)
    )


# -- values that do not depend on the batch ------------------------------------------------

_FILLED = frozenset({
    aten.full, aten.full_like, aten.new_full, aten.new_ones, aten.new_zeros, aten.ones,
    aten.ones_like, aten.zeros, aten.zeros_like,
})  # fmt: skip


def _created(function: Any, shape: torch.Size) -> Shared:
    is_filled = function.overloadpacket in _FILLED
    return Shared(uniform=frozenset(range(len(shape))) if is_filled else frozenset())


def _of_shared(at: _Arguments) -> Proof:
    """Return along which dimensions the result of a call on shared values is uniform."""
    packet, shape = at.call.function.overloadpacket, at.out_shape() if at.call.outputs else ()
    uniform: Iterable[int] = ()
    if len(at.call.outputs) == 1 and packet is aten.expand:
        before = at.shape(at["self"])
        lead = len(shape) - len(before)
        old = _uniform(at, at["self"])
        uniform = [
            d for d in range(len(shape))
            if d < lead or d - lead in old or before[d - lead] != shape[d]
        ]  # fmt: skip
    elif len(at.call.outputs) == 1 and torch.Tag.pointwise in at.call.function.tags:
        uniform = [d for d in range(len(shape)) if all(_is_level(at, r, d) for r in _refs(at))]
    elif packet in (aten.alias, aten.detach, aten.lift_fresh, aten._to_copy):
        uniform = _uniform(at, at["self"])
    elif packet is aten.unsqueeze:
        dim = at["dim"] % len(shape)
        uniform = [dim, *(d + (d >= dim) for d in _uniform(at, at["self"]))]
    elif packet is aten.slice:
        uniform = _uniform(at, at["self"])
    return at.all_as(Shared(uniform=frozenset(uniform)))


def _refs(at: _Arguments) -> list[Ref]:
    return [Ref(number) for number in at.call.refs]


def _uniform(at: _Arguments, ref: Ref) -> frozenset[int]:
    kind = at.kind(ref)
    return kind.uniform if isinstance(kind, Shared) else frozenset()


def _is_level(at: _Arguments, ref: Ref, dim: int) -> bool:
    """Return whether a shared argument has the same entries at all places along a dimension.

    ``dim`` is a dimension of the result, whose shape the argument is broadcast to.
    """
    own = dim - (len(at.out_shape()) - len(at.shape(ref)))
    return own < 0 or at.shape(ref)[own] == 1 or own in _uniform(at, ref)


# -- rules ---------------------------------------------------------------------------------


def _broadcast(at: _Arguments, refs: Iterable[Any]) -> Kind | None:
    """Return what a function of arguments that are broadcast to the result's shape gives."""
    refs = [ref for ref in refs if isinstance(ref, Ref)]
    num = len(at.out_shape())
    found: PerSample | None = None
    for ref in refs:
        kind = at.kind(ref)
        if isinstance(kind, PerSample):
            moved = kind.at(kind.dim + num - len(at.shape(ref)))
            if found not in (None, moved):
                return None
            found = moved
    if found is None:
        return Shared()
    shared = [ref for ref in refs if isinstance(at.kind(ref), Shared)]
    return found if all(_is_level(at, ref, found.dim) for ref in shared) else None


def _pointwise(at: _Arguments) -> Proof:
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *[at.shape(ref) for ref in _refs(at)]
    )
    if any(at.out_shape(place) != shape for place in range(len(at.call.outputs))):
        return None  # such as a loss that is reduced
    return at.all_as(_broadcast(at, _refs(at)))


@_rule("alias", "detach", "lift_fresh", "_to_copy")
def _same(at: _Arguments) -> Proof:
    return at.all_as(at.kind(at["self"]))


_RULES[aten.masked_fill] = _pointwise


@_rule("copy_")
def _copied(at: _Arguments) -> Proof:
    return at.all_as(_broadcast(at, [at["src"]]))


@_rule("view", "_unsafe_view", "_reshape_alias")
def _viewed(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None:
        return None
    kind, shape = rows
    new = at.out_shape()
    before, after = math.prod(shape[: kind.dim]), math.prod(shape[kind.dim + 1 :])
    of_sample = kind.inner * after
    found = [
        PerSample(dim=dim, inner=size // at.num_rows)
        for dim, size in enumerate(new)
        if math.prod(new[:dim]) == before
        and size % at.num_rows == 0
        and (size // at.num_rows) * math.prod(new[dim + 1 :]) == of_sample
    ]
    found.sort(key=lambda each: each.inner != kind.inner)
    return at.all_as(found[0]) if found else None


@_rule("t", "transpose", "permute")
def _permuted(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None:
        return None
    kind, shape = rows
    order = list(range(len(shape)))
    if at["dims"] is not None:
        order = [d % len(shape) for d in at["dims"]]
    elif len(shape) > 1:
        one, other = (at["dim0"], at["dim1"]) if at["dim0"] is not None else (0, 1)
        order[one], order[other] = order[other], order[one]
    return at.all_as(kind.at(order.index(kind.dim)))


@_rule("unsqueeze")
def _unsqueezed(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None:
        return None
    dim = at["dim"] % len(at.out_shape())
    return at.all_as(rows[0].at(rows[0].dim + (dim <= rows[0].dim)))


@_rule("squeeze")
def _squeezed(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None or at["dim"] is None:
        return None
    kind, shape = rows
    gone = [d for d in _dims(at["dim"], len(shape)) if shape[d] == 1]
    return None if kind.dim in gone else at.all_as(kind.at(kind.dim - _num_below(gone, kind.dim)))


@_rule("expand")
def _expanded(at: _Arguments) -> Proof:
    return at.all_as(_broadcast(at, [at["self"]]))


@_rule("slice")
def _sliced(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is not None and at.out_shape() == rows[1]:
        return at.all_as(rows[0] if at["step"] == 1 else None)  # all of it, as in ``x[:, 0]``
    return _along(at)


@_rule("split", "split_with_sizes", "chunk", "narrow", "glu", "cumsum", "flip", "roll",
       "_softmax", "_log_softmax", "sort", "topk", "softmax", "log_softmax")  # fmt: skip
def _along(at: _Arguments) -> Proof:
    """Judge functions that work along dimensions and keep all dimensions."""
    rows = at.rows_of("self")
    if rows is None:
        return None
    dims = at["dim"] if at["dim"] is not None else at["dims"]
    if dims is None or dims == [] or rows[0].dim in _dims(dims, len(rows[1])):
        return None
    return at.all_as(rows[0])


@_rule("select", "unbind")
def _selected(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None:
        return None
    kind, shape = rows
    dim = at["dim"] % len(shape)
    return None if dim == kind.dim else at.all_as(kind.at(kind.dim - (dim < kind.dim)))


@_rule("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "any", "all", "prod", "argmax",
       "argmin", "max", "min", "linalg_vector_norm", "norm", "var_mean", "std_mean")  # fmt: skip
def _reduced(at: _Arguments) -> Proof:
    if len(at.call.refs) != 1:  # max and min of two tensors
        return _pointwise(at) if torch.Tag.pointwise in at.call.function.tags else None
    rows = at.rows_of("self")
    dims = at["dim"]
    if rows is None or dims is None or dims == []:
        return None
    kind, shape = rows
    gone = _dims(dims, len(shape))
    if kind.dim in gone:
        return None
    return at.all_as(kind if at["keepdim"] else kind.at(kind.dim - _num_below(gone, kind.dim)))


@_rule("cat", "stack")
def _joined(at: _Arguments) -> Proof:
    parts, num = at["tensors"], len(at.out_shape())
    dim = at["dim"] % num
    is_new = int(at.call.function.overloadpacket is aten.stack)
    kinds = [at.kind(part) for part in parts]
    own = {kind for kind in kinds if isinstance(kind, PerSample)}
    if len(own) != 1:
        return None
    (kind,) = own
    for part, each in zip(parts, kinds, strict=True):
        if isinstance(each, Shared) and kind.dim not in each.uniform:
            return None
        if len(at.shape(part)) != num - is_new:  # an empty part, which torch leaves out
            return None
    if is_new:
        return at.all_as(kind.at(kind.dim + (dim <= kind.dim)))
    return None if dim == kind.dim else at.all_as(kind)


@_rule("mm", "addmm", "bmm", "baddbmm")
def _product(at: _Arguments) -> Proof:
    names = ("mat1", "mat2") if at["mat1"] is not None else ("self", "mat2")
    if at.call.function.overloadpacket in (aten.bmm, aten.baddbmm):
        names = ("batch1", "batch2") if at["batch1"] is not None else ("self", "mat2")
    kind = _of_product(at, at[names[0]], at[names[1]])
    if kind is None or names[0] == "self":
        return at.all_as(kind)
    bias = at.kind(at["self"])  # what is added
    if isinstance(bias, Shared):
        return at.all_as(kind) if _is_level(at, at["self"], kind.dim) else None
    is_same = isinstance(bias, PerSample) and at.shape(at["self"]) == at.out_shape()
    return at.all_as(kind) if is_same and bias == kind else None


def _of_product(at: _Arguments, one: Ref, other: Ref) -> PerSample | None:
    num = len(at.out_shape())
    left, right = at.kind(one), at.kind(other)
    if isinstance(left, PerSample) and isinstance(right, PerSample):
        return left if num == 3 and left.dim == right.dim == 0 and left == right else None
    if isinstance(left, PerSample):
        if left.dim == num - 1 or (left.dim == 0 and num == 3 and not _is_flat(at, other)):
            return None
        return left
    if isinstance(right, PerSample):
        if right.dim == num - 2 or (right.dim == 0 and num == 3 and not _is_flat(at, one)):
            return None
        return right
    return None


def _is_flat(at: _Arguments, ref: Ref) -> bool:
    """Return whether a shared argument is the same for each entry of its first dimension."""
    return at.shape(ref)[0] == 1 or 0 in _uniform(at, ref)


@_rule("convolution")
def _convolution(at: _Arguments) -> Proof:
    rows = at.rows_of("input")
    if rows is None or rows[0].dim != 0 or not at.is_shared("weight", "bias"):
        return None
    return at.all_as(rows[0])


@_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d",
       "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_nearest2d",
       "upsample_bilinear2d", "reflection_pad2d", "replication_pad2d", "avg_pool1d",
       "max_pool2d")  # fmt: skip
def _pooled(at: _Arguments) -> Proof:
    rows = at.rows_of("self" if at["self"] is not None else "input")
    return None if rows is None or rows[0].dim != 0 else at.all_as(rows[0])


@_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(at: _Arguments) -> Proof:
    rows = at.rows_of("input")
    if rows is None or not at.is_shared("weight", "bias"):
        return None
    kind, shape = rows
    return at.all_as(kind) if kind.dim < len(shape) - len(at["normalized_shape"]) else None


@_rule("native_group_norm")
def _group_norm(at: _Arguments) -> Proof:
    rows = at.rows_of("input")
    if rows is None or rows[0].dim != 0 or not at.is_shared("weight", "bias"):
        return None
    return at.all_as(rows[0])


@_rule("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def _batch_norm(at: _Arguments) -> Proof:
    rows = at.rows_of("input")
    others = ("weight", "bias", "running_mean", "running_var")
    if rows is None or rows[0].dim == 1 or at["training"] or not at.is_shared(*others):
        return None
    if at["running_mean"] is None or at["running_var"] is None:
        return None
    return [rows[0], *[None] * (len(at.call.outputs) - 1)]


@_rule("constant_pad_nd")
def _padded(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None or rows[0].dim >= len(rows[1]) - len(at["pad"]) // 2:
        return None
    return at.all_as(rows[0])


@_rule("embedding")
def _embedded(at: _Arguments) -> Proof:
    rows = at.rows_of("indices")
    return at.all_as(rows[0]) if rows is not None and at.is_shared("weight") else None


@_rule("gather")
def _gathered(at: _Arguments) -> Proof:
    rows, index = at.rows_of("self"), at.kind(at["index"])
    if rows is None or rows[0] != index or at["dim"] % len(rows[1]) == rows[0].dim:
        return None
    return at.all_as(rows[0])


@_rule("index_select")
def _index_selected(at: _Arguments) -> Proof:
    rows = at.rows_of("self")
    if rows is None or not at.is_shared("index") or at["dim"] % len(rows[1]) == rows[0].dim:
        return None
    return at.all_as(rows[0])


@_rule("index")
def _indexed(at: _Arguments) -> Proof:
    """Judge indexing by one tensor, as in a table of embeddings."""
    given = [(d, ref) for d, ref in enumerate(at["indices"]) if ref is not None]
    if len(given) != 1:
        return None
    ((dim, index),) = given
    own, by = at.kind(at["self"]), at.kind(index)
    if isinstance(own, Shared) and isinstance(by, PerSample):
        return at.all_as(by.at(dim + by.dim))
    if isinstance(own, PerSample) and isinstance(by, Shared) and dim != own.dim:
        return at.all_as(own.at(own.dim + (len(at.shape(index)) - 1) * (dim < own.dim)))
    return None


@_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
       "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
       "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def _attention(at: _Arguments) -> Proof:
    kinds = {at.kind(at[name]) for name in ("query", "key", "value")}
    if len(kinds) != 1 or at["dropout_p"]:
        return None
    (kind,) = kinds
    mask = at["attn_mask"] if at["attn_mask"] is not None else at["attn_bias"]
    if not isinstance(kind, PerSample) or kind.dim != 0:
        return None
    if mask is not None:
        given, num = at.kind(mask), len(at.out_shape())
        if isinstance(given, PerSample):
            is_right = given == kind and len(at.shape(mask)) == num
        else:
            is_right = _is_level(at, mask, 0)
        if not is_right:
            return None
    return [kind, *[None] * (len(at.call.outputs) - 1)]


_SIZED = frozenset({aten.view, aten._unsafe_view, aten._reshape_alias, aten.expand})
"""Functions whose arguments may say how many samples a batch has."""


def _dims(dims: Any, num: int) -> list[int]:
    return [d % num for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _num_below(dims: Sequence[int], dim: int) -> int:
    return sum(d < dim for d in dims)


# -- cost ----------------------------------------------------------------------------------


def num_operations(call: Call, program: Program) -> int:
    """Return how many multiplications and additions a product, convolution or attention takes.

    The result is 0 for all other functions, whose time is that of reading their arguments.
    """
    packet = call.function.overloadpacket
    if not call.outputs:
        return 0
    out = program.meta[call.outputs[0]][0]
    shapes = [program.meta[ref][0] for ref in call.refs]
    if packet in (aten.mm, aten.bmm):
        return 2 * out.numel() * shapes[0][-1]
    if packet in (aten.addmm, aten.baddbmm):
        return 2 * out.numel() * shapes[1][-1]
    if packet is aten.convolution:
        return 2 * out.numel() * math.prod(shapes[1][1:])
    if "scaled_dot_product" in str(packet):
        return 4 * out.numel() * shapes[1][-2]
    return 0
