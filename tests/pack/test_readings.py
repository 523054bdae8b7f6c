"""Scheduled hyper-parameters are followed, or refused before training."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.devices import here
from tests.pack._drive import Trial, together
from tests.pack._toys import Toy
from thrifty.core import SpaceError, TaskError
from thrifty.core._errors import RESERVED_NAMES
from thrifty.pack import (
    SGD,
    ArrayData,
    AutoBackend,
    ConcatenatedBackend,
    DatasetPair,
    HyperParameters,
    Member,
    Optimizer,
    SoloBackend,
    Trainable,
    epoch_order,
    inspect_task,
)
from thrifty.pack.task._sources import Sources
from thrifty.run import train_alone
from thrifty.space import Linear, MultiStep, Timeline


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


MOVES = MultiStep([1, 2], milestones=[1])
BACKENDS = [
    SoloBackend,
    ConcatenatedBackend,
    lambda task: AutoBackend(task, device=here(), prefer="fused"),
]


# -- reading hyper-parameters ----------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda hp: list(hp),
        lambda hp: dict(hp),
        lambda hp: dict(**hp),
        lambda hp: list(hp.items()),
        lambda hp: list(hp.values()),
        lambda hp: hp == {},
        lambda hp: (copy.deepcopy(hp).a, copy.copy(hp).b),
        lambda hp: pickle.dumps(hp),
    ],
)
def test_what_reads_all_names(read):
    hp = HyperParameters({"a": 1, "b": 2})
    read(hp)
    assert hp.names_read == {"a", "b"}


def test_looking_at_them_is_not_reading():
    hp = HyperParameters({"a": 1, "b": 2})
    assert (len(hp), repr(hp)) == (2, "HyperParameters({'a': 1, 'b': 2})")
    assert not hp.names_read


def test_a_pickled_one_has_the_same_values():
    assert dict(pickle.loads(pickle.dumps(HyperParameters({"a": 1})))) == {"a": 1}


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_names_that_would_not_be_values(name):
    with pytest.raises(SpaceError, match=f"cannot be called '{name}'.*{name}_"):
        HyperParameters({name: 3})


def test_reserved_names_are_the_attributes_of_hyper_parameters():
    assert {n for n in dir(HyperParameters) if not n.startswith("_")} == RESERVED_NAMES


# -- values that are read once ---------------------------------------------------------------


class ReadByModel(Toy):
    def network(self, hp):
        self.scale = hp.x
        return super().network(hp)


class ReadByData(Toy):
    def data(self, hp):
        return ArrayData(**{
            name: tuple(hp.x * t for t in getattr(super(ReadByData, self).data(hp), name))
            for name in ("train", "valid")
        })


class ReadByFactory(Toy):
    def optimizer(self, hp):
        return Optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1 * hp.x))


class AdaptsSomethingElse(ReadByModel):
    """Overriding ``adapt`` does not excuse values that it does not read."""

    def adapt(self, model, hp):
        assert hp.lr


class Scaled(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.hp = hp

    def forward(self, x):
        return self.hp.x * self.inner(x)


class ReadLater(Toy):
    """A model that keeps its hyper-parameters and reads them in each forward pass."""

    def network(self, hp):
        return Scaled(hp)


NOT_FOLLOWED = [
    (ReadByModel, r"ReadByModel\.model reads it only once.*Task\.adapt\(model, hp\).*hp\.x"),
    (ReadByData, r"ReadByData\.data reads it only once.*fixed value"),
    (ReadByFactory, r"ReadByFactory\.optimizer reads it only once.*as an option"),
    (AdaptsSomethingElse, r"AdaptsSomethingElse\.model reads it only once"),
    (ReadLater, r"ReadLater\.model reads it only once"),
]


class Moving(Trial):
    @property
    def member(self):
        return replace(super().member, moving=self.timeline.moving())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("task", "message"), NOT_FOLLOWED)
def test_what_moves_and_is_read_once_is_refused_before_training(task, message, backend):
    """A scheduled value that is read once is refused, given scheduled names as by a worker."""
    trial = Moving(config={"lr": 0.1, "x": MOVES})
    error = None
    try:
        (result,) = together(backend(task()), [trial])
    except TaskError as refused:
        error = refused
    else:
        error = result.error
        assert not result.metrics
    assert isinstance(error, TaskError)
    with pytest.raises(TaskError, match=f"'x' has a schedule, but {message}"):
        raise error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moves", [MOVES, Linear(2.0)], ids=["between", "within"])
def test_a_back_end_that_is_told_nothing_finds_out_when_it_moves(backend, moves):
    trial = Trial(config={"lr": 0.1, "x": moves})
    (result,) = together(backend(AdaptsSomethingElse()), [trial])
    assert isinstance(result.error, TaskError)
    assert len(result.metrics) == (1 if moves is MOVES else 0)


class Follows(ReadByModel):
    def adapt(self, model, hp):
        self.scale = hp.get("x", 1)


class FollowsByMethod(ReadByModel):
    def optimizer(self, hp):
        return SGD(lr=0.1 * hp.x)


FOLLOWED = [
    Follows(),
    FollowsByMethod(),
    type(
        "ByOptimizer", (ReadByModel,), {"optimizer": SGD(lr=0.1, momentum=0.0, weight_decay="x")}
    )(),
    type("ByBatchSize", (ReadByModel,), {"batch_size": "x"})(),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", FOLLOWED, ids=lambda task: type(task).__name__)
def test_what_is_followed_may_be_read_once_too(task, backend):
    trial = Trial(config={"lr": 0.1, "x": MOVES})
    (result,) = together(backend(task), [trial])
    assert result.error is None


def test_what_is_read_and_does_not_move():
    (result,) = together(
        SoloBackend(ReadByModel(), device=here()), [Trial(config={"lr": Linear(0.1), "x": 2})]
    )
    assert result.error is None


# -- resumed trials --------------------------------------------------------------------------


SEEN: list = []


class Remembering(Toy):
    """A task that records values seen by data and model; ``adapt`` reads but ignores them."""

    def data(self, hp):
        SEEN.append(("data", hp.x))
        return super().data(hp)

    def network(self, hp):
        SEEN.append(("model", hp.x))
        return super().network(hp)

    def adapt(self, model, hp):
        SEEN.append(("adapt", hp.x))


def test_what_is_read_once_is_read_of_the_first_epoch_wherever_a_trial_begins():
    task = Remembering()
    SEEN.clear()
    timeline = Timeline({"lr": 0.1, "x": Linear(3.0)}, epochs=3)
    half, _ = train_alone(task, timeline, seed=0, epochs=1)
    SEEN.clear()
    train_alone(Remembering(), timeline, seed=0, epochs=3, state=(1, half.state(0)))
    assert SEEN == [("data", 3.0), ("model", 3.0), ("adapt", 2.0), ("adapt", 1.0)]


def test_a_model_that_is_only_loaded_is_as_in_its_last_epoch():
    task = Remembering()
    SEEN.clear()
    timeline = Timeline({"lr": 0.1, "x": Linear(3.0)}, epochs=3)
    backend, _ = train_alone(task, timeline, seed=0, epochs=2)
    SEEN.clear()
    train_alone(task, timeline, seed=0, epochs=2, state=(2, backend.state(0)))
    assert SEEN[-1] == ("adapt", 2.0)


class Noisy(Dataset):
    """A dataset that reads its hyper-parameters when its rows are read."""

    def __init__(self, hp):
        self.hp = hp

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((6,), float(self.hp.x)), torch.ones(1)


class ReadsWithItsRows(Toy):
    def data(self, hp):
        return Noisy(hp), Noisy(hp)


def test_data_that_are_read_later_are_not_shared():
    given = [Trial(config={"lr": 0.1, "x": x}, epochs=1) for x in (1, 2)]
    task = ReadsWithItsRows()
    both = together(ConcatenatedBackend(task, device=here()), given)
    apart = [
        together(ConcatenatedBackend(ReadsWithItsRows(), device=here()), [one])[0] for one in given
    ]
    assert [result.metrics for result in both] == [result.metrics for result in apart]
    assert both[0].metrics != both[1].metrics


class ReadsTooLate(Noisy):
    """A dataset where the one row that is probed does not show what the others read."""

    def __getitem__(self, index):
        looked_at = int(epoch_order(8, seed=0, epoch=0)[0])
        x = torch.ones(6) if index == looked_at else super().__getitem__(index)[0]
        return x, torch.ones(1)


def test_data_that_are_read_too_late_to_be_told_apart():
    class Task(Toy):
        def data(self, hp):
            return ReadsTooLate(hp), TensorDataset(torch.ones(3, 6), torch.ones(3, 1))

    def results(task, *xs):
        given = [Trial(config={"lr": 0.1, "x": x}, epochs=1) for x in xs]
        return together(ConcatenatedBackend(task, device=here()), given)

    for result in results(Task(), 1, 2):
        with pytest.raises(TaskError, match=r"hp\.x is read after data\(hp\) has returned"):
            raise result.error
    assert [result.error for result in results(Task(), 1, 1)] == [None, None]


def test_data_that_are_read_in_other_processes_are_not_shared():
    class Task(Toy):
        def data(self, hp):
            return DatasetPair(train=Noisy(hp), valid=Noisy(hp), num_workers=1)

    sources = Sources(torch.device("cpu"))
    one, two, same = (
        sources.get(Task(), HyperParameters({"lr": lr, "x": x}))
        for lr, x in ((0.1, 1), (0.1, 2), (0.1, 1))
    )
    assert one is same is not two


def test_data_that_only_keep_what_they_were_given_are_shared():
    class Keeps(TensorDataset):
        pass

    class Task(Toy):
        num_loaded = 0

        def data(self, hp):
            Task.num_loaded += 1
            both = (
                Keeps(torch.ones(8, 6), torch.ones(8, 1)),
                Keeps(torch.ones(3, 6), torch.ones(3, 1)),
            )
            both[0].hp = hp
            return both

    together(
        ConcatenatedBackend(Task(), device=here()), [Trial(config={"lr": lr}) for lr in (0.1, 0.2)]
    )
    assert Task.num_loaded == 1


# -- a Trainable -----------------------------------------------------------------------------


class Loop(Trainable):
    def setup(self, hp, *, seed, device):
        self.x = hp.x

    def train(self, epoch, hp):
        pass

    def evaluate(self):
        return {"x": float(self.x)}

    def state(self):
        return {}

    def load_state(self, state):
        pass


class KeepsWhatItWasGiven(Loop):
    def setup(self, hp, *, seed, device):
        self.hp = hp

    def train(self, epoch, hp):
        self.x = self.hp.x


class Reads(Loop):
    def train(self, epoch, hp):
        self.x = hp.x


@pytest.mark.parametrize("task", [Loop(), KeepsWhatItWasGiven()])
def test_a_trainable_that_reads_in_setup_only(task):
    timeline = Timeline({"x": MOVES}, epochs=3)
    with pytest.raises(TaskError, match=r"\.setup reads it only once.*in train\(epoch, hp\)"):
        train_alone(task, timeline, seed=0, epochs=3)


def test_a_trainable_that_reads_in_train_too():
    timeline = Timeline({"x": MOVES}, epochs=3)
    _, metrics = train_alone(Reads(), timeline, seed=0, epochs=3)
    assert [each["x"] for each in metrics] == [1.0, 2.0, 2.0]


def test_a_trainable_is_set_up_with_the_values_of_the_first_epoch():
    timeline = Timeline({"x": MOVES}, epochs=3)
    half, _ = train_alone(Reads(), timeline, seed=0, epochs=2)
    member = Member(
        values=timeline.at(2), first=timeline.at(0), seed=0, epoch=2, state=half.state(0)
    )
    backend = SoloBackend(Reads(), device=here())
    backend.put(0, member)
    assert backend.trial.task.x == 1


# -- the dry run -----------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "message"), NOT_FOLLOWED)
def test_a_dry_run_finds_out(task, message):
    with pytest.raises(TaskError, match=message):
        inspect_task(task(), {"lr": 0.1, "x": 1}, seed=0, moving={"x"})


@pytest.mark.parametrize("task", FOLLOWED, ids=lambda task: type(task).__name__)
def test_a_dry_run_of_what_follows(task):
    report = inspect_task(task, {"lr": 0.1, "x": 1}, seed=0, moving={"x"})
    assert "x" in report.structural & report.followed


def test_a_dry_run_tries_the_optimizer_on_the_model():
    class Task(Toy):
        optimizer = SGD(lr="lr", groups={"head.*": {"lr": 0.0}})

    with pytest.raises(TaskError, match=r"'head\.\*'.*0\.weight"):
        inspect_task(Task(), {"lr": 0.1}, seed=0)


def test_a_dry_run_leaves_the_task_as_it_was():
    task = Follows()
    inspect_task(task, {"lr": 0.1, "x": 1}, seed=0)
    assert not vars(task)
