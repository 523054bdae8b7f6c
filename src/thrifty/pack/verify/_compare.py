"""Comparing tensors and states, exactly and within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from thrifty.pack._frozen import is_same_memory
from thrifty.pack.identity import parts_of
from thrifty.pack.identity._settings import allows_tf32


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors and arrays to the last bit; NaN equals NaN.

    >>> same({"w": torch.tensor([1.0, float("nan")])}, {"w": torch.tensor([1.0, float("nan")])})
    True
    >>> same([1, 2], (1, 2))
    False
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and (bool((one == other).all()) or one.tobytes() == other.tobytes())
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return (
            isinstance(one, list) == isinstance(other, list)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:  # noqa: BLE001 (the user's objects may define any comparison)
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout != other.layout:
        return False
    if is_same_memory(one, other):
        return True
    one, other = one.detach(), other.detach()
    if one.layout != torch.strided:
        return all(map(_same_tensors, parts_of(one), parts_of(other)))
    if one.dtype.is_floating_point or one.dtype.is_complex:
        nan = torch.isnan(one) & torch.isnan(other)
        return bool(((one == other) | nan).all())
    return bool(torch.equal(one, other))


GRADIENT_FACTOR = 4.0
"""Times ``eps * sqrt(n)``, the largest relative error of a gradient that counts as rounding."""
MIN_TERMS = 256
"""The least number of terms that a gradient is assumed to sum up."""
SHARE_OF_LARGEST = 0.25
"""The least magnitude assumed for a gradient, as a share of the largest of all parameters."""
ULPS_OF_VALUE = 4.0
"""Units in the last place of a parameter by which two updates may differ."""
ULPS_OF_UPDATE = 64.0
"""Units in the last place of the update itself, since optimizers round several times."""
FINEST = 1e-10
"""The smallest relative tolerance.

Terms may cancel, so even two computations in double precision do not agree more closely.
"""
SMALLEST = 1e-30
"""Differences below this are lost among denormal numbers."""
SMALLEST_LOSS = 1e-2
"""The least magnitude assumed for a loss, which may be a small difference of large terms."""
SLACK = 4.0
"""Rounding explains a difference up to this factor times one that is known to be rounding."""
MOST_KNOWN = 100.0
"""The ratio to what is allowed up to which ``KnownRounding`` notes a difference."""
LOST_DIGITS = 1e-2
"""The relative error from which a gradient alone has lost its digits to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between a trial in a block and the same trial alone, and its size.

    ``is_rounding_possible`` says whether rounding can explain it in principle, so that a second
    computation in double precision is worth its cost. ``gradient_of`` is the name of the parameter
    if a gradient differs.
    """

    what: str
    found: float
    allowed: float
    is_rounding_possible: bool = True
    gradient_of: str | None = None

    @property
    def excess(self) -> float:
        """The ratio of the difference to what is allowed."""
        return self.found / self.allowed if self.allowed else math.inf

    def __str__(self) -> str:
        return (
            f"{self.what} differs by {self.found:.1e} from the trial alone "
            f"(allowed: {self.allowed:.1e})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDifference:
    """A metric that is not the same in a block and alone."""

    name: str
    found: float
    alone: float

    def __str__(self) -> str:
        return f"the metric {self.name!r} is {self.found:g} in the pack and {self.alone:g} alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One step of one trial: its loss, gradients before clipping, and all tensors afterwards.

    A gradient is None if the loss does not depend on the parameter. ``moments`` are the tensors
    that the optimizer keeps, by their name and their parameter's. An optimizer may keep some for
    later steps only, so an error in them would not show in the parameters.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    tensors: Mapping[str, torch.Tensor]
    moments: Mapping[tuple[str, str], torch.Tensor] = field(default_factory=dict)


def compare_step(
    packed: StepTaken, alone: StepTaken, *, before: Mapping[str, torch.Tensor], num_terms: int
) -> Difference | None:
    """Compare a step in a block with the same step alone.

    Args:
        packed: The step in the block.
        alone: The step alone; its update was computed from the gradients in ``packed``.
        before: The trial's tensors before the step.
        num_terms: How many values a gradient sums up, roughly: the numbers in the batch.

    Returns:
        A difference that is too large for rounding; None if there is none. See ``worst``.
    """
    return worst(step_differences(packed, alone, before=before, num_terms=num_terms))


def step_differences(
    packed: StepTaken, alone: StepTaken, *, before: Mapping[str, torch.Tensor], num_terms: int
) -> list[Difference]:
    """Return all differences that are too large for rounding; arguments as ``compare_step``'s."""
    tf32 = rounds_to_tf32(alone.tensors.values())
    packed, alone, before = _on_host(packed, alone, before)
    return [
        *_differences(packed, alone, num_terms=num_terms, tf32=tf32),
        *_tensor_differences(packed, alone, before),
        *_moment_differences(packed, alone),
    ]


