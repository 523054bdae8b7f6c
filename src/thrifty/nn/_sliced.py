"""Products with only the kept groups of a weight, and whether they may replace layers."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as torch_module

from thrifty.core import LayerError, plain_logger

from . import _block_kernels
from ._masks import KeptGroups


def gyro_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: KeptGroups | None = None,
    outputs: KeptGroups | None = None,
) -> Tensor:
    """Apply ``F.linear`` to each part of a batch, with the rows and columns that the part keeps.

    Source: block-wise gyro dropout (Lee et al., MLSys 2022), by dense products of gathered blocks.
    On CUDA, Triton kernels read the blocks in place, if Triton is installed.

    Args:
        x: Shape ``(parts, samples, ..., inputs kept)``.
        weight: Weight of the whole layer, shape ``(out_features, in_features)``.
        bias: Bias of the whole layer, shape ``(out_features,)``.
        inputs: The inputs that ``x`` has; None for all.
        outputs: The outputs to compute; None for all.

    Returns:
        Shape ``(parts, samples, ..., outputs kept)``.

    Raises:
        LayerError: ``x`` does not have as many features as are kept.

    >>> x, weight = torch.ones(2, 3, 2), torch.eye(4)
    >>> kept = KeptGroups(torch.tensor([[0], [1]]), group_size=2, num_groups=2)
    >>> gyro_linear(x, weight, inputs=kept).sum((0, 1))
    tensor([3., 3., 3., 3.])
    """
    wanted = weight.shape[1] if inputs is None else inputs.num_units
    if x.shape[-1] != wanted:
        raise LayerError(f"x has {x.shape[-1]} features, and {wanted} are kept")
    rows = x.flatten(1, -2)
    if runs_in_place(rows, weight, bias, inputs=inputs, outputs=outputs):
        dtype = _product_dtype(x)
        if dtype != x.dtype or dtype != weight.dtype:
            rows, weight = rows.to(dtype), weight.to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        out: Tensor = _InPlace.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, inputs, outputs
        )
        return out if x.dim() == 3 else out.reshape(*x.shape[:-1], out.shape[-1])
    places = _places(weight, num_parts=len(x), inputs=inputs, outputs=outputs)
    blocks = weight.reshape(-1, weight.shape[1] // (1 if inputs is None else inputs.num_groups))
    if _by_parts(rows, blocks):
        out = _ByParts.apply(rows, blocks, places)  # type: ignore[no-untyped-call]
    else:
        chosen = _gathered(rows, weight, inputs=inputs, outputs=outputs)
        out = torch.bmm(rows, chosen.transpose(1, 2))
    if bias is not None:
        # Under autocast, the product may have another dtype.
        out = out + _of_outputs(bias, outputs).to(out.dtype)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def gyro_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: KeptGroups | None = None,
    outputs: KeptGroups | None = None,
    **options: Any,
) -> Tensor:
    """Apply ``F.conv2d`` to each part of a batch, with the channels that the part keeps.

    Args:
        x: Shape ``(parts, samples, channels kept, height, width)``.
        weight: Weight of the whole layer, shape ``(out_channels, in_channels, height, width)``.
        bias: Bias of the whole layer, shape ``(out_channels,)``.
        inputs: The channels that ``x`` has; None for all.
        outputs: The channels to compute; None for all.
        options: ``stride``, ``padding`` and ``dilation`` of ``F.conv2d``.

    Returns:
        Shape ``(parts, samples, channels kept, height, width)``.

    Raises:
        LayerError: ``x`` does not have as many channels as are kept.

    >>> x, weight = torch.ones(2, 3, 2, 5, 5), torch.ones(4, 4, 3, 3)
    >>> kept = KeptGroups(torch.tensor([[0], [1]]), group_size=2, num_groups=2)
    >>> gyro_conv2d(x, weight, inputs=kept, outputs=kept, padding=1).shape
    torch.Size([2, 3, 2, 5, 5])
    """
    wanted = weight.shape[1] if inputs is None else inputs.num_units
    if x.shape[2] != wanted:
        raise LayerError(f"x has {x.shape[2]} channels, and {wanted} are kept")
    places = _places(weight, num_parts=len(x), inputs=inputs, outputs=outputs)
    num_blocks = weight.shape[0] * (1 if inputs is None else inputs.num_groups)
    chosen = weight.reshape(num_blocks, -1).index_select(0, places.flatten())
    kernels = chosen.reshape(len(x), -1, wanted, *weight.shape[2:])
    biases = [None] * len(x) if bias is None else _of_outputs(bias, outputs).expand(len(x), 1, -1)
    return torch.stack([
        F.conv2d(part, kernel, None if own is None else own[0], **options)
        for part, kernel, own in zip(x, kernels, biases, strict=True)
    ])


def _by_parts(x: Tensor, blocks: Tensor) -> bool:
    # Code that compiles, or changes dtypes on the way, must consist of torch's own functions.
    return (
        x.device.type == "cpu"
        and x.dtype == blocks.dtype
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def multiplies_exactly(x: Tensor) -> bool:
    """Return whether products of ``x`` are in float32, without TF32."""
    half = torch.is_autocast_enabled(x.device.type)
    return x.dtype == torch.float32 and not half and _block_kernels.precision() == "ieee"


def runs_in_place(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: KeptGroups | None,
    outputs: KeptGroups | None,
) -> bool:
    """Return whether ``gyro_linear`` reads the kept groups of a weight where they are."""
    if not (x.is_cuda or _block_kernels.INTERPRETED) or torch.compiler.is_compiling():
        return False
    dtype = _product_dtype(x)
    return (
        all(each is None or dtype in {each.dtype, _autocast_dtype(each)} for each in (weight, bias))
        and not is_transformed(x)
        and _block_kernels.fits(x, weight, dtype=dtype, inputs=inputs, outputs=outputs)
    )


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that ``F.linear`` multiplies in."""
    return _autocast_dtype(x) or x.dtype


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast converts a tensor to; None if it does not."""
    # Autocast leaves double precision alone.
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _places(
    weight: Tensor, *, num_parts: int, inputs: KeptGroups | None, outputs: KeptGroups | None
) -> Tensor:
    """Return the places of each part's kept blocks; int64, shape ``(parts, blocks)``.

    A block holds the weights from one group of inputs to one output, side by side in memory.
    """
    num_groups = 1 if inputs is None else inputs.num_groups
    every = torch.arange(weight.shape[0], device=weight.device)
    rows = every.expand(num_parts, -1) if outputs is None else outputs.units()
    if inputs is None:
        return rows
    return (rows.unsqueeze(-1) * num_groups + inputs.groups.unsqueeze(1)).flatten(1)


def _of_outputs(bias: Tensor, outputs: KeptGroups | None) -> Tensor:
    """Return the bias of the kept outputs; shape ``(parts or 1, 1, outputs kept)``."""
    if outputs is None:
        return bias.reshape(1, 1, -1)
    units = outputs.units()
    return bias.index_select(0, units.flatten()).reshape(len(units), 1, -1)


class _ByParts(Function):
    """Products of one part after the other, as an autograd function.

    The gathered matrix is small, stays in the cache, and is not kept for the backward pass: on a
    CPU, fresh memory costs more than gathering again.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 -- apply() takes no keywords
        ctx: Any, x: Tensor, blocks: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, blocks, places)
        chosen = _buffer(blocks, places)
        out = x.new_empty(*x.shape[:2], chosen.numel() // x.shape[-1])
        for part, place, target in zip(x, places, out, strict=True):
            torch.index_select(blocks, 0, place, out=chosen)
            torch.mm(part, chosen.view(-1, x.shape[-1]).t(), out=target)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, blocks, places = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_x, wants_blocks, _ = ctx.needs_input_grad
        chosen = _buffer(blocks, places)
        matrix = chosen.view(grad.shape[-1], x.shape[-1])
        of_x = torch.empty_like(x) if wants_x else None
        of_blocks = torch.zeros_like(blocks) if wants_blocks else None
        for number, (part, place, back) in enumerate(zip(x, places, grad, strict=True)):
            if of_x is not None:
                torch.index_select(blocks, 0, place, out=chosen)
                torch.mm(back, matrix, out=of_x[number])
            if of_blocks is not None:
                torch.mm(back.t(), part, out=matrix)
                of_blocks.index_add_(0, place, chosen)
        return of_x, of_blocks, None


class _InPlace(Function):
    """Products by kernels that read the kept groups of a weight in place.

    For the gradient of an input of many rows, gathered copies are faster, see
    ``_block_kernels.gathers``.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 -- apply() takes no keywords
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: KeptGroups | None,
        outputs: KeptGroups | None,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.inputs, ctx.outputs = inputs, outputs
        size = weight.shape[0] if outputs is None else outputs.num_units
        ctx.save_for_backward(x, weight)
        return _block_kernels.product(
            x, weight, bias, contracted=inputs, kept=outputs, size=size, transposed=False
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        inputs, outputs = ctx.inputs, ctx.outputs
        of_x = of_weight = of_bias = None
        if wants_x and _block_kernels.gathers(x):
            of_x = torch.bmm(grad, _gathered(x, weight, inputs=inputs, outputs=outputs))
        elif wants_x:
            of_x = _block_kernels.product(
                grad, weight, None,
                contracted=outputs, kept=inputs, size=x.shape[-1], transposed=True,
            )  # fmt: skip
        if wants_weight or wants_bias:
            of_weight, of_bias = _block_kernels.weight_gradient(
                grad, x, weight,
                inputs=inputs, outputs=outputs, with_weight=wants_weight, with_bias=wants_bias,
            )  # fmt: skip
        return of_x, of_weight, of_bias, None, None


def _gathered(
    x: Tensor, weight: Tensor, *, inputs: KeptGroups | None, outputs: KeptGroups | None
) -> Tensor:
    """Return the kept blocks of each part; shape ``(parts, outputs kept, inputs kept)``."""
    places = _places(weight, num_parts=len(x), inputs=inputs, outputs=outputs)
    blocks = weight.reshape(-1, weight.shape[1] // (1 if inputs is None else inputs.num_groups))
    return blocks.index_select(0, places.flatten()).reshape(len(x), -1, x.shape[-1])


def _buffer(blocks: Tensor, places: Tensor) -> Tensor:
    return blocks.new_empty(places.shape[1], blocks.shape[1])


logger = plain_logger(__name__)

_EVERY = 1000
"""Batches between two checks of a group of layers, on average.

A check costs about two batches.
"""

_NUM_NUDGES = 6
_NUDGE_ULPS = 16.0
"""How far inputs are moved, in units in the last place: about the rounding of a long sum."""
_SLACK = 4.0

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Split(Protocol):
    """A batch in parts."""

    x: Tensor

    def whole(self) -> Tensor:
        """Return the whole batch."""
        ...


S = TypeVar("S", bound=Any)


@dataclass(slots=True)
class _Record:
    """What the checks know about one group of layers."""

    layers: tuple[weakref.ref[nn.Module], ...]
    rng: random.Random
    left: int = 0
    differs: bool = False

    def is_of(self, group: Sequence[nn.Module]) -> bool:
        return all(ref() is layer for ref, layer in zip(self.layers, group, strict=True))


@dataclass(slots=True)
class _Records:
    """Records by position and kind of input."""

    known: dict[tuple[Any, ...], _Record] = field(default_factory=dict)


# Not an attribute: models that differ in it alone are equal, and copies do not contain it.
_records: weakref.WeakKeyDictionary[nn.Module, _Records] = weakref.WeakKeyDictionary()


def is_plain(layer: nn.Module) -> bool:
    """Return whether calling the layer does what its class says and nothing else."""
    own = vars(layer)
    for name in _HOOKS:  # faster than any(): this is asked many times in each step
        if own.get(name):
            return False
    return not (
        "forward" in own or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def is_transformed(x: Tensor) -> bool:
    """Return whether values cannot be compared: on the meta device, or inside ``torch.func``."""
    if x.is_meta:
        return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_trusted(
    owner: nn.Module, group: Sequence[nn.Module], *, position: int, now: S, quick: Callable[[S], S]
) -> bool:
    """Return whether ``quick`` may replace the layers of a group; compare both now and then.

    Args:
        owner: Model that contains the layers.
        group: Layers to replace.
        position: Position of the first layer.
        now: Input of the layers.
        quick: Computation that replaces them.
    """
    if torch.compiler.is_compiling():
        return True
    known = _records.setdefault(owner, _Records()).known
    key = (
        position,
        len(group),
        now.x.dim(),
        now.x.dtype,
        torch.is_autocast_enabled(now.x.device.type),
    )
    record = known.get(key)
    if is_captured(now.x):  # nothing can be compared now: replace what has been compared
        return record is not None and record.is_of(group) and not record.differs
    if record is None or not record.is_of(group):
        record = known[key] = _Record(tuple(map(weakref.ref, group)), random.Random(position))
    if record.differs:
        return False
    if record.left:
        record.left -= 1
        return True
    difference = _difference(group, now, quick)
    if difference == "":
        return True  # values that are not finite tell nothing: check the next batch
    record.left = record.rng.randrange(1, 2 * _EVERY)
    if difference is not None:
        record.differs = True
        names = ", ".join(type(layer).__name__ for layer in group)
        logger.warning(
            "layers %d to %d (%s) run as they are from now on: without what is dropped, %s",
            position, position + len(group) - 1, names, difference,
        )  # fmt: skip
    return difference is None


def _difference(group: Sequence[nn.Module], now: S, quick: Callable[[S], S]) -> str | None:
    """Describe what differs between the layers and their replacement.

    Returns:
        None if nothing differs; an empty text if that cannot be told.
    """
    parameters = [p for layer in group for p in layer.parameters() if _is_followed(p)]

    def result(run: Callable[[S], S] | None, *, nudge: int = 0) -> tuple[Tensor | None, ...]:
        x = now.x.detach()
        if nudge:
            # In float32: sixteen units in the last place of bfloat16 are 12 % of a number.
            wide = torch.promote_types(x.dtype, torch.float32)
            places = torch.arange(x.numel(), device=x.device, dtype=wide).view_as(x)
            size = _NUDGE_ULPS * torch.finfo(wide).eps
            x = (x.to(wide) * (1 + size * (nudge * places).cos())).to(x.dtype)
        x.requires_grad_(now.x.requires_grad)
        # A layer may work in place (``ReLU(inplace=True)``), on the data or on a leaf of autograd.
        split = replace(now, x=x.clone())
        out = split.whole() if run is None else run(split).whole()
        for layer in group if run is None else ():
            out = layer(out)
        return (out.detach(), *_gradients(out, [x, *parameters]))

    # Checkpointing counts the tensors that are saved within it; those of a comparison must not
    # count.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        ours, plain = result(quick), result(None)
        assert plain[0] is not None
        if not plain[0].isfinite().all():
            return ""
        gaps = list(map(_relative_gap, ours, plain))
        # Under autocast, the output has another dtype than the input.
        allowed = [math.sqrt(torch.finfo(plain[0].dtype).eps)] * len(gaps)
        for nudge in range(1, _NUM_NUDGES + 1):
            if all(gap <= most for gap, most in zip(gaps, allowed, strict=True)):
                return None
            # An activation's kink turns rounding into a jump of the gradient, in the layers, too.
            moved = map(_relative_gap, result(None, nudge=nudge), plain)
            allowed = [max(m, _SLACK * n) for m, n in zip(allowed, moved, strict=True)]
    names = [
        "the output",
        "the gradient of the input",
        *["the gradient of a parameter"] * len(parameters),
    ]
    for name, gap, most in zip(names, gaps, allowed, strict=True):
        if not gap <= most:
            return f"{name} differs by {gap:.2g} of its size"
    return None


def _gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [each for each in inputs if each.requires_grad]
    if not wanted or not out.requires_grad:
        return [None] * len(inputs)
    # A direction that no symmetry hides, and that takes no number from a random stream.
    towards = torch.arange(out.numel(), device=out.device).cos().to(out.dtype).view_as(out)
    found = iter(torch.autograd.grad(out, wanted, towards, allow_unused=True))
    return [next(found) if each.requires_grad else None for each in inputs]


def _relative_gap(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape:
        return math.inf
    if not theirs.numel() or torch.equal(ours, theirs):
        return 0.0
    gap, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return gap / size if size else math.inf


def _is_followed(parameter: nn.Parameter) -> bool:
    """Return whether the gradient can be requested without calling the user's code."""
    return parameter.requires_grad and not parameter._backward_hooks


def is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing can be looked at."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _same(x: Any) -> Any:
    return x
