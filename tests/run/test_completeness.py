"""Workers check that states are complete.

Trials that fail when they take turns, or diverge in a pack, are trained again.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.run.test_packing import CONFIGS, EPOCHS, Run, alone, nearly
from thrifty.core import EpochDone, Refused, StageDone, StageFailed
from thrifty.pack import Member, Trainable, evaluate_state
from thrifty.pack.fused._block import Block
from thrifty.run import Local, state_from_arrays, train_alone
from thrifty.space import MultiStep, Timeline
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


PACKS = ["fused", "concatenated", "solo"]
RATES = [{"lr": 0.05 / (k + 1), "width": 4} for k in range(3)]


def run(folder, task, configs=RATES, *, pack="concatenated", size=3):
    return Run(Local(workers=1, threads=1, pack=pack, pack_size=size), folder, task, configs)


class Counting(LineTask):
    """Task that weights the loss by the number of its calls, which no checkpoint holds."""

    def __init__(self):
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) / self.calls


@pytest.mark.parametrize("pack", PACKS)
def test_a_state_that_is_not_complete_fails_its_trial(tmp_path, pack):
    failed = run(tmp_path, Counting(), pack=pack).every(StageFailed)
    assert [(each.kind, each.epoch) for each in failed] == [("task", 2)] * len(RATES)
    assert all(each.message.startswith("StateError: Counting keeps") for each in failed)
    assert "'self.calls'" in failed[0].message


class Meant(Counting):
    not_state = ("calls",)


def test_what_is_meant_not_to_be_state_is_trained(tmp_path):
    assert not run(tmp_path, Meant()).every(StageFailed)


class Orthogonal(LineTask):
    """Task with a buffer whose memory order is not that of its dimensions."""

    def model(self, hp):
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(1, 8))
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 1))


class SparseBuffer(LineTask):
    def model(self, hp):
        model = super().model(hp)
        model.register_buffer("matrix", torch.tensor([[0.0, 2.0]]).to_sparse())
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) * torch.sparse.sum(model.matrix)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("task", [Orthogonal, SparseBuffer])
def test_tensors_that_are_not_laid_out_in_order(tmp_path, task, pack):
    found = run(tmp_path, task(), pack=pack)
    assert not found.every(StageFailed)
    assert {each.stop for each in found.every(StageDone)} == {2, EPOCHS}


STARTED: list[int] = []


class Leaving(LineTask):
    """Task whose first trial decides what all others compute."""

    def loss(self, model, batch):
        if not STARTED:
            STARTED.append(3 if model[0].in_features else 0)
        return super().loss(model, batch) * STARTED[0]


def test_a_variable_that_no_result_depends_on_is_a_warning(tmp_path, caplog):
    STARTED.clear()
    assert not run(tmp_path, Leaving(), size=1).every(StageFailed)
    assert "STARTED" in caplog.text


SCALE: list[float] = []


class Tuned(LineTask):
    """Task in which the first trial's hyper-parameter scales all trials of a process."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        if not SCALE:
            SCALE.append(hp.lr * 100)

    def loss(self, model, batch):
        return super().loss(model, batch) * SCALE[0]


def test_what_one_trial_leaves_for_the_next_is_an_error(tmp_path):
    SCALE.clear()
    results = run(tmp_path, Tuned(), size=1)
    assert [each.node for each in results.every(StageFailed)] == [1, 2]
    assert "SCALE" in results.every(StageFailed)[0].message
    SCALE.clear()
    assert results.metrics(0) == alone(Tuned(), RATES[0], 0)


HELD: list[nn.Module] = []


