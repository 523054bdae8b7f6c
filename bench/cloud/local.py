"""Step times of data-parallel training on this machine, predicted from single-process profiles.

The truth is plain PyTorch DDP over gloo, in one process and in two, each on a core of its own. The
prediction never sees the truth. It uses profiles of single processes (alone, and beside a copy of
the same training on the other core that exchanges nothing), and the time that DDP adds to the steps
of models that only hold parameters. Profiles and truths alternate.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from bench.common.harness import table
from bench.common.processes import free_port, member, pinned
from thrifty.perf import CollectiveModel, CollectiveTiming, StepProfile, iteration_s


BATCHES: Mapping[str, Sequence[int]] = {
    "MLP": (32, 64, 128, 256),
    "wide MLP": (32, 64, 128, 256),
    "LeNet": (16, 32, 64, 128),
    "ResNet": (8, 16, 32, 64),
    "LSTM": (16, 32, 64, 128),
    "Transformer": (8, 16, 32, 64),
}

HOLDERS = tuple(
    {"tensors": tensors, "num_bytes": num_bytes, "buffers": buffers}
    for tensors, num_bytes in product((2, 8, 64), (2**12, 2**20, 2**23))
    for buffers in (0, 12)
)
"""Models that only hold parameters, with which DDP's wrapper is measured in one process."""

SUMMED = tuple(
    int(2**power) for power in (12, 14, 16, 17, 18, 19, 19.5, 20, 20.5, 21, 22, 22.5, 23)
)
"""Bytes of further such models, of one tensor and so of one bucket.

With them, sums between two processes are measured.
"""


