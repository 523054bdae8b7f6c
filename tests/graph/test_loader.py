from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import traceback
from itertools import chain, islice

import numpy as np
import pytest
import torch

from tests.graph.graphs import as_lists, random_graph
from thrifty.core import GraphError
from thrifty.graph import NeighborSampler
from thrifty.graph._gnn import make_batch
from thrifty.graph._loader import NeighborLoader


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


NUM_NODES = 60


def graph_with_data(dtype=torch.float32):
    graph = random_graph(NUM_NODES, 400, isolated=5)
    x = torch.randn(NUM_NODES, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    return graph.replace(x=x, y=10 * torch.arange(NUM_NODES))


def loader(graph=None, fanouts=(3, 2), **options):
    graph = graph_with_data() if graph is None else graph
    return NeighborLoader(graph, fanouts, **{"batch_size": 8, "num_threads": 2} | options)


def seen(batches):
    """Return the whole content of some batches."""
    return [
        (*as_lists(b), b.num_seeds, b.hop_nodes, b.hop_edges, b.x.tolist(), b.y.tolist())
        for b in batches
    ]


def seeds(batches):
    return [batch.seeds.tolist() for batch in batches]


def batch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("thrifty-batches")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in batch_threads():
        thread.join()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"mode": "full"}, {"replace": True}, {"depth": 1}])
def test_batches_do_not_depend_on_threads(num_threads, options):
    alone = loader(num_threads=0, **options)
    together = loader(num_threads=num_threads, **options)
    for _ in range(2):
        assert seen(together) == seen(alone)


def test_hash_and_dense_give_the_same_batches():
    assert seen(loader(relabel="hash")) == seen(loader(relabel="dense"))


def test_tables_of_all_threads_share_the_memory():
    assert loader(num_threads=2, table_bytes=8 * NUM_NODES).sampler.relabel == "dense"
    assert loader(num_threads=3, table_bytes=8 * NUM_NODES).sampler.relabel == "hash"


def test_features_and_labels_are_those_of_the_nodes():
    graph = graph_with_data()
    for batch in loader(graph):
        assert torch.equal(batch.x, graph.x[batch.nodes])
        assert torch.equal(batch.y, graph.y[batch.seeds])


def test_batches_without_features_and_labels():
    batch = next(loader(random_graph(NUM_NODES, 100), num_threads=0).epoch(0))
    assert batch.x is None
    assert batch.y is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_stay_or_become_floats(dtype):
    graph = graph_with_data(dtype)
    for stays, widened in zip(loader(graph), loader(graph, dtype=torch.float32), strict=True):
        assert stays.x.dtype == dtype
        assert widened.x.dtype == torch.float32
        assert torch.equal(stays.x.float(), widened.x)


def test_kept_batches_never_change():
    graph = graph_with_data()
    for batch in list(chain(loader(graph), loader(graph).epoch(1))):
        assert torch.equal(batch.x, graph.x[batch.nodes])


def test_memory_of_features_is_used_again():
    places = [batch.x.untyped_storage().data_ptr() for batch in loader(num_threads=0).epoch(0)]
    assert len(set(places)) < len(places)


def test_each_pass_is_the_next_epoch():
    batches = loader()
    passes = [seen(batches), seen(batches)]
    assert passes == [seen(batches.epoch(0)), seen(batches.epoch(1))]
    assert passes[0] != passes[1]
    assert batches.next_epoch == 2


def test_training_goes_on_at_an_epoch():
    batches, later = loader(), loader()
    later.next_epoch = 5
    assert seen(later) == seen(batches.epoch(5))
    assert later.next_epoch == 6


def test_epochs_given_by_numpy_are_the_same():
    batches = loader()
    assert seen(batches.epoch(np.int64(3))) == seen(batches.epoch(3))
    batches.next_epoch = np.int64(3)
    assert seen(batches) == seen(batches.epoch(3))


def test_draws_differ_between_epochs_also_in_the_same_order():
    batches = loader(shuffle=False)
    assert seeds(batches.epoch(0)) == seeds(batches.epoch(1))
    assert seen(batches.epoch(0)) != seen(batches.epoch(1))


def test_seeds_of_the_loader_give_other_epochs():
    assert seen(loader(seed=1)) == seen(loader(seed=1))
    assert seen(loader(seed=1)) != seen(loader(seed=2))


