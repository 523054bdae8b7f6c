"""No trial can change a batch that several trials share."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from itertools import tee

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.devices import here
from tests.graph.test_data import CONFIGS, CPU, NUM_CLASSES, Nodes, data, random_graph, trained
from thrifty.core import GraphError
from thrifty.graph import GNN, SAGE, Batch, NeighborLoader
from thrifty.graph._aggregate import mean_and_own, neighbor_mean, neighbor_sum
from thrifty.graph._graph_data import SharedEpoch, Sharing
from thrifty.pack import ConcatenatedBackend, SoloBackend


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


def loader(**options):
    return NeighborLoader(random_graph(), [4, 3], batch_size=16, seed=1, num_threads=0, **options)


def arrays(batch):
    own = [batch.nodes, batch.seed_rows, batch.x, batch.y]
    return own + [a for block in batch.blocks for a in (block.indptr, block.indices)]


def same(one, other):
    return all(map(torch.equal, arrays(one), arrays(other)))


# --- copies


@pytest.mark.parametrize("copied", [Batch.clone, Batch.double, copy.deepcopy])
@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_has_arrays_of_its_own(copied, shared):
    batch = next(iter(loader()))
    batch = batch.shared() if shared else batch
    model = GNN([SAGE(4, 8), SAGE(8, 3)])
    before = model(batch)
    other = copied(batch)
    for array in arrays(other):
        array.zero_()
    assert same(batch, next(iter(loader())))
    torch.testing.assert_close(model(batch), before)


def test_a_batch_in_double_precision_is_copied_once_more():
    once = next(iter(loader())).double()
    twice = once.double()
    twice.x.zero_()
    twice.y.zero_()
    assert once.x.any()
    assert once.y.any()


def test_the_graph_s_own_arrays_are_never_changed():
    graph = random_graph()
    before = [t.clone() for t in (graph.x, graph.y)], graph.indptr.copy(), graph.indices.copy()
    for batch in NeighborLoader(graph, [-1, -1], batch_size=60, num_threads=0):
        for array in arrays(batch):
            array.zero_()
    assert all(map(torch.equal, before[0], (graph.x, graph.y)))
    assert np.array_equal(before[1], graph.indptr)
    assert np.array_equal(before[2], graph.indices)


# --- values that a block caches for several layers


@pytest.mark.parametrize("aggregate", [neighbor_mean, neighbor_sum, mean_and_own])
def test_what_was_made_of_features_may_be_changed(aggregate):
    batch = next(iter(loader())).shared()
    expected = aggregate(batch.x, batch.blocks[0]).clone()
    aggregate(batch.x, batch.blocks[0]).mul_(2)
    assert torch.equal(aggregate(batch.x, batch.blocks[0]), expected)


def test_what_a_block_has_made_may_be_changed():
    block = next(iter(loader())).blocks[0]
    expected = block.destinations().clone()
    block.destinations().zero_()
    assert torch.equal(block.destinations(), expected)
    assert block.destinations() is block.destinations()


def test_what_is_made_without_gradients_is_made_once():
    block = next(iter(loader())).blocks[0]
    with torch.inference_mode():
        assert block.destinations() is block.destinations()


# --- layers


@pytest.mark.parametrize("training", [True, False])
def test_a_hook_keeps_what_a_layer_gave(training):
    """The activation that follows writes elsewhere, so a hook can keep a layer's output."""
    model = GNN([SAGE(4, 8), SAGE(8, 3)]).train(training)
    seen = []
    model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out))
    batch = next(iter(loader()))
    with torch.no_grad():
        model(batch)
        assert torch.equal(seen[0], model.layers[0](batch.x, batch.blocks[0]))


class Residual(SAGE):
    """A layer that returns a part of its input."""

    def forward(self, x, block):
        return x[: block.num_dst]


def test_a_subclass_may_give_its_input():
    model = GNN([Residual(4, 4), SAGE(4, 3)]).eval()
    batch = next(iter(loader()))
    before = batch.x.clone()
    model(batch)
    assert torch.equal(batch.x, before)


# --- trials


