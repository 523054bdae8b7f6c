"""Trials in a block are checked against solo training, and every difference is found."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.pack import (
    AutoBackend,
    EpochPlan,
    FusedBackend,
    Member,
    UnfusableError,
    UnverifiedError,
)
from thrifty.pack.fused._checking import StepCheck
from thrifty.pack.fused._fusable import RULES
from thrifty.pack.fused._row_state import RowState
from thrifty.run import train_alone
from thrifty.space import Timeline


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


TRIALS = [Trial(config={"lr": lr}, epochs=2) for lr in (0.02, 0.05, 0.1)]


@pytest.fixture
def wrong_updates(monkeypatch):
    """Make the updates of blocks wrong, from number ``first`` up to but not including ``last``."""

    def make(first, last=10**9):
        right = RowState.updater
        number = [0]

        def updater(self, options):
            update = right(self, options)

            def wrong():
                update()
                if first <= number[0] < last:
                    self._parameters.mul_(1.01)
                number[0] += 1

            return wrong

        monkeypatch.setattr(RowState, "updater", updater)

    return make


def begun(task, trials=TRIALS):
    backend = FusedBackend(task, device=here())
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    return backend


def epoch(backend, number, trials=TRIALS, *, verify=True):
    plans = {
        slot: EpochPlan(epoch=number, values=trial.timeline.at(number), verify=verify)
        for slot, trial in enumerate(trials)
    }
    return backend.step(plans)


def test_the_first_step_is_checked(wrong_updates):
    wrong_updates(0)
    outcomes = epoch(begun(Toy()), 0)
    assert all(isinstance(outcome, UnverifiedError) for outcome in outcomes.values())
    assert outcomes[0].mismatch
    assert "differs" in str(outcomes[0])


def test_what_goes_wrong_later_is_found_before_the_epoch_counts(wrong_updates):
    wrong_updates(4)
    backend = begun(Toy())
    assert not isinstance(epoch(backend, 0)[0], Exception)
    assert backend.num_unverified(0) == 0
    assert all(isinstance(outcome, UnverifiedError) for outcome in epoch(backend, 1).values())


class Even(Toy):
    """A task whose batches all have one size, which makes a single program."""

    batch_size = 5


def test_an_epoch_that_need_not_be_verified_yet_is_not_said_to_be(wrong_updates):
    wrong_updates(8)
    backend = begun(Even())
    assert not isinstance(epoch(backend, 0)[1], Exception)
    assert backend.num_unverified(1) == 0
    assert not isinstance(epoch(backend, 1, verify=False)[1], Exception)
    assert backend.num_unverified(1) == 1
    assert isinstance(epoch(backend, 2)[1], UnverifiedError)


def test_copies_of_states_are_freed_after_a_check():
    backend = begun(Toy())
    epoch(backend, 0)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is StepCheck]


def test_a_structure_that_failed_is_not_fused_again(wrong_updates):
    wrong_updates(0, 1)
    backend = begun(Toy())
    epoch(backend, 0)
    for slot in range(3):
        backend.release(slot)
    with pytest.raises(UnfusableError, match="differs"):
        backend.put(7, TRIALS[0].member)


def test_the_automatic_back_end_fuses_what_agrees():
    """The automatic back-end does fuse, so that the other tests really test fusion."""
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    assert_same(together(backend, TRIALS), alone(Toy(), TRIALS), tolerance=2e-5)
    assert backend.checks.num_checks >= len(TRIALS)
    assert backend.checks.spent_s > 0


@pytest.mark.parametrize("agrees", [True, False])
def test_where_tf32_may_hide_an_error_a_second_opinion_decides(monkeypatch, agrees):
    """It is asked at a trial's first check; later ones compare what is left."""
    asked = []
    checking = "thrifty.pack.fused._checking"
    monkeypatch.setattr(f"{checking}.rounds_to_tf32", lambda tensors: True)
    monkeypatch.setattr(
        f"{checking}.agrees_in_double", lambda *_, **__: bool(asked.append(1)) or agrees
    )
    backend = begun(Toy())
    outcomes = [epoch(backend, 0), epoch(backend, 1)]
    if agrees:
        assert not any(isinstance(each, Exception) for found in outcomes for each in found.values())
        assert len(asked) == len(TRIALS)
    else:
        assert "in double precision differs" in str(outcomes[0][0])


@pytest.mark.parametrize("agrees", [True, False])
def test_the_same_for_metrics(monkeypatch, caplog, agrees):
    evaluation = "thrifty.pack.fused._evaluation"
    monkeypatch.setattr(f"{evaluation}.rounds_to_tf32", lambda tensors: True)
    monkeypatch.setattr(f"{evaluation}.metrics_agree_in_double", lambda *_, **__: agrees)
    found = together(AutoBackend(Toy(), device=here(), prefer="fused"), TRIALS)
    assert_same(found, alone(Toy(), TRIALS), tolerance=2e-5)
    assert ("they differ in double precision" in caplog.text) is not agrees


