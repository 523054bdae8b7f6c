"""Graph trials in one batched computation get the results of solo training."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.graph.test_data import NUM_CLASSES, data
from tests.pack._drive import Trial, alone, assert_same, together
from thrifty.graph import GAT, GIN, GNN, SAGE, Batch
from thrifty.pack import (
    Adam,
    AutoBackend,
    BlockOptions,
    EpochPlan,
    FusedBackend,
    Member,
    Task,
    UnfusableError,
)


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


class InDtype:
    """Graph data with double-precision batches, so that rounding hides no error."""

    arrays = None

    def __init__(self, inner, dtype):
        self.change = Batch.double if dtype == torch.float64 else Batch.shared
        self.inner = inner.source(here())
        self.num_train = self.inner.num_train

    def source(self, device):
        return self

    def train_batches(self, **options):
        return map(self.change, self.inner.train_batches(**options))

    def valid_batches(self, **options):
        return ((self.change(batch), num) for batch, num in self.inner.valid_batches(**options))


class Nodes(Task):
    """A graph task where an epoch has 3 steps, so that 20 steps are about 7 epochs."""

    optimizer = Adam(lr="lr")
    batch_size = 16
    dtype = torch.float64

    def data(self, hp):
        return InDtype(data(), self.dtype)

    def layers(self):
        return [SAGE(4, 8), SAGE(8, NUM_CLASSES)]

    def model(self, hp):
        return GNN(self.layers(), dropout=hp.get("dropout", 0.0)).to(self.dtype)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch), batch.y)

    def metrics(self, model, batch):
        out = model(batch)
        return {"loss": F.cross_entropy(out, batch.y)}


class Wide(Nodes):
    """A task whose hidden layer gets narrower before it is averaged."""

    def layers(self):
        return [SAGE(4, 32), SAGE(32, NUM_CLASSES)]


class Single(Nodes):
    dtype = torch.float32


class Sums(Nodes):
    def layers(self):
        inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        return [GIN(inner), GIN(nn.Linear(8, NUM_CLASSES), train_eps=True)]


class Smooth(Nodes):
    def model(self, hp):
        return GNN(self.layers(), activation=F.elu, dropout=hp.get("dropout", 0.0)).double()


class Attending(Nodes):
    def layers(self):
        return [GAT(4, 8), SAGE(8, NUM_CLASSES)]


def fused(task, size=8):
    return FusedBackend(task, device=here(), block=BlockOptions(size=size))


def trials(num, *, epochs=7, **options):
    configs = product((0.01, 0.03), (0.5, 0.0, 0.2))
    return [
        Trial(config={"lr": lr, "dropout": p}, seed=3, epochs=epochs, **options)
        for lr, p in list(configs)[:num]
    ]


@pytest.mark.parametrize(
    "task", [Nodes(), Wide(), Sums(), Smooth()], ids=lambda t: type(t).__name__
)
def test_fused_trials_get_what_they_get_alone(task):
    some = trials(4)
    assert_same(together(fused(task), some), alone(task, some), tolerance=1e-10)


def test_single_precision_is_close():
    some = trials(4)
    assert_same(together(fused(Single()), some), alone(Single(), some), tolerance=1e-4)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_masks_are_those_of_the_trial_alone_in_packs_of_any_size(size):
    some = trials(6, epochs=2)[:size]
    assert_same(together(fused(Nodes()), some), alone(Nodes(), some), tolerance=1e-12)


def test_more_trials_than_are_computed_at_once():
    some = trials(5, epochs=2)
    assert_same(together(fused(Nodes(), size=2), some), alone(Nodes(), some), tolerance=1e-12)


def test_trials_come_and_go():
    some = [
        Trial(config=t.config, seed=3, epochs=epochs)
        for t, epochs in zip(trials(6), (1, 3, 2, 4, 1, 2), strict=True)
    ]
    found = together(fused(Nodes()), some, at_once=3)
    assert_same(found, alone(Nodes(), some), tolerance=1e-10)


def test_trials_of_other_seeds_see_their_own_batches():
    # Two groups in one block, whose rows are not adjacent.
    some = [
        Trial(config=t.config, seed=seed, epochs=3)
        for t, seed in zip(trials(5), (1, 2, 1, 2, 1), strict=True)
    ]
    assert_same(together(fused(Nodes()), some), alone(Nodes(), some), tolerance=1e-10)


def test_batches_are_made_once_for_all_trials_of_a_block():
    made = []

    class Counting(InDtype):
        def train_batches(self, **options):
            for batch in super().train_batches(**options):
                made.append(batch)
                yield batch

    class Counted(Nodes):
        not_state = ("made",)

        def data(self, hp):
            return Counting(data(), self.dtype)

    backend = fused(Counted())
    for slot, trial in enumerate(trials(4)):
        backend.put(slot, trial.member)
    made.clear()
    backend.step({k: EpochPlan(epoch=0, values=t.config) for k, t in enumerate(trials(4))})
    assert len(made) == 3  # one for each step, not for each trial
    assert all(type(batch) is Batch for batch in made)


def test_rates_of_dropout_do_not_part_trials():
    backend = fused(Nodes())
    for slot, trial in enumerate(trials(3)):
        backend.put(slot, trial.member)
    assert len(backend.blocks.by_key) == 1


class Halving(GNN):
    """A model that may do anything with its dropout rate."""

    def layer(self, number, x, block):
        out = super().layer(number, x, block)
        return out * 2 if self.dropout > 0.3 else out


def test_a_subclass_is_not_trusted_with_other_rates():
    class Task(Nodes):
        def model(self, hp):
            return Halving(self.layers(), dropout=hp.dropout).double()

    some = trials(3, epochs=2)
    assert_same(together(fused(Task()), some), alone(Task(), some), tolerance=1e-10)


def test_attention_is_not_fused(device):
    if device.type == "cuda":
        pytest.skip("on a GPU, it reads no values")
    with pytest.raises(UnfusableError, match="reads the value of a tensor"):
        fused(Attending()).put(0, Member(values={"lr": 0.01}, seed=0))


def test_attention_is_trained_plainly_instead(caplog):
    some = trials(2, epochs=2)
    found = together(AutoBackend(Attending(), device=here(), prefer="fused"), some)
    on_cpu = here().type == "cpu"
    assert_same(found, alone(Attending(), some), tolerance=0.0 if on_cpu else 1e-5)
    assert caplog.text.count("not fused") == on_cpu


def test_a_measurement_decides():
    some = trials(3, epochs=2)
    found = together(AutoBackend(Nodes(), device=here()), some)
    assert_same(found, alone(Nodes(), some), tolerance=1e-10)