def worst(found: Collection[Difference]) -> Difference | None:
    """Return a difference that rounding can never explain, else the largest to what is allowed."""
    hard = (difference for difference in found if not difference.is_rounding_possible)
    return next(hard, None) or max(found, key=lambda d: d.excess, default=None)


class KnownRounding:
    """How large the differences of each gradient were that double precision showed to be rounding.

    Where torch rounds to TF32, nearly every step of a convolutional network has such differences,
    and a second opinion on each of them would take several times as long as the step.
    """

    def __init__(self) -> None:
        self._excess: dict[str, float] = {}

    def note(self, found: Iterable[Difference]) -> None:
        """Note differences that are rounding, unless they are far larger than what is allowed.

        Such are kinks and overflows of one trial, which say nothing about the next one.
        """
        for each in found:
            if each.excess <= MOST_KNOWN:
                self._excess[each.what] = max(each.excess, self._excess.get(each.what, 0.0))

    def covers(self, difference: Difference) -> bool:
        """Return whether a difference is about as large as one that was rounding."""
        known = self._excess.get(difference.what, 0.0)
        return difference.is_rounding_possible and difference.excess <= SLACK * known


def differences(packed: StepTaken, alone: StepTaken, *, num_terms: int) -> Iterator[Difference]:
    """Yield differences of losses and gradients of two steps that are too large for rounding."""
    tf32 = rounds_to_tf32(alone.tensors.values())
    yield from _differences(packed, alone, num_terms=num_terms, tf32=tf32)


def _differences(
    packed: StepTaken, alone: StepTaken, *, num_terms: int, tf32: bool
) -> Iterator[Difference]:
    loss = _loss_difference(packed.loss, alone.loss, num_terms=num_terms, tf32=tf32)
    if loss is not None:
        yield loss
    yield from _gradient_differences(packed, alone, num_terms=num_terms, tf32=tf32)


MOST_SENT = 2**22
"""How many numbers are sent from a GPU to be compared by the CPU.

Comparing them there takes one wait for the GPU instead of several for each tensor. More of them are
compared where they are.
"""


def _on_host(
    packed: StepTaken, alone: StepTaken, before: Mapping[str, torch.Tensor]
) -> tuple[StepTaken, StepTaken, Mapping[str, torch.Tensor]]:
    """Return what is compared as tensors of the CPU, unless it is much."""
    steps = (packed, alone)
    named: dict[Any, torch.Tensor | None] = {("before", n): t for n, t in before.items()}
    for number, step in enumerate(steps):
        named[number, "loss"] = step.loss
        named.update({(number, "gradients", n): t for n, t in step.gradients.items()})
        named.update({(number, "tensors", n): t for n, t in step.tensors.items()})
        named.update({(number, "moments", n): t for n, t in step.moments.items()})
    there = {key: t for key, t in named.items() if t is not None and t.is_cuda}
    if not there or sum(t.numel() for t in there.values()) > MOST_SENT:
        return packed, alone, before
    for dtype in {t.dtype for t in there.values()}:
        group = {key: t for key, t in there.items() if t.dtype == dtype}
        flat = torch.cat([t.detach().reshape(-1) for t in group.values()]).cpu()
        parts = flat.split([t.numel() for t in group.values()])  # type: ignore[no-untyped-call]
        for (key, tensor), part in zip(group.items(), parts, strict=True):
            named[key] = part.view(tensor.shape)

    def step_of(number: int) -> StepTaken:
        loss = named[number, "loss"]
        assert loss is not None
        gradients = {n: named[number, "gradients", n] for n in steps[number].gradients}
        tensors = {n: named[number, "tensors", n] for n in steps[number].tensors}
        moments = {n: named[number, "moments", n] for n in steps[number].moments}
        return StepTaken(
            loss=loss,
            gradients=gradients,
            tensors=cast("Any", tensors),
            moments=cast("Any", moments),
        )

    moved = {n: named["before", n] for n in before}
    return step_of(0), step_of(1), cast("Any", moved)