class OneModel(LineTask):
    def model(self, hp):
        if not HELD:
            HELD.append(super().model(hp))
        return HELD[0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_for_all_trials_is_refused(tmp_path, size):
    HELD.clear()
    failed = run(tmp_path, OneModel(), size=size).every(StageFailed)
    assert {each.node for each in failed} >= {1, 2}
    assert all("the same parameter" in f.message or "to several" in f.message for f in failed)


class Drawing(LineTask):
    """Task that draws from Python's stream in some steps only."""

    def loss(self, model, batch):
        x, _ = batch
        factor = random.random() if float(x.sum()) > 0 else 1.0
        return super().loss(model, batch) * (0.5 + factor)


@pytest.mark.parametrize("pack", PACKS)
def test_trials_that_draw_get_what_they_get_alone(tmp_path, pack):
    results = run(tmp_path, Drawing(), pack=pack)
    assert not results.every(StageFailed)
    for number, config in enumerate(RATES):
        assert results.metrics(number) == alone(Drawing(), config, number)


FACTOR = {"now": 1.0}


class Following(LineTask):
    """Task that follows a hyper-parameter through a variable that all trials share."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        FACTOR["now"] = 1.0 + hp.t

    def loss(self, model, batch):
        return super().loss(model, batch) * FACTOR["now"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("pack", PACKS)
def test_a_shared_variable_that_adapt_sets(tmp_path, pack, size):
    moves = [range(4), range(3, -1, -1), [0, 0, 2, 3]]
    configs = [
        {"lr": 0.02, "width": 4, "t": MultiStep(list(each), milestones=[1, 2, 3])} for each in moves
    ]
    results = run(tmp_path, Following(), configs, pack=pack, size=size)
    assert not results.every(StageFailed)
    for number, config in enumerate(configs):
        nearly(results.metrics(number), alone(Following(), config, number))


class Scaling(LineTask):
    """Task that does in ``adapt`` what must be done once for each epoch."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)


class Replacing(LineTask):
    """Task that gives parameters other memory in ``adapt``."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9


class Doubling(LineTask):
    """Task that adds a hook in ``adapt``, once, in the epochs in which ``lr`` is low."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        model[0].register_forward_hook(lambda module, args, out: out * 1.1)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("task", [Scaling, Replacing])
def test_adapt_is_called_once_for_an_epoch(tmp_path, task, pack):
    results = run(tmp_path, task(), CONFIGS[:3], pack=pack)
    for number in range(3):
        nearly(results.metrics(number), alone(task(), CONFIGS[number], number))
        done = results.of(number, StageDone)[-1]
        state = state_from_arrays(*results.checkpoints.read(done.checkpoint))
        timeline = Timeline(CONFIGS[number], epochs=EPOCHS)
        backend, _ = train_alone(task(), timeline, seed=number, epochs=4, state=(4, state))
        for name, tensor in backend.model.state_dict().items():
            assert torch.equal(tensor, state.tensors[f"model.{name}"])
        member = Member(values=timeline.at(3), seed=number, epoch=3, state=state)
        metrics = results.metrics(number)[-1]
        assert evaluate_state(task(), member)["mse"] == pytest.approx(metrics["mse"], rel=1e-5)


def test_other_memory_at_the_end_of_an_epoch(tmp_path, monkeypatch):
    """The rows that are trained are then not the parameters that the model is saved with."""
    right, calls = Block.advance, []

    def advance(self):
        ended = right(self)
        calls.append(len(self.trials))
        if len(calls) == 2:
            for parameter in self.trials[-1].model.parameters():
                parameter.data = parameter.data * 2
        return ended

    monkeypatch.setattr(Block, "advance", advance)
    results = run(tmp_path, LineTask(), pack="fused")
    (refused,) = results.every(Refused)
    assert "given other memory while it trained" in refused.reason
    for number, config in enumerate(RATES):
        nearly(results.metrics(number), alone(LineTask(), config, number))


@pytest.mark.parametrize("pack", PACKS)
def test_hooks_that_pile_up_are_state(tmp_path, pack):
    failed = run(tmp_path, Doubling(), pack=pack).every(StageFailed)
    assert {each.kind for each in failed} == {"task"}
    assert len(failed) == len(RATES)


class TooFast(LineTask):
    """Task that diverges in its second epoch, or is as good as LineTask."""

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)


@pytest.mark.parametrize("pack", PACKS)
def test_a_trial_that_diverges_does_so_alone(tmp_path, pack):
    configs = [{"lr": lr, "width": 4} for lr in (0.05, 1e6, 0.02)]
    results = run(tmp_path, TooFast(), configs, pack=pack)
    (failed,) = results.every(StageFailed)
    assert (failed.node, failed.kind) == (1, "diverged")
    assert "pack" not in failed.message
    for number in (0, 2):
        nearly(results.metrics(number), alone(TooFast(), configs[number], number))


@pytest.mark.parametrize("pack", PACKS)
def test_what_goes_wrong_later_does_not_fail_the_stage_before(tmp_path, pack):
    configs = [{"lr": 0.1, "width": 4, "fault": MultiStep(["", "raise"], milestones=[2])}]
    results = run(tmp_path, FaultyTask(), configs, pack=pack)
    assert [(each.start, each.stop) for each in results.every(StageDone)] == [(0, 2)]
    (failed,) = results.every(StageFailed)
    assert (failed.start, failed.kind) == (2, "error")


class Owner(Trainable):
    """Trainable that keeps a number under a key that is not a string."""

    def setup(self, hp, *, seed, device):
        self.notes = {1: 0.0, "pair": (1, 2)}

    def train(self, epoch, hp):
        self.notes[1] += hp.lr
        self.notes["pair"] = (epoch, *self.notes["pair"][:1])

    def evaluate(self):
        return {"value": self.notes[1], "last": float(self.notes["pair"][0])}

    def state(self):
        return {"notes": self.notes}

    def load_state(self, state):
        self.notes = state["notes"]


def test_states_are_compared_as_they_are_read_back(tmp_path):
    results = run(tmp_path, Owner(), pack="auto")
    assert not results.every(StageFailed)
    assert len(results.every(EpochDone)) == 4 * len(RATES)
    for number, config in enumerate(RATES):
        assert results.metrics(number) == alone(Owner(), config, number)