def test_metrics_that_differ_are_computed_one_by_one(monkeypatch, caplog):
    def wrong(*args, size, **options):
        return [{"mse": 1000.0 + k} for k in range(size)]

    monkeypatch.setattr("thrifty.pack.fused._evaluation.evaluate_packed", wrong)
    found = together(AutoBackend(Toy(), device=here(), prefer="fused"), TRIALS)
    assert_same(found, alone(Toy(), TRIALS), tolerance=2e-5)
    assert "one trial after the other" in caplog.text


def test_metrics_that_differ_later_have_the_epoch_trained_again(monkeypatch):
    backend = begun(Toy())
    assert not isinstance(epoch(backend, 0)[0], Exception)

    def wrong(*args, size, **options):
        return [{"mse": 1000.0} for _ in range(size)]

    monkeypatch.setattr("thrifty.pack.fused._evaluation.evaluate_packed", wrong)
    monkeypatch.setattr(type(backend.budget), "allows", lambda self, seconds: True)
    outcomes = epoch(backend, 1)
    assert any(isinstance(outcome, UnverifiedError) for outcome in outcomes.values())


class WrongInSingle(torch.autograd.Function):
    """The identity, whose gradient is wrong by a thousandth in single precision only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001 if gradient.dtype == torch.float32 else gradient


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.inner(x) + torch.sinh(self.shift)


class FarOff(Toy):
    """A task whose largest gradient is that of a tensor of one number."""

    def __init__(self, scale, offset):
        self.scale, self.offset = scale, offset

    def targets(self, x):
        return super().targets(x) + 5.0

    def network(self, hp):
        return Shifted()

    def loss(self, model, batch):
        return self.scale * super().loss(model, batch) + self.offset


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 1e4), (1e-8, 0.0), (1e-10, 0.0)])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_that_is_wrong_in_single_precision_is_refused(monkeypatch, scale, offset, wrong):
    def rule(group, x):
        out = torch.sinh(group.first(x))
        return group.pack(WrongInSingle.apply(out) if wrong else out)

    monkeypatch.setitem(RULES, torch.sinh, rule)
    outcomes = epoch(begun(FarOff(scale, offset)), 0)
    for outcome in outcomes.values():
        assert isinstance(outcome, UnverifiedError) == wrong
        assert not wrong or "the gradient of 'shift' differs" in str(outcome)


class Scaled(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.settings = settings

    def forward(self, x):
        return self.inner(x) * self.settings["factor"]


class Meddling(Dataset):
    """A dataset that changes a setting of the models while it is read."""

    def __init__(self, settings, *, at):
        self.settings, self.at = settings, at
        self.x = normal(320, 6, seed=3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        # The setting depends on the row, not on which trial reads it or how often.
        self.settings["factor"] = 2.0 if index < self.at else 1.0
        return self.x[index], self.x[index].sum().reshape(1)


SETTINGS = {"factor": 1.0}


class Counting(Meddling):
    """It also changes, with each row, a setting that makes no difference."""

    def __getitem__(self, index):
        COUNTS["rows"] = index
        batch = super().__getitem__(index)
        self.settings["factor"] = 2.0 if index % 32 == 7 else 1.0
        return batch


class Meddled(Toy):
    not_state: tuple[str, ...] = ("settings",)

    def data(self, hp):
        return Meddling(SETTINGS, at=40), Meddling(SETTINGS, at=0)

    def network(self, hp):
        return Scaled(SETTINGS)


COUNTS = {"rows": 0}


class Counted(Meddled):
    not_state = ("settings", "COUNTS")

    def data(self, hp):
        return Counting(SETTINGS, at=0), Meddling(SETTINGS, at=0)

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.0 * COUNTS["rows"]


@pytest.mark.parametrize("kind", [Meddled, Counted])
def test_what_a_dataset_changes_within_an_epoch_is_noticed(kind):
    trials = TRIALS[:2]
    backend = AutoBackend(kind(), device=here(), prefer="fused")
    found = together(backend, trials)
    for one, config in zip(found, trials, strict=True):
        if one.error is not None:
            assert isinstance(one.error, UnverifiedError)
            continue
        (wanted,) = alone(kind(), [config])
        assert_same([one], [wanted], tolerance=2e-5)


def test_a_state_that_a_block_gives_is_that_of_the_trial_alone():
    backend = begun(Toy())
    epoch(backend, 0)
    mine, _ = train_alone(Toy(), Timeline({"lr": 0.02}, epochs=20), seed=0, epochs=1)
    for name, tensor in mine.state(0).tensors.items():
        assert torch.allclose(
            backend.state(0).tensors[name].cpu(), tensor.cpu(), rtol=1e-4, atol=1e-6
        )


def test_a_trial_that_must_stay_alone_is_not_fused():
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    backend.put(0, Member(values={"lr": 0.1}, seed=0, alone=True))
    backend.step({0: EpochPlan(epoch=0, values={"lr": 0.1})})
    assert backend.checks.num_checks == 0
