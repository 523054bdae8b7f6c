"""The advice for a variable that a training function loses: it is given, and works as it stands."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thrifty as th
from tests.integrations import _settings
from thrifty.core import StateError
from thrifty.core._child import pickled


ROWS = torch.linspace(-1, 1, 32)[:, None]
DATA = TensorDataset(ROWS, 2 * ROWS)


class Scaled:
    """A loss that divides by a running mean of itself."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, found, target):
        loss = (found - target).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean


class ScaledWithState(Scaled):
    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class ScaledModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 1.0

    forward = Scaled.__call__


class ScaledByBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, found, target):
        loss = (found - target).square().mean()
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


def function(make_loader, *, kept=(), loss=torch.nn.MSELoss):
    """Return a training function with a loader and a loss."""

    def train(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, crit = make_loader(trial), loss()
        state = {"model": model, "optimizer": optimizer}
        if "generator" in kept:
            state["loader_generator"] = loader.generator
        if "loader" in kept:
            state["loader"] = loader
        if "crit" in kept:
            state["crit"] = crit
        for _ in trial.epochs(state):
            for x, y in loader:
                optimizer.zero_grad()
                found = crit(model(x), y)
                found.backward()
                optimizer.param_groups[0]["lr"] = lr.value
                optimizer.step()
            yield {"loss": found.item()}

    return th.trainable(train)


@th.trainable
def with_a_loader_in_each_epoch(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in trial.epochs({"model": model, "optimizer": optimizer}):
        for x, y in sampled(trial):
            optimizer.zero_grad()
            found = (model(x) - y).square().mean()
            found.backward()
            optimizer.param_groups[0]["lr"] = lr.value
            optimizer.step()
        yield {"loss": found.item()}


def plain(trial):
    return DataLoader(DATA, batch_size=8, shuffle=True)


def seeded(trial):
    generator = torch.Generator().manual_seed(trial.seed)
    return DataLoader(DATA, batch_size=8, shuffle=True, generator=generator)


def sampled(trial):
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0)
    return DataLoader(DATA, batch_size=8, sampler=CountsPasses(sampler))


class CountsPasses(torch.utils.data.Sampler):
    def __init__(self, inner):
        self.inner, self.passes = inner, 0

    def __iter__(self):
        self.inner.set_epoch(self.passes)
        self.passes += 1
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


def run(task):
    study = th.Study(
        task,
        th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
        algorithm=th.GridSearch(max_epochs=4),
        metric="loss",
        mode="min",
        storage="sqlite://",
        name="advice",
    )
    return study.run(progress=False, executor=th.Local(pack="solo"))


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        (function(seeded), 'put "loader_generator": loader.generator into the dict'),
        (function(seeded, kept=["loader"]), 'put "loader_generator": loader.generator into'),
        (function(sampled), "A loader has no state that can be kept: make it in each epoch;"),
        (function(plain, loss=Scaled), "make it a torch.nn.Module with what changes in buffers"),
        (function(plain, loss=ScaledModule), "as 'crit': crit, and what changes in it into"),
        (function(plain, loss=ScaledByBuffer), "Put it into the dict that trial.epochs() gets"),
    ],
)
def test_what_is_lost_is_named_with_what_to_do(task, advice):
    try:
        (error, *_) = [trial.error for trial in run(task).trials]
    except th.ThriftyError as refused:
        error = str(refused)
    assert advice in error


@pytest.mark.parametrize(
    "task",
    [
        function(seeded, kept=["generator"]),
        with_a_loader_in_each_epoch,
        function(plain, loss=ScaledByBuffer, kept=["crit"]),
        function(plain, loss=ScaledWithState, kept=["crit"]),
    ],
)
def test_the_advice_works(task):
    found = run(task)
    assert [trial.state for trial in found.trials] == ["done", "done"]
    assert found.savings.unique_epochs == 6
    plain_curve, late_curve = (trial.curve for trial in found.trials)
    assert plain_curve[:2] == late_curve[:2]
    assert plain_curve[2:] != late_curve[2:]


@th.trainable
def sets_before_its_loop(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
    _settings.SCALE = 2.0
    state = {"x": 1.0}
    for _ in trial.epochs(state):
        state["x"] -= lr.value * state["x"] * _settings.SCALE
        yield {"loss": state["x"]}


@th.trainable
def sets_in_each_round(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
    state = {"x": 1.0}
    for _ in trial.epochs(state):
        before, _settings.SCALE = _settings.SCALE, 2.0
        state["x"] -= lr.value * state["x"] * _settings.SCALE
        _settings.SCALE = before
        yield {"loss": state["x"]}


def test_a_setting_of_another_module_is_refused_with_advice_for_functions(monkeypatch):
    monkeypatch.setattr(_settings, "SCALE", 1.0)
    with pytest.raises(StateError, match=r"'.*_settings\.SCALE'.*top of each round") as caught:
        run(sets_before_its_loop)
    assert "not_state" not in str(caught.value)


def test_a_setting_that_is_set_back_before_the_yield_is_no_state(monkeypatch):
    monkeypatch.setattr(_settings, "SCALE", 1.0)
    found = run(sets_in_each_round)
    assert [trial.state for trial in found.trials] == ["done", "done"]
    assert found.trials[0].curve[0] == pytest.approx(0.8)


def test_modules_of_a_class_of_their_own_are_sent_by_name():
    assert pickle.loads(pickled(torch.backends.cudnn)) is torch.backends.cudnn
