"""Trials that take turns: if one affects others, this is noticed and they stop taking turns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.core import TaskError
from thrifty.pack import AutoBackend, ConcatenatedBackend, UnverifiedError
from thrifty.space import Cosine


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


TRIALS = [Trial(config={"lr": 0.05 / (k + 1), "k": float(k)}, seed=k) for k in range(3)]
LATER = 2
"""Step of an epoch (20 rows in batches of 8) from which an effect starts."""


def unverified(backend, trials=TRIALS):
    """Return the numbers of the trials that must be trained again; the others must be right."""
    found = together(backend, trials)
    again = {n for n, r in enumerate(found) if isinstance(r.error, UnverifiedError)}
    assert not any(found[n].error.mismatch for n in again)
    rest = [n for n in range(len(trials)) if n not in again]
    wanted = alone(type(backend._task)(), [trials[n] for n in rest])
    assert_same([found[n] for n in rest], wanted)
    return again


def check_again(backend, trials=TRIALS):
    """Assert that trials no longer take turns and that all of them are right."""
    assert backend.why_apart
    assert_same(together(backend, trials), alone(type(backend._task)(), trials))


class Drawing(Toy):
    """A task that draws from Python's or NumPy's stream in some steps."""

    since = 0
    draw = staticmethod(random.random)

    def loss(self, model, batch):
        rows = len(batch[0])
        late = rows < self.batch_size
        factor = self.draw() if late or not self.since else 1.0
        return super().loss(model, batch) * (0.5 + factor)


class DrawingLate(Drawing):
    since = LATER


class DrawingLateFromNumpy(DrawingLate):
    draw = staticmethod(np.random.rand)


def test_a_task_that_draws_in_each_step_is_right_at_once():
    backend = ConcatenatedBackend(Drawing(), device=here())
    assert not unverified(backend)
    check_again(backend)


@pytest.mark.parametrize("task", [DrawingLate, DrawingLateFromNumpy])
def test_a_draw_in_a_later_step_is_noticed(task):
    backend = ConcatenatedBackend(task(), device=here())
    assert unverified(backend)
    check_again(backend)


class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        x = normal(6, seed=index) + random.random()
        return x, x.sum()[None]


class FromRows(Toy):
    def data(self, hp):
        return Rows(), Rows()


class FromRowsDrawing(FromRows):
    def loss(self, model, batch):
        return super().loss(model, batch) * (0.5 + random.random())


def test_rows_may_draw():
    backend = ConcatenatedBackend(FromRows(), device=here())
    assert not unverified(backend)
    assert not backend.why_apart


def test_steps_on_rows_that_others_have_read_may_not():
    """Trials may not take turns if a step draws after rows have drawn, since rows are read once."""
    trials = [Trial(config={"lr": 0.05 / (k + 1)}) for k in range(3)]
    backend = ConcatenatedBackend(FromRowsDrawing(), device=here())
    assert unverified(backend, trials)
    check_again(backend, trials)


FACTOR = {"now": 1.0}


class Shared(Toy):
    """A task that passes a hyper-parameter through a variable that all trials share."""

    def adapt(self, model, hp):
        FACTOR["now"] = 1.0 + hp.k

    def loss(self, model, batch):
        return super().loss(model, batch) * FACTOR["now"]


def test_a_shared_variable_that_adapt_sets_is_noticed():
    backend = ConcatenatedBackend(Shared(), device=here())
    assert unverified(backend) >= {0, 1}
    assert "FACTOR" in backend.why_apart
    check_again(backend)


class Counter:
    last = 0.0


class SharedObject(Toy):
    """A task that sets a class attribute in a later step."""

    def loss(self, model, batch):
        if len(batch[0]) < self.batch_size:
            Counter.last = float(model[0].weight.detach().sum())
        return super().loss(model, batch) * (1 + 0 * Counter.last)


def test_a_shared_variable_that_a_step_sets_is_noticed():
    backend = ConcatenatedBackend(SharedObject(), device=here())
    assert unverified(backend)
    assert "Counter.last" in backend.why_apart


class Own(Toy):
    """A task that stores notes in its own model and in itself, where no other trial reads them."""

    def __init__(self):
        self.notes = []

    def network(self, hp):
        model = super().network(hp)
        model.notes, model.factor = {"calls": [0]}, 1.0
        return model

    def adapt(self, model, hp):
        model.factor = 1.0 + hp.k

    def loss(self, model, batch):
        self.notes.append(1)
        model.notes["calls"][0] += 1
        return super().loss(model, batch) * model.factor


def test_variables_of_its_own_are_no_concern():
    backend = ConcatenatedBackend(Own(), device=here())
    assert not unverified(backend)
    assert not backend.why_apart


CACHED: dict[float, nn.Module] = {}


class SharedModel(Toy):
    """A task that gives all trials the same model or the same backbone."""

    frozen = False

    def network(self, hp):
        backbone = CACHED.setdefault(0.0, nn.Linear(6, 4))
        return nn.Sequential(backbone.requires_grad_(not self.frozen), nn.Linear(4, 1))


class SharedBackbone(SharedModel):
    frozen = True


@pytest.mark.parametrize(
    "make", [ConcatenatedBackend, lambda task: AutoBackend(task, device=here(), prefer="fused")]
)
def test_parameters_that_several_trials_train_are_refused(make):
    backend = make(SharedModel())
    backend.put(0, TRIALS[0].member)
    with pytest.raises(TaskError, match=r"gives the parameter '0\.weight' to several trials"):
        backend.put(1, TRIALS[1].member)


def test_a_frozen_backbone_may_be_shared():
    CACHED[0.0] = nn.Linear(6, 4)
    state = {name: t.clone() for name, t in CACHED[0.0].state_dict().items()}
    backend = ConcatenatedBackend(SharedBackbone(), device=here())
    found = together(backend, TRIALS)
    CACHED[0.0].load_state_dict(state)
    assert_same(found, alone(SharedBackbone(), TRIALS))


class Unfreezing(SharedBackbone):
    def adapt(self, model, hp):
        model[0].requires_grad_(hp.lr < 0.05)


def test_a_backbone_that_is_unfrozen_later_is_refused_then():
    trials = [Trial(config={"lr": Cosine(0.06)}, run_epochs=3, seed=k) for k in range(2)]
    found = together(ConcatenatedBackend(Unfreezing(), device=here()), trials)
    assert all(isinstance(result.error, TaskError) for result in found)


def test_an_error_in_a_step_is_that_trials_alone():
    class Failing(Toy):
        def loss(self, model, batch):
            if len(batch[0]) < self.batch_size and model[0].weight.shape[0] == 4:
                raise RuntimeError("broken")
            return super().loss(model, batch)

    trials = [Trial(config={"lr": 0.1, "width": width}) for width in (8, 4)]
    found = together(ConcatenatedBackend(Failing(), device=here()), trials)
    assert str(found[1].error) == "broken"
    assert_same(found[:1], alone(Failing(), trials[:1]))


def test_a_model_with_lazy_layers_is_refused():
    class Lazy(Toy):
        def network(self, hp):
            return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))

    backend = ConcatenatedBackend(Lazy(), device=here())
    with pytest.raises(TaskError, match=r"a lazy layer whose '0\.weight' has no shape yet"):
        backend.put(0, TRIALS[0].member)
    assert torch.is_grad_enabled()
