"""The workload of ``bench_sharing`` as a thrifty task and space.

It is apart from ``digits``, so that the peers of ``bench_sharing`` load none of thrifty's tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import thrifty as th
from bench.common import digits


class Digits(th.Task):
    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = digits.BATCH_SIZE

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        train, valid = digits.load()
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        return digits.make_model()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


def space_of(configs: Sequence[digits.Config]) -> th.Space:
    schedules: list[th.Schedule] = [
        th.Step(c["lr"], c["drops"], gamma=c["gamma"])
        if c["kind"] == "step"
        else th.Cosine(c["lr"], epochs=float(c["epochs"]))
        for c in configs
    ]
    return th.Space(lr=th.Choice(schedules))
