from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.devices import here
from thrifty.core import GraphError, TaskError
from thrifty.graph import GNN, SAGE, Graph, GraphData, from_edge_index
from thrifty.pack import (
    Adam,
    ConcatenatedBackend,
    EpochPlan,
    HyperParameters,
    Member,
    SoloBackend,
    Task,
)


pytestmark = pytest.mark.usefixtures("device")


CPU = torch.device("cpu")
NUM_NODES, NUM_CLASSES = 60, 3


def random_graph(**parts):
    rng = np.random.default_rng(0)
    parts = {
        "x": torch.from_numpy(rng.normal(size=(NUM_NODES, 4))).float(),
        "y": torch.from_numpy(rng.integers(NUM_CLASSES, size=NUM_NODES)),
        **parts,
    }
    edges = rng.integers(NUM_NODES, size=(2, 400))
    return from_edge_index(edges, num_nodes=NUM_NODES, **parts)


def data(**options):
    options = {"train": np.arange(40), "valid": np.arange(40, 60), "fanouts": [4, 3], **options}
    return GraphData(random_graph(), **options)


class Nodes(Task):
    optimizer = Adam(lr="lr")
    batch_size = 16

    def __init__(self):
        # All trials write to one record, although each has a copy of the task, because loggers are
        # not copied.
        self.log = logging.getLogger(f"tests.graph.{id(self)}")
        self.log.made = []

    @property
    def made(self):
        return self.log.made

    def data(self, hp):
        return data(fanouts=[hp.fanout, 3])

    def model(self, hp):
        return GNN([SAGE(4, 8), SAGE(8, NUM_CLASSES)], dropout=hp.dropout)

    def loss(self, model, batch):
        self.log.made.append(batch)
        return F.cross_entropy(model(batch), batch.y)

    def metrics(self, model, batch):
        return {"accuracy": (model(batch).argmax(1) == batch.y).float().mean()}


CONFIGS = [
    {"lr": 0.01, "dropout": 0.5, "fanout": 4},
    {"lr": 0.03, "dropout": 0.5, "fanout": 4},
    {"lr": 0.01, "dropout": 0.0, "fanout": 4},
]


def trained(backend, configs, *, epochs=2):
    """Return the metrics of each epoch and the final state, by slot."""
    for slot, values in enumerate(configs):
        backend.put(slot, Member(values=values, seed=5))
    found = {slot: [] for slot in range(len(configs))}
    waiting = set(found)
    while any(len(metrics) < epochs for metrics in found.values()):
        plans = {
            slot: EpochPlan(epoch=len(found[slot]), values=configs[slot])
            for slot in waiting
            if len(found[slot]) < epochs
        }
        waiting = set()
        for slot, outcome in backend.step(plans).items():
            if isinstance(outcome, Exception):
                raise outcome
            found[slot].append(outcome)
            waiting.add(slot)
    return found


def test_packed_trials_get_what_they_get_alone():
    together = trained(ConcatenatedBackend(Nodes(), device=here()), CONFIGS)
    for slot, values in enumerate(CONFIGS):
        (alone,) = trained(SoloBackend(Nodes(), device=here()), [values]).values()
        assert alone == together[slot]


def test_packed_trials_of_equal_fanout_see_the_very_same_batches():
    task = Nodes()
    trained(
        ConcatenatedBackend(task, device=here()), [*CONFIGS, {**CONFIGS[0], "fanout": 2}], epochs=1
    )
    # Three batches of 40 seeds, and one batch for each fanout at each step.
    assert len(task.made) == 4 * 3
    assert len({id(batch) for batch in task.made}) == 2 * 3


def test_the_input_is_averaged_once_for_all(monkeypatch):
    calls = []
    module = __import__("thrifty.graph._aggregate", fromlist=["_gather"])
    real = module._gather

    def counted(x, block, how):
        calls.append(x.shape[1])
        return real(x, block, how)

    monkeypatch.setattr(module, "_gather", counted)
    trained(ConcatenatedBackend(Nodes(), device=here()), CONFIGS, epochs=1)
    # Width 4 is the input features: 3 training batches and 1 validation batch. Hidden features (8)
    # and classes (3) are gathered for each trial.
    assert sum(width == 4 for width in calls) == 3 + 1


def test_batches_are_a_function_of_seed_and_epoch():
    source = data(num_threads=2).source(CPU)

    def nodes(seed, epoch):
        batches = source.train_batches(seed=seed, epoch=epoch, batch_size=16)
        return torch.cat([batch.nodes for batch in batches])

    assert torch.equal(nodes(1, 0), nodes(1, 0))
    assert not torch.equal(nodes(1, 0), nodes(1, 1))
    assert not torch.equal(nodes(1, 0), nodes(2, 0))


@pytest.mark.parametrize("keep_bytes", [0, 2**20])
def test_validation_batches_are_always_the_same(keep_bytes):
    source = data(keep_bytes=keep_bytes).source(CPU)
    first, second = (list(source.valid_batches(batch_size=8)) for _ in range(2))
    assert [num for _, num in first] == [8, 8, 4]
    assert torch.equal(torch.cat([b.seeds for b, _ in first]), torch.arange(40, 60))
    for (a, _), (b, _) in zip(first, second, strict=True):
        assert torch.equal(a.nodes, b.nodes)
        assert (a is b) == bool(keep_bytes)


def test_an_epoch_of_validation_that_is_broken_off_is_not_kept():
    source = data().source(CPU)
    next(iter(source.valid_batches(batch_size=8)))
    assert len(list(source.valid_batches(batch_size=8))) == 3


@pytest.mark.parametrize("missing", ["x", "y"])
def test_features_and_labels_are_needed(missing):
    with pytest.raises(GraphError, match=f"has no {missing}; give it one"):
        GraphData(random_graph(**{missing: None}), train=[0], valid=[1], fanouts=[2])


def test_both_fanouts_have_a_hop_for_each_layer():
    with pytest.raises(GraphError, match=r"2 hops and valid_fanouts=\[5\] has 1"):
        data(valid_fanouts=[5])


def test_what_cannot_be_sampled_is_said_at_once():
    with pytest.raises(GraphError, match="does not exist"):
        data(valid=[NUM_NODES])


def test_other_data_are_still_an_error():
    class Wrong(Nodes):
        def data(self, hp):
            return random_graph()

    with pytest.raises(TaskError, match=r"returned Graph; return thrifty\.ArrayData"):
        SoloBackend(Wrong(), device=here()).put(0, Member(values=CONFIGS[0], seed=0))


def test_labels_say_what_a_model_should():
    hp = HyperParameters(CONFIGS[0])
    task = Nodes()
    batch = next(task.data(hp).source(CPU).train_batches(seed=0, epoch=0, batch_size=16))
    assert task.model(hp)(batch).shape == (16, NUM_CLASSES)
    assert torch.equal(batch.y, random_graph().y[batch.seeds])


@pytest.mark.parametrize("tuned", [True, False])
def test_the_allocator_is_tuned_where_training_begins(monkeypatch, tuned):
    calls = []
    monkeypatch.setattr("thrifty.graph._graph_data.tune_allocator", lambda: calls.append(1))
    ring = Graph(
        np.arange(5), np.array([1, 2, 3, 0], dtype=np.int32), x=torch.eye(4), y=torch.arange(4)
    )
    data = GraphData(ring, train=[0, 1], valid=[2, 3], fanouts=[1], tuned=tuned)
    assert not calls
    data.source(torch.device("cpu"))
    assert len(calls) == tuned
