"""One worker of the part ``mixed``: ``python -m bench.hetero.mixed_worker '{"device": "cuda:0"}'``.

It trains by itself first, then in a gloo group with the others, which train on other devices. It
writes a line of JSON for each phase, so that what came before a failure still counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench.hetero.speed_worker import data, loss, network
from thrifty.hetero import (
    BalancerOptions,
    FixedMembership,
    HeteroOptions,
    HeteroTrainer,
    StepCurve,
    StepReport,
)


_NEVER = BalancerOptions(slower=1e9)
"""No step counts as unusual, so the first split stays."""


class Worker:
    """Trains the phases that all workers train in the same order."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._device = torch.device(options["device"])
        self._rank: int = options["rank"]
        self._batch: int = options["batch"]
        self._steps: int = options["steps"]
        self._answer_steps: int = options["answer_steps"]
        self._samples = options["samples"]
        self._alone: dict[tuple[str, torch.dtype], Tensor] = {}

    def run(self, networks: list[str], join: Callable[[], FixedMembership]) -> None:
        """Train by itself, then with the others."""
        alone = FixedMembership()  # there is no group yet
        for name in networks:
            for dtype in (torch.float64, torch.float32):
                self._alone[name, dtype] = self._answer(name, dtype, alone, verify=False)
            # Processors take long for a whole batch, and the others wait meanwhile.
            steps = min(8, self._steps) if self._device.type == "cpu" else self._steps
            self._speed(f"{name}: alone", name, alone, steps=steps)
        members = join()
        for name in networks:
            for dtype in (torch.float64, torch.float32):
                here = self._answer(name, dtype, members, verify=False)
                self._say(f"{name}: answer", dtype=str(dtype), distance=_distance(
                    here, self._alone[name, dtype]
                ))  # fmt: skip
            # The steps of an even split take as long as those of the slowest worker.
            self._speed(
                f"{name}: even", name, members, steps=max(4, self._steps // 3), verify=False,
                curve=StepCurve(sample_s=1.0), balancing=_NEVER, stand_by=False,
            )  # fmt: skip
            self._speed(f"{name}: uneven", name, members, steps=self._steps, verify=False)
        for name in networks:
            # Last, because it has never run on a GPU: all checks of the loss while it trains.
            self._speed(f"{name}: uneven, checked", name, members, steps=self._steps)
            here = self._answer(name, torch.float32, members, verify=True)
            self._say(f"{name}: answer, checked", dtype="torch.float32", distance=_distance(
                here, self._alone[name, torch.float32]
            ))  # fmt: skip
        members.close()

    def _answer(
        self, name: str, dtype: torch.dtype, members: FixedMembership, *, verify: bool
    ) -> Tensor:
        """Return the parameters after a few steps with a split of 3 to 1 (to 1 ...)."""
        curve = StepCurve(sample_s=3.0 if self._rank else 1.0)
        trainer, parameters = self._trainer(
            name, members, dtype=dtype, verify=verify, curve=curve, balancing=_NEVER, stand_by=False
        )
        for report in trainer.run(epochs=1000):
            if report.step >= self._answer_steps:
                break
        return torch.cat([each.detach().cpu().double().flatten() for each in parameters()])

    def _speed(
        self, phase: str, name: str, members: FixedMembership, *, steps: int, **options: Any
    ) -> None:
        trainer, _ = self._trainer(name, members, dtype=torch.float32, **options)
        reports: list[StepReport] = []
        ends: list[float] = []
        for report in trainer.run(epochs=1000):
            reports.append(report)
            ends.append(time.monotonic())
            if report.step >= steps:
                break
        if len(reports) < steps:
            # This worker stood by, so the reports of those that trained count.
            self._say(phase, stood_by_after=len(reports))
            return
        warm = min(len(reports) // 3, 10)
        counted = reports[warm + 1 :]
        self._say(
            phase,
            samples_per_s=sum(sum(each.sizes) for each in counted) / (ends[-1] - ends[warm]),
            step_ms=1e3 * (ends[-1] - ends[warm]) / len(counted),
            split=list(reports[-1].sizes),
            trained_by=list(reports[-1].names),
            splits=len({each.sizes for each in reports}),
            busy_ms=[round(1e3 * busy, 2) for busy in reports[-1].busy_s],
            loss=reports[-1].loss,
            curves=[[each.fixed_s, each.sample_s] for each in trainer.curves],
        )

    def _trainer(
        self, name: str, members: FixedMembership, *, dtype: torch.dtype, **options: Any
    ) -> tuple[HeteroTrainer, Callable[[], list[torch.nn.Parameter]]]:
        # The model's values are drawn on the CPU, so they are equal on all devices.
        model = network(name).to(device=self._device, dtype=dtype)
        x, y = data().tensors
        x, y = x[: self._samples], y[: self._samples]
        dataset = TensorDataset(x.to(device=self._device, dtype=dtype), y.to(self._device))
        trainer = HeteroTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            dataset,
            loss=loss,
            global_batch=self._batch,
            seed=0,
            members=members,
            options=HeteroOptions(**{"stand_by": True, **options}),
        )
        return trainer, lambda: list(model.parameters())

    def _say(self, phase: str, **found: Any) -> None:
        print(json.dumps({"phase": phase, "rank": self._rank, **found}), flush=True)


def _distance(here: Tensor, there: Tensor) -> float:
    return float((here - there).norm() / there.norm())


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # Until it joins the others, this process is one that torchrun has not started.
    rank = os.environ.pop("RANK")

    def join() -> FixedMembership:
        os.environ["RANK"] = rank
        return FixedMembership(device=options["device"], timeout_s=options["timeout_s"])

    Worker(options).run(options["networks"], join)


if __name__ == "__main__":
    main()
