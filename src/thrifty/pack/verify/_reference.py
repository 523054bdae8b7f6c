"""Steps alone, the reference of checks: how often they run, and how long they take."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch

from thrifty.pack._frozen import cheap_copy
from thrifty.pack._state import named_tensors, step_counters

from ._compare import SLACK, TF32_EPS, StepTaken, differences, is_saturated, rounds_to_tf32


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """A copy of a trial's parameters and buffers by name, and of its optimizer's state.

    ``moments`` has the optimizer's state by parameter name.
    """

    tensors: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, Any]]

    def copied(self) -> OwnState:
        """Return a copy that may be changed."""
        return OwnState(
            tensors={name: cheap_copy(t) for name, t in self.tensors.items()},
            moments={
                name: {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in moments.items()
                }
                for name, moments in self.moments.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAlone(StepTaken):
    """A step alone, and how long its forward pass, backward pass and update took.

    ``is_first`` says that the optimizer created its state in this step, which takes extra time.
    """

    seconds: float
    is_first: bool = False


def own_state(
    model: torch.nn.Module, moments: Mapping[str, Mapping[str, Any]] | None = None
) -> OwnState:
    """Copy a model's tensors; ``moments`` is its optimizer's state, by parameter name."""
    return OwnState(tensors=own_tensors(model), moments=moments or {}).copied()


def own_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name, each once, without autograd."""
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


def moment_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of numbers in an optimizer's state, by their name and their parameter's.

    Args:
        state: The state by parameter name. Counts of steps are left out.
    """
    return {
        (key, name): value
        for name, held in state.items()
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and key != "step"
    }


def step_alone(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: OwnState,
    *,
    compute_loss: Callable[[], torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    clip: Callable[[Iterable[torch.nn.Parameter]], None],
) -> StepAlone:
    """Take one step of a module from a copy of its state, and leave the module as it was.

    The update is computed from ``gradients`` (those of the block), so that it can be compared by
    itself: optimizers such as Adam turn the rounding of a small gradient into a whole step.

    Args:
        model: The trial's own module; its tensors are exchanged for the copies and put back.
        optimizer: The trial's own optimizer, with the options of the step. Its state is not kept.
        state: The copy to start from. It is changed.
        compute_loss: Seeds the random streams and computes the loss of the step's batch.
        gradients: The gradients computed by the block, before clipping.
        clip: Clips the gradients of the parameters before the update.
    """
    with exchanged(model, state.tensors):
        try:
            return _step(
                model, optimizer, state, compute_loss=compute_loss, gradients=gradients, clip=clip
            )
        finally:
            optimizer.state.clear()


def gradients_alone(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    compute_loss: Callable[[], torch.Tensor],
) -> StepTaken:
    """Compute loss and gradients of a module with other tensors, and leave the module as it was.

    Args:
        model: The trial's own module.
        tensors: The parameters and buffers to use instead. The module may change buffers.
        compute_loss: Seeds the random streams and computes the loss of the step's batch.
    """
    with exchanged(model, tensors), torch.enable_grad():
        model.train()
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return StepTaken(
            loss=loss.detach(),
            gradients={n: p.grad for n, p in model.named_parameters() if p.requires_grad},
            tensors=own_tensors(model),
        )


@contextmanager
def exchanged(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Exchange a module's tensors; on exit it is as it was, without gradients."""
    own: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    homes = {name: tensor.data for name, tensor in own.items()}
    training = {module: module.training for module in model.modules()}
    try:
        for name, tensor in own.items():
            tensor.grad = None  # first: it has the type of the data
            tensor.data = tensors[name]
        yield
    finally:
        for name, tensor in own.items():
            tensor.grad = None
            tensor.data = homes[name]
        for module, mode in training.items():
            module.training = mode


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: OwnState,
    *,
    compute_loss: Callable[[], torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    clip: Callable[[Iterable[torch.nn.Parameter]], None],
) -> StepAlone:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, moments in state.moments.items():
        optimizer.state[parameters[name]] = dict(moments)
    if isinstance(optimizer, torch.optim.Adagrad):
        _begin_adagrad(optimizer)
    model.train()
    began = _now(parameters)
    with torch.enable_grad():
        optimizer.zero_grad(set_to_none=True)
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
    forward_s = _now(parameters) - began
    own = {name: p.grad for name, p in parameters.items() if p.requires_grad}
    for name, parameter in parameters.items():
        found = gradients.get(name)
        if own.get(name) is not None and found is not None:
            # a copy, because clipping changes it in place
            parameter.grad = found.reshape(parameter.shape).clone()
    began = _now(parameters)
    clip(model.parameters())
    optimizer.step()
    with torch.no_grad():
        for counter in step_counters(model).values():
            counter += 1
    seconds = forward_s + _now(parameters) - began
    return StepAlone(
        loss=loss.detach(),
        gradients=own,
        tensors=own_tensors(model),
        moments=moment_tensors({n: optimizer.state.get(p, {}) for n, p in parameters.items()}),
        seconds=seconds,
        is_first=not state.moments and bool(optimizer.state),
    )


