"""Step times on the device that is there, forecast from what little has been measured.

Three questions, each about steps that the forecast has not seen:

- *batches*: a network has been profiled with some batch sizes; how long do the others take?
- *data sheets*: a network has been profiled on this machine's processors only.
- *another device*: it has been profiled on the processors, others on both devices, and one step of
  it has been tried on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.cloud.devices import offer_of
from bench.cloud.local_worker import MODELS, loss, trained
from bench.cloud.step_time_models import Ernest
from bench.common.harness import Goal, Part, at_least, at_most, table
from thrifty.cloud import ACCELERATORS, HardwareEstimates
from thrifty.core import CloudError
from thrifty.hetero import profile_step
from thrifty.perf import StepProfile
from thrifty.perf.steptime import OtherDevice, PairedSteps, Setup


PROFILED = (16, 128, 1024)
HELD_OUT = (32, 64, 256, 512, 2048)
ON_CPU = (16, 32, 64, 128)
"""Batch sizes that are timed on the processors, too: larger ones would take too long."""

Steps = dict[int, float]
"""Seconds of a step by batch size."""


def this_gpu(*, quick: bool, device: str = "cuda") -> Part:
    """Report errors of forecasts of steps on this device."""
    place = torch.device("cuda:0" if device == "cuda" else device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    profiled, held_out, on_cpu = (
        ((8, 16), (12, 32), (8, 12, 16)) if quick else (PROFILED, HELD_OUT, ON_CPU)
    )
    names = list(MODELS)[: 3 if quick else None]
    budget_s = 0.3 if quick else 0.5
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    profiles: dict[str, StepProfile] = {}
    there: dict[str, Steps] = {}
    here: dict[str, Steps] = {}
    for network in names:
        profiles[network] = _profile(network, place, profiled, budget_s=budget_s)
        there[network] = _times(network, place, sorted({*held_out, *on_cpu}), budget_s=budget_s)
        here[network] = _times(network, torch.device("cpu"), on_cpu, budget_s=budget_s)
        print(f"{network}: measured", flush=True)
    rows = _batches(profiles, there, held_out=held_out)
    print(f"\nother batches than those profiled, on {name}: mean absolute error, %\n")
    table(rows)
    sheets = _by_sheet(here, there, gpu=name)
    if sheets:
        print("\nfrom a profile on processors, by data sheets\n")
        table([sheets])
    others = _from_others(here, there)
    print("\nfrom processors, with other networks on both devices: mean absolute error, %\n")
    table(others)
    figures = {
        "device": name, "batches": rows, "data sheets": sheets, "another device": others,
        "seconds there": there, "seconds on processors": here,
    }  # fmt: skip
    return figures, _goals(rows, sheets, others)


def _profile(
    network: str, device: torch.device, batches: Sequence[int], *, budget_s: float
) -> StepProfile:
    model, optimizer, make = trained(network)
    model.to(device)
    return profile_step(
        model, optimizer, lambda num: _to(make(num), device),
        loss=loss, batches=batches, budget_s=budget_s * len(batches),
    )  # fmt: skip


def _times(network: str, device: torch.device, batches: Sequence[int], *, budget_s: float) -> Steps:
    """Return the median seconds of plain training steps, by batch size."""
    model, optimizer, make = trained(network)
    model.to(device)
    return {
        batch: _step_s(model, optimizer, _to(make(batch), device), budget_s=budget_s / 2)
        for batch in batches
    }


def _step_s(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, budget_s: float
) -> float:
    def step() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    time_of = _on_gpu if batch[0].is_cuda else _on_cpu
    for _ in range(3):
        time_of(step)
    times: list[float] = []
    end = time.monotonic() + budget_s
    while len(times) < 5 or (time.monotonic() < end and len(times) < 50):
        times.append(time_of(step))
    return float(np.median(times))


def _on_gpu(step: Callable[[], None]) -> float:
    """Return the seconds between two events around a step."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _on_cpu(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _batches(
    profiles: Mapping[str, StepProfile], there: Mapping[str, Steps], *, held_out: Sequence[int]
) -> list[dict[str, Any]]:
    """Return errors of steps of other batch sizes, by network and over all."""
    out = []
    for network, profile in profiles.items():
        known = list(profile.batches)
        step_s = [float(each) for each in _replayed(profile, known)]
        ernest = Ernest()
        ernest.fit([_alone(batch) for batch in known], step_s)
        middle = len(known) // 2
        true = np.array([there[network][batch] for batch in held_out])
        nearest = [_nearest(known, batch) for batch in held_out]
        forecasts = {
            "thrifty": _replayed(profile, held_out),
            "Ernest": ernest.predict([_alone(batch) for batch in held_out]),
            "in proportion": np.array(held_out) * step_s[middle] / known[middle],
            "nearest profiled": np.array([step_s[known.index(one)] for one in nearest]),
        }
        out.append({
            "network": network,
            "steps": len(held_out),
            **{name: _error(each, true) for name, each in forecasts.items()},
        })
    return [*out, _mean(out, "network")]


