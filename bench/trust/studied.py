"""Each case and each task in a study, and each of its trials in a plain PyTorch loop.

The study packs trials and shares stages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import Dataset

import thrifty as th
from bench.trust.case import CORPUS, NUM_MODELS, Named
from bench.trust.moving import EPOCHS, Moving, Trained, batches_of, train_plainly
from bench.trust.packed import Verdict, attempt, clip, everything, nudge, only_plain_fails, relative
from thrifty.core import derive_seed, step_seed
from thrifty.perf import PackCurve


# -- cases -------------------------------------------------------------------------------


MEASURED = "measured"
"""``pack="fused"`` with packs that an earlier study has measured and found good."""

NUM_BATCHES = 4
TOLERANCE = 1e-3


class Rows(Dataset[Any]):
    """The rows of some batches, one by one, for batches that are not tuples of tensors."""

    def __init__(self, batches: list[Any]) -> None:
        self._rows = [
            {key: value[i] for key, value in batch.items()}
            for batch in batches
            for i in range(len(next(iter(batch.values()))))
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class CaseTask(th.Task):
    """A case of the corpus as a task.

    Trials differ in their model's number and in their schedule.
    """

    batch_size = 16

    def __init__(self, name: str) -> None:
        self.name = name
        self.case = CORPUS[name].make()
        self.optimizer = self.case.optimizer

    def data(self, hp: th.HyperParameters) -> Any:
        train = [self.case.batch(step) for step in range(NUM_BATCHES)]
        valid = [self.case.batch(step) for step in range(100, 102)]
        if isinstance(train[0], dict):
            return Rows(train), Rows(valid)
        return th.ArrayData(
            train=tuple(map(torch.cat, zip(*train, strict=True))),
            valid=tuple(map(torch.cat, zip(*valid, strict=True))),
        )

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return self.case.model(hp.k)

    def adapt(self, model: nn.Module, hp: th.HyperParameters) -> None:
        if self.case.between is not None:
            self.case.between(int(hp.t), [model])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.case.loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        if self.case.metrics is not None:
            return self.case.metrics(model, batch)
        return {"value": self.case.loss(model, batch)}


def space(named: Named) -> th.Space:
    """Return a space of models that differ, and schedules that diverge after two epochs."""
    case = named.make()
    values = [case.values(k) for k in range(NUM_MODELS)]
    lr = values[0]["lr"]
    params: dict[str, Any] = {
        "k": th.Choice(range(NUM_MODELS)),
        "lr": th.Choice([th.Constant(lr), th.Step(lr, [2], gamma=0.5)]),
    }
    for name in values[0].keys() - {"lr"}:
        params[name] = values[1][name]
    if case.between is not None:
        params["t"] = th.MultiStep(list(range(EPOCHS)), milestones=list(range(1, EPOCHS)))
    return th.Space(**params)


def run_studied(named: Named, *, pack: str) -> Verdict:
    """Run one case as a study and compare each of its trials with the plain loop."""
    study, error = attempt(
        lambda: _study(CaseTask(named.name), space(named), name=named.name, pack=pack)
    )
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        refused = isinstance(error, th.ThriftyError)
        return Verdict(
            name=named.name, how="refused" if refused else "CRASH", deviation=0.0, why=text
        )
    deviation, control, failed = 0.0, 0.0, []
    for trial in study.trials:
        wanted, plain_error = attempt(lambda trial=trial: _plain(named, trial.config))
        if trial.state == "failed":
            if plain_error is None and not wanted.is_diverged:
                failed.append(trial.error.partition("\n")[0])
            continue
        if plain_error is not None:
            return only_plain_fails(named.name, plain_error)
        model, load_error = attempt(trial.load_model)
        if load_error is not None:
            failed.append(f"{type(load_error).__name__}: {load_error}")
            continue
        apart = _apart(Trained(model=model, curve=list(trial.curve)), wanted)
        deviation = max(deviation, apart)
        if not apart <= TOLERANCE:
            control = max(control, _apart(_plain(named, trial.config, nudged=True), wanted))
    if failed:
        is_clear = all(any(kind in reason for kind in _CLEAR) for reason in failed)
        how = "refused" if is_clear else "CRASH"
        return Verdict(name=named.name, how=how, deviation=0.0, why=failed[0])
    return Verdict(
        name=named.name, how="trained", deviation=deviation, control=control, tolerance=TOLERANCE
    )


_CLEAR = ("TaskError", "UsageError", "StateError")


def _apart(found: Trained, wanted: Trained) -> float:
    """Return the distance of two trials: the worst of their curves and their tensors."""
    mine, theirs = dict(found.model.state_dict()), dict(wanted.model.state_dict())
    if mine.keys() != theirs.keys() or len(found.curve) != len(wanted.curve):
        return math.inf
    curve = relative(torch.tensor(found.curve), torch.tensor(wanted.curve))
    states = [relative(mine[n], theirs[n]) for n in theirs if isinstance(theirs[n], torch.Tensor)]
    return max([curve, *states])


def _known_gains() -> AbstractContextManager[Any]:
    """Stand for curves that an earlier study has stored: packs of four are four times as fast."""
    curves = [
        PackCurve(backend="solo", step_s={1: 1.0}),
        PackCurve(backend="fused", step_s={1: 1.0, 4: 1.0}),
    ]
    return mock.patch("thrifty.pack.backends._fusion_policy.calibrate", return_value=curves)


def _study(task: th.Task, space: th.Space, *, name: str, pack: str) -> th.Study:
    folder = Path(tempfile.mkdtemp())
    study = th.Study(
        task,
        space,
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="value",
        mode="min",
        storage=f"sqlite:///{folder / 'trust.db'}",
        name=name,
        seed=0,
    )
    with _known_gains() if pack == MEASURED else nullcontext():
        way = "fused" if pack == MEASURED else pack
        study.run(progress=False, executor=th.Local(workers=1, threads=1, pack=way, pack_size=4))
    return study


def _plain(named: Named, config: Mapping[str, Any], *, nudged: bool = False) -> Trained:
    """Train one trial in a plain loop, with thrifty's names of the random streams."""
    task = CaseTask(named.name)

    def at(epoch: int, step: int, num_steps: int) -> dict[str, Any]:
        out = {}
        for name, value in config.items():
            if hasattr(value, "values") and hasattr(value, "segments"):
                out[name] = value.values(
                    epoch, epoch + 1, epochs=EPOCHS, steps_per_epoch=num_steps
                ).tolist()[step]
            else:
                out[name] = value
        return out

    start = th.HyperParameters(at(0, 0, 1))
    everything(derive_seed(0, "data"))
    data = task.data(start)
    everything(derive_seed(0, "model"))
    model = task.model(start)
    if nudged:
        nudge(model)
    optimizer = task.optimizer.build(model.parameters(), at(0, 0, 1))
    curve = []
    for epoch in range(EPOCHS):
        task.adapt(model, th.HyperParameters(at(epoch, 0, 1)))
        epoch_seed = derive_seed(0, "epoch", epoch)
        everything(epoch_seed)
        model.train()
        batches = _batches(data, epoch)
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = at(epoch, step, len(batches))["lr"]
            torch.manual_seed(step_seed(epoch_seed, step))
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            clip(model, task.optimizer.clipping(at(epoch, step, len(batches))))
            optimizer.step()
        model.eval()
        everything(derive_seed(0, "evaluate", epoch))
        with torch.no_grad():
            batch = _valid(data)
            curve.append(float(task.metrics(model, batch)["value"]))
    return Trained(model=model.eval(), curve=curve)


