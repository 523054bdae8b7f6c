from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.graph.graphs import random_graph
from tests.graph.test_loader import (
    NUM_NODES,
    FailingSampler,
    graph_with_data,
    loader as any_loader,
    seeds,
    seen,
)
from tests.graph.test_transfer import FakeStreams, finish, same
from thrifty.core import GraphError, TrainingError, UsageError, WorkerLostError
from thrifty.graph import _loader, _processes
from thrifty.graph._batch import Memory
from thrifty.graph._processes import CudaPageLock, Plan, ProcessBatches, Target, WorkerPool
from thrifty.graph._sampler import NeighborSampler
from thrifty.graph._slots import LEAST_BYTES


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux"),
]


def loader(graph=None, fanouts=(3, 2), **options):
    return any_loader(graph, fanouts, **{"processes": True} | options)


def pids_of(batches):
    """Return the processes of an iteration."""
    return list(batches._pool._pids)


def idle_pids(batches):
    return [pid for pool in batches._pools for pid in pool._pids]


def is_running(pid):
    """Return whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def exists(pid):
    return Path(f"/proc/{pid}").exists()


def await_end(pids):
    while any(map(is_running, pids)):
        time.sleep(0.02)


def num_files():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- counts without opening more


OPTIONS = [
    {},
    {"mode": "full"},
    {"replace": True},
    {"depth": 1},
    {"rank": 1, "world_size": 2},
    {"relabel": "hash", "drop_last": True, "fanouts": (-1,)},
]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_processes_make_the_batches_of_threads(num_threads, options):
    alone = any_loader(num_threads=0, **options)
    threads = any_loader(num_threads=2, processes=False, **options)
    forked = loader(num_threads=num_threads, **options)
    for _ in range(2):
        assert seen(forked) == seen(alone) == seen(threads)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_features_of_each_dtype(stored, dtype):
    graph = graph_with_data(stored)
    pairs = zip(loader(graph, dtype=dtype), any_loader(graph, dtype=dtype), strict=True)
    for forked, threads in pairs:
        assert forked.x.dtype == threads.x.dtype
        assert torch.equal(forked.x, threads.x)
        assert forked.x.is_contiguous()


@pytest.mark.parametrize(
    "y", [torch.rand(NUM_NODES, 3, 2).double(), torch.arange(NUM_NODES) % 2 == 0]
)
def test_labels_of_any_shape(y):
    graph = graph_with_data().replace(y=y)
    for batch in loader(graph):
        assert torch.equal(batch.y, y[batch.seeds])
        assert batch.y.dtype == y.dtype


def test_without_features_labels_and_edges():
    graph = random_graph(NUM_NODES, 0)
    for batch in loader(graph, seeds=[3, 5], batch_size=1):
        assert batch.x is batch.y is None
        assert batch.num_edges == 0
        assert len(batch.nodes) == 1


def test_parts_of_an_epoch():
    assert seen(loader().epoch(1, start=2, stop=5)) == seen(any_loader().epoch(1))[2:5]
    assert list(loader().epoch(0, start=2, stop=2)) == []


def test_other_devices_get_batches_too():
    batch = next(loader(device="meta").epoch(0))
    assert batch.x.device.type == batch.blocks[0].device.type == "meta"


def test_kept_batches_never_change():
    graph = graph_with_data()
    batches = loader(graph)
    for batch in [*batches, *batches]:
        assert torch.equal(batch.x, graph.x[batch.nodes])
        assert same(batch.clone(), batch)


def test_changing_features_is_no_change_of_the_edges():
    batch = next(iter(loader()))
    before = batch.blocks[0].indices._version
    batch.x.zero_()
    batch.y.zero_()
    assert batch.blocks[0].indices._version == before == batch.nodes._version


def test_without_threads_there_are_no_processes():
    batches = loader(num_threads=0)
    assert seen(batches) == seen(any_loader())
    assert not batches._pools


def test_the_default_is_threads_on_the_cpu():
    assert any_loader().processes is False


def test_systems_that_cannot_fork(monkeypatch):
    monkeypatch.setattr(_loader, "can_fork", lambda: False)
    with pytest.raises(GraphError, match="processes=True needs Linux; give processes=False"):
        loader()


def test_processes_are_kept_for_the_next_epoch():
    batches = loader()
    epoch = iter(batches)
    pids = pids_of(epoch)
    assert len(pids) == 2
    list(epoch)
    assert pids_of(iter(batches)) == pids


def test_processes_of_a_dropped_epoch_make_the_next_one():
    batches = loader(batch_size=1, depth=9)
    epoch = batches.epoch(0)
    pids = pids_of(epoch)
    next(epoch)
    del epoch
    for number in range(1, 4):
        epoch = batches.epoch(number)
        assert pids_of(epoch) == pids
        assert seen(islice(epoch, 5)) == seen(any_loader(batch_size=1).epoch(number))[:5]
        del epoch


def test_epochs_in_progress_at_once_have_their_own_processes():
    batches = loader()
    first, second = batches.epoch(0), batches.epoch(1)
    pids = pids_of(first) + pids_of(second)
    assert len(set(pids)) == 4
    pairs = list(zip(first, second, strict=True))
    assert seen(a for a, _ in pairs) == seen(any_loader().epoch(0))
    assert seen(b for _, b in pairs) == seen(any_loader().epoch(1))
    assert len(idle_pids(batches)) == 2
    assert sum(map(exists, pids)) == 2


def test_processes_and_memory_end_with_the_loader():
    gc.collect()
    before = num_files()
    batches = loader()
    epoch = iter(batches)
    pids = pids_of(epoch)
    next(epoch)
    del batches
    assert all(map(is_running, pids))
    del epoch
    assert not any(map(exists, pids))
    assert num_files() == before


def test_a_newer_pool_keeps_no_memory_of_an_older_one():
    older, newer = loader(), loader()
    list(older)
    list(newer)
    of_process = Path(f"/proc/{idle_pids(newer)[0]}")

    def files():
        """Return the numbers of the files that it has open, and of those that it has mapped."""
        opened = (of_process / "fd").iterdir()
        mapped = (of_process / "maps").read_text().splitlines()
        return (
            {file.stat().st_ino for file in opened if "thrifty-batch" in file.readlink().name},
            {int(line.split()[4]) for line in mapped if "thrifty-batch" in line},
        )

    # Another process may have made all batches while this one still starts.
    num = len(newer._pools[0]._slots)
    while [*map(len, files())] != [num, num]:
        time.sleep(0.02)


def test_batches_outlive_their_loader():
    batches = loader(graph := graph_with_data())
    kept = next(iter(batches))
    del batches
    gc.collect()
    assert torch.equal(kept.x, graph.x[kept.nodes])


def test_another_sampler_gets_other_processes():
    batches = loader()
    pids = pids_of(iter(batches))
    batches.sampler = NeighborSampler(batches.graph, [1, 1], seed=4)
    threads = any_loader()
    threads.sampler = NeighborSampler(batches.graph, [1, 1], seed=4)
    assert seen(batches.epoch(0)) == seen(threads.epoch(0))
    assert not any(map(exists, pids))


def test_an_exception_comes_at_the_place_of_its_batch():
    batches = loader()
    whole = seen(batches.epoch(0))
    sampler = batches.sampler
    batches.sampler = FailingSampler(sampler, at=3)
    got = []
    with pytest.raises(ZeroDivisionError, match="in a thread") as caught:
        got.extend(seen([batch]) for batch in batches.epoch(0))
    assert [one[0] for one in got] == whole[:3]
    assert "in sample" in caught.value.__notes__[0]
    batches.sampler = sampler
    assert seen(batches.epoch(0)) == whole


def test_the_first_batch_may_fail_too():
    batches = loader()
    batches.sampler = FailingSampler(batches.sampler, at=0)
    epoch = iter(batches)
    pids = pids_of(epoch)
    with pytest.raises(ZeroDivisionError):
        next(epoch)
    assert not any(map(exists, pids))
    with pytest.raises(StopIteration):
        next(epoch)


class OddSampler(FailingSampler):
    """A wrapper of a sampler that does something odd at one batch."""

    def __init__(self, sampler, act, *, at=3):
        super().__init__(sampler, at=at)
        self._act = act

    def sample(self, seeds, *, epoch, batch):
        if batch == self._at:
            self._act()
        return self._sampler.sample(seeds, epoch=epoch, batch=batch)


def test_exceptions_that_cannot_be_sent():
    class LocalError(Exception):
        pass

    def act():
        raise LocalError("of a local class")

    batches = loader()
    batches.sampler = OddSampler(batches.sampler, act)
    with pytest.raises(TrainingError, match="LocalError: of a local class"):
        list(batches)


def test_exceptions_with_a_long_text():
    def act():
        raise ValueError("long" * LEAST_BYTES)

    batches = loader()
    batches.sampler = OddSampler(batches.sampler, act)
    with pytest.raises(TrainingError, match="ValueError: longlong"):
        list(batches)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL.*smaller depth"),
        (lambda: os._exit(3), "has ended with exit status 3"),
    ],
)
def test_a_process_that_ends_is_an_error_and_no_wait(act, message, monkeypatch):
    monkeypatch.setattr(_processes, "_CHECK_MS", 20)
    batches = loader()
    batches.sampler = OddSampler(batches.sampler, act)
    epoch = batches.epoch(0)
    pids = pids_of(epoch)
    with pytest.raises(WorkerLostError, match=message):
        list(epoch)
    assert not any(map(exists, pids))


def test_a_process_that_was_reaped_elsewhere(monkeypatch):
    monkeypatch.setattr(_processes, "_CHECK_MS", 20)
    batches = loader(num_threads=1)
    epoch = batches.epoch(0)
    (pid,) = pids_of(epoch)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(WorkerLostError, match="has ended;"):
        list(epoch)


def test_a_process_killed_while_its_batches_are_used():
    """No job can be given to it any more, before any of its batches is missed."""
    epoch = loader(num_threads=1, batch_size=1, depth=2).epoch(0)
    next(epoch)
    (pid,) = pids_of(epoch)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(WorkerLostError, match=r"was killed by SIGKILL.*smaller depth"):
        list(epoch)


def test_processes_killed_between_epochs_are_replaced():
    batches = loader()
    list(batches)
    pids = idle_pids(batches)
    os.kill(pids[0], signal.SIGKILL)
    # Not only until it is a zombie: that can be before its last thread has ended.
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    assert seen(batches.epoch(5)) == seen(any_loader().epoch(5))
    assert not any(map(exists, pids))


def test_an_iteration_begun_in_another_thread():
    found = []
    batches = loader()
    thread = threading.Thread(target=lambda: found.append(batches.epoch(0)))
    thread.start()
    thread.join()
    assert seen(found[0]) == seen(any_loader().epoch(0))


def test_threads_that_share_an_iterator_get_each_batch_once():
    found = []
    epoch = loader(batch_size=1).epoch(0)
    threads = [threading.Thread(target=lambda: found.extend(seeds(epoch))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [[node] for node in range(NUM_NODES)]


def test_a_fork_of_the_caller_leaves_the_iteration_alone():
    batches = loader()
    epoch = batches.epoch(0)
    first = next(epoch)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                next(epoch)
            except UsageError as error:
                code = 0 if "begin a new one" in str(error) else 2
            if seen(batches.epoch(0))[:1] != seen([first]):
                code = 3
            del epoch
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert seen([first, *epoch]) == seen(any_loader().epoch(0))


SCRIPT = """
import os, signal, sys, time
import numpy as np, torch
from thrifty.graph import Graph, NeighborLoader
rng = np.random.default_rng(0)
graph = Graph(
    np.arange(0, 5001, 5), rng.integers(0, 1000, 5000).astype(np.int32), x=torch.ones(1000, 300)
)
loader = NeighborLoader(
    graph, [5, 5], batch_size=1, num_threads=3, depth=50, processes=True
)
batches = iter(loader)
next(batches)
print(*batches._pool._pids, flush=True)
"""


def run(ending, **options):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT + ending],
        **options,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_interpreter_ends_in_the_midst_of_an_epoch():
    process = run("")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert not any(map(exists, map(int, out.split())))


@pytest.mark.parametrize("thread", [False, True])
def test_processes_die_with_their_parent(thread):
    ending = "time.sleep(1000)"
    if thread:
        ending = f"""
