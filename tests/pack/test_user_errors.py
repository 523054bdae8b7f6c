"""An error of the user's code fails the trial that it belongs to, with its own message."""

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.depth import draws
from tests.devices import here
from thrifty.pack import (
    SGD,
    AutoBackend,
    DatasetPair,
    EpochPlan,
    FusedBackend,
    Member,
    SoloBackend,
    UnverifiedError,
    borrowed_streams,
)
from thrifty.pack.backends import _fusion_policy
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, MultiStep, Space
from thrifty.study import Study
from thrifty.testing import LineTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


X = torch.linspace(-1, 1, 32)[:, None]


class BrokenError(Exception):
    """The error of the user's code."""


class Batches:
    """Data of a user that make their own batches; reading them fails in one epoch."""

    arrays = None
    num_train = len(X)

    def __init__(self, fault):
        self.point, _, self.epoch = fault.partition(" at ")

    def source(self, device):
        return self

    def is_broken(self, point, epoch):
        return self.point == point and int(self.epoch) == epoch

    def train_batches(self, *, seed, epoch, batch_size):
        if self.is_broken("train", epoch):
            raise BrokenError("in train")
        return self.rows(epoch, batch_size)

    def rows(self, epoch, batch_size):
        for number, x in enumerate(X.split(batch_size)):
            if number == 1 and self.is_broken("second batch", epoch):
                raise BrokenError("in second batch")
            yield x.to(here(), copy=True), (2 * x + 1).to(here())

    def valid_batches(self, *, batch_size):
        if self.point == "valid":
            raise BrokenError("in valid")
        yield (X.to(here(), copy=True), (2 * X + 1).to(here())), len(X)


class Faulty(LineTask):
    """A task that fails where hyper-parameter ``fault`` says."""

    own_batches = False

    def __init__(self):
        self.now = ""

    def trip(self, hp, point):
        if hp.fault == point:
            raise BrokenError(f"in {point}")

    def data(self, hp):
        if not self.own_batches:
            return super().data(hp)
        self.trip(hp, "data")
        return Batches(hp.fault)

    def model(self, hp):
        if self.own_batches:
            self.trip(hp, "model")
        return super().model(hp)

    def optimizer(self, hp):
        self.trip(hp, "optimizer")
        return SGD(lr=hp.lr)

    def adapt(self, model, hp):
        super().adapt(model, hp)
        self.trip(hp, "adapt")
        self.now = hp.fault

    def loss(self, model, batch):
        if model.training and self.now == "loss":
            raise BrokenError("in loss")
        return super().loss(model, batch)

    def metrics(self, model, batch):
        if self.now == "metrics":
            raise BrokenError("in metrics")
        return super().metrics(model, batch)


class FaultyBatches(Faulty):
    own_batches = True


def trained(task, pack, fault, tmp_path, *, workers=0):
    """Train three trials, of which the second fails."""
    study = Study(
        task,
        Space(lr=0.1, fault=Choice(["", fault, "none"])),
        algorithm=GridSearch(max_epochs=8),
        metric="mse",
        mode="min",
        name="s",
        storage=f"sqlite:///{tmp_path / 'study.db'}",
    )
    options = {"workers": workers} if workers else {}
    study.run(progress=False, executor=Local(pack=pack, threads=1, pack_size=3, **options))
    return study.trials


def assert_only_the_second_fails(trials, point):
    assert [t.state for t in trials] == ["done", "failed", "done"]
    assert trials[1].error.splitlines()[0] == f"BrokenError: in {point}"
    assert [t.epochs for t in trials[::2]] == [8, 8]


# "concatenated" and "auto" go the ways of the other two
packs = pytest.mark.parametrize("pack", ["solo", "fused", "concatenated", "auto"][: draws(2, 4)])
epochs = pytest.mark.parametrize("epoch", [0, 2])


@pytest.fixture
def measures_early(monkeypatch):
    """Measure in the first epochs whether fusing pays, as large studies do."""
    monkeypatch.setattr(_fusion_policy, "PRICE_STEPS", 0)
    monkeypatch.setattr(_fusion_policy, "PRICE_S", 0.0)


@pytest.mark.sample(6)
@packs
@epochs
@pytest.mark.parametrize("point", ["optimizer", "adapt", "loss", "metrics"])
@pytest.mark.usefixtures("measures_early")
def test_an_error_in_what_follows_hyper_parameters_fails_its_trial_alone(
    pack, epoch, point, tmp_path
):
    fault = MultiStep(["none", point], milestones=[epoch]) if epoch else point
    trials = trained(Faulty(), pack, fault, tmp_path)
    assert_only_the_second_fails(trials, point)


@pytest.mark.sample(6)
@packs
@pytest.mark.parametrize(
    "fault",
    [
        "data",
        "model",
        "train at 0",
        "train at 2",
        "second batch at 0",
        "second batch at 2",
        "valid",
    ],
)
@pytest.mark.usefixtures("measures_early")
def test_an_error_in_data_model_or_batches_fails_its_trial_alone(pack, fault, tmp_path):
    trials = trained(FaultyBatches(), pack, fault, tmp_path)
    assert_only_the_second_fails(trials, fault.partition(" at ")[0])


