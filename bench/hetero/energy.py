"""Joules of a known load on a GPU: Zeus, as ``ZeusMeter`` reads it, beside NVML itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from statistics import mean
from typing import Any

import torch

from bench.common.harness import Goal, Part, at_most, equal, table
from thrifty.core import ThriftyError
from thrifty.hetero import ZeusMeter


def energy(*, quick: bool, device: str) -> Part:
    """Multiply large matrices, and count joules in one reading and in a reading for each step."""
    seconds = 0.3 if quick else 3.0
    place = torch.device("cuda:0" if device == "cuda" else device)
    gpus, cpus = ([0], [0]) if place.type == "cuda" else ([], [0])
    try:
        source = ZeusMeter(gpus=gpus, cpus=cpus).source
        print(f"counters of {place} and its processors: {source}\n", flush=True)
    except ThriftyError as error:
        source = ""
        print(f"no counters: {error}\n", flush=True)
    nvml = _Nvml() if place.type == "cuda" else None
    load = _Load(place, size=256 if place.type == "cpu" else 8192)
    rows = []
    for name, windows in (("idle", 0), ("one window", 1), ("a window for each step", 2)):
        meter = ZeusMeter(gpus=[0]) if source and nvml is not None else None
        with _sampled(nvml) as watts:
            row = _measured(load, meter, nvml, seconds=seconds, windows=windows)
        row = {"load": name, **row}
        if watts:
            row["NVML's watts, mean"] = mean(watts)
            row["NVML's watts, times seconds"] = mean(watts) * row["seconds"]
        rows.append(row)
    table([{key: each for key, each in row.items() if key != "steps' joules"} for row in rows])
    return {"source": source, "rows": rows}, _goals(rows) if nvml is not None else []


def _measured(
    load: _Load, meter: ZeusMeter | None, nvml: _Nvml | None, *, seconds: float, windows: int
) -> dict[str, Any]:
    """Run the load (or nothing) for some seconds, with one reading or one for each step."""
    before = nvml.joules() if nvml is not None else None
    if meter is not None:
        meter.joules(busy_s=0.0, whole_s=0.0)  # the first reading begins here
    began = time.monotonic()
    steps: list[float] = []
    while time.monotonic() < began + seconds:
        if windows:
            load.step()
        else:
            time.sleep(0.05)
        if windows > 1 and meter is not None:
            steps.append(meter.joules(busy_s=0.0, whole_s=0.0))
    took = time.monotonic() - began
    joules = None
    if meter is not None:
        joules = sum(steps) + meter.joules(busy_s=took, whole_s=took)
    direct = nvml.joules() - before if nvml is not None and before is not None else None
    return {
        "seconds": took,
        "ZeusMeter, J": joules,
        "ZeusMeter, mean W": None if joules is None else joules / took,
        "NVML's counter, J": direct,
        "steps": len(steps),
        "steps without an update": sum(not each for each in steps),
    }


class _Load:
    """Products of large matrices, in steps of some milliseconds."""

    def __init__(self, device: torch.device, *, size: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._device = device
        self._one = torch.randn(size, size, device=device, dtype=dtype)
        self._other = torch.randn(size, size, device=device, dtype=dtype)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        for _ in range(4):
            torch.matmul(self._one, self._other)
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class _Nvml:
    """NVML's own counter and watts of the first GPU that PyTorch sees."""

    def __init__(self) -> None:
        self._nvml = import_module("pynvml")
        self._nvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers PyTorch's devices but not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError:
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000


@contextmanager
def _sampled(nvml: _Nvml | None) -> Iterator[list[float]]:
    """Collect the GPU's watts every 50 ms."""
    watts: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while nvml is not None and not done.wait(0.05):
            watts.append(nvml.watts())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield watts
    finally:
        done.set()
        thread.join()


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return how far the joules are from NVML's counter; of each load."""
    goals = [equal("loads without joules", sum(row["ZeusMeter, J"] is None for row in rows), 0)]
    for row in rows:
        ours, direct = row["ZeusMeter, J"], row["NVML's counter, J"]
        if ours is not None and direct:
            goals.append(
                at_most(f"{row['load']}: ZeusMeter from NVML's counter, %",
                        100 * abs(ours / direct - 1), 5)
            )  # fmt: skip
    return goals