class Worker:
    """A process pinned to a core that answers requests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()

    def ask(self, do: str, **options: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}; see above for why")
        return json.loads(line)


def ask(workers: Sequence[Worker], do: str, **options: Any) -> list[Any]:
    """Send a request to all workers at the same time."""
    for worker in workers:
        worker.ask(do, **options)
    return [worker.answer() for worker in workers]


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The workers: independent ones, one in a group alone, and two in a group."""

    single: Sequence[Worker]
    alone: Sequence[Worker]
    pair: Sequence[Worker]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of gloo and DDP here, measured on other models than those predicted."""

    sums: CollectiveModel
    hop_s: float
    wrapper: Sequence[float]

    def step_s(
        self, profiles: Sequence[StepProfile], batch: int, about: Mapping[str, int]
    ) -> float:
        """Return the predicted step time; there is one profile for each process."""
        first, num = profiles[0], len(profiles)
        wrapped = float(np.dot(self.wrapper, _wrapper_terms(about)))
        buckets = self.sums.seconds("here", num_bytes=first.bucket_bytes, nodes=num)
        received = self.sums.seconds("here", num_bytes=512, nodes=num, collective="broadcast")
        if num > 1:
            # The wrapper was measured with sums of one process. The two-process sums already
            # contain the way to gloo's thread and back.
            wrapped -= self.hop_s * len(buckets)
        step = iteration_s(
            forward_s=[float(each.forward_at(batch)) for each in profiles],
            backward_s=[float(each.backward_at(batch)) for each in profiles],
            optimizer_s=[each.optimizer_s for each in profiles],
            bucket_ready=first.bucket_ready,
            bucket_s=buckets,
            # The core that computes also carries the sums.
            stolen=1.0,
        )
        return float(step) + max(0.0, wrapped) + float(received) * about["kinds"]


def local_prediction(*, quick: bool, rounds: int = 3) -> dict[str, Any]:
    """Predict and measure six models at four batch sizes.

    Returns:
        ``rows``, one for each model, batch and number of processes, and ``median_error`` for one
        process, for two processes, and for all.
    """
    rounds, batches = (1, {"MLP": (32, 64)}) if quick else (rounds, BATCHES)
    with _crew() as crew:
        costs = _Costs()
        profiles: dict[tuple[str, int], list[list[StepProfile]]] = {}
        truths: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(rounds):
            costs.measure(crew, repeats=6 if quick else 30)
            for model, sizes in batches.items():
                _round(crew, model, sizes, profiles=profiles, truths=truths)
        about = {model: ask(crew.single[:1], "describe", model=model)[0] for model in batches}
    known, rows = costs.fitted(), []
    for (model, batch, num), times in truths.items():
        merged = [_merged(each) for each in zip(*profiles[model, num], strict=True)]
        foretold, measured = known.step_s(merged, batch, about[model]), median(times)
        rows.append({
            "model": model,
            "batch": batch,
            "processes": num,
            "foretold_ms": 1e3 * foretold,
            "measured_ms": 1e3 * measured,
            "error_%": 100 * (foretold / measured - 1),
            # How far single measurements of the truth are from their median.
            "spread_%": 100 * median(abs(time / measured - 1) for time in times),
        })
    rows.sort(key=lambda row: (row["processes"], list(batches).index(row["model"]), row["batch"]))
    table(rows)
    errors = {
        name: median(abs(row["error_%"]) for row in rows if row["processes"] in nums)
        for name, nums in (("1", {1}), ("2", {2}), ("all", {1, 2}))
    }
    return {"rows": rows, "median_error": errors}


def _round(
    crew: WorkerGroup,
    model: str,
    sizes: Sequence[int],
    *,
    profiles: dict[tuple[str, int], list[list[StepProfile]]],
    truths: dict[tuple[str, int, int], list[float]],
) -> None:
    """Measure profile and truth in turn, first of one process, then of two."""
    for num, group in ((1, crew.alone), (2, crew.pair)):
        found = ask(
            crew.single[:num],
            "profile",
            model=model,
            batches=list(sizes),
            budget_s=1.0 * len(sizes),
        )
        each = [StepProfile.from_json(data) for data in found]
        profiles.setdefault((model, num), []).append(each)
        for batch in sizes:
            step_s = each[0].forward_at(batch) + each[0].backward_at(batch) + each[0].optimizer_s
            steps = int(min(100, max(10, 0.4 / float(step_s))))
            times = ask(group, "train", model=model, batch=batch, steps=steps)
            truths.setdefault((model, batch, num), []).append(times[0])


class _Costs:
    """The cost of exchanging, measured without the predicted models; each round adds samples."""

    def __init__(self) -> None:
        self._wrappers: list[list[float]] = []
        self._hops: list[float] = []
        self._timings: list[CollectiveTiming] = []

    def measure(self, crew: WorkerGroup, *, repeats: int) -> None:
        hop_s = median(ask(crew.alone, "sum_alone", repeats=10 * repeats))
        self._wrappers.append([
            ask(crew.alone, "exchange", **held, repeats=repeats)[0] for held in HOLDERS
        ])  # fmt: skip
        for num_bytes in SUMMED:
            held = {"tensors": 1, "num_bytes": num_bytes, "buffers": 0, "repeats": repeats}
            (alone,) = ask(crew.alone, "exchange", **held)
            seconds = ask(crew.pair, "exchange", **held)[0] - alone + hop_s
            self._note(num_bytes, seconds)
        for num_bytes in (256, 1024, 4096):
            seconds = ask(crew.pair, "broadcast", num_bytes=num_bytes, repeats=repeats)[0]
            self._note(num_bytes, seconds, collective="broadcast")
        self._hops.append(hop_s)

    def fitted(self) -> Costs:
        return Costs(
            sums=CollectiveModel.fit(self._timings),
            hop_s=median(self._hops),
            wrapper=_fit(
                np.array([_wrapper_terms(held) for held in HOLDERS]),
                np.median(self._wrappers, axis=0),
            ),
        )

    def _note(self, num_bytes: int, seconds: float, **options: Any) -> None:
        self._timings.append(CollectiveTiming(
            name="here", num_bytes=num_bytes, nodes=2, seconds=max(seconds, 1e-6), **options
        ))  # fmt: skip


def _wrapper_terms(about: Mapping[str, int]) -> list[float]:
    """Return the terms of DDP's cost: once, for each tensor, for each byte, and with buffers.

    The bytes are copied to DDP's buckets and back.
    """
    buffers = about["buffers"]
    return [1.0, about["tensors"], about["num_bytes"], float(buffers > 0), buffers]


def _fit(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Fit non-negative costs to minimise relative errors."""
    from scipy.optimize import nnls  # noqa: PLC0415

    weights = 1 / np.maximum(seconds, 1e-5)
    scale = terms.max(axis=0)
    each, _ = nnls(terms / scale * weights[:, None], seconds * weights)
    return list(each / scale)


def _merged(profiles: Sequence[StepProfile]) -> StepProfile:
    """Return the medians of the rounds, for the batch sizes that every round had time for."""
    sizes = min(len(each.batches) for each in profiles)

    def column(name: str, num: int) -> tuple[float, ...]:
        rows = zip(*(getattr(each, name)[:num] for each in profiles), strict=True)
        return tuple(median(row) for row in rows)

    columns = {
        "batches": profiles[0].batches[:sizes],
        "peak_bytes": profiles[0].peak_bytes[:sizes],
        "forward_s": column("forward_s", sizes),
        "backward_s": column("backward_s", sizes),
        "bucket_ready": column("bucket_ready", len(profiles[0].bucket_ready)),
    }
    optimizer_s = median(each.optimizer_s for each in profiles)
    return replace(profiles[0], **columns, optimizer_s=optimizer_s)


@contextmanager
def _crew() -> Iterator[WorkerGroup]:
    with ExitStack() as stack:
        alone, pair = free_port(), free_port()
        started = [
            stack.enter_context(pinned("bench.cloud.local_worker", core=core, env=env))
            for core, env in (
                (0, {}),
                (1, {}),
                (0, member(0, 1, alone)),
                (0, member(0, 2, pair)),
                (1, member(1, 2, pair)),
            )
        ]
        workers = [Worker(process) for process in started]
        yield WorkerGroup(single=workers[:2], alone=workers[2:3], pair=workers[3:])
