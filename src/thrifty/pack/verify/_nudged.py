"""A test whether rounding explains how far two computations of a step differ.

It repeats the step with its weights moved by their last bits. Where a ReLU is at zero, the last bit
decides, and a difference may be of any size. Then the trial alone is as unstable, and moving its
weights by their last bits shows that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ._compare import StepTaken, differences


NUM_NUDGES = 6
NUDGE_ULPS = 16.0
"""How far weights are moved, in units in the last place.

This is about the rounding error of a sum of a few hundred terms.
"""
SLACK = 4.0
"""Rounding explains a difference up to this factor times one caused by moving the weights."""
LARGE = 100.0
"""The factor above the allowed difference from which a difference has to be explained.

Smaller differences are too small to come from wrong code.
"""


def is_rounding(
    packed: StepTaken,
    alone: StepTaken,
    *,
    tensors: Mapping[str, torch.Tensor],
    step: Callable[[Mapping[str, torch.Tensor]], StepTaken],
    num_terms: int,
) -> bool:
    """Return whether rounding explains all large differences between two computations of a step.

    Args:
        packed: The step in a block.
        alone: The step alone.
        tensors: Parameters and buffers before the step.
        step: Computes loss and gradients alone, from other tensors.
        num_terms: As for ``compare_step``.
    """
    left = {
        each.what: each.found
        for each in differences(packed, alone, num_terms=num_terms)
        if each.excess > LARGE
    }
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_NUDGES):
        if not left:
            break
        moved = step({name: _moved(tensor, generator) for name, tensor in tensors.items()})
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
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_NUDGES):
        if not left:
            break
        moved = evaluate({name: _moved(tensor, generator) for name, tensor in tensors.items()})
        left = {
            name
            for name in left
            if not _distance(packed, alone, name) <= SLACK * _distance(moved, alone, name)
        }
    return not left


def _distance(one: Mapping[str, float], other: Mapping[str, float], name: str) -> float:
    return abs(one.get(name, math.nan) - other.get(name, math.nan))


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor.clone()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    size = NUDGE_ULPS * torch.finfo(tensor.dtype).eps
    return tensor * (1.0 + size * noise).to(tensor)
