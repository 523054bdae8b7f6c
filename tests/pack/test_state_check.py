"""A checkpoint holds the whole state of a trial, or an error names what it lacks."""

from __future__ import annotations

import io
import itertools
import json
import logging
import queue
import random
from functools import cache, lru_cache, partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.pack._toys import Toy, normal
from thrifty.core import StateError
from thrifty.pack import (
    AdamW,
    EpochPlan,
    Member,
    Optimizer,
    StateCheck,
    Trainable,
    borrowed_streams,
    task_identity,
)
from thrifty.pack._state import pack_state, unpack_state
from thrifty.pack.trial._probes import FURTHER_STEPS, probe, probe_further
from thrifty.pack.trial._state_check import SHORT_S
from thrifty.pack.trial._trial import TaskTrial, TrainableTrial
from thrifty.pack.verify import same
from thrifty.run import state_from_arrays, state_to_arrays


pytestmark = pytest.mark.slow


CPU = torch.device("cpu")
VALUES = {"lr": 0.05}


def plan(epoch):
    return EpochPlan(epoch=epoch, values=VALUES)


def trained(task, check, *, epochs=1):
    """Return a trial after some epochs, and the member restored from its checkpoint."""
    trial = (TaskTrial if isinstance(task, Toy) else TrainableTrial)(task, CPU)
    trial.begin(Member(values=VALUES, seed=3))
    check.note(trial, Member(values=VALUES, seed=3))
    for epoch in range(epochs):
        trial.epoch(plan(epoch))
    return trial, Member(values=VALUES, seed=3, epoch=epochs, state=trial.state())


def run_check(task, *, epochs=1, seconds=0.0):
    with borrowed_streams():
        check = StateCheck(task, device=CPU)
        trial, member = trained(task, check, epochs=epochs)
        check.check(trial, member, plan(epochs), epoch=epochs, seconds=seconds)
    return check


# -- complete states -------------------------------------------------------------------------


class Adam(Toy):
    optimizer = AdamW(lr="lr")


class Normed(Toy):
    def network(self, hp):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))


class Counts(nn.Module):
    """A model that counts its steps in a buffer."""

    def __init__(self, *, persistent=True):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.register_buffer("calls", torch.ones(()), persistent=persistent)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.inner(x / self.calls)


class Buffered(Toy):
    def network(self, hp):
        return Counts()


class Uncounted(Toy):
    """A task whose model has batch normalisation that does not count its batches."""

    def network(self, hp):
        norm = nn.BatchNorm1d(8)
        norm.num_batches_tracked = None
        return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 1))


class Inverted(nn.Module):
    """A model that converts states of its first version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        return self.inner(x) * self.scale

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = 1 / state[f"{prefix}scale"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Versioned(Toy):
    def network(self, hp):
        return Inverted()


@pytest.mark.parametrize("task", [Toy, Adam, Normed, Buffered, Uncounted, Versioned])
def test_a_complete_state(task, caplog):
    check = run_check(task())
    assert not caplog.messages
    assert (check.budget.num_checks, check.is_changed()) == (1, False)


def test_it_is_asked_for_once_for_each_kind_of_model():
    with borrowed_streams():
        check = StateCheck(Toy(), device=CPU)
        trial, member = trained(Toy(), check)
        assert check.is_due(trial, epoch=1)
        check.check(trial, member, plan(1), epoch=1, seconds=0.0)
        assert not check.is_due(trial, epoch=1)
        other, _ = trained(Normed(), check)
        assert check.is_due(other, epoch=1)


# -- state outside of the checkpoint -----------------------------------------------------------


class NotPersistent(Toy):
    def network(self, hp):
        return Counts(persistent=False)


class AttributeCounter(Toy):
    def network(self, hp):
        model = super().network(hp)
        model.calls = 0
        return model

    def loss(self, model, batch):
        model.calls += 1
        return super().loss(model, batch) / model.calls


class TaskCounter(Toy):
    def __init__(self):
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) / self.calls


class ListCounter(TaskCounter):
    def __init__(self):
        self.notes = [1]

    def loss(self, model, batch):
        self.notes.append(1)
        return super(TaskCounter, self).loss(model, batch) / len(self.notes)


TOTAL = {"calls": 0}


class GlobalCounter(Toy):
    def loss(self, model, batch):
        TOTAL["calls"] += 1
        return super().loss(model, batch) / TOTAL["calls"]


@lru_cache
def kept_counts():
    return {"steps": 0}


class CachedCounter(Toy):
    """A task whose counter is in what a cached function keeps."""

    def loss(self, model, batch):
        counts = kept_counts()
        counts["steps"] += 1
        return super().loss(model, batch) * (1 + 0.1 * counts["steps"])


@cache
def kept_notes():
    return []


class CachedNotes(Toy):
    """A task that only notes things in what a cached function keeps."""

    def loss(self, model, batch):
        kept_notes().append(len(batch))
        return super().loss(model, batch)


@cache
def weight_of(size):
    return torch.full((), 1.0 / size)


class CachedWeights(Toy):
    """A task that computes what it needs only once."""

    def loss(self, model, batch):
        return super().loss(model, batch) * weight_of(len(batch[0]))


def test_a_counter_in_a_cached_result_is_named():
    kept_counts.cache_clear()
    with pytest.raises(StateError, match=r"Not in the checkpoint: 'kept_counts\(\.\.\.\)'"):
        run_check(CachedCounter())
    assert kept_counts()["steps"] > 0


@pytest.mark.parametrize("task", [CachedNotes, CachedWeights])
def test_cached_results_without_effect_are_kept_as_they_are(task):
    kept_notes.cache_clear()
    weight_of.cache_clear()
    check = StateCheck(task(), device=CPU)
    with borrowed_streams():
        trial, member = trained(task(), check)
        before = [*kept_notes(), weight_of.cache_info().currsize]
        check.check(trial, member, plan(1), epoch=1, seconds=0.0)
    assert [*kept_notes(), weight_of.cache_info().currsize] == before


class ClassCounter(Toy):
    calls = 0

    def loss(self, model, batch):
        type(self).calls += 1
        return super().loss(model, batch) / type(self).calls


class MetricsCounter(Toy):
    def __init__(self):
        self.calls = 0

    def metrics(self, model, batch):
        self.calls += 1
        return {"calls": self.calls}


class FirstBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 1), None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.detach().abs().mean()
        return self.inner(x / self.scale)


class Caching(Toy):
    def network(self, hp):
        return FirstBatch()


class OwnGenerator(Toy):
    def network(self, hp):
        model = super().network(hp)
        model.rng = torch.Generator().manual_seed(0)
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + torch.rand(1, generator=model.rng)).sum()


class Forgetful(torch.optim.SGD):
    """An optimizer that halves its updates at each step and hides its step count."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] * 0.5**self.num_steps)