def _begin_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """Create the state of parameters without any, as torch's optimizer does when it is made."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                start = group["initial_accumulator_value"]
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "sum": torch.full_like(parameter, start, memory_format=torch.preserve_format),
                }


def _now(parameters: Mapping[str, torch.Tensor]) -> float:
    """Return the time at which the GPU has finished all its work."""
    if any(parameter.is_cuda for parameter in parameters.values()):
        torch.cuda.synchronize()
    return time.perf_counter()


NUM_NUDGES = 6
NUDGE_ULPS = 16.0
"""How far weights are moved, in units in the last place.

This is about the rounding error of a sum of a few hundred terms.
"""
LARGE = 100.0
"""The factor above the allowed difference from which a difference has to be explained.

Smaller differences are too small to come from wrong code.
"""


# -- what may be rounding ----------------------------------------------------------------


def is_rounding(
    packed: StepTaken,
    alone: StepTaken,
    *,
    tensors: Mapping[str, torch.Tensor],
    step: Callable[[Mapping[str, torch.Tensor]], StepTaken],
    in_double: Callable[[], StepTaken],
    num_terms: int,
) -> bool:
    """Return whether rounding explains all large differences between two computations of a step.

    Args:
        packed: The step in a block.
        alone: The step alone.
        tensors: Parameters and buffers before the step.
        step: Computes loss and gradients alone, from other tensors.
        in_double: Computes loss and gradients alone in double precision.
        num_terms: As for ``compare_step``.
    """
    in_double = cache(in_double)
    left = {
        each.what: each.found
        for each in differences(packed, alone, num_terms=num_terms)
        if each.excess > LARGE
        and not is_saturated(each, packed, alone, in_double=in_double, num_terms=num_terms)
    }
    for moved in map(step, _nudged(tensors)):
        if not left:
            break
        for each in differences(moved, alone, num_terms=num_terms):
            if left.get(each.what, 0.0) > SLACK * each.found:
                continue
            left.pop(each.what, None)
    return not left


def are_metrics_rounding(
    packed: Mapping[str, float],
    alone: Mapping[str, float],
    *,
    tensors: Mapping[str, torch.Tensor],
    evaluate: Callable[[Mapping[str, torch.Tensor]], Mapping[str, float]],
    tolerance: float,
) -> bool:
    """Return whether rounding explains all large differences between two computations of metrics.

    Args:
        packed: The metrics in a block.
        alone: The metrics alone.
        tensors: Parameters and buffers.
        evaluate: Computes metrics alone, from other tensors.
        tolerance: As for ``compare_metrics``.
    """
    left = {
        name
        for name in (*packed, *alone)
        if not _distance(packed, alone, name) <= LARGE * tolerance * abs(alone.get(name, 0.0))
    }
    for moved in map(evaluate, _nudged(tensors)):
        if not left:
            break
        left = {
            name
            for name in left
            if not _distance(packed, alone, name) <= SLACK * _distance(moved, alone, name)
        }
    return not left


def _distance(one: Mapping[str, float], other: Mapping[str, float], name: str) -> float:
    return abs(one.get(name, math.nan) - other.get(name, math.nan))


def _nudged(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of tensors that are moved in their last places, at random.

    Where torch rounds to TF32, they are moved by a unit of that.
    """
    generator = torch.Generator().manual_seed(0)
    least = TF32_EPS if rounds_to_tf32(tensors.values()) else 0.0
    for _ in range(NUM_NUDGES):
        yield {name: _moved(t, generator, least=least) for name, t in tensors.items()}


def _moved(tensor: torch.Tensor, generator: torch.Generator, *, least: float) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor.clone()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    size = max(NUDGE_ULPS * torch.finfo(tensor.dtype).eps, least)
    return tensor * (1.0 + size * noise).to(tensor)