class Changing(Nodes):
    """A task that writes to its batch, without dropout, so results depend on the batch alone."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def model(self, hp):
        torch.manual_seed(0)
        return GNN([SAGE(4, 8), SAGE(8, NUM_CLASSES)])

    def loss(self, model, batch):
        self.change(batch)
        return F.cross_entropy(model(batch), batch.y)

    def metrics(self, model, batch):
        self.change(batch)
        return {"loss": F.cross_entropy(model(batch), batch.y)}


CHANGES = {
    "features": lambda batch: batch.x.mul_(1.5).add_(0.1),
    "features by data": lambda batch: batch.x.data.mul_(1.5),
    "features by numpy": lambda batch: (
        np.multiply(batch.x.numpy(), 1.5, out=batch.x.numpy())
        if here().type == "cpu"
        else batch.x.data.mul_(1.5)
    ),
    "labels": lambda batch: batch.y.fill_(0),
    "an activation": lambda batch: F.relu(batch.x, inplace=True),
    "edges": lambda batch: batch.blocks[0].indices.fill_(0),
    "nodes": lambda batch: batch.nodes.zero_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_trial_gets_what_it_gets_alone(name, caplog):
    configs = [{**config, "dropout": 0.0} for config in CONFIGS]
    together = trained(
        ConcatenatedBackend(Changing(CHANGES[name]), device=here()), configs, epochs=3
    )
    for slot, values in enumerate(configs):
        (alone,) = trained(
            SoloBackend(Changing(CHANGES[name]), device=here()), [values], epochs=3
        ).values()
        for mine, its in zip(together[slot], alone, strict=True):
            assert mine == pytest.approx(its, rel=1e-5)
    assert "changed a batch in place" in caplog.text


@pytest.mark.parametrize("name", CHANGES)
def test_validation_is_the_same_in_each_epoch(name):
    (found,) = trained(
        SoloBackend(Changing(CHANGES[name]), device=here()), [{**CONFIGS[0], "lr": 0.0}], epochs=4
    ).values()
    assert len({metrics["loss"] for metrics in found}) == 1


def test_batches_that_nobody_changes_are_not_copied(caplog):
    task = Nodes()
    trained(ConcatenatedBackend(task, device=here()), CONFIGS, epochs=2)
    assert len({id(batch) for batch in task.made}) == 2 * 3
    assert not caplog.records


def test_a_change_that_does_not_count_is_found_later(caplog, monkeypatch):
    """Values are compared at random times, which finds a change that torch does not count."""
    monkeypatch.setattr("thrifty.graph._graph_data._EVERY", 2)
    source = data().source(CPU)
    for epoch in range(8):
        batches = source.train_batches(seed=1, epoch=epoch, batch_size=16)
        first, second = tee(batches)
        for batch in first:
            if epoch >= 3:
                batch.x.data.zero_()
            next(second)
    assert caplog.text.count("changed a batch in place") == 1


# --- one epoch for several trials


def test_copies_of_an_epoch_go_through_the_same_batches():
    source = data().source(CPU)
    one, two = tee(source.train_batches(seed=1, epoch=0, batch_size=16))
    assert isinstance(one, SharedEpoch)
    firsts = [next(one), next(one)]
    assert [next(two), next(two)] == firsts
    late = copy.copy(one)
    assert next(late) is next(two) is next(one)
    assert [list(each) for each in (one, two, late)] == [[], [], []]


def test_a_batch_is_kept_until_all_have_had_it():
    source = data().source(CPU)
    one, two = tee(source.train_batches(seed=1, epoch=0, batch_size=16))
    gone = weakref.ref(next(one).x)
    gc.collect()
    assert gone() is not None
    next(two)
    gc.collect()
    assert gone() is None


def test_what_is_copied_is_what_was_made():
    sharing = Sharing()
    batches = loader()
    epoch = SharedEpoch(
        batches.epoch(0), remake=lambda index: batches.batch(0, index), sharing=sharing
    )
    others = [copy.copy(epoch) for _ in range(3)]
    for each in (epoch, *others):
        for batch, expected in zip(each, batches.epoch(0), strict=True):
            assert same(batch, expected)
            batch.x.zero_()
            batch.nodes.zero_()
    assert sharing.copies


# --- one batch of an epoch


@pytest.mark.parametrize("options", [{}, {"world_size": 2, "rank": 1}, {"shuffle": False}])
def test_one_batch_is_that_of_the_epoch(options):
    batches = loader(**options)
    for index, batch in enumerate(batches.epoch(2)):
        assert same(batches.batch(2, index), batch)
    assert batches.next_epoch == 0


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (0, 4)])
def test_a_batch_that_does_not_exist(place):
    with pytest.raises(GraphError):
        loader().batch(*place)


def test_an_error_in_a_batch_is_everybodys():
    """Each trial gets an error in a batch, although a generator that has failed just ends."""

    one = next(iter(data().source(CPU).train_batches(seed=1, epoch=0, batch_size=20)))

    def batches():
        yield one
        raise RuntimeError("the disk is gone")

    first, second = tee(SharedEpoch(batches(), remake=lambda index: one, sharing=Sharing()))
    for each in (first, second):
        with pytest.raises(RuntimeError, match="disk"):
            deque(each, maxlen=0)