class OwnOptimizer(Toy):
    optimizer = Optimizer(Forgetful, lr="lr")


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (NotPersistent, "'model.calls (a buffer that is not persistent)'"),
        (AttributeCounter, "'model.calls'"),
        (TaskCounter, "'self.calls'"),
        (ListCounter, "'self.notes'"),
        (GlobalCounter, "TOTAL"),
        (ClassCounter, "ClassCounter.calls"),
        (MetricsCounter, "'self.calls'"),
        (Caching, "'model.scale'"),
        (OwnGenerator, "'model.rng'"),
        (OwnOptimizer, "'optimizer.num_steps'"),
    ],
)
def test_what_is_outside_of_the_state_is_named(task, what):
    with pytest.raises(StateError, match=r"keeps state outside of its checkpoint") as caught:
        run_check(task())
    assert what in str(caught.value).replace("tests.pack.test_state_check.", "")
    mend = "self.state[p]" if task is OwnOptimizer else "register_buffer"
    assert mend in str(caught.value)


# -- state whose effect comes after the next step ----------------------------------------------


class Lookahead(torch.optim.SGD):
    """An optimizer that pulls weights back every fifth step and hides the state for this."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.num_steps = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class PulledBack(Toy):
    optimizer = Optimizer(Lookahead, lr="lr")


class Wrapping(torch.optim.SGD):
    """An optimizer with another optimizer inside, and one in a list."""

    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, lr=lr)
        self.inner = Lookahead(params, lr)
        self.others = [Lookahead(params, lr)]

    def step(self, closure=None):
        self.inner.step()
        self.others[0].step()


class Wrapped(Toy):
    optimizer = Optimizer(Wrapping, lr="lr")


class Periodic(Toy):
    """A task that acts every 60 steps, a period longer than an epoch."""

    def __init__(self):
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) * (2 if self.calls % 60 == 0 else 1)


class Schedule:
    def __init__(self):
        self.calls = 0


class InnerPeriodic(Periodic):
    """A task that keeps its count in an object."""

    def __init__(self):
        self.schedule = Schedule()

    def loss(self, model, batch):
        self.schedule.calls += 1
        factor = 2 if self.schedule.calls % 7 == 0 else 1
        return super(Periodic, self).loss(model, batch) * factor


class PeriodicMetrics(Periodic):
    """A task that acts in every second epoch's evaluation."""

    def loss(self, model, batch):
        return super(Periodic, self).loss(model, batch)

    def metrics(self, model, batch):
        self.calls += 1
        return {"calls": self.calls // 4}


class Breaking(Periodic):
    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == FURTHER_STEPS + 2:  # the restored trial does not reach this step
            raise ValueError("too many calls")
        return super(Periodic, self).loss(model, batch)


@pytest.fixture
def patient(monkeypatch):
    """Take all further steps, however slow the machine is."""
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("task", "what"),
    [
        (PulledBack, "'optimizer.num_steps', 'optimizer.slow'"),
        (Wrapped, "'optimizer.inner.num_steps', 'optimizer.inner.slow', 'optimizer.others[0]."),
        (Periodic, "'self.calls'"),
        (InnerPeriodic, "'self.schedule.calls'"),
        (PeriodicMetrics, "'self.calls'"),
    ],
)
def test_state_that_acts_later_than_in_the_next_step(task, what):
    with pytest.raises(
        StateError, match=r"keeps state outside.*(further steps|calls of evaluation)"
    ) as caught:
        run_check(task(), epochs=2)
    assert what in str(caught.value)