SHARE = 0.01
"""The share of training time that checks may take, besides those that are never skipped."""


# -- what checks may take ----------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class CheckBudget:
    """Seconds of checks and of training.

    Attributes:
        share: The share of training time up to which optional checks may bring the total.
        trained_s: Seconds of training in blocks.
        spent_s: Seconds of all checks.
        num_checks: Checks so far.
    """

    share: float = SHARE
    trained_s: float = 0.0
    spent_s: float = 0.0
    num_checks: int = 0

    def spend(self, seconds: float) -> None:
        """Add the cost of a check."""
        self.spent_s += seconds
        self.num_checks += 1

    def allows(self, seconds: float) -> bool:
        """Return whether a check of this cost fits into the share of training time.

        >>> budget = CheckBudget(trained_s=10.0)
        >>> budget.spend(0.02)
        >>> budget.allows(0.02), budget.allows(0.1)
        (True, False)
        """
        return self.spent_s + seconds <= self.share * self.trained_s


MIN_SAMPLES = 3
"""The fewest steps from which the time of a step is estimated."""
MAX_SAMPLES = 200
"""How many of the latest times are kept."""
TAIL = 0.025
"""The probability that the median lies beyond either end of its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneTime:
    """The seconds that something takes alone, with the ends of its confidence interval."""

    seconds: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> AloneTime:
    """Return the median of some times with a distribution-free 95 % confidence interval.

    Its ends are order statistics; with fewer than six samples they are the minimum and the maximum.

    >>> median_interval([3.0, 1.0, 2.0])
    AloneTime(seconds=2.0, low=1.0, high=3.0)
    >>> median_interval([float(k) for k in range(20)])
    AloneTime(seconds=9.5, low=5.0, high=14.0)
    """
    ordered, first = sorted(samples), _first_inside(len(samples))
    return AloneTime(seconds=median(ordered), low=ordered[first], high=ordered[-1 - first])


@cache
def _first_inside(num: int) -> int:
    """Return the index of the interval's low end among ``num`` ordered samples."""
    below, outside = 0.5**num, 0
    while below <= TAIL and 2 * (outside + 1) < num:
        outside += 1
        below += math.comb(num, outside) * 0.5**num
    return max(outside - 1, 0)


class SoloTimes:
    """Times of steps and evaluations alone, by what they depend on.

    The first step of each kind is dropped, because libraries and memory are prepared in it. The
    first evaluation counts only while there is no other.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[Hashable, deque[float]] = defaultdict(_samples)
        self._evaluations: defaultdict[Hashable, deque[float]] = defaultdict(_samples)
        self._first: dict[Hashable, float] = {}
        """The first evaluation of each kind, used until there is another one."""
        self._warm: set[tuple[str, Hashable]] = set()

    def note_step(self, key: Hashable, seconds: float) -> None:
        """Record the time of a step alone."""
        if self._is_warm("step", key):
            self._steps[key].append(seconds)

    def note_evaluation(self, key: Hashable, seconds: float) -> None:
        """Record the time of an evaluation alone."""
        if not self._is_warm("evaluation", key):
            self._first[key] = seconds
        else:
            self._evaluations[key].append(seconds)

    def evaluation_s(self, key: Hashable) -> float | None:
        """Return the median time of an evaluation; None if there was none."""
        found = self._all_evaluations(key)
        return median(found) if found else None

    def epoch(self, key: Hashable, *, num_steps: int) -> AloneTime | None:
        """Return how long an epoch takes alone; None while too little was measured."""
        steps, evaluations = self._steps.get(key, ()), self._all_evaluations(key)
        if len(steps) < MIN_SAMPLES or not evaluations:
            return None
        step, evaluation = median_interval(steps), median_interval(evaluations)
        return AloneTime(
            seconds=num_steps * step.seconds + evaluation.seconds,
            low=num_steps * step.low + evaluation.low,
            high=num_steps * step.high + evaluation.high,
        )

    def _all_evaluations(self, key: Hashable) -> Sequence[float]:
        first = [self._first[key]] if key in self._first else []
        return self._evaluations.get(key) or first

    def _is_warm(self, what: str, key: Hashable) -> bool:
        """Return whether this is not the first call for this kind and key."""
        is_warm = (what, key) in self._warm
        self._warm.add((what, key))
        return is_warm


def _samples() -> deque[float]:
    return deque(maxlen=MAX_SAMPLES)
