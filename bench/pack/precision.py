"""How close packed training comes to a trial alone.

    python -m bench.pack.precision SUBJECT [--quick]

A subject is a workload of the zoo, ``masks`` (dropout) or ``digits`` (final metrics).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.common.digits_task import Digits
from bench.common.harness import Goal, at_most, equal
from bench.common.processes import say_result
from bench.pack.ours import Pack, training_only
from bench.pack.zoo import NUM_BATCHES, ZOO, Classification, Trial, trials
from thrifty.pack import (
    Backend,
    BlockOptions,
    ConcatenatedBackend,
    EpochPlan,
    FusedBackend,
    Member,
    SoloBackend,
)
from thrifty.pack.backends._dry_runs import Structures


SUBJECTS = ("mlp", "lenet", "resnet20", "transformer", "masks", "digits")
CHANNELS_LAST = ("lenet",)
SMALL_BATCHES = {"resnet20": 8}
NUM_TRIALS = 9
NUM_SEEDS = 10
PACKS = (1, 2, 5)
Results = Mapping[str, Mapping[str, Any]]


# -- parameters --------------------------------------------------------------------------


def task_of(
    name: str,
    steps: int,
    *,
    double: bool = False,
    nudge: float | None = None,
    channels_last: bool = False,
) -> th.Task:
    """Return a task of the zoo with epochs of ``steps`` or a part of them.

    Options: double precision, every initial weight one ulp towards ``nudge``, or model and images
    laid out channels last.
    """
    base: type[Classification] = ZOO[name].make  # type: ignore[assignment]

    class Changed(base):  # type: ignore[misc, valid-type]
        batch_size = SMALL_BATCHES.get(name, base.batch_size)

        def data(self, hp: th.HyperParameters) -> th.ArrayData:
            data = super().data(hp)
            train, valid = (
                tuple(t.double() if double and t.is_floating_point() else t for t in part)
                for part in (data.train, data.valid)
            )
            return th.ArrayData(train=train, valid=valid)

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            x, y = batch
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            return super().loss(model, (x, y))

        def model(self, hp: th.HyperParameters) -> nn.Module:
            model = super().model(hp)
            if channels_last:
                model = model.to(memory_format=torch.channels_last)
            if nudge is not None:
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(torch.nextafter(p, torch.full_like(p, nudge)))
            return model.double() if double else model

    return training_only(Changed, math.gcd(steps, NUM_BATCHES))


def compare(name: str, *, quick: bool) -> dict[str, Any]:
    """Compare fused and concatenated training with solo training.

    Solo runs that begin one ulp away, up and down, show what rounding alone does.

    After one step, medians over trials are reported: now and then an activation lies so close to
    zero that rounding decides whether a ReLU lets it through, and one step is enough to see that in
    a gradient, in solo runs as well. After many steps, means are reported with the standard error
    of their difference: where training is chaotic, all runs are as far apart as they can be. A solo
    model laid out channels last shows the effect of that order of summation.
    """
    many, some = (2, 2) if quick else (200, 50)
    members = trials(ZOO[name], NUM_TRIALS)
    short, single = task_of(name, 1), task_of(name, many)
    double = task_of(name, some, double=True)
    runs = ((short, 1), (single, many), (double, some))
    one, long, precise = (solo(task, members, steps) for task, steps in runs)
    moved_one = solo(task_of(name, 1, nudge=math.inf), members, 1)
    moved = [solo(task_of(name, many, nudge=way), members, many) for way in (math.inf, -math.inf)]
    ways = [list(map(_relative, each, long)) for each in moved]
    control = [mean(pair) for pair in zip(*ways, strict=True)]
    laid_out = (
        solo(task_of(name, many, channels_last=True), members, many)
        if name in CHANNELS_LAST
        else []
    )
    variants: dict[str, Any] = {}
    structures: Structures = {}
    for variant in ("", "channels last") if name in CHANNELS_LAST else ("",):
        block = BlockOptions(size=NUM_TRIALS, channels_last=bool(variant))
        first, last, exact = (
            together(FusedBackend(task, block=block, structures=structures), members, steps)
            for task, steps in runs
        )
        variants[variant] = {
            "one_step": median(map(_largest, first, one)),
            "one_step_worst": max(map(_largest, first, one)),
            "float64": max(map(_largest, exact, precise)),
            **_against(list(map(_relative, last, long)), control),
        }
    concatenated = together(ConcatenatedBackend(single), members, many)
    pairs = zip(concatenated, long, strict=True)
    return {
        "steps": {"float32": many, "float64": some},
        "control_one_step": median(map(_largest, moved_one, one)),
        "control": mean(control),
        "controls": {"up": mean(ways[0]), "down": mean(ways[1])},
        "solo_channels_last": mean(map(_relative, laid_out, long)) if laid_out else None,
        "concatenated": sum(not torch.equal(a, b) for a, b in pairs),
        "fused": variants,
    }


def solo(task: th.Task, members: Sequence[Trial], steps: int) -> list[torch.Tensor]:
    """Return the trained parameters of each trial alone."""
    return [together(SoloBackend(task), [member], steps)[0] for member in members]


def together(backend: Backend, members: Sequence[Trial], steps: int) -> list[torch.Tensor]:
    """Return the trained parameters of each trial of a pack."""
    Pack(backend, members).train(steps)
    return [_vector(_model(backend, slot)) for slot in range(len(members))]


def _model(backend: Backend, slot: int) -> nn.Module:
    match backend:
        case FusedBackend():
            return backend.model(slot)
        case ConcatenatedBackend():
            return backend.trials[slot].model
        case SoloBackend():
            return backend.model
    raise TypeError(type(backend).__name__)


def _vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _against(found: Sequence[float], control: Sequence[float]) -> dict[str, float]:
    """Return the mean, and the standard error of its difference from the control's."""
    differences = [f - c for f, c in zip(found, control, strict=True)]
    return {"relative": mean(found), "relative_error": _standard_error(differences)}


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _relative(one: torch.Tensor, alone: torch.Tensor) -> float:
    return float((one - alone).norm() / alone.norm())


