"""Trains one epoch of two tiny trials on a back-end, to check that it works here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thrifty.pack import (
    SGD,
    ArrayData,
    Backend,
    ConcatenatedBackend,
    EpochPlan,
    FusedBackend,
    HyperParameters,
    Member,
    SoloBackend,
    Task,
    borrowed_streams,
)


_BACKENDS: Mapping[str, Any] = {
    "solo": SoloBackend,
    "concatenated": ConcatenatedBackend,
    "fused": FusedBackend,
}


class _Line(Task):
    """Sixteen points on a line."""

    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 8

    def data(self, hp: HyperParameters) -> ArrayData:
        x = torch.linspace(-1, 1, 16)[:, None]
        return ArrayData(train=(x, 2 * x), valid=(x, 2 * x))

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"mse": self.loss(model, batch)}


def tiny_step(name: str, *, device: str | None) -> tuple[str, str]:
    """Return ``("ok", detail)`` or ``("broken", reason)``; an error at the start is raised.

    ``device`` defaults to the first GPU, or else the CPU.
    """
    where = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    backend: Backend = _BACKENDS[name](_Line(), device=where)
    slots = range(1 if name == "solo" else 2)
    members = {slot: Member(values={"lr": 0.01 * (slot + 1)}, seed=0) for slot in slots}
    with borrowed_streams():
        for slot, member in members.items():
            backend.stack(slot, member)
        plans = {slot: EpochPlan(epoch=0, values=m.values) for slot, m in members.items()}
        outcomes = dict(backend.step(plans))
        while len(outcomes) < len(members):
            outcomes.update(backend.step({}))
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            return "broken", f"{type(outcome).__name__}: {outcome}"
        if not math.isfinite(outcome["mse"]):
            return "broken", f"an epoch gave {outcome['mse']}"
    return "ok", f"{len(members)} trial{'s' * (len(members) > 1)} on {where}"
