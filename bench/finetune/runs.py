"""Measurements of the LoRA sweep in a process of their own: ``python -m bench.finetune.runs``.

``speed`` prepares its trials, says that it is ready, waits for a line, and trains. ``memory``
reports the peak of preparing trials and of training them; ``study_memory`` that of a whole study
through the public interface.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

import thrifty as th
from bench.common.processes import say_result
from bench.finetune.setting import (
    SEED,
    Setting,
    Sweep,
    adapted,
    configurations,
    solo_steps,
    weights,
)
from thrifty.pack import BlockOptions, EpochPlan, FusedBackend, Member


READY = "READY"


class Packed:
    """The trials of the sweep in a back-end that fuses up to ``at_once`` of them."""

    def __init__(
        self, setting: Setting, configs: Sequence[Mapping[str, Any]], *, at_once: int
    ) -> None:
        self.backend = FusedBackend(
            Sweep(setting), device=setting.device, block=BlockOptions(size=at_once)
        )
        self.configs = configs
        self._epoch = 0
        for slot, config in enumerate(configs):
            self.backend.put(slot, Member(values=config, seed=SEED))

    def train(self, *, ends: bool = True) -> None:
        """Train all trials for an epoch.

        Args:
            ends: Whether a stage ends with it, so that each trial is verified, as in a worker.
                Within a stage, checks run within their budget.
        """
        left = dict(enumerate(self.configs))
        plans = {
            slot: EpochPlan(epoch=self._epoch, values=c, verify=ends) for slot, c in left.items()
        }
        while left:
            ended = self.backend.step(plans)
            plans = {}
            for slot, outcome in ended.items():
                if isinstance(outcome, Exception):
                    raise outcome
                del left[slot]
        self._epoch += 1

    def steps(self) -> Iterator[None]:
        """Take steps of all trials without checks, one at a time, without end."""
        while True:
            plans = {
                slot: EpochPlan(epoch=self._epoch, values=config)
                for slot, config in enumerate(self.configs)
            }
            for _ in range(self.backend.start(plans)):
                self.backend.one_step()
                yield
            self._epoch += 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks that train trials."""
        return sum(bool(block.trials) for block in self.backend.blocks)


class Solo:
    """The trials of the sweep by peft and plain PyTorch, one after the other."""

    def __init__(self, setting: Setting, configs: Sequence[Mapping[str, Any]]) -> None:
        self._runs = [
            solo_steps(setting, adapted(setting, config), config["lr"]) for config in configs
        ]
        self._num_steps = setting.steps

    def train(self, *, ends: bool = True) -> None:
        """Train each trial for an epoch."""
        for run in self._runs:
            for _ in range(self._num_steps):
                next(run)


# -- speed ---------------------------------------------------------------------------------