# -- dropout -----------------------------------------------------------------------------


class Masks(th.Task):
    """Task whose trained weights tell which masks were drawn.

    The inputs are powers of two, so that all sums are exact.
    """

    optimizer = th.SGD(lr="lr")
    batch_size = 16
    width = 64

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        x = (2.0 ** (torch.arange(64) % 16)[:, None]).expand(-1, self.width)
        return th.ArrayData(train=(x,), valid=(x,))

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return _Masked(self.width)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": self.loss(model, batch)}


class _Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + self.weight) * x


def masks(*, quick: bool) -> dict[str, Any]:
    """Count the trials whose masks in packs differ from those alone, by the size of the pack."""
    members = [Trial(seed=seed, values={"lr": 1.0}) for seed in range(max(PACKS))]
    steps = 4 if quick else 8
    alone = solo(Masks(), members, steps)
    assert len({tuple(v.tolist()) for v in alone}) == len(members), "masks tell nothing"
    different = {}
    for size in PACKS:
        backend = FusedBackend(Masks(), block=BlockOptions(size=size))
        found = together(backend, members[:size], steps)
        pairs = zip(found, alone[:size], strict=True)
        different[size] = sum(not torch.equal(a, b) for a, b in pairs)
    return {"different": different}


# -- final metrics -----------------------------------------------------------------------


def digits(*, quick: bool) -> dict[str, Any]:
    """Return the final accuracy over seeds, packed minus solo."""
    seeds, epochs = (3, 2) if quick else (NUM_SEEDS, 10)
    task = Digits()
    packed = accuracies(FusedBackend(task, block=BlockOptions(size=seeds)), range(seeds), epochs)
    alone = [accuracies(SoloBackend(task), [seed], epochs)[0] for seed in range(seeds)]
    differences = [p - a for p, a in zip(packed, alone, strict=True)]
    return {
        "packed": packed,
        "solo": alone,
        "difference": mean(differences),
        "standard_error": _standard_error(differences),
    }


def accuracies(backend: Backend, seeds: Sequence[int], epochs: int) -> list[float]:
    """Return the final accuracy of each trial of a pack."""
    values = {"lr": 0.1}
    for slot, seed in enumerate(seeds):
        backend.put(slot, Member(values=values, seed=seed))
    for epoch in range(epochs):
        plan = EpochPlan(epoch=epoch, values=values)
        outcomes = backend.step(dict.fromkeys(range(len(seeds)), plan))
    accuracies = []
    for slot in range(len(seeds)):
        outcome = outcomes[slot]
        if isinstance(outcome, Exception):
            raise outcome
        accuracies.append(outcome["accuracy"])
    return accuracies


# -- what it says ------------------------------------------------------------------------


def rows(results: Results) -> list[dict[str, Any]]:
    """Return the table of the models; numbers are too small for fixed places."""
    return [
        {
            "model": f"{name} {variant}".strip(),
            "fused: 1 step, largest": f"{found['one_step']:.1e}",
            "in the worst trial": f"{found['one_step_worst']:.1e}",
            "solo, one ulp moved: 1 step": f"{result['control_one_step']:.1e}",
            "fused: float64, largest": f"{found['float64']:.1e}",
            "fused: float32, relative": f"{found['relative']:.2e}",
            "solo, one ulp up: float32": f"{result['controls']['up']:.2e}",
            "one ulp down": f"{result['controls']['down']:.2e}",
            "error of the difference": f"{found['relative_error']:.1e}",
            "solo, channels last: float32": (
                ""
                if result["solo_channels_last"] is None
                else f"{result['solo_channels_last']:.2e}"
            ),
            "concatenated: trials that differ": result["concatenated"],
        }
        for name, result in results.items()
        if name in ZOO
        for variant, found in result["fused"].items()
    ]


def goals(results: Results) -> list[Goal]:
    out = []
    for name, result in results.items():
        if name == "masks":
            for size, num in result["different"].items():
                out.append(equal(f"packs of {size}: trials with other dropout masks", num, 0))
        elif name == "digits":
            limit = 2 * result["standard_error"]
            difference = abs(result["difference"])
            out.append(at_most("digits: |packed - solo| within 2 errors", difference, limit))
        else:
            out += _goals_of(name, result)
    return out


def _goals_of(name: str, result: Mapping[str, Any]) -> list[Goal]:
    steps = result["steps"]
    out = [equal(f"{name}: concatenated trials that differ", result["concatenated"], 0)]
    for variant, found in result["fused"].items():
        what = f"{name} {variant}".strip()
        out.append(_small(f"{what}: largest difference after 1 step", found["one_step"], 1e-6))
        after = f"after {steps['float32']} steps, against one ulp moved"
        control = result["control"]
        out.append(_small(f"{what}: relative difference {after}", found["relative"], control))
        after = f"after {steps['float64']} steps in float64"
        out.append(_small(f"{what}: largest difference {after}", found["float64"], 1e-10))
    return out


def _small(name: str, value: float, limit: float) -> Goal:
    """Return a goal as ``at_most`` does, with significant digits."""
    value = float(f"{value:.3g}")
    return Goal(name=name, value=value, goal=f"<= {limit:.3g}", holds=value <= limit)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    special = {"masks": masks, "digits": digits}
    if args.subject in special:
        say_result(special[args.subject](quick=args.quick))
    else:
        say_result(compare(args.subject, quick=args.quick))


if __name__ == "__main__":
    main()