def _batches(data: Any, epoch: int) -> list[Any]:
    if not isinstance(data, tuple):
        return list(batches_of(data.train, epoch, size=CaseTask.batch_size))
    train = data[0]
    numbers = batches_of([torch.arange(len(train))], epoch, size=CaseTask.batch_size)
    return [torch.utils.data.default_collate([train[int(i)] for i in part]) for (part,) in numbers]


def _valid(data: Any) -> Any:
    if isinstance(data, tuple):
        rows = [data[1][i] for i in range(len(data[1]))]
        return torch.utils.data.default_collate(rows)
    return tuple(t.clone() for t in data.valid)


# -- tasks with a plain loop of their own ------------------------------------------------


def run_moving(one: Moving, *, pack: str) -> Verdict:
    """Run one task as a study and compare each trial with the plain loop, or check its refusal."""
    study, error = attempt(lambda: _study(one.task(), one.space, name=one.name, pack=pack))
    errors = [] if error is None else [error]
    texts = [f"{type(e).__name__}: {e}" for e in errors]
    if study is not None:
        texts += [trial.error for trial in study.trials if trial.state == "failed"]
    if texts:
        is_clear = (
            one.refused is not None
            and all(one.refused in text for text in texts)
            and all(isinstance(e, th.ThriftyError) for e in errors)
        )
        how = "refused" if is_clear else "CRASH"
        return Verdict(name=one.name, how=how, deviation=0.0, why=texts[0].split("\n")[0])
    if one.refused is not None:
        return Verdict(name=one.name, how="trained", deviation=float("inf"), why="must be refused")
    deviation = 0.0
    for trial in study.trials:
        wanted = train_plainly(one, trial.config)
        theirs, mine = dict(wanted.model.state_dict()), dict(trial.load_model().state_dict())
        deviation = max(
            deviation,
            relative(torch.tensor(trial.curve), torch.tensor(wanted.curve)),
            *(relative(mine[name], theirs[name]) for name in theirs),
        )
    return Verdict(name=one.name, how="trained", deviation=deviation)
