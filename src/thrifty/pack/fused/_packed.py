"""Parameters of several models in one tensor, and their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ._fusable import DRAWS, RULES, UnfusableError, note_refusal, within_rule
from ._randomness import Randomness, TrialValue


ALIGNMENT = 16
"""Alignment of each tensor in a row, in elements.

For 4-byte numbers this is a 64-byte boundary, so that vector loads never straddle one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One parameter: its name, its shape and the position in a row at which it begins."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Position in a row at which it ends."""
        return self.start + self.shape.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trained parameters of a model, one after the other.

    Attributes:
        segments: The parameters, in the order of a row.
        width: P, the length of a row.
        dtype: The dtype of all parameters.
    """

    segments: tuple[Segment, ...]
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, torch.Tensor]]) -> Layout:
        """Return the layout for some parameters, given with their names.

        Raises:
            UnfusableError: The parameters differ in dtype, or have half precision.
        """
        segments, start = [], 0
        types = {parameter.dtype for _, parameter in parameters}
        if len(types) > 1:
            raise UnfusableError(
                f"its parameters have several types ({', '.join(sorted(map(str, types)))})"
            )
        if types & {torch.bfloat16, torch.float16}:
            raise UnfusableError("its parameters have half precision")
        for name, parameter in parameters:
            segments.append(Segment(name=name, shape=parameter.shape, start=start))
            start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        dtype = parameters[0][1].dtype if parameters else torch.float32
        return cls(segments=tuple(segments), width=start, dtype=dtype)

    def within(self, names: Iterable[str]) -> list[str]:
        """Return the given names that are in a row, in the order of the row."""
        wanted = set(names)
        return [segment.name for segment in self.segments if segment.name in wanted]

    def range_of(self, names: Iterable[str]) -> tuple[int, int] | None:
        """Return where adjacent parameters begin and end in a row; None if none is in it."""
        wanted = set(names)
        places = [n for n, segment in enumerate(self.segments) if segment.name in wanted]
        if not places:
            return None
        first, last = places[0], places[-1]
        assert len(places) == last - first + 1, "parameters of one group lie side by side"
        is_last = last + 1 == len(self.segments)
        return self.segments[first].start, self.width if is_last else self.segments[last + 1].start

    def views(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each parameter, ``[K, *shape]``, as a view of ``rows``, ``[K, P]``."""
        for segment in self.segments:
            yield rows[:, segment.start : segment.stop].view(rows.shape[0], *segment.shape)

    def row_views(
        self, row: torch.Tensor, shapes: Mapping[str, torch.Size] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield each parameter as a view of one row, ``[P]``.

        Given the ``shapes`` of a narrower model, views are the leading corners of these shapes.
        """
        for segment in self.segments:
            view = row[segment.start : segment.stop].view(segment.shape)
            shape = segment.shape if shapes is None else shapes[segment.name]
            yield view if shape == segment.shape else corner(view, shape)

    def parts(
        self, shapes: Mapping[str, torch.Size], *, within: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Return the ranges of a row that hold all numbers of a narrower model: one at least.

        A parameter that is narrower in its first dimension alone lies in one piece. Of others, the
        range of the whole is returned.

        Args:
            shapes: The shapes of its parameters, by name.
            within: A range of columns, at the borders of parameters; the ranges count from there.
        """
        out: list[tuple[int, int]] = []
        ends = [segment.start for segment in self.segments[1:]] + [self.width]
        for segment, end in zip(self.segments, ends, strict=True):
            if not within[0] <= segment.start < within[1]:
                continue
            shape = shapes[segment.name]
            is_one_piece = shape != segment.shape and shape[1:] == segment.shape[1:]
            start, stop = segment.start, segment.start + shape.numel() if is_one_piece else end
            if out and out[-1][1] == start - within[0]:
                start = out.pop()[0] + within[0]
            out.append((start - within[0], stop - within[0]))
        return out

    def holds(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a model with these parameters fits into the corners of this layout's."""
        return all(
            segment.name in parameters
            and parameters[segment.name].dim() == len(segment.shape)
            and all(
                n <= m for n, m in zip(parameters[segment.name].shape, segment.shape, strict=True)
            )
            for segment in self.segments
        )


def corner(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the leading corner of a tensor: the part that belongs to a narrower model."""
    return tensor[tuple(slice(n) for n in shape)]


READS = frozenset({
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__",
    "is_nonzero", "allclose", "equal", "nonzero",
})  # fmt: skip
"""Functions that read the value of a tensor."""


class Group:
    """What the trials of a pack have in common while their loss is computed.

    Attributes:
        size: K, the number of trials.
        rows: Weights of the rows of the batch, ``[K, B]``, where batches differ in size: 1/b for
            the b real rows of a trial, 0 for padding. None where all rows are real.
        batch: B where ``rows`` are given, else -1.
        randomness: The source of random draws.
        channels_last: Whether images are stored as ``[batch, height, width, K, channels]`` in
            memory, on which some convolutions are faster.
    """

    def __init__(
        self,
        size: int,
        *,
        randomness: Randomness,
        rows: torch.Tensor | None = None,
        channels_last: bool = False,
    ) -> None:
        self.size = size
        self.channels_last = channels_last
        self.randomness = randomness
        self.rows = rows
        self.batch = -1 if rows is None else rows.shape[1]

    def pack(self, value: torch.Tensor, axis: int = 0) -> Packed:
        """Return a packed tensor; ``axis`` is the trial dimension of ``value``."""
        return Packed(self, value, axis)

    def first(self, x: Any) -> torch.Tensor:
        """Return the plain tensor with the trials as its first dimension.

        A tensor or number that all trials share is expanded.
        """
        if type(x) is not Packed:
            return torch.as_tensor(x).expand(self.size, *torch.as_tensor(x).shape)
        return x.value if x.axis == 0 else x.value.movedim(x.axis, 0)

    def second(self, x: Any) -> torch.Tensor:
        """Return the plain tensor with the trials as its second dimension, after the batch."""
        if type(x) is not Packed:
            rows: torch.Tensor = x.unsqueeze(1)
            return rows.expand(x.shape[0], self.size, *x.shape[1:])
        value = x.value if x.axis == 1 else x.value.movedim(x.axis, 1)
        if self.channels_last and value.dim() == 5:
            # this permutation is its own inverse: [B, K, C, H, W] <-> [B, H, W, K, C]
            return value.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
        return value


class Packed(torch.Tensor):
    """K tensors in one object; see the module docstring."""

    def __new__(cls, _: Group, value: torch.Tensor, axis: int = 0) -> Packed:
        """Create a wrapper without its own memory, which C++ treats as the tensor it looks like."""
        whole = value.shape
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch.Tensor._make_wrapper_subclass(
                cls,
                torch.Size(whole[:axis] + whole[axis + 1 :]),
                dtype=value.dtype,
                device=value.device,
                requires_grad=False,
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise note_refusal(UnfusableError(f"{func} reached a packed tensor below autograd"))

    def __init__(self, group: Group, value: torch.Tensor, axis: int = 0) -> None:
        self.group = group
        self.value = value
        self.axis = axis

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return apply(func, args, kwargs or {})

    # -- the view of one trial ----------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape that one trial sees."""
        whole = self.value.shape
        return torch.Size(whole[: self.axis] + whole[self.axis + 1 :])

    def size(self, dim: int | None = None) -> Any:
        """Return what ``torch.Tensor.size`` gives for one trial."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions that one trial sees."""
        return self.value.dim() - 1

    def numel(self) -> int:
        """Return the number of elements of one trial's tensor."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(apply(torch.Tensor.unbind, (self,), {}))

    def dim(self) -> int:
        """Return the number of dimensions that one trial sees."""
        return self.value.dim() - 1

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({self.group.size} x {tuple(self.shape)})"

    def __hash__(self) -> int:
        return id(self)


_SAME_FOR_ALL = frozenset({
    "dtype", "device", "layout", "is_cuda", "is_cpu", "requires_grad", "is_floating_point",
    "is_complex", "is_sparse", "is_quantized", "is_mps", "is_meta", "element_size", "is_leaf",
    "grad_fn", "get_device", "is_nested", "itemsize", "is_xpu", "is_mkldnn",
})  # fmt: skip


def _same(name: str) -> property:
    """Return a property that each trial's tensor shares with the plain tensor that holds all."""
    return property(lambda self: getattr(self.value, name))


def _refuse(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise note_refusal(_reads(name))

    return call


def _reads(name: str) -> UnfusableError:
    return UnfusableError(f"it reads the value of a tensor ({name})")


for _name in _SAME_FOR_ALL:
    setattr(Packed, _name, _same(_name))
for _name in READS:
    setattr(Packed, _name, _refuse(_name))


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(self: Packed, *args: Any, **kwargs: Any) -> Any:
        return apply(method, (self, *args), kwargs)

    call.__name__ = name
    return call


for _name in (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
    "itruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "neg", "abs", "invert",
    "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem",
):  # fmt: skip
    setattr(Packed, f"__{_name}__", _operator(f"__{_name}__"))


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a torch function to packed tensors by its rule, or by ``torch.vmap`` without a rule.

    Raises:
        UnfusableError: The function cannot be applied in either way.
    """
    with within_rule():
        return _applied(func, args, kwargs)


def _applied(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = RULES.get(func)
    group = group_of(args, kwargs)
    if rule is None:
        _note_numbers(args, kwargs)
    name = getattr(func, "__name__", str(func))
    if name in READS:
        raise _reads(name)
    try:
        if rule is not None:
            return rule(group, *args, **kwargs)
        return by_vmap(group, func, args, kwargs)
    except UnfusableError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if "called random operation" in reason:
            reason = "it draws random numbers, and in a fused step only dropout may"
        if "must only return Tensors" in reason:
            reason = "it returns something else than tensors"
        raise UnfusableError(f"{name}: {reason or type(error).__name__}") from error


class EachItsOwnMask(TorchFunctionMode):
    """A mode in which each trial draws its own random numbers for a tensor that all trials share.

    From there on, the computation is no longer the same for all trials.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = DRAWS.get(func)
        if draws is None or not draws(*args, **kwargs):
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not any(type(leaf) is Packed for leaf in leaves):
            first = next(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
            leaves[first] = self._group.pack(self._group.first(leaves[first]).contiguous())
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return apply(func, args, kwargs)


def _note_numbers(args: Any, kwargs: Any) -> None:
    """Note each ``TrialValue`` argument: the function gets one trial's number for all trials."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, TrialValue):
            leaf.built_in.add(leaf.path)


def group_of(args: Any, kwargs: Any) -> Group:
    """Return the group that the packed tensors among some arguments belong to."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if type(leaf) is Packed:
            return leaf.group
    raise AssertionError("no packed tensor among the arguments")


def by_vmap(
    group: Group, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a function to each trial through ``torch.vmap``, with autograd outside of it."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is Packed]

    def one(*values: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        its_args, its_kwargs = pytree.tree_unflatten(filled, spec)
        return func(*its_args, **its_kwargs)

    out = torch.vmap(one, in_dims=tuple(leaves[i].axis for i in places), randomness="error")(*[
        leaves[i].value for i in places
    ])
    return pytree.tree_map_only(torch.Tensor, group.pack, out)