@pytest.mark.usefixtures("patient")
def test_an_error_of_one_trial_only_in_a_later_step():
    with pytest.raises(StateError, match="only one of them raises ValueError: too many calls"):
        run_check(Breaking())


@pytest.mark.usefixtures("patient")
def test_an_error_of_both_trials_in_a_later_step_says_nothing(monkeypatch, caplog):
    def fails(*_, **__):
        raise ValueError("too many calls")

    monkeypatch.setattr("thrifty.pack.trial._comparison.probe_further", fails)
    with caplog.at_level(logging.WARNING):
        run_check(Logging())
    assert "'self.notes'" in caplog.text


def test_trials_go_no_further_if_nothing_is_outside_of_the_state(monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._comparison.probe_further", pytest.fail)
    for task in (Toy, Adam, Normed, Buffered):
        run_check(task())


def test_what_is_meant_may_matter_later():
    class Meant(PulledBack):
        not_state = ("num_steps", "slow")

    class Partly(Logging, Periodic):
        not_state = ("calls",)

        def __init__(self):
            self.notes, self.calls = [], 0

        def loss(self, model, batch):
            self.notes.append(1)
            return Periodic.loss(self, model, batch)

    run_check(Meant())
    run_check(Partly())


def test_going_further_ends_when_the_time_is_up(monkeypatch):
    with borrowed_streams():
        check = StateCheck(Toy(), device=CPU)
        trial, _ = trained(Toy(), check)
        probe(trial, plan(1), trains=False)
        assert probe_further(trial, plan(1), limit_s=0.0)[1] == 0
        assert probe_further(trial, plan(1), num_steps=7, limit_s=0.0)[1] == 7


def test_trials_go_further_once_for_what_is_outside(monkeypatch):
    calls, found = [], []

    def counted(*args, **options):
        calls.append(1)
        return probe_further(*args, **options)

    monkeypatch.setattr("thrifty.pack.trial._comparison.probe_further", counted)
    with borrowed_streams():
        check = StateCheck(Logging(), device=CPU)
        for _ in range(2):
            trial, member = trained(Logging(), check)
            check.check(trial, member, plan(1), epoch=1, seconds=0.0)
            found.append(len(calls))
    # The live trial and the restored one; and another, if equal steps differ in their last bits.
    assert found[0] in (2, 3)
    assert found[1] == found[0], "the second trial goes no further"


# -- values without ordinary comparison -----------------------------------------------------------


class Graph(nn.Module):
    """A model with a sparse matrix of each layout as a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        matrix = torch.ones(6, 6).tril() / 6
        twice = torch.tensor([[0, 0], [1, 1]])
        self.register_buffer("coo", matrix.to_sparse())
        self.register_buffer("csr", matrix.to_sparse_csr())
        self.register_buffer("csc", matrix.to_sparse_csc())
        self.register_buffer(
            "twice", torch.sparse_coo_tensor(twice, torch.tensor([1.0, 2.0]), (6, 6))
        )

    def forward(self, x):
        return self.inner(torch.sparse.mm(self.coo, x.t()).t())


of_sparse = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|invariant)")


class Sparse(Toy):
    def network(self, hp):
        return Graph()


@of_sparse
def test_sparse_buffers(caplog):
    run_check(Sparse())
    assert not caplog.messages


@of_sparse
def test_sparse_tensors_in_a_state():
    held = dict(Graph().state_dict())
    arrays, meta = state_to_arrays(pack_state(held))
    again = unpack_state(state_from_arrays(arrays, json.loads(json.dumps(meta))))
    assert same(held, again)
    assert again["coo"].is_coalesced()
    assert not again["twice"].is_coalesced()
    for key in ("coo", "csr", "csc"):
        other = {**again, key: again[key] * 2}
        assert not same(held, other)
        assert not same(held, {**again, key: again[key].to_dense()})


def test_a_stored_state_keeps_the_versions_of_its_modules():
    held = nn.Sequential(Inverted()).state_dict()
    arrays, meta = state_to_arrays(pack_state({"model": held}))
    again = unpack_state(state_from_arrays(arrays, json.loads(json.dumps(meta))))["model"]
    assert again._metadata == held._metadata
    assert again._metadata["0"] == {"version": 2}


def test_what_hooks_add_to_the_versions_is_left_out_unless_it_is_plain():
    net = torch.nn.BatchNorm1d(1)
    net._register_state_dict_hook(
        lambda module, state, prefix, local: local.update(kind=torch.float32, tag="x")
    )
    again = unpack_state(pack_state({"model": net.state_dict()}))["model"]
    assert again._metadata[""] == {"version": 2, "tag": "x"}


def test_a_state_of_an_earlier_release_can_be_read():
    """It has no versions, so torch takes its modules for old ones, as it always did."""
    model = nn.Linear(2, 1)
    state = pack_state(dict(model.state_dict()))
    assert list(state.tree) == ["dict"]
    nn.Linear(2, 1).load_state_dict(unpack_state(state))


class OtherSparse(Toy):
    """A task that changes a sparse buffer which is not persistent."""

    def network(self, hp):
        model = super().network(hp)
        matrix = torch.ones(6, 6).tril().to_sparse()
        model.register_buffer("matrix", matrix, persistent=False)
        return model

    def loss(self, model, batch):
        model.matrix = model.matrix * 0.5
        return super().loss(model, batch) * torch.sparse.sum(model.matrix)


def test_a_sparse_buffer_that_is_not_persistent():
    with pytest.raises(StateError, match=r"'model\.matrix \(a buffer that is not persistent\)'"):
        run_check(OtherSparse())


def test_variables_are_put_back_after_a_comparison():
    with borrowed_streams():
        check = StateCheck(GlobalCounter(), device=CPU)
        trial, member = trained(GlobalCounter(), check)
        before = TOTAL["calls"]
        with pytest.raises(StateError):
            check.check(trial, member, plan(1), epoch=1, seconds=0.0)
    assert TOTAL["calls"] == before


class Replacing(Toy):
    """A task that adds a layer when training continues, so that its state fits no new model."""

    def adapt(self, model, hp):
        model.append(nn.Linear(1, 1))


def test_a_state_that_does_not_fit_a_new_model():
    with pytest.raises(StateError, match=r"cannot be loaded into a new model \(RuntimeError"):
        run_check(Replacing())


# -- accepted states ---------------------------------------------------------------------------


class Logging(Toy):
    def __init__(self):
        self.notes = []

    def loss(self, model, batch):
        self.notes.append(len(batch))
        return super().loss(model, batch)


def test_state_that_does_not_matter_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        run_check(Logging())
    # where memory is aligned differently, a product may round differently, which is said, too
    (message,) = [each for each in caplog.messages if "differ in their last bits" not in each]
    assert "not in the checkpoint: 'self.notes'" in message
    assert "not_state" in message


def test_what_is_meant_is_no_warning(caplog):
    class Meant(Logging):
        not_state = ("notes",)

    run_check(Meant())
    assert not caplog.messages


@pytest.mark.parametrize("base", [TaskCounter, AttributeCounter])
def test_what_is_meant_may_matter(base):
    class Meant(base):
        not_state = ("calls",)

    run_check(Meant())


def test_only_what_is_meant_may_matter():
    class Meant(AttributeCounter):
        not_state = ("other",)

    with pytest.raises(StateError):
        run_check(Meant())


def test_what_is_meant_does_not_change_what_a_task_is():
    class One(Toy):
        pass

    plain = task_identity(One())
    One.not_state = ("notes",)
    assert task_identity(One()).training == plain.training
    One.other = ("notes",)
    assert task_identity(One()).training != plain.training


# -- training that cannot be repeated ----------------------------------------------------------

ENDLESS = itertools.count(1)


class Unrepeatable(Toy):
    def loss(self, model, batch):
        return super().loss(model, batch) / next(ENDLESS)


def test_a_task_that_gives_another_result_each_time():
    with pytest.raises(StateError, match=r"another result each time.*the loss of the next step"):
        run_check(Unrepeatable())


class Rows(Dataset):
    num_read = itertools.count()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        x = normal(6, seed=index) + next(self.num_read)
        return x, x.sum()[None]


class Unreadable(Toy):
    def data(self, hp):
        return Rows(), Rows()


def test_data_that_are_others_each_time():
    with pytest.raises(StateError, match=r"the data of Unreadable are not the same each time"):
        run_check(Unreadable())


class OtherRows(Toy):
    """A task that adds noise from an unseeded generator."""

    def inputs(self, num, seed):
        return super().inputs(num, seed) + torch.rand(num, 6, generator=self.generator())

    def generator(self):
        found = torch.Generator()
        found.seed()
        return found


class OtherValidation(OtherRows):
    def inputs(self, num, seed):
        return super().inputs(num, seed) if seed == 2 else normal(num, 6, seed=seed)


class SeededRows(OtherRows):
    """A task that draws from the global stream, which is seeded before data are loaded."""

    def generator(self):
        return None


@pytest.mark.parametrize(
    ("task", "which"), [(OtherRows, "training"), (OtherValidation, "validation")]
)
def test_data_that_are_others_each_time_that_they_are_loaded(task, which):
    with pytest.raises(StateError, match=f"data gives other {which} data each time"):
        run_check(task())


def test_data_that_draw_from_the_seeded_streams():
    run_check(SeededRows())


def test_data_that_take_long_are_not_loaded_twice(monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._probes.QUICK_S", -1.0)
    run_check(OtherRows())


class AnotherStart(Toy):
    def network(self, hp):
        model = super().network(hp)
        with torch.no_grad():
            model[0].weight.fill_(next(ENDLESS))
        return model


def test_models_that_are_others_each_time():
    with pytest.raises(StateError, match=r"gives another '0\.weight' each time, for the same seed"):
        run_check(AnotherStart())


HELD: list[nn.Module] = []


class SharedModel(Toy):
    def network(self, hp):
        if not HELD:
            HELD.append(super().network(hp))
        return HELD[0]


@lru_cache
def hidden_model():
    return nn.Sequential(nn.Linear(6, 1))


class HiddenModel(Toy):
    """A task with a cache in no variable that training code reads."""

    def network(self, hp):
        return hidden_model()


@pytest.mark.parametrize("task", [SharedModel, HiddenModel])
def test_a_model_that_all_trials_share(task):
    HELD.clear()
    with pytest.raises(StateError, match=r"the same parameter '0\.weight' to several trials"):
        run_check(task())


def test_a_model_that_another_trial_has_trained():
    HELD[:] = [nn.Sequential(nn.Linear(6, 1))]
    check = StateCheck(SharedModel(), device=CPU)
    with borrowed_streams():
        trained(SharedModel(), check)
        with pytest.raises(StateError, match=r"the same parameter '0\.weight' to several trials"):
            trained(SharedModel(), check)
    fresh = StateCheck(Toy(), device=CPU)
    with borrowed_streams():
        for _ in range(3):
            trained(Toy(), fresh)


class SharedBackbone(SharedModel):
    """A task where the part that all trials share is frozen."""

    def network(self, hp):
        return nn.Sequential(super().network(hp).requires_grad_(False), nn.Linear(1, 1))


def test_a_frozen_model_may_be_shared():
    HELD[:] = [nn.Sequential(nn.Linear(6, 1))]
    check = StateCheck(SharedBackbone(), device=CPU)
    with borrowed_streams():
        for _ in range(2):
            trial, member = trained(SharedBackbone(), check)
            check.check(trial, member, plan(1), epoch=1, seconds=0.0)


class Rounding(Toy):
    """A task that rounds differently each time, as some devices do."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + 1e-7 * (next(ENDLESS) % 5))


def test_noise_in_the_last_bits_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        run_check(Rounding())
    assert any("differ in their last bits on cpu" in message for message in caplog.messages)


def test_no_memory_for_a_comparison_is_a_warning(caplog, monkeypatch):
    check = StateCheck(Toy(), device=CPU)
    with borrowed_streams():
        trial, member = trained(Toy(), check)

        def full(*_, **__):
            raise MemoryError

        monkeypatch.setattr(check, "_compare", full)
        check.check(trial, member, plan(1), epoch=1, seconds=0.0)
    assert "there was no memory" in caplog.text
    assert not check.is_due(trial, epoch=1)


# -- variables that all trials share -------------------------------------------------------------

FACTOR = {"now": 1.0}


class Following(Toy):
    def adapt(self, model, hp):
        FACTOR["now"] = 1.0 + hp.lr

    def loss(self, model, batch):
        return super().loss(model, batch) * FACTOR["now"]


def test_a_variable_that_follows_from_the_hyper_parameters(caplog):
    FACTOR["now"] = 0.0
    with caplog.at_level(logging.WARNING):
        check = run_check(Following())
    assert check.is_changed()
    assert "FACTOR" in caplog.text
    assert FACTOR["now"] == 1.05


LEFT = {"by": None}


class Leaving(Toy):
    """A task where a value computed by the first trial reaches all others."""

    def loss(self, model, batch):
        if LEFT["by"] is None:
            LEFT["by"] = float(batch[0].mean()) + 2
        return super().loss(model, batch) * LEFT["by"]


def test_what_a_trial_leaves_behind_must_not_reach_a_new_one():
    LEFT["by"] = None
    with borrowed_streams():
        check = StateCheck(Leaving(), device=CPU)
        trained(Leaving(), check)
        assert check.is_changed()
        new = Member(values=VALUES, seed=4)
        begun = check.begin(new)
        assert check.is_due(begun, epoch=1)
        with pytest.raises(StateError, match="LEFT"):
            check.check(begun, new, plan(0), epoch=1, seconds=0.0)


# -- trainables ----------------------------------------------------------------------------------


class Owner(Trainable):
    """A trainable that counts its epochs."""

    def setup(self, hp, *, seed, device):
        self.model = nn.Linear(1, 1)
        self.count = 0

    def train(self, epoch, hp):
        self.count += 1
        with torch.no_grad():
            self.model.weight.add_(self.count)

    def evaluate(self):
        return {"weight": float(self.model.weight.detach().sum())}

    def state(self):
        return {"model": self.model.state_dict(), "count": self.count}

    def load_state(self, state):
        self.model.load_state_dict(state["model"])
        self.count = state["count"]


class Losing(Owner):
    def load_state(self, state):
        self.model.load_state_dict(state["model"])


class Strict(Owner):
    def load_state(self, state):
        raise ValueError("not again")


class Hiding(Owner):
    """A trainable whose state lacks what it trains with."""

    def state(self):
        return {"model": self.model.state_dict(), "count": 0}

    def load_state(self, state):
        self.model.load_state_dict(state["model"])


class Returning(Owner):
    """A trainable whose metrics are those of its last training, which no state needs."""

    not_state = ("last",)

    def train(self, epoch, hp):
        super().train(epoch, hp)
        self.last = float(self.model.weight.detach().sum())

    def evaluate(self):
        return {"weight": self.last}


def test_a_trainable_that_keeps_all():
    assert run_check(Owner()).budget.num_checks == 1


def test_a_trainable_that_loses_something():
    with pytest.raises(StateError, match=r"Losing keeps state outside.*'self\.count'") as caught:
        run_check(Losing())
    assert "keep it in state() and load_state()" in str(caught.value)


class Accumulating(Owner):
    """Takes a step after every second batch, and an epoch has three."""

    def train(self, epoch, hp):
        for number in range(3):
            self.model(torch.ones(1, 1)).square().sum().backward()
            if number % 2:
                with torch.no_grad():
                    self.model.weight -= 0.1 * self.model.weight.grad
                self.model.zero_grad()


class Engine:
    """An object of the user's own, with a network and raw parameters."""

    def __init__(self):
        self.networks = {"main": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}
        self.scale = torch.ones((), requires_grad=True)
        self.optimizer = torch.optim.SGD([*self.networks["main"].parameters(), self.scale], lr=0.1)

    def backward(self):
        found = self.networks["main"](torch.eye(2)) * self.scale
        found[0].square().sum().backward()


class Owning(Trainable):
    """A trainable whose ``state`` has values only; ``act`` does more in an epoch."""

    def setup(self, hp, *, seed, device):
        self.engine = Engine()
        self.num = 0

    @property
    def network(self):
        return self.engine.networks["main"]

    def train(self, epoch, hp):
        self.act(epoch)
        for _ in range(3):
            self.engine.backward()
            self.num += 1
            if self.num % self.every == 0:
                self.engine.optimizer.step()
                self.engine.optimizer.zero_grad()

    every = 1

    def act(self, epoch):
        pass

    def evaluate(self):
        return {"sum": sum(float(each.detach().sum()) for each in self.network.parameters())}

    def state(self):
        return {
            "network": self.network.state_dict(),
            "scale": self.engine.scale.detach(),
            "num": self.num,
        }

    def load_state(self, state):
        self.network.load_state_dict(state["network"])
        self.engine.scale.data.copy_(state["scale"])
        self.num = state["num"]


class OwningAccumulating(Owning):
    every = 2


class Unfreezing(Owning):
    def setup(self, hp, **others):
        super().setup(hp, **others)
        self.network[0].weight.requires_grad_(False)

    def act(self, epoch):
        if epoch == 2:
            self.network[0].weight.requires_grad_(True)


class StandingStill(Owning):
    def act(self, epoch):
        if epoch == 2:
            self.network[1].eval()


class NotClearing(Owning):
    """Reads the gradients that the optimizer has used in the last epoch."""

    def act(self, epoch):
        gradient = self.network[0].weight.grad
        if gradient is not None:
            with torch.no_grad():
                self.network[0].weight.mul_(1 + gradient.norm())

    def train(self, epoch, hp):
        self.act(epoch)
        self.engine.optimizer.zero_grad()
        self.engine.backward()
        self.engine.optimizer.step()


KEPT_FLAGS = [Accumulating, OwningAccumulating, Unfreezing, StandingStill, NotClearing]


@pytest.mark.parametrize("task", KEPT_FLAGS)
def test_flags_and_gradients_of_networks_are_part_of_the_state(task):
    ends = []
    for parts in ([6], [3, 3], [1] * 6):
        member = Member(values=VALUES, seed=3)
        epoch = 0
        for num in parts:
            with borrowed_streams():
                trial = TrainableTrial(task(), CPU)
                trial.begin(member)
                for _ in range(num):
                    metrics = trial.epoch(plan(epoch))
                    epoch += 1
            member = Member(values=VALUES, seed=3, epoch=epoch, state=trial.state())
        ends.append(metrics)
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("seconds", [0.0, 2 * SHORT_S])
@pytest.mark.parametrize("task", KEPT_FLAGS)
def test_trainables_with_flags_and_gradients_pass_the_check(task, seconds, epochs_of):
    run_check_at_end(task(), epochs=3, seconds=seconds)
    assert len(epochs_of) == (3 if seconds else 5)


def test_gradients_that_an_optimizer_has_used_take_no_place_in_the_state():
    with borrowed_streams():
        trial, _ = trained(OwningAccumulating(), StateCheck(OwningAccumulating(), device=CPU))
        left = [name for name in trial.state().tensors if "gradients" in name]
        assert len(left) >= 4
        trial.epoch(plan(1))
        assert not [name for name in trial.state().tensors if "gradients" in name]


class ScalingOnce(Owning):
    """Changes an attribute in one epoch, which restored trials would not do later."""

    def setup(self, hp, **others):
        super().setup(hp, **others)
        self.factor = 1.0

    def act(self, epoch):
        self.factor = self.factor_in(epoch)
        with torch.no_grad():
            self.network[0].weight.mul_(self.factor)

    def factor_in(self, epoch):
        return 0.5 if epoch == 2 else self.factor


class ScalingByEpoch(ScalingOnce):
    def factor_in(self, epoch):
        return 1.0 if epoch < 2 else 0.5


class OfThreeEpochs(ScalingOnce):
    def factor_in(self, epoch):
        return (1.0, 1.0, 0.5)[epoch]


class HookingOnce(Owning):
    def act(self, epoch):
        if epoch == 2:
            self.network[0].weight.register_hook(lambda gradient: gradient * 0.1)


def run_check_at_end(task, *, epochs, seconds=0.0):
    """Compare as a worker does: in the epoch that has just ended."""
    with borrowed_streams():
        check = StateCheck(task, device=CPU)
        trial, member = trained(task, check, epochs=epochs)
        check.check(trial, member, plan(epochs - 1), epoch=epochs, seconds=seconds)


@pytest.mark.parametrize("seconds", [0.0, 2 * SHORT_S])
def test_what_one_epoch_switches_is_missed_in_the_next(seconds):
    with pytest.raises(StateError, match=r"ScalingOnce keeps state outside.*'self\.factor'"):
        run_check_at_end(ScalingOnce(), epochs=3, seconds=seconds)


@pytest.mark.parametrize("task", [ScalingByEpoch, OfThreeEpochs])
def test_what_each_epoch_sets_is_no_state(task):
    run_check_at_end(task(), epochs=3)


def test_a_hook_of_a_parameter_is_named_as_one():
    class Flat(HookingOnce):
        def setup(self, hp, **others):
            super().setup(hp, **others)
            self.held = self.network

    with pytest.raises(StateError, match=r"'self\.held\.0\.weight hooks'; .*register the hook"):
        run_check_at_end(Flat(), epochs=3)


def test_a_state_of_earlier_versions_has_no_flags():
    with borrowed_streams():
        trial, _ = trained(Owning(), StateCheck(Owning(), device=CPU))
        old = pack_state(trial.task.state())
        again = TrainableTrial(Owning(), CPU)
        again.begin(Member(values=VALUES, seed=3, epoch=1, state=old))
        assert again.task.num == 3


def test_a_trainable_that_cannot_be_loaded():
    with pytest.raises(
        StateError, match=r"cannot be loaded into a new trial \(ValueError: not again"
    ):
        run_check(Strict())


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return self.n > 50


def counting():
    n = 0

    def late():
        nonlocal n
        n += 1
        return n > 50

    return late


def counting_in_a_default():
    def late(c=[0]):  # noqa: B006
        c[0] += 1
        return c[0] > 50

    return late


def counting_in(counts):
    counts["n"] += 1
    return counts["n"] > 50


class Late(Owner):
    """A trainable that trains nothing from a late call of a function on."""

    make = staticmethod(counting)

    def setup(self, hp, **others):
        super().setup(hp, **others)
        self.late = self.make()

    def train(self, epoch, hp):
        if not self.late():
            super().train(epoch, hp)


class LateFlag(Late):
    make = staticmethod(lambda: itertools.cycle([False] * 50 + [True]))

    def train(self, epoch, hp):
        if not next(self.late):
            Owner.train(self, epoch, hp)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Slotted, r"self\.late\.n"),
        (counting, r"self\.late\.n \(closure\)"),
        (counting_in_a_default, r"self\.late\.c \(default\)"),
        (lambda: partial(counting_in, {"n": 0}), r"self\.late\.counts \(argument\)"),
    ],
)
def test_a_late_effect_of_what_an_attribute_holds(monkeypatch, make, name):
    monkeypatch.setattr(Late, "make", staticmethod(make))
    with pytest.raises(StateError, match=f"uses later: '{name}'"):
        run_check(Late())


