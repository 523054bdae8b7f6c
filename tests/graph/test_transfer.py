from __future__ import annotations

import ctypes
import gc
from dataclasses import fields

import pytest
import torch

from tests.graph.graphs import as_lists, random_graph
from thrifty.graph._batch import Memory, copied as copied_batch
from thrifty.graph._features import Transfer
from thrifty.graph._gnn import make_batch
from thrifty.graph._loader import NeighborLoader
from thrifty.graph._sampler import NeighborSampler


class FakeEvent:
    def __init__(self, stream):
        self._stream = stream
        self._behind = stream.num_begun

    def query(self):
        return self._stream.num_done >= self._behind

    def synchronize(self):
        while not self.query():
            self._stream.work()


class FakeStreams:
    """A device that copies only when told to, so that reads and writes that come too early show."""

    def __init__(self):
        self.queue = []
        self.num_begun = self.num_done = 0
        self.waited, self.used = [], []
        self.fail_at = None

    def copy(self, tensor):
        if self.fail_at == self.num_begun:
            raise MemoryError("the device is full")
        out = torch.full_like(tensor, 99)
        # Keep raw addresses, as a device does: they keep no memory alive.
        self.queue.append((tensor.numpy().__array_interface__["data"][0], tensor.nbytes, out))
        self.num_begun += 1
        return out

    def record(self):
        return FakeEvent(self)

    def wait(self, event):
        self.waited.append(event)

    def use(self, tensor):
        self.used.append(tensor)

    def work(self):
        address, num_bytes, out = self.queue.pop(0)
        ctypes.memmove(out.data_ptr(), address, num_bytes)
        self.num_done += 1


def graph_with_data():
    graph = random_graph(40, 200)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return graph.replace(x=x, y=torch.arange(40))


def batches(memory, *, num=4, mode="frontier"):
    sampler = NeighborSampler(graph_with_data(), [3, 2], mode=mode)
    for index in range(num):
        yield make_batch(sampler, [index, 7, 20], index=index, memory=memory)


def same(a, b):
    return as_lists(a) == as_lists(b) and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def finish(streams):
    while streams.queue:
        streams.work()


@pytest.mark.parametrize("mode", ["frontier", "full"])
def test_what_arrives_is_what_was_sent(mode):
    streams = FakeStreams()
    transfer = Transfer(streams, Memory())
    (batch,) = batches(None, num=1, mode=mode)
    sent = transfer.send(batch)
    finish(streams)
    assert same(transfer.receive(sent), batch)


def test_memory_is_not_used_again_before_it_was_copied_from():
    streams, memory = FakeStreams(), Memory(keep=100)
    transfer = Transfer(streams, memory)
    # No batch is copied until all have been sent, so each needs its own memory.
    sent = [transfer.send(batch) for batch in batches(memory)]
    finish(streams)
    got = map(transfer.receive, sent)
    assert all(same(a, b) for a, b in zip(got, batches(None), strict=True))


def test_the_fake_device_shows_memory_that_is_used_too_early():
    streams, memory = FakeStreams(), Memory(keep=100)
    transfer = Transfer(streams, memory)
    sent = []
    for batch in batches(memory):
        sent.append(transfer.send(batch))
        transfer._held.clear()
    finish(streams)
    got = map(transfer.receive, sent)
    assert not all(same(a, b) for a, b in zip(got, batches(None), strict=True))


def test_memory_is_used_again_after_it_was_copied_from():
    streams, memory = FakeStreams(), Memory(keep=100)
    transfer = Transfer(streams, memory)
    made = batches(memory)
    first = next(made)
    place = first.x.untyped_storage().data_ptr()
    transfer.send(first)
    del first
    finish(streams)
    transfer.send(next(made))
    assert place in {buffer.data_ptr() for buffer in memory._free}


def test_memory_of_a_dropped_transfer_is_held_until_copies_are_done():
    streams, memory = FakeStreams(), Memory(keep=100)
    transfer = Transfer(streams, memory)
    (batch,) = batches(None, num=1)
    transfer.send(batch)
    assert streams.queue
    del transfer
    gc.collect()
    assert not streams.queue


def test_memory_is_held_when_a_later_copy_fails():
    streams, memory = FakeStreams(), Memory(keep=100)
    transfer = Transfer(streams, memory)
    (batch,) = batches(None, num=1)
    streams.fail_at = 3
    with pytest.raises(MemoryError, match="full"):
        transfer.send(batch)
    assert len(streams.queue) == 3
    assert memory.num_free == 0


def test_computing_waits_for_copies_and_keeps_their_memory():
    streams = FakeStreams()
    transfer = Transfer(streams, Memory())
    (batch,) = batches(None, num=1)
    sent = transfer.send(batch)
    assert streams.waited == streams.used == []
    got = transfer.receive(sent)
    assert streams.waited == [sent.event]
    used = {tensor.untyped_storage().data_ptr() for tensor in streams.used}
    for field in fields(got):
        value = getattr(got, field.name)
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().data_ptr() in used
    for block in got.blocks:
        assert block.indices.untyped_storage().data_ptr() in used
        assert block.indptr.untyped_storage().data_ptr() in used


@pytest.mark.parametrize(("mode", "num"), [("frontier", 6), ("full", 7)])
def test_no_array_is_copied_twice(mode, num):
    (batch,) = batches(None, num=1, mode=mode)
    copied = []
    copied_batch(batch, lambda tensor: copied.append(tensor) or tensor.clone())
    # Nodes, seed_rows, x, y and edges once; row starts once, or once a layer.
    assert len(copied) == num


def test_batches_without_features_and_edges_can_be_sent():
    graph = random_graph(5, 0)
    batch = make_batch(NeighborSampler(graph, [2, 2]), [3, 1])
    moved = copied_batch(batch, torch.clone)
    assert as_lists(moved) == as_lists(batch)
    assert moved.x is None
    assert moved.y is None


@pytest.mark.parametrize("num_threads", [0, 2])
def test_batches_on_a_device_are_those_on_the_cpu(device, num_threads):
    graph = random_graph(2000, 20_000)
    graph = graph.replace(x=torch.randn(2000, 100), y=torch.arange(2000))
    options = {"batch_size": 50, "num_threads": num_threads, "depth": 3}
    here = NeighborLoader(graph, [5, 5], **options)
    there = NeighborLoader(graph, [5, 5], device=device, **options)
    weight = torch.randn(100, 100, device=device)
    for _ in range(3):
        for a, b in zip(here, there, strict=True):
            assert b.x.device.type == device.type
            # Keep the device busy with the batch while later ones are copied.
            busy = b.x
            for _ in range(20):
                busy = busy @ weight
            assert same(a, b.to("cpu"))
