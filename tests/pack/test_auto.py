"""The automatic back-end chooses by what can be fused, then by measured times."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._measuring import curves
from tests.pack._toys import Dropping, Images, Toy
from tests.pack.test_fused_backend import UNFUSABLE, task_with
from thrifty.core import DivergedError
from thrifty.pack import AutoBackend, DatasetPair, FusedBackend, Optimizer, Trainable
from thrifty.pack.backends._dry_runs import may_use_files
from thrifty.pack.backends._fusion_policy import MUCH_MORE, PRICE_STEPS
from thrifty.pack.fused._member import FusedTrial
from thrifty.perf import PackCurve
from thrifty.space import MultiStep
from thrifty.testing import FaultyTask


pytestmark = [
    pytest.mark.usefixtures("free_checks"),
    pytest.mark.slow,
    pytest.mark.usefixtures("device"),
]

TRIALS = [Trial(config={"lr": 0.05 / (k + 1)}, seed=k, epochs=2 + k % 2) for k in range(3)]


def fused_slots(backend, trials=TRIALS):
    """Return the slots that are fused once the trials have been assigned to slots."""
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    return [slot for slot in range(len(trials)) if is_fused(backend, slot)]


def is_fused(backend, slot):
    return isinstance(backend._where[slot], FusedBackend)


def blocks(backend):
    """Return the number of trials in each block."""
    return [len(block.trials) for each in backend._fused.blocks.by_key.values() for block in each]


# -- by measurement ------------------------------------------------------------------------


def test_fused_where_that_is_faster(measure):
    measure({1: 0.5, 4: 1.0})
    backend = AutoBackend(Toy(), device=here())
    assert fused_slots(backend) == [0, 1, 2]
    assert blocks(backend) == [3]


def test_blocks_have_the_best_size(measure):
    measure({1: 0.5, 2: 0.6})
    backend = AutoBackend(Toy(), device=here())
    assert fused_slots(backend) == [0, 1, 2]
    assert blocks(backend) == [2, 1]


def test_plain_where_fused_is_slower(measure):
    measure({1: 3.0, 4: 8.0})
    assert fused_slots(AutoBackend(Dropping(), device=here())) == []
    assert_same(together(AutoBackend(Dropping(), device=here()), TRIALS), alone(Dropping(), TRIALS))


def test_the_order_of_images_that_is_best(monkeypatch):
    better = PackCurve(backend="fused", variant="channels last", step_s={1: 0.4, 4: 1.0})
    monkeypatch.setattr(
        "thrifty.pack.backends._fusion_policy.calibrate",
        lambda *_, **__: [*curves({1: 0.5, 4: 2.0}), better],
    )
    backend = AutoBackend(Images(), device=here())
    assert_same(together(backend, TRIALS), alone(Images(), TRIALS), tolerance=1e-5)
    held = [block for each in backend._fused.blocks.by_key.values() for block in each]
    assert held
    assert all(block.structure.channels_last for block in held)


@pytest.mark.parametrize("fused", [{1: 0.5, 4: 1.0}, {4: 9.0}])
def test_the_answer_does_not_depend_on_the_choice(measure, fused):
    measure(fused)
    found = together(AutoBackend(Dropping(), device=here()), TRIALS, at_once=2)
    assert_same(found, alone(Dropping(), TRIALS), tolerance=1e-5)


def test_one_measurement_for_each_structure(measure):
    measuring = measure({1: 0.5, 4: 1.0})
    other = [Trial(config={"lr": 0.1, "width": width}) for width in (64, 64, 3)]
    fused_slots(AutoBackend(Toy(), device=here()), [*TRIALS, *other])
    assert len(measuring.calls) == 3


def test_a_measurement_leaves_no_trace():
    """A real measurement does not change the training that follows."""
    assert_same(
        together(AutoBackend(Toy(), device=here()), TRIALS), alone(Toy(), TRIALS), tolerance=1e-5
    )


def test_known_measurements_are_told_but_not_made_again(measure):
    measuring, told = measure({1: 0.5, 4: 1.0}), []
    fused_slots(AutoBackend(Toy(), device=here(), on_calibrated=told.append))
    assert len(told) == len(measuring.calls) == 1
    known = {told[0].key: curves({1: 0.7, 4: 2.0})}
    second = AutoBackend(Toy(), device=here(), known=known, on_calibrated=told.append)
    assert fused_slots(second) == [0, 1, 2]
    assert len(measuring.calls) == 1
    assert len(told) == 2
    assert (told[1].key, told[1].curves) == (told[0].key, tuple(known[told[0].key]))
    assert second.calibration(0).solo_s == 1.0
    assert "parameters" in told[0].structure
    slow = {told[0].key: curves({4: 9.0})}
    assert fused_slots(AutoBackend(Toy(), device=here(), known=slow)) == []


def test_a_measurement_waits_until_it_has_paid_or_much_is_known_to_come(measure):
    measuring = measure({1: 0.5, 4: 1.0})
    backend = AutoBackend(Toy(), device=here(), patient=True)
    enough = math.ceil(MUCH_MORE * PRICE_STEPS / 3)  # an epoch has three steps
    backend.epochs_to_come = enough - 1
    assert fused_slots(backend) == []
    assert not measuring.calls
    backend = AutoBackend(Toy(), device=here(), patient=True)
    backend.epochs_to_come = enough
    assert fused_slots(backend) == [0, 1, 2]
    assert len(measuring.calls) == 1


def test_measurements_of_another_structure_are_not_taken(measure):
    measuring, told = measure({1: 0.5, 4: 1.0}), []
    fused_slots(AutoBackend(Toy(), device=here(), on_calibrated=told.append))
    known = {told[0].key: curves({4: 9.0})}
    assert fused_slots(AutoBackend(Dropping(), device=here(), known=known)) == [0, 1, 2]
    assert len(measuring.calls) == 2


@pytest.mark.parametrize(("prefer", "found"), [("fused", [0, 1, 2]), ("concatenated", [])])
def test_what_the_user_prefers(measure, prefer, found):
    measure({4: 9.0} if prefer == "fused" else {1: 0.01})
    assert fused_slots(AutoBackend(Toy(), device=here(), prefer=prefer)) == found


@pytest.mark.parametrize("prefer", ["solo", "concatenated"])
def test_what_is_bit_identical_if_the_user_prefers(prefer):
    found = together(AutoBackend(Dropping(), device=here(), prefer=prefer), TRIALS)
    assert_same(found, alone(Dropping(), TRIALS))


# -- tasks that cannot be fused ------------------------------------------------------------


def reasons(caplog):
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [r.getMessage() for r in caplog.records if r.name.startswith("thrifty.pack")]


@pytest.mark.parametrize("kind", UNFUSABLE)
def test_what_cannot_be_fused_goes_on_concatenated(kind, caplog):
    task = task_with(UNFUSABLE[kind][0])
    found = together(AutoBackend(task, device=here()), TRIALS)
    (line,) = reasons(caplog)
    assert line.startswith("Task is trained by plain PyTorch, not fused: ")
    assert_same(found, alone(task, TRIALS))


def test_an_unknown_optimizer_goes_on_concatenated(caplog):
    class Task(Toy):
        optimizer = Optimizer(torch.optim.Adadelta, lr="lr")

    found = together(AutoBackend(Task(), device=here()), TRIALS)
    (line,) = reasons(caplog)
    assert "Adadelta" in line
    assert_same(found, alone(Task(), TRIALS))


class Changing(Toy):
    """A task that can be fused until a hyper-parameter turns fusion off."""

    def network(self, hp):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def adapt(self, model, hp):
        self.reads = hp.reads

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * (1.0 if loss.item() else 0.0) if self.reads else loss


def test_a_trial_that_can_no_longer_be_fused_moves_and_goes_on(caplog):
    trials = [
        Trial(config={"lr": 0.05, "reads": reads}, seed=k, epochs=4)
        for k, reads in enumerate([MultiStep([False, True], milestones=[2]), False, False])
    ]
    found = together(AutoBackend(Changing(), device=here(), prefer="fused"), trials)
    (line,) = reasons(caplog)
    assert "item" in line
    assert_same(found, alone(Changing(), trials), tolerance=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("at_once", [2, 4])
@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_goes_wrong_is_the_affair_of_one_trial(fault, at_once):
    trials = [
        Trial(config={"lr": 0.05, "width": 4, "fault": each}, seed=k, epochs=4)
        for k, each in enumerate(["", MultiStep(["", fault], milestones=[2]), "", ""])
    ]
    found = together(
        AutoBackend(FaultyTask(), device=here(), prefer="fused"), trials, at_once=at_once
    )
    assert isinstance(found[1].error, DivergedError if fault == "nan" else RuntimeError)
    assert_same(found, alone(FaultyTask(), trials), tolerance=1e-5)


# -- custom training loops -----------------------------------------------------------------


class Walk(Trainable):
    def setup(self, hp, *, seed, device):
        self.at, self.log = 0.0, []

    def train(self, epoch, hp):
        self.at += hp.add + float(torch.rand(()))
        self.log.append(epoch)

    def evaluate(self):
        return {"at": self.at}

    def state(self):
        return {"at": self.at, "log": self.log}

    def load_state(self, state):
        self.at, self.log = state["at"], state["log"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_loops_of_their_own_train_side_by_side(at_once):
    trials = [
        Trial(config={"add": float(k)}, seed=k % 2, epochs=1 + k % 3, start=0) for k in range(5)
    ]
    backend = AutoBackend(Walk(), device=here())
    found = together(backend, trials, at_once=at_once)
    assert_same(found, alone(Walk(), trials))
    rest = [
        Trial(config=t.config, seed=t.seed, start=t.epochs, epochs=t.epochs + 2, state=r.state)
        for t, r in zip(trials, found, strict=True)
    ]
    assert_same(together(backend, rest, at_once=at_once), alone(Walk(), rest))
    backend.put(0, trials[0].member)
    assert backend.calibration(0) is None
    assert backend.num_steps(0, {}) == 1


# -- files that an early measurement could leave behind ------------------------------------------


def note(path):
    with open(path, "a") as file:  # noqa: PTH123
        file.write("x")


class Noter:
    def __init__(self):
        self.path = Path("notes")

    def note(self):
        self.path.write_text("x")


class Opens(Toy):
    def loss(self, model, batch):
        if not Path("scale").exists():
            Path("scale").write_text(str(float(batch[1].std())))
        return super().loss(model, batch) / float(Path("scale").read_text())


class CallsOneThatOpens(Toy):
    def metrics(self, model, batch):
        note("notes")
        return super().metrics(model, batch)


class MakesOneThatOpens(Toy):
    def loss(self, model, batch):
        Noter().note()
        return super().loss(model, batch)


class HoldsOneThatOpens(Toy):
    def __init__(self):
        self.note = note

    def loss(self, model, batch):
        self.note("notes")
        return super().loss(model, batch)


class ImportsLate(Toy):
    def loss(self, model, batch):
        import shutil as files  # noqa: PLC0415

        files.copy("one", "other")
        return super().loss(model, batch)


class HoldsAnObjectOfAPackage(Toy):
    def __init__(self):
        self.log = logging.FileHandler("notes", delay=True)


class Loads(Toy):
    def loss(self, model, batch):
        return super().loss(model, batch) * torch.from_numpy(np.load("scale.npy"))


class FromDisk(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.ones(6), torch.ones(1)


class ReadsAgain(Toy):
    def data(self, hp):
        return DatasetPair(train=FromDisk(), valid=FromDisk())


class ReadsItsModelFromAFile(Toy):
    """What makes a trial is no part of its steps."""

    def model(self, hp):
        note(os.devnull)
        return super().model(hp)

    def unused(self):
        note("notes")


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (Toy(), False),
        (Dropping(), False),
        (Images(), False),
        (ReadsItsModelFromAFile(), False),
        (Opens(), True),
        (CallsOneThatOpens(), True),
        (MakesOneThatOpens(), True),
        (HoldsOneThatOpens(), True),
        (ImportsLate(), True),
        (HoldsAnObjectOfAPackage(), True),
        (Loads(), True),
        (ReadsAgain(), True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_nothing_is_measured_early_whose_steps_may_use_files(measure, task, found):
    measuring = measure({1: 0.5, 4: 1.0})
    trial = FusedTrial(task, here())
    trial.begin(TRIALS[0].member)
    assert may_use_files(trial) is found
    backend = AutoBackend(task, device=here(), patient=True)
    backend.epochs_to_come = math.inf
    fused_slots(backend)
    assert bool(measuring.calls) is not found
