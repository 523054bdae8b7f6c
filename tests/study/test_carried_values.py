"""Trials that carry what those compared before did not carry are compared as well."""

from __future__ import annotations

import pytest
import torch

import thrifty as th
from thrifty.core import StateError
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


class CarriesIfAsked(LineTask):
    """The hidden state of its model goes from batch to batch, for one value of an option."""

    def model(self, hp):
        made = super().model(hp)
        made.carry, made.carried = hp.carry, None
        return made

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if model.carry:
            found = found * (1 if model.carried is None else model.carried)
            model.carried = 1 / (1 + found.item())
        return found


class SwitchesLate(LineTask):
    """A plain attribute of its model is set once, in a late epoch, and acts from then on."""

    def model(self, hp):
        made = super().model(hp)
        made.num_seen, made.factor = 0, 1.0
        made.register_buffer("seen", torch.zeros(()))
        return made

    def loss(self, model, batch):
        model.seen += 1
        if int(model.seen) == 9:
            model.factor = 3.0
        return super().loss(model, batch) * model.factor


class TrainsOnlyOnceAsked(th.Trainable):
    """A running mean outside of its state, for one value of an option."""

    def setup(self, hp, *, seed, device):
        self.weight, self.mean, self.carry = 0.0, 1.0, hp.carry

    def train(self, epoch, hp):
        self.weight += hp.lr * self.mean
        if self.carry:
            self.mean = 0.5 * self.mean + 0.1

    def evaluate(self):
        return {"mse": self.weight}

    def state(self):
        return {"weight": self.weight}

    def load_state(self, state):
        self.weight = state["weight"]


@pytest.mark.parametrize(
    ("task", "space"),
    [
        (CarriesIfAsked, {"carry": th.Choice([False, True])}),
        (TrainsOnlyOnceAsked, {"carry": th.Choice([False, True])}),
        (SwitchesLate, {}),
    ],
)
@pytest.mark.parametrize("pack", ["solo", "auto"])
def test_what_only_some_trials_or_late_epochs_carry_is_compared_too(tmp_path, task, space, pack):
    rates = th.Choice([0.1, th.Step(0.1, [2]), th.Step(0.1, [5])])
    study = th.Study(
        task(),
        th.Space(**space, lr=rates),
        metric="mse",
        mode="min",
        name="carries",
        algorithm=th.GridSearch(max_epochs=7),
        storage=f"sqlite:///{tmp_path}/t.db",
    )
    with pytest.raises(StateError, match="outside of its checkpoint"):
        study.run(progress=False, executor=th.Local(pack=pack))


def test_epochs_that_are_too_long_to_train_again_are_compared_too(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 0.0)  # no epoch is short
    study = th.Study(
        TrainsOnlyOnceAsked(),
        th.Space(carry=th.Choice([False, True]), lr=th.Choice([0.1, th.Step(0.1, [2])])),
        metric="mse",
        mode="min",
        name="long",
        algorithm=th.GridSearch(max_epochs=5),
        storage=f"sqlite:///{tmp_path}/t.db",
    )
    with pytest.raises(StateError, match=r"'self\.mean'"):
        study.run(progress=False, executor=th.Local(pack="solo"))