def speed(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Train one epoch to warm up, then as many epochs as each line of the input says."""
    configs = configurations(args.trials)[args.first :: args.every]
    empty = memory_now(setting)
    found: dict[str, Any] = {}
    if args.method == "packed":
        run: Packed | Solo = Packed(setting, configs, at_once=args.at_once)
    else:
        run = Solo(setting, configs)
    run.train()
    synchronise(setting)
    print(READY, flush=True)
    for line in sys.stdin:
        epochs = int(line)
        checks = run.backend.budget.spent_s if isinstance(run, Packed) else 0.0
        began = time.monotonic()
        with peak_memory(setting) as peak:
            for _epoch in range(epochs):
                run.train(ends=False)
            synchronise(setting)
        found = {
            "began": began,
            "ended": time.monotonic(),
            "trial_steps": epochs * setting.steps * len(configs),
            "peak": peak["bytes"] - empty,
        }
        if isinstance(run, Packed):
            found["checks_s"] = run.backend.budget.spent_s - checks
            found["blocks"] = run.num_blocks
        say_result(found)
    return found


def synchronise(setting: Setting) -> None:
    """Wait until the device has done all that it was told to."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


# -- where the time goes -------------------------------------------------------------------


def parts(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a joint step by what they are spent on."""
    run = Packed(setting, configurations(args.trials), at_once=args.at_once)
    run.train()
    steps = run.steps()
    next(steps)
    began = time.perf_counter()
    next(steps)
    synchronise(setting)
    whole = time.perf_counter() - began
    activities = [ProfilerActivity.CPU]
    if setting.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as seen:
        next(steps)
        synchronise(setting)
    return {"seconds": whole, "parts": _sorted_events(seen)}


def _sorted_events(seen: Any) -> dict[str, float]:
    """Return the share of each part of a step in the time of all operations."""
    ranks = {config["rank"] for config in configurations()}
    out: dict[str, float] = {}
    backward = False
    for event in sorted(seen.events(), key=lambda e: e.time_range.start):
        name = event.name.removeprefix("aten::")
        backward = (backward or "backward" in name) and name not in ("embedding", "_foreach")
        own = event.self_device_time_total + event.self_cpu_time_total
        shapes = [shape for shape in event.input_shapes if shape]
        if name in ("mm", "addmm", "mkldnn::_linear_pointwise"):
            kind = "products with the base"
        elif name in ("bmm", "baddbmm"):
            thin = any(side in ranks for shape in shapes for side in shape[1:])
            kind = "adapters" if thin else "attention"
        elif "attention" in name:
            kind = "attention"
        elif "softmax" in name or "nll" in name:
            kind = "loss"
        else:
            kind = "other operations"
        where = "backward" if backward else "forward"
        out[f"{where}: {kind}"] = out.get(f"{where}: {kind}", 0.0) + own
    total = sum(out.values())
    return {name: value / total for name, value in sorted(out.items())}


# -- equality ------------------------------------------------------------------------------


def equality(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return how far trials in a pack are from peft's after an epoch, and moved ones from theirs.

    Distances are relative: of the adapters' weights, in the Euclidean norm. A moved run begins with
    each weight of base and adapters one ulp higher or lower.
    """
    configs = configurations(args.trials)
    packed = Packed(setting, configs, at_once=args.at_once)
    packed.train()
    ours, moved, greatest = [], [], []
    for slot, config in enumerate(configs):
        wanted = _solo_weights(setting, config)
        found = weights(packed.backend.model(slot))
        greatest.append(max(float((found[n] - wanted[n]).abs().max()) for n in wanted))
        ours.append(_distance(found, wanted))
        moved.append([
            _distance(_solo_weights(setting, config, moved=number), wanted)
            for number in range(1, args.moved + 1)
        ])
    return {"ours": ours, "moved": moved, "greatest": greatest, "blocks": packed.num_blocks}


def _solo_weights(
    setting: Setting, config: Mapping[str, Any], *, moved: int = 0
) -> dict[str, torch.Tensor]:
    model = adapted(setting, config)
    if moved:
        move(model, seed=moved)
    run = solo_steps(setting, model, config["lr"])
    for _ in range(setting.steps):
        next(run)
    return weights(model)


@torch.no_grad()
def move(model: torch.nn.Module, *, seed: int) -> None:
    """Move each weight by one ulp, up or down."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue  # of a quantised layer
        up = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.copy_(torch.nextafter(parameter, up * torch.inf))


def _distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    apart = sum(float((found[name] - tensor).square().sum()) for name, tensor in wanted.items())
    return (apart / sum(float(tensor.square().sum()) for tensor in wanted.values())) ** 0.5


# -- memory --------------------------------------------------------------------------------


class InStudy:
    """The trials as a study through the public interface, packed or one at a time."""

    def __init__(
        self, setting: Setting, configs: Sequence[Mapping[str, Any]], *, at_once: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.study = th.Study(
            Sweep(setting),
            th.Space(**{
                name: th.Choice(list(dict.fromkeys(config[name] for config in configs)))
                for name in configs[0]
            }),
            algorithm=th.RandomSearch(max_epochs=NUM_EPOCHS, num_trials=len(configs)),
            metric="train_loss",
            mode="min",
            storage=f"sqlite:///{self._folder.name}/studies.db",
            name="sweep",
            seed=SEED,
        )
        for config in configs:
            self.study.enqueue_trial(config)
        self._executor = th.Local(
            workers=1,
            threads=1,
            pack="solo" if at_once == 1 else "fused",
            pack_size=at_once,
            devices=(setting.device,),
        )

    def train(self) -> None:
        """Train all trials to their end."""
        self.study.run(executor=self._executor, progress=False)
        assert all(len(trial.curve) == NUM_EPOCHS for trial in self.study.trials)


NUM_EPOCHS = 2


def study_memory(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of a study's trials beyond that of an empty process, in bytes."""
    tiny = Setting(hidden=64, layers=1, vocabulary=64, length=8, steps=1, device=setting.device)
    InStudy(tiny, configurations(2), at_once=min(args.at_once, 2)).train()
    gc.collect()
    empty = memory_now(setting)
    run = InStudy(setting, configurations(args.trials), at_once=args.at_once)
    began = time.monotonic()
    with peak_memory(setting) as training:
        run.train()
    seconds = time.monotonic() - began
    return {
        "training": training["bytes"] - empty,
        "kept": memory_now(setting) - empty,
        "trial_steps_a_second": args.trials * NUM_EPOCHS * setting.steps / seconds,
    }


def memory(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of trials beyond that of an empty process, in bytes."""
    configs = configurations(args.trials)
    begin: Callable[[], Packed | Solo]
    if args.method == "packed":
        begin = lambda: Packed(setting, configs, at_once=args.at_once)  # noqa: E731
    else:
        begin = lambda: Solo(setting, configs[:1])  # noqa: E731
    _warm_up(setting, args)
    gc.collect()
    empty = memory_now(setting)
    with peak_memory(setting) as building:
        run = begin()
    built = memory_now(setting)
    with peak_memory(setting) as training:
        run.train()
        run.train()
    return {
        "building": building["bytes"] - empty,
        "built": built - empty,
        "training": training["bytes"] - empty,
        "base": sum(p.numel() * p.element_size() for p in setting.base().parameters()),
    }


def _warm_up(setting: Setting, args: argparse.Namespace) -> None:
    """Train something tiny, so that what libraries load late is there."""
    tiny = Setting(hidden=64, layers=1, vocabulary=64, length=8, steps=1, device=setting.device)
    if args.method == "packed":
        Packed(tiny, configurations(2), at_once=2).train()
    else:
        Solo(tiny, configurations(1)).train()


@contextmanager
def peak_memory(setting: Setting) -> Iterator[dict[str, int]]:
    """Give the highest memory of the process, or of the GPU, within the context."""
    out: dict[str, int] = {}
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield out
        out["bytes"] = torch.cuda.max_memory_allocated()
        return
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
    yield out
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    out["bytes"] = int(peak.split()[1]) * 1024


def memory_now(setting: Setting) -> int:
    """Return the memory of the process, or of the GPU, in bytes."""
    if setting.device == "cuda":
        return int(torch.cuda.memory_allocated())
    return int(psutil.Process().memory_info().rss)


JOBS = {
    "equality": equality,
    "speed": speed,
    "parts": parts,
    "memory": memory,
    "study_memory": study_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--setting", type=json.loads, default={})
    parser.add_argument("--method", choices=("packed", "solo"), default="packed")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="the first trial of a process")
    parser.add_argument("--every", type=int, default=1, help="its step from trial to trial")
    parser.add_argument(
        "--moved", type=int, default=0, help="runs moved by one ulp, for each trial"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = JOBS[args.job](Setting(**args.setting), args)
    if args.job != "speed":
        say_result(found)


if __name__ == "__main__":
    main()