def test_a_late_effect_of_the_position_of_an_iterator():
    with pytest.raises(StateError, match=r"uses later: 'self\.late'"):
        run_check(LateFlag())


LONG_S = 2 * SHORT_S


@pytest.fixture
def epochs_of(monkeypatch):
    """The epochs that trainables train."""
    found, epoch = [], TrainableTrial.epoch

    def counted(self, plan):
        found.append(plan.epoch)
        return epoch(self, plan)

    monkeypatch.setattr(TrainableTrial, "epoch", counted)
    return found


@pytest.mark.parametrize("task", [Owner, Returning])
def test_long_epochs_are_not_trained_again_while_nothing_else_differs(epochs_of, task):
    run_check(task(), seconds=LONG_S)
    assert epochs_of == [0]


def test_long_epochs_are_trained_again_once_that_costs_little(epochs_of):
    task = Owner()
    with borrowed_streams():
        check = StateCheck(task, device=CPU)
        for trained_s in (0.0, 1e4):
            check.budget.trained_s = trained_s
            trial, member = trained(task, check)
            assert check.is_due(trial, epoch=1)
            check.check(trial, member, plan(1), epoch=1, seconds=LONG_S)
            assert not check.is_due(trial, epoch=1)
    assert epochs_of == [0, 0, 1, 1]