import threading
def begin():
    global other
    other = loader.epoch(3)
thread = threading.Thread(target=begin)
thread.start()
thread.join()
print(*other._pool._pids, flush=True)
{ending}
"""
    process = run(ending)
    pids = [int(pid) for _ in range(1 + thread) for pid in process.stdout.readline().split()]
    assert len(pids) == 3 * (1 + thread)
    assert all(map(is_running, pids))
    process.kill()
    process.communicate()
    await_end(pids)


def test_an_interruption_reaches_only_the_parent():
    process = run(
        """
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(1000)
except KeyboardInterrupt:
    print(1 + sum(1 for _ in batches))
""",
        process_group=0,
    )
    out, err = process.communicate()
    pids, num = out.splitlines()
    assert (process.returncode, err, num) == (0, "", "1000")
    assert not any(map(exists, map(int, pids.split())))


def plan_of(batches, *, epoch=0):
    places = batches.order.of(epoch=epoch)
    return Plan(
        epoch=epoch,
        num=len(batches),
        seeds=lambda position: batches.seeds[places[batches.order.part(position)]],
        number=batches.order.number,
    )


class FakeLock:
    def __init__(self, *, works=True):
        self.locked, self.works, self.times = {}, works, 0

    def lock(self, address, num_bytes):
        assert address not in self.locked
        self.times += 1
        if self.works:
            self.locked[address] = num_bytes
        return self.works

    def unlock(self, address):
        del self.locked[address]


def pool_of(batches, target, *, num_bytes=2 * LEAST_BYTES, **options):
    return WorkerPool(
        batches.sampler,
        None,
        target,
        num_bytes=num_bytes,
        **{"num_processes": 2, "depth": 4} | options,
    )


def wide(num_features=500):
    graph = random_graph(300, 2000)
    x = torch.randn(300, num_features, generator=torch.Generator().manual_seed(0))
    return graph.replace(x=x, y=torch.arange(300))


@pytest.mark.parametrize("works", [True, False])
def test_slots_grow_and_are_locked_again(works):
    batches = loader(wide(), batch_size=20)
    lock = FakeLock(works=works)
    pool = pool_of(batches, Target(None, lock, Memory()), num_bytes=1)
    assert {slot.size for slot in pool._slots} == {LEAST_BYTES}
    got = list(ProcessBatches(pool, plan_of(batches), []))
    assert all(same(a, b) for a, b in zip(got, any_loader(wide(), batch_size=20), strict=True))
    sizes = [slot.size for slot in pool._slots]
    assert max(sizes) > LEAST_BYTES
    assert lock.times > len(sizes)
    assert sorted(lock.locked.values()) == (sorted(sizes) if works else [])
    pool.close()
    assert not lock.locked


def test_many_seeds_need_large_slots():
    graph = random_graph(30_000, 100)
    batches = loader(graph, batch_size=25_000)
    pool = pool_of(batches, Target(None, None, Memory()), num_bytes=1)
    got = list(ProcessBatches(pool, plan_of(batches), []))
    assert seeds(got) == seeds(any_loader(graph, batch_size=25_000))
    pool.close()


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_a_slot_is_not_used_again_before_it_was_copied_from(depth):
    batches = loader(wide(20), batch_size=8)
    streams, lock = FakeStreams(), FakeLock()
    pool = pool_of(batches, Target(streams, lock, Memory()), depth=depth)
    idle = []
    # The device copies only when the pool waits for it, because no slot is free.
    got = list(ProcessBatches(pool, plan_of(batches), idle))
    assert idle == [pool]
    assert len(streams.waited) == len(streams.used) == len(got) == len(batches)
    finish(streams)
    assert all(same(a, b) for a, b in zip(got, any_loader(wide(20), batch_size=8), strict=True))
    again = list(ProcessBatches(idle.pop(), plan_of(batches, epoch=1), idle))
    pool.close()
    assert not streams.queue
    assert all(
        same(a, b) for a, b in zip(again, any_loader(wide(20), batch_size=8).epoch(1), strict=True)
    )


def test_the_fake_device_shows_a_slot_that_is_used_too_early(monkeypatch):
    batches = loader(wide(20), batch_size=8)
    streams = FakeStreams()
    pool = pool_of(batches, Target(streams, None, Memory()), depth=1)

    def release_at_once():
        while pool._held:
            pool._free.append(pool._held.popleft()[1])

    monkeypatch.setattr(pool, "_release", release_at_once)
    got = list(ProcessBatches(pool, plan_of(batches), []))
    finish(streams)
    pool.close()
    assert not all(same(a, b) for a, b in zip(got, any_loader(wide(20), batch_size=8), strict=True))


def test_a_copy_that_fails_closes_the_pool_after_earlier_copies():
    batches = loader(wide(20), batch_size=8)
    streams = FakeStreams()
    streams.fail_at = 2
    pool = pool_of(batches, Target(streams, None, Memory()))
    pids = list(pool._pids)
    with pytest.raises(MemoryError, match="full"):
        list(ProcessBatches(pool, plan_of(batches), []))
    assert not streams.queue
    assert not any(map(exists, pids))


def test_batches_copied_ahead_in_inference_mode_can_be_trained_on():
    batches = loader(wide(20), batch_size=8)
    pool = pool_of(batches, Target(FakeStreams(), None, Memory()))
    epoch = ProcessBatches(pool, plan_of(batches), [])
    with torch.inference_mode():
        next(epoch)
    assert not next(epoch).x.is_inference()
    pool.close()


class FakeRuntime:
    def __init__(self, code):
        self.code, self.calls = code, []

    def cudaHostRegister(self, *args):  # noqa: N802
        self.calls.append(args)
        return self.code

    def cudaHostUnregister(self, *args):  # noqa: N802
        self.calls.append(args)
        return 0


def test_cuda_locks_pages_and_says_when_it_cannot(monkeypatch, caplog):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert CudaPageLock().lock(4096, 8192)
    CudaPageLock().unlock(4096)
    assert runtime.calls == [(4096, 8192, 1), (4096,)]
    assert not caplog.records
    runtime.code = 2
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert not CudaPageLock().lock(4096, 5 << 20)
    assert "cannot page-lock 5.0 MiB for batches (error 2)" in caplog.text


def test_batches_of_processes_reach_the_device(device):
    graph = wide(100)
    for stored in (graph, graph.replace(x=graph.x.bfloat16())):
        here = any_loader(stored, (5, 5), batch_size=25)
        there = loader(stored, (5, 5), batch_size=25, device=device, depth=3)
        for _ in range(3):
            for a, b in zip(here, there, strict=True):
                assert b.x.device.type == device.type
                busy = b.x.float()
                for _ in range(20):
                    busy = busy @ torch.ones(100, 100, device=device)
                assert same(a, b.to("cpu"))


def test_seeds_changed_later_change_nothing():
    mine = np.array([3, 9, 40])
    batches = loader(seeds=mine, shuffle=False)
    mine[:] = 0
    assert seeds(batches) == [[3, 9, 40]]