def test_two_iterations_at_once_are_independent():
    batches = loader()
    pairs = list(zip(batches.epoch(0), batches.epoch(1), strict=True))
    assert seen(a for a, _ in pairs) == seen(batches.epoch(0))
    assert seen(b for _, b in pairs) == seen(batches.epoch(1))


def test_an_epoch_after_one_that_was_left_is_whole():
    batches = loader()
    for _ in batches:
        break
    assert seen(batches) == seen(batches.epoch(1))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_length_is_the_number_of_batches(num_threads):
    for size, drop_last, num in [(8, False, 8), (8, True, 7), (60, True, 1), (100, False, 1)]:
        batches = loader(batch_size=size, drop_last=drop_last, num_threads=num_threads)
        assert len(batches) == len(list(batches)) == num


def test_all_nodes_are_seeds_by_default():
    assert sorted(chain.from_iterable(seeds(loader()))) == list(range(NUM_NODES))
    assert loader().num_seeds == NUM_NODES


def mask_of(*nodes):
    mask = np.zeros(NUM_NODES, dtype=bool)
    mask[list(nodes)] = True
    return mask


@pytest.mark.parametrize(
    "given",
    [
        [3, 9, 40],
        np.array([3, 9, 40], dtype=np.uint8),
        torch.tensor([3, 9, 40]),
        mask_of(3, 9, 40),
        torch.from_numpy(mask_of(3, 9, 40)),
        mask_of(3, 9, 40).tolist(),
    ],
)
def test_seeds_are_numbers_or_a_mask(given):
    assert seeds(loader(seeds=given, shuffle=False)) == [[3, 9, 40]]


def test_without_shuffling_seeds_stay_in_their_order():
    assert seeds(loader(seeds=[9, 3, 40], shuffle=False, batch_size=2)) == [[9, 3], [40]]


def test_seeds_changed_later_change_nothing():
    mine = np.array([3, 9, 40])
    batches = loader(seeds=mine, shuffle=False)
    mine[:] = 0
    assert seeds(batches) == [[3, 9, 40]]


def test_isolated_seeds_have_batches_too():
    batch = next(loader(seeds=[NUM_NODES - 1], num_threads=0).epoch(0))
    assert batch.num_edges == 0
    assert batch.x.shape == (1, 6)


@pytest.mark.parametrize("num_seeds", [60, 53, 49])
def test_ranks_share_each_epoch(num_seeds):
    ranks = [
        loader(seeds=np.arange(num_seeds), rank=rank, world_size=3, num_threads=1)
        for rank in range(3)
    ]
    parts = [seeds(rank) for rank in ranks]
    assert sorted(chain.from_iterable(chain(*parts))) == list(range(num_seeds))
    assert len({len(part) for part in parts} | {len(rank) for rank in ranks}) == 1


class ListeningSampler:
    """A wrapper of a sampler that records which batches are requested."""

    def __init__(self, sampler):
        self.graph, self._sampler, self.numbers = sampler.graph, sampler, []

    def sample(self, seeds, *, epoch, batch):
        self.numbers.append(batch)
        return self._sampler.sample(seeds, epoch=epoch, batch=batch)


def test_ranks_draw_independently():
    # Draws are a function of a batch's number, so no two ranks may have a number in common.
    numbers = []
    for rank in range(3):
        batches = loader(rank=rank, world_size=3, num_threads=0)
        batches.sampler = ListeningSampler(batches.sampler)
        assert len(list(batches)) == 3
        numbers += batches.sampler.numbers
    assert sorted(numbers) == list(range(9))


class FailingSampler:
    """A wrapper of a sampler that fails at one batch."""

    def __init__(self, sampler, *, at):
        self.graph, self._sampler, self._at = sampler.graph, sampler, at

    def sample(self, seeds, *, epoch, batch):
        if batch == self._at:
            raise ZeroDivisionError("in a thread")
        return self._sampler.sample(seeds, epoch=epoch, batch=batch)


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_an_exception_comes_at_the_place_of_its_batch(num_threads):
    batches = loader(num_threads=num_threads)
    whole = seen(batches.epoch(0))
    batches.sampler = FailingSampler(batches.sampler, at=3)
    got = []
    with pytest.raises(ZeroDivisionError, match="in a thread") as caught:
        got.extend(seen([batch]) for batch in batches)
    assert [one[0] for one in got] == whole[:3]
    assert "in sample" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_a_loader_can_be_used_after_an_exception():
    batches = loader()
    whole = seen(batches.epoch(0))
    sampler = batches.sampler
    batches.sampler = FailingSampler(sampler, at=3)
    with pytest.raises(ZeroDivisionError):
        list(batches)
    batches.sampler = sampler
    assert seen(batches.epoch(0)) == whole


