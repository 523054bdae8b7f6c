"""Each case through ``thrifty.pack`` and through a plain PyTorch loop."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import thrifty as th
from bench.trust.case import NUM_MODELS, NUM_STEPS, Case, Named
from thrifty.core import derive_seed, step_seed
from thrifty.pack import pack


TOLERANCE = 2e-4
"""Tolerance, relative to the largest entry of a tensor.

Six steps amplify rounding, and no structural error is as small.
"""
CONTROL_FACTOR = 10.0
"""Largest ratio of a deviation to the control's.

The control is a plain loop whose first parameter is moved by its last bit.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a case.

    Attributes:
        name: Name of the case.
        how: "fused", "in turn", "trained" (in a study), "refused" (with a clear error),
            "plain fails, too", or "CRASH".
        deviation: Deviation relative to the largest entry of each tensor.
        why: Why it was not fused.
        control: How far the plain loop is from itself if one parameter is moved by its last bit;
            0 if it was not measured.
        tolerance: Deviation that is always allowed.
    """

    name: str
    how: str
    deviation: float
    why: str = ""
    control: float = 0.0
    tolerance: float = TOLERANCE

    @property
    def allowed(self) -> float:
        """Return the largest deviation that rounding explains; chaotic runs amplify it."""
        return max(self.tolerance, CONTROL_FACTOR * self.control)

    @property
    def is_silent_deviation(self) -> bool:
        trained = ("fused", "in turn", "trained")
        return self.how in trained and not self.deviation <= self.allowed

    @property
    def is_crash(self) -> bool:
        return self.how == "CRASH"


def only_plain_fails(name: str, error: Exception) -> Verdict:
    """Return the verdict where there is nothing to compare a result with."""
    why = f"only the plain loop fails: {type(error).__name__}: {error}"
    return Verdict(name=name, how="CRASH", deviation=0.0, why=why)


def run_packed(named: Named) -> Verdict:
    """Run one case through ``thrifty.pack`` and compare it with the plain loop."""
    wanted, plain_error = attempt(lambda: _plain(named.make()))
    messages: list[str] = []
    handler = _Collect(messages)
    log = logging.getLogger("thrifty")
    log.addHandler(handler)
    try:
        found, error = attempt(lambda: _packed(named.make()))
    finally:
        log.removeHandler(handler)
    why = messages[-1] if messages else ""
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        if plain_error is not None:
            return Verdict(name=named.name, how="plain fails, too", deviation=0.0, why=text)
        refused = isinstance(error, th.ThriftyError)
        return Verdict(
            name=named.name, how="refused" if refused else "CRASH", deviation=0.0, why=text
        )
    if plain_error is not None:
        return only_plain_fails(named.name, plain_error)
    models, fused = found
    deviation = _worst(models, wanted)
    how = "fused" if fused else "in turn"
    control = 0.0
    if not deviation <= TOLERANCE:
        control = _worst(_plain(named.make(), nudged=True), wanted)
    return Verdict(name=named.name, how=how, deviation=deviation, why=why, control=control)


def _worst(found: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> float:
    return max(_deviation(a, b) for a, b in zip(found, wanted, strict=True))


def attempt(run: Any) -> tuple[Any, Exception | None]:
    """Return the result of a call, or the error that it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(), None
        except Exception as error:  # noqa: BLE001 (any error is a result here)
            return None, error


def _packed(case: Case) -> tuple[list[nn.Module], bool]:
    models = [case.model(k) for k in range(NUM_MODELS)]
    values = [case.values(k) for k in range(NUM_MODELS)]
    packed = pack(models, loss=case.loss, optimizer=case.optimizer, values=values)
    for step in range(NUM_STEPS):
        if case.between is not None:
            case.between(step, models)
        packed.step(case.batch(step))
    return models, bool(packed.fused)


def nudge(model: nn.Module) -> None:
    """Move all entries of one parameter by their last bit.

    Any other order of sums does as much in a step.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                up = torch.full_like(parameter, torch.finfo(parameter.dtype).max)
                parameter.copy_(torch.nextafter(parameter, up))
                return


def _plain(case: Case, *, nudged: bool = False) -> list[nn.Module]:
    """Train several models in the loop that one would write."""
    models = [case.model(k) for k in range(NUM_MODELS)]
    if nudged:
        for model in models:
            nudge(model)
    values = [case.values(k) for k in range(NUM_MODELS)]
    optimizers = [
        case.optimizer.build(model.parameters(), now)
        for model, now in zip(models, values, strict=True)
    ]
    for step in range(NUM_STEPS):
        if case.between is not None:
            case.between(step, models)
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            everything(step_seed(derive_seed(k, "pack"), step))
            model.train()
            optimizer.zero_grad()
            loss = case.loss(model, case.batch(step))
            loss.backward()
            clip(model, case.optimizer.clipping(values[k]))
            optimizer.step()
    return models


def clip(model: nn.Module, limits: Any) -> None:
    """Clip gradients as an optimizer's ``clip_value`` and ``clip_norm`` say."""
    if limits.value is not None:
        nn.utils.clip_grad_value_(model.parameters(), limits.value)
    if limits.norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), limits.norm)


def everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.manual_seed(seed)


def _deviation(found: nn.Module, wanted: nn.Module) -> float:
    mine, theirs = tensors_of(found), tensors_of(wanted)
    if mine.keys() != theirs.keys():
        return float("inf")
    return max((relative(mine[n], theirs[n]) for n in theirs), default=0.0)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **{n: p.detach() for n, p in model.named_parameters()},
        **{n: b.detach() for n, b in model.named_buffers()},
    }


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    if one.shape != other.shape:
        return float("inf")
    if not other.numel():
        return 0.0
    one, other = (
        t.to_dense().to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other)
    )
    both_nan = torch.isnan(one) & torch.isnan(other)
    difference = torch.where(both_nan | (one == other), 0.0, (one - other).abs().double())
    worst = float(torch.nan_to_num(difference, nan=float("inf")).max())
    scale = float(torch.nan_to_num(other.abs(), nan=0.0).max())
    return worst / max(scale, 1e-6)


class _Collect(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def rows_of(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {"case": v.name, "how": v.how, "deviation": f"{v.deviation:.0e}", "why": v.why[:90]}
        for v in verdicts
    ]