class OptionsThatAPyTorchLoaderRefuses(LineTask):
    def data(self, hp):
        rows = TensorDataset(X, 2 * X + 1)
        options = {"prefetch_factor": 2} if hp.fault == "loader" else {}
        return DatasetPair(train=rows, valid=rows, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_loader_fails_its_trial_alone_in_each_process(workers, tmp_path):
    task = OptionsThatAPyTorchLoaderRefuses()
    trials = trained(task, "auto", "loader", tmp_path, workers=workers)
    assert [t.state for t in trials] == ["done", "failed", "done"]
    assert trials[1].error.startswith("ValueError: prefetch_factor option could only")


def outcomes(backend, faults, *, num_epochs=3, lr=(0.1, 0.05, 0.02)):
    """Return the last outcomes of trials that fail in later epochs, and those of each epoch."""
    found = {}
    with borrowed_streams():
        for slot, rate in enumerate(lr):
            backend.put(slot, Member(values={"lr": rate, "fault": faults[slot][0]}, seed=0))
        epochs = dict.fromkeys(range(len(lr)), 0)
        ready = set(epochs)
        while epochs:
            plans = {
                slot: EpochPlan(
                    epoch=epochs[slot], values={"lr": lr[slot], "fault": faults[slot][epochs[slot]]}
                )
                for slot in ready
            }
            ready = set()
            for slot, outcome in backend.step(plans).items():
                found[slot] = outcome
                epochs[slot] += 1
                if isinstance(outcome, Exception) or epochs[slot] == num_epochs:
                    backend.release(slot)
                    del epochs[slot]
                else:
                    ready.add(slot)
    return [found[slot] for slot in range(len(lr))]


@pytest.mark.parametrize("prefer", ["auto", "fused", "concatenated"])
@pytest.mark.parametrize("point", ["optimizer", "adapt"])
def test_an_error_amid_a_stage_is_the_outcome_of_its_trial(prefer, point):
    faults = [("", "", ""), ("", "", point), ("", "", "")]
    first, second, third = outcomes(AutoBackend(Faulty(), device=here(), prefer=prefer), faults)
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert isinstance(second, BrokenError)


def test_each_of_the_trials_that_share_batches_gets_the_error_of_reading_them():
    class Failing(LineTask):
        def data(self, hp):
            return Batches("second batch at 1")

    found = outcomes(FusedBackend(Failing(), device=here()), [("", "", "")] * 3)
    assert [repr(each) for each in found] == ["BrokenError('in second batch')"] * 3


def test_an_error_of_the_measurement_alone_is_no_error_of_a_trial(caplog, monkeypatch):
    def measured(*args, **options):
        raise BrokenError("in train")  # of an epoch that no trial reaches

    monkeypatch.setattr(_fusion_policy, "calibrate", measured)
    backend = AutoBackend(FaultyBatches(), device=here(), prefer="fused")
    found = outcomes(backend, [("",) * 3] * 3)
    assert all(isinstance(each, dict) for each in found), found
    assert "its measurement for packing failed with BrokenError: in train" in caplog.text


class Uneven(LineTask):
    """A task whose data have another number of batches than they say where ``fault`` gives one."""

    def data(self, hp):
        return Cut(hp.fault)


class Cut(Batches):
    def __init__(self, num):
        super().__init__("")
        self.num = num

    def rows(self, epoch, batch_size):
        rows = super().rows(epoch, batch_size)
        return itertools.islice(itertools.cycle(list(rows)), self.num) if self.num else rows


@pytest.mark.parametrize(("num", "word"), [(2, "fewer"), (6, "more")])
def test_only_a_source_with_other_batches_than_it_says_is_trained_alone(num, word):
    faults = [("",) * 3, (num,) * 3, ("",) * 3]
    first, second, third = outcomes(FusedBackend(Uneven(), device=here()), faults)
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert isinstance(second, UnverifiedError)
    assert not second.mismatch, "others of its structure may be fused"
    assert f"{word} batches in an epoch than num_train" in str(second)


def test_a_source_that_draws_after_its_last_batch_draws_what_it_draws_alone():
    class Drawing(LineTask):
        def data(self, hp):
            return Ending()

    class Ending(Batches):
        def __init__(self):
            super().__init__("")
            self.shift = 0.0

        def rows(self, epoch, batch_size):
            for x, y in super().rows(epoch, batch_size):
                yield x + self.shift, y
            self.shift = float(torch.rand(()))

    alone, fused = (
        outcomes(backend(Drawing(), device=here()), [("", "", "")], lr=(0.1,))
        for backend in (SoloBackend, FusedBackend)
    )
    assert fused[0] == pytest.approx(alone[0])


@pytest.mark.parametrize("prefer", ["auto", "fused", "concatenated"])
def test_a_batch_size_that_is_none_in_a_later_epoch_is_the_outcome_of_its_trial(prefer):
    class Sized(LineTask):
        batch_size = "fault"

    faults = [(8, 8, 8), (8, 8, 0), (8, 8, 8)]
    first, second, third = outcomes(AutoBackend(Sized(), device=here(), prefer=prefer), faults)
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert "batch_size is 0" in str(second)


def test_a_wider_trial_is_not_joined_where_reading_a_batch_fails():
    class Breaking(Batches):
        is_whole = True

        def train_batches(self, *, seed, epoch, batch_size):
            if batch_size == 32 and not self.is_whole:  # a dry run reads fewer rows
                raise BrokenError("in train")
            return super().train_batches(seed=seed, epoch=epoch, batch_size=batch_size)

    made = Breaking("")

    class Wide(LineTask):
        batch_size = 32
        not_state = ("is_whole",)

        def data(self, hp):
            return made

    backend = FusedBackend(Wide(), device=here())
    with borrowed_streams():
        backend.put(0, Member(values={"lr": 0.1, "width": 8}, seed=0))
        made.is_whole = False
        backend.put(1, Member(values={"lr": 0.1, "width": 7}, seed=0))
        plan = EpochPlan(epoch=0, values={"lr": 0.1, "width": 7})
        assert repr(backend.step({1: plan})[1]) == "BrokenError('in train')"