@pytest.mark.parametrize(
    "send", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_loaders_can_be_sent_to_other_processes(send):
    batches = loader(seeds=[1, 5, 9, 30], batch_size=3, dtype=torch.float32)
    list(batches)
    sent = send(batches)
    assert sent.next_epoch == 1
    assert seen(sent) == seen(batches)


def test_tables_are_not_pickled():
    batches = loader(random_graph(30_000, 30), seeds=[1], relabel="dense")
    before = len(pickle.dumps(batches))
    list(batches)
    assert len(pickle.dumps(batches)) < before + 1000


def test_a_loader_in_the_caller_has_no_threads():
    iterator = loader(num_threads=0).epoch(0)
    next(iterator)
    assert not batch_threads()


def test_a_loader_has_threads_and_ends_them():
    iterator = iter(loader(num_threads=3, batch_size=1))
    next(iterator)
    assert len(batch_threads()) == 3


def test_a_batch_holds_neither_loader_nor_threads():
    (batch,) = islice(loader(batch_size=4), 1)
    assert batch.num_seeds == 4


EXIT = """
import numpy as np, torch
from thrifty.graph._graph import Graph
from thrifty.graph._loader import NeighborLoader
rng = np.random.default_rng(0)
graph = Graph(
    np.arange(0, 5001, 5), rng.integers(0, 1000, 5000).astype(np.int32), \
x=torch.ones(1000, 300), y=torch.ones(1000, 60)
)
batches = iter(NeighborLoader(graph, [5, 5], batch_size=1, num_threads=4, depth=50))
next(batches)
"""


def test_the_interpreter_ends_in_the_midst_of_an_epoch():
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": []}, "there are no seeds"),
        ({"seeds": np.zeros(NUM_NODES, dtype=bool)}, "there are no seeds"),
        ({"seeds": [1, 2, 1, 2, 2]}, "3 of 5 seeds are there already, such as node 2.*np.unique"),
        ({"seeds": [1, NUM_NODES]}, f"seed {NUM_NODES} does not exist"),
        ({"seeds": [-1]}, "seed -1 does not exist"),
        ({"seeds": [0.5]}, "dtype float64"),
        ({"seeds": np.zeros(3, dtype=bool)}, r"mask of seeds has shape \(3,\).*60 nodes"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_threads": -1}, "num_threads=-1"),
        ({"num_threads": 1.5}, "num_threads=1.5"),
        ({"depth": 0}, "depth=0"),
        ({"fanouts": []}, "fanouts"),
        ({"mode": "half"}, "mode='half'"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"rank": 1}, "rank=1 and world_size=1"),
        ({"drop_last": True, "batch_size": 61}, "drop_last=True"),
        ({"device": "gpu"}, "device='gpu'.*'cpu' or 'cuda'"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(GraphError, match=message):
        loader(**options)


def test_an_empty_graph_has_no_seeds():
    with pytest.raises(GraphError, match="there are no seeds"):
        loader(random_graph(0, 0))


@pytest.mark.parametrize("epoch", [-1, 1.5, "0"])
def test_what_is_no_epoch(epoch):
    batches = loader()
    with pytest.raises(GraphError, match="epoch="):
        batches.epoch(epoch)
    with pytest.raises(GraphError, match="next_epoch="):
        batches.next_epoch = epoch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(GraphError, match="device='cuda:1', but PyTorch finds no CUDA device"):
        loader(device="cuda:1")


def test_other_devices_get_batches_too():
    batch = next(loader(device="meta").epoch(0))
    assert {batch.x.device.type, batch.nodes.device.type, batch.blocks[0].device.type} == {"meta"}


def test_making_one_batch_follows_the_distinct_seeds():
    graph = graph_with_data()
    batch = make_batch(NeighborSampler(graph, [2]), [7, 3, 7])
    assert batch.y.tolist() == [70, 30]
    assert torch.equal(batch.x[batch.seed_rows], graph.x[[7, 3, 7]])