def compare_metrics(
    packed: Mapping[str, float], alone: Mapping[str, float], *, tolerance: float
) -> MetricsDifference | None:
    """Compare the metrics of one evaluation; ``tolerance`` is relative to the larger value.

    >>> compare_metrics({"mse": 1.0}, {"mse": 1.1}, tolerance=1e-5)
    MetricsDifference(name='mse', found=1.0, alone=1.1)
    """
    for name in dict.fromkeys((*packed, *alone)):
        one, other = packed.get(name, math.nan), alone.get(name, math.nan)
        if name not in packed or name not in alone:
            return MetricsDifference(name=name, found=one, alone=other)
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        allowed = tolerance * max(abs(one), abs(other)) + SMALLEST
        if not (math.isfinite(allowed) and abs(one - other) <= allowed):
            return MetricsDifference(name=name, found=one, alone=other)
    return None


def rounds_to_tf32(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether torch may round float32 numbers to TF32 before it multiplies them.

    By default, it does so for convolutions, whose weights have three dimensions or more.

    Args:
        tensors: The tensors of a model.
    """
    ranks = [tensor.dim() for tensor in tensors if tensor.is_cuda]
    if allows_tf32("cuda.matmul"):
        return bool(ranks)
    return allows_tf32("cudnn.conv") and max(ranks, default=0) > 2


TF32_EPS = 2.0**-10
"""The unit in the last place of TF32, relative to the number."""
TF32_ULPS = 16.0
"""Units of TF32 by which a result may differ. TF32 rounds what is multiplied, not the sums."""


def relative_tolerance(dtype: torch.dtype, *, num_terms: int, tf32: bool = False) -> float:
    """Return the relative error that counts as rounding for a sum of ``num_terms`` terms.

    Args:
        dtype: Type of the numbers.
        num_terms: How many are added.
        tf32: Whether float32 numbers may be rounded to TF32 (see ``rounds_to_tf32``).

    >>> relative_tolerance(torch.float32, num_terms=10_000) < 1e-4
    True
    """
    inexact = dtype.is_floating_point or dtype.is_complex
    eps = torch.finfo(dtype).eps if inexact else 0.0
    rounded = TF32_ULPS * TF32_EPS if tf32 and dtype == torch.float32 else 0.0
    return max(GRADIENT_FACTOR * eps * math.sqrt(max(num_terms, MIN_TERMS)), FINEST) + rounded


def _loss_difference(
    packed: torch.Tensor, alone: torch.Tensor, *, num_terms: int, tf32: bool
) -> Difference | None:
    one, other = float(packed), float(alone)
    if one == other or (math.isnan(one) and math.isnan(other)):
        return None
    if not (math.isfinite(one) and math.isfinite(other)):
        # Whether a sum that overflows is infinite or NaN depends on its order.
        if not (math.isfinite(one) or math.isfinite(other)):
            return None
        return Difference(what="the loss", found=math.inf, allowed=0.0)
    scale = max(abs(one), abs(other), SMALLEST_LOSS)
    allowed = relative_tolerance(
        _coarser(packed.dtype, alone.dtype), num_terms=num_terms, tf32=tf32
    )
    found = abs(one - other)
    if found <= allowed * scale:
        return None
    return Difference(what="the loss", found=found, allowed=allowed * scale)


def _gradient_differences(
    packed: StepTaken, alone: StepTaken, *, num_terms: int, tf32: bool
) -> Iterator[Difference]:
    largest = 0.0
    # NaN times a weight of zero is NaN in one kernel and skipped in another
    diverged = not (math.isfinite(float(packed.loss)) or math.isfinite(float(alone.loss)))
    for name in dict.fromkeys((*alone.gradients, *packed.gradients)):
        mine, own = packed.gradients.get(name), alone.gradients.get(name)
        if mine is None and own is None:
            continue
        if own is None or mine is None:
            # a gradient of zero is equivalent to none
            rest = mine if own is None else own
            assert rest is not None
            size = _largest(rest)
            if size > SMALLEST:
                yield Difference(
                    what=f"the gradient of {name!r}",
                    found=size,
                    allowed=0.0,
                    is_rounding_possible=False,
                )
            continue
        if torch.equal(mine, own):
            continue
        terms = max(num_terms, own.numel())
        tolerance = relative_tolerance(own.dtype, num_terms=terms, tf32=tf32)
        largest = largest or max(
            _largest(g) for g in alone.gradients.values() if g is not None and g.numel()
        )
        # a gradient that cancels out (a bias before a normalization) consists only of rounding
        # errors of the others
        allowed = tolerance * max(_largest(own), SHARE_OF_LARGEST * largest) + SMALLEST
        found = _distance(mine, own, one_may_be_finite=diverged)
        if not found <= allowed:
            yield Difference(
                what=f"the gradient of {name!r}", found=found, allowed=allowed, gradient_of=name
            )


def is_saturated(
    difference: Difference,
    packed: StepTaken,
    alone: StepTaken,
    *,
    in_double: Callable[[], StepTaken],
    num_terms: int,
) -> bool:
    """Return whether the difference of a gradient is one step of a saturated softmax.

    A saturated softmax rounds a probability to 1 or to the number below it, depending on the order
    of its sum. All gradients may be smaller than this step, so their sizes are no scale for it.

    All of this must hold:

    - The losses are small: a softmax that is saturated at a wrong class has a large loss and large
      gradients.
    - The difference is below the rounding of numbers of the size ``SMALLEST_LOSS``.
    - The trial alone gets this gradient wrong, too: in single precision, it lost digits of it.
      Where the trial alone is precise, a difference is an error of the pack, however small.

    Args:
        difference: A difference of losses or gradients.
        packed: The step in a block.
        alone: The step alone.
        in_double: Computes the step alone in double precision.
        num_terms: As for ``compare_step``.
    """
    name = difference.gradient_of
    if name is None or not max(abs(float(packed.loss)), abs(float(alone.loss))) <= SMALLEST_LOSS:
        return False
    own = alone.gradients[name]
    assert own is not None
    tolerance = relative_tolerance(own.dtype, num_terms=num_terms)
    if not difference.found <= tolerance * SMALLEST_LOSS:
        return False
    exact = in_double().gradients[name]
    if exact is None:
        return False
    lost = _distance(own.double(), exact)
    return lost > min(difference.found / SLACK, max(LOST_DIGITS, tolerance) * _largest(exact))


def _tensor_differences(
    packed: StepTaken, alone: StepTaken, before: Mapping[str, torch.Tensor]
) -> Iterator[Difference]:
    for name, own in alone.tensors.items():
        mine = packed.tensors.get(name)
        if mine is None:
            yield Difference(
                what=f"{name!r}, which the pack does not have,",
                found=_largest(own),
                allowed=0.0,
                is_rounding_possible=False,
            )
            continue
        if torch.equal(mine, own):
            continue
        found = _distance(mine, own)
        if not _is_inexact(own):
            yield Difference(
                what=f"{name!r} after the step",
                found=found,
                allowed=0.0,
                is_rounding_possible=False,
            )
            continue
        eps = torch.finfo(own.dtype).eps
        allowed = eps * ULPS_OF_VALUE * _largest(own) + SMALLEST
        if found <= allowed:
            continue
        allowed += eps * ULPS_OF_UPDATE * _distance(own, before[name])
        if not found <= allowed:
            # both updates were computed from the same gradients, so a tie cannot explain this
            yield Difference(
                what=f"{name!r} after the step",
                found=found,
                allowed=allowed,
                is_rounding_possible=packed.gradients.get(name) is None,
            )


def _moment_differences(packed: StepTaken, alone: StepTaken) -> Iterator[Difference]:
    for (moment, name), own in alone.moments.items():
        mine = packed.moments.get((moment, name))
        if mine is None or torch.equal(mine, own):
            continue
        # The gradient and the moment before may cancel each other, but for the rounding of each.
        gradient = packed.gradients.get(name)
        size = _largest(own) + (0.0 if gradient is None else _largest(gradient))
        allowed = torch.finfo(own.dtype).eps * ULPS_OF_UPDATE * size + SMALLEST
        found = _distance(mine, own)
        if not found <= allowed:
            yield Difference(
                what=f"the optimizer's {moment!r} of {name!r} after the step",
                found=found,
                allowed=allowed,
                is_rounding_possible=False,
            )


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    if not tensor.numel():
        return 0.0
    size = float(tensor.abs().max())
    if math.isfinite(size):
        return size
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _distance(one: torch.Tensor, other: torch.Tensor, *, one_may_be_finite: bool = False) -> float:
    """Return the largest difference of two tensors; infinite if only one is finite somewhere.

    With ``one_may_be_finite``, only places where both are finite count.
    """
    if one.shape != other.shape:
        return math.inf
    if not _is_inexact(other):
        return float((one.double() - other.double()).abs().max())
    difference = (one - other).abs()
    largest = float(difference.max())
    if math.isfinite(largest):
        return largest
    # Whether a sum that overflows is infinite or NaN depends on its order.
    finite = torch.isfinite(one), torch.isfinite(other)
    both_lost = ~(finite[0] & finite[1]) if one_may_be_finite else ~(finite[0] | finite[1])
    same = (one == other) | both_lost
    difference = torch.where(same, torch.zeros_like(difference), difference)
    return float(torch.nan_to_num(difference, nan=math.inf).max())


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max((one, other), key=lambda d: torch.finfo(d).eps)