def _nearest(known: Sequence[int], batch: int) -> int:
    return min(known, key=lambda one: float(abs(np.log(one / batch))))


def _replayed(profile: StepProfile, batches: Sequence[int]) -> np.ndarray:
    """Return the step's seconds on one device: its phases, one after the other."""
    return np.asarray(
        profile.forward_at(batches) + profile.backward_at(batches) + profile.optimizer_s
    )


def _by_sheet(here: Mapping[str, Steps], there: Mapping[str, Steps], *, gpu: str) -> dict[str, Any]:
    """Return errors of ``HardwareEstimates``; nothing for a device that has no data sheet."""
    known = accelerator_of(gpu)
    if known is None:
        return {}
    try:
        factor = HardwareEstimates(profiled="", profiled_vcpus=torch.get_num_threads()).compute(
            offer_of(known)
        )
    except CloudError as error:
        print(error)
        return {}
    ratios = np.array([there[name][b] / here[name][b] for name in here for b in here[name]])
    return {
        "accelerator": known,
        "threads": torch.get_num_threads(),
        "steps": len(ratios),
        "forecast / true, median": float(np.median(factor.median / ratios)),
        "error, %": _error(np.full(len(ratios), factor.median), ratios),
        "in the 90 % interval, %": 100
        * float(np.mean((factor.low <= ratios) & (ratios <= factor.high))),
    }


def accelerator_of(gpu: str) -> str | None:
    """Return the data sheet of a GPU by the name that its driver gives it.

    >>> accelerator_of("NVIDIA H100 80GB HBM3"), accelerator_of("NVIDIA H100 PCIe")
    ('H100', 'H100-PCIe')
    >>> accelerator_of("Voodoo 2")
    """
    words = gpu.replace("-", " ").split()
    found = [
        name
        for name in ACCELERATORS
        if all(part in words for part in name.replace("-", " ").split())
    ]
    return max(found, key=len, default=None)


def _from_others(here: Mapping[str, Steps], there: Mapping[str, Steps]) -> list[dict[str, Any]]:
    """Return errors for each network, which has had one step on the device."""
    out = []
    for network in here:
        rest = [name for name in here if name != network]
        references = [_paired(here[name], there[name], list(here[name])) for name in rest]
        batches = list(here[network])
        probe = batches[len(batches) // 2]
        asked = [batch for batch in batches if batch != probe]
        true = np.array([there[network][batch] for batch in asked])
        here_s = np.array([here[network][batch] for batch in asked])
        model = OtherDevice(references)
        model.fit(_paired(here[network], there[network], [probe]))
        ours = model.predict(np.array(asked, dtype=float)[:, None], here_s)
        ratios = [np.exp(np.mean(each.ratios)) for each in references]
        one = there[network][probe] / here[network][probe]
        out.append({
            "network": network,
            "steps": len(asked),
            "thrifty": _error(ours, true),
            "ratio of the tried step": _error(one * here_s, true),
            "mean ratio of the others": _error(
                float(np.exp(np.mean(np.log(ratios)))) * here_s, true
            ),
            "the tried step's time": _error(np.full(len(asked), there[network][probe]), true),
        })
    return [*out, _mean(out, "network")]


def _paired(here: Steps, there: Steps, batches: Sequence[int]) -> PairedSteps:
    return PairedSteps(
        setups=np.array(batches, dtype=float)[:, None],
        here_s=np.array([here[batch] for batch in batches]),
        there_s=np.array([there[batch] for batch in batches]),
    )


def _alone(batch: int) -> Setup:
    return Setup(placement=(1,), batch=float(batch))


def _to(batch: Any, device: torch.device) -> Any:
    return tuple(each.to(device) for each in batch)


def _error(forecast: np.ndarray, true: np.ndarray) -> float:
    """Return the mean absolute percentage error."""
    return 100 * float(np.mean(np.abs(forecast / true - 1)))


def _mean(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    columns = [key for key in rows[0] if key not in {name, "steps"}]
    total = sum(row["steps"] for row in rows)
    means = {key: float(np.mean([row[key] for row in rows])) for key in columns}
    return {name: "all", "steps": total, **means}


def _goals(
    rows: Sequence[dict[str, Any]], sheets: dict[str, Any], others: Sequence[dict[str, Any]]
) -> list[Goal]:
    last, other = rows[-1], others[-1]
    best = min(each for key, each in last.items() if key not in {"network", "steps", "thrifty"})
    simple = min(each for key, each in other.items() if key not in {"network", "steps", "thrifty"})
    goals = [
        at_most("other batches: error, %", last["thrifty"], 15),
        at_least("other batches: the best simple rule's error / ours", best / last["thrifty"], 1),
        at_least("another device: the best simple rule's error / ours",
                 simple / other["thrifty"], 1),
    ]  # fmt: skip
    if sheets:
        inside = sheets["in the 90 % interval, %"]
        goals.append(at_least("data sheets: in the 90 % interval, %", inside, 85))
    return goals