def test_long_epochs_are_trained_again_if_something_else_differs(epochs_of):
    with pytest.raises(StateError, match=r"Hiding keeps state outside.*'self\.count'"):
        run_check(Hiding(), seconds=LONG_S)
    assert epochs_of == [0, 1, 1, 1]  # the last to tell it from noise


def test_without_time_for_that_it_is_said(epochs_of, caplog):
    with borrowed_streams():
        check = StateCheck(Hiding(), device=CPU, limit_s=5 * LONG_S)
        trial, member = trained(Hiding(), check)
        check.check(trial, member, plan(1), epoch=1, seconds=LONG_S)
        assert not check.is_due(trial, epoch=1)
    assert "not in the checkpoint: 'self.count'. epoch_timeout leaves no time" in caplog.text
    assert epochs_of == [0]


class Queueing(Owner):
    """A trainable that reads what nothing else can."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.waiting = queue.SimpleQueue()

    def train(self, epoch, hp):
        self.count = self.waiting.qsize()
        super().train(epoch, hp)


class QueueingInVain(Owner):
    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.waiting = queue.SimpleQueue()


class NestingOnPurpose(Owner):
    not_state = ("nested",)

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.nested = [[[[[[[[[[1]]]]]]]]]]

    def train(self, epoch, hp):
        super().train(epoch + len(self.nested), hp)


class Storing(Queueing):
    """A trainable whose file in memory is not in its state."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.best = io.BytesIO()

    def train(self, epoch, hp):
        self.count = len(self.best.getvalue())
        self.best.write(b"x")
        Owner.train(self, epoch, hp)


class QueueingMore(Queueing):
    def train(self, epoch, hp):
        with torch.no_grad():
            self.model.weight.add_(self.waiting.qsize())
        self.waiting.put(1)


def test_long_epochs_are_trained_again_once_if_something_cannot_be_read(epochs_of):
    task = Queueing()
    with borrowed_streams():
        check = StateCheck(task, device=CPU)
        trial, member = trained(task, check)
        check.check(trial, member, plan(1), epoch=1, seconds=LONG_S)
        assert epochs_of == [0, 1, 1]
        trial, member = trained(task, check)
        assert not check.is_due(trial, epoch=1)
        check.check(trial, member, plan(1), epoch=1, seconds=LONG_S)
    assert epochs_of == [0, 1, 1, 0]


@pytest.mark.parametrize("task", [QueueingInVain, NestingOnPurpose])
def test_what_no_code_reads_costs_no_epoch(epochs_of, task):
    run_check(task(), seconds=LONG_S)
    assert epochs_of == [0]


def test_a_file_in_memory_is_state():
    with pytest.raises(StateError, match=r"'self\.best \(a file\)'"):
        run_check(Storing(), seconds=LONG_S)


def test_what_cannot_be_read_is_state():
    with pytest.raises(StateError, match=r"'self\.waiting \(its content is hidden\)'"):
        run_check(QueueingMore(), seconds=LONG_S)


def test_without_time_to_train_for_what_cannot_be_read_it_is_said(epochs_of, caplog):
    with borrowed_streams():
        check = StateCheck(Queueing(), device=CPU, limit_s=5 * LONG_S)
        trial, member = trained(Queueing(), check)
        check.check(trial, member, plan(1), epoch=1, seconds=LONG_S)
    assert "cannot read what these hold: 'self.waiting'. epoch_timeout leaves no" in caplog.text
    assert epochs_of == [0]


def test_streams_are_not_part_of_it():
    """The global random streams are seeded, so both trials draw the same numbers."""

    class Drawing(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch) * (1 + random.random()) + torch.rand(()) * 0

    assert run_check(Drawing(), epochs=2).budget.num_checks == 1


# -- user errors ---------------------------------------------------------------------------


class Failing(Toy):
    """A task that fails in its second epoch."""

    def adapt(self, model, hp):
        if hp.lr == 0.5:
            raise ValueError("no such rate")


def check_next_epoch(task, *, lr):
    with borrowed_streams():
        check = StateCheck(task, device=CPU)
        trial, member = trained(task, check)
        check.check(trial, member, EpochPlan(epoch=1, values={"lr": lr}), epoch=1, seconds=0.0)
        return check, trained(task, check)[0]


def test_what_fails_in_the_next_epoch_is_not_the_fault_of_this_one():
    check, trial = check_next_epoch(Failing(), lr=0.5)
    assert check.is_due(trial, epoch=1), "nothing is known yet"
    check, trial = check_next_epoch(Failing(), lr=0.05)
    assert not check.is_due(trial, epoch=1)


class Beginning(Toy):
    def network(self, hp):
        model = super().network(hp)
        model.begun = False
        return model

    def adapt(self, model, hp):
        if hp.lr == 0.5 and not model.begun:
            raise ValueError("it has not begun")
        model.begun = True


def test_an_error_of_a_restored_trial_only_is_a_difference():
    with pytest.raises(StateError, match="only one of them raises ValueError: it has not begun"):
        check_next_epoch(Beginning(), lr=0.5)


class Traced(Toy):
    """A model of torch.fx, whose nodes make attributes when they are read."""

    def network(self, hp):
        return torch.fx.symbolic_trace(super().network(hp))


def test_a_model_of_torch_fx_is_read():
    run_check(Traced())
