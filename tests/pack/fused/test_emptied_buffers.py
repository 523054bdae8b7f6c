"""Buffers of packed programs have no memory while trials compute alone."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.pack._drive import Trial, assert_same, together
from tests.pack._toys import Toy
from tests.pack.test_frozen import Headed
from thrifty.pack import ArrayData, BlockOptions, FusedBackend
from thrifty.pack.backends import _dry_runs
from thrifty.pack.fused import _tape
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._checking import StepCheck
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.fused._record import record
from thrifty.pack.fused._structure import Structure
from thrifty.pack.fused._tape import BufferPool, bind


pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LARGE, SMALL = _tape.MIN_EMPTIED_BYTES, 64
NEVER = 2**60


def size_of(buffer):
    return buffer.untyped_storage().nbytes()


def held_bytes(pool):
    """Return how many bytes of memory the large buffers of a pool have now."""
    return sum(map(size_of, pool._large))


# -- the pool ------------------------------------------------------------------------------


def test_large_buffers_have_no_memory_within_the_context():
    pool = BufferPool()
    large, small = pool.take(LARGE, CPU), pool.take(SMALL, CPU)
    view = large.view(torch.float32).as_strided((8, 8), (8, 1))
    with pool.emptied():
        assert (size_of(large), size_of(small)) == (0, SMALL)
    assert size_of(large) == LARGE
    torch.mm(torch.eye(8), torch.ones(8, 8), out=view)
    assert torch.equal(view, torch.ones(8, 8)), "what was made before is in the new memory"
    assert pool.num_bytes == LARGE + SMALL


def test_buffers_that_tapes_have_given_back_count_too():
    pool = BufferPool()
    large = pool.take(LARGE, CPU)
    pool.give_back(large)
    with pool.emptied():
        assert not size_of(large)
    assert size_of(pool.take(LARGE, CPU)) == LARGE


def test_buffers_are_filled_again_after_an_error():
    pool = BufferPool()
    large = pool.take(LARGE, CPU)
    with pytest.raises(KeyError), pool.emptied():
        raise KeyError
    assert size_of(large) == LARGE


def test_the_first_error_counts(monkeypatch):
    pool = BufferPool()
    large = pool.take(LARGE, CPU)
    resize = torch.UntypedStorage.resize_

    def failing(storage, size):
        if size:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", failing)
    with pytest.raises(KeyError), pool.emptied():
        raise KeyError
    monkeypatch.undo()
    pool.refill()
    assert size_of(large) == LARGE


def test_a_context_within_another_one():
    pool = BufferPool()
    large = pool.take(LARGE, CPU)
    with pool.emptied():
        with pool.emptied():
            assert not size_of(large)
        assert not size_of(large), "the outer context is not over"
    assert size_of(large) == LARGE


def test_a_buffer_that_is_taken_within_the_context_has_memory():
    pool = BufferPool()
    pool.give_back(pool.take(LARGE, CPU))
    with pool.emptied():
        assert size_of(pool.take(LARGE, CPU)) == LARGE


def test_memory_that_has_run_out_is_asked_for_again(monkeypatch):
    pool = BufferPool()
    buffers = [pool.take(LARGE, CPU) for _ in range(3)]
    resize = torch.UntypedStorage.resize_
    calls = []

    def failing(storage, size):
        calls.append(size)
        if size and len(calls) > 4:  # three are emptied and one is filled
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", failing)
    with pytest.raises(RuntimeError, match="can't allocate memory"), pool.emptied():
        pass
    assert sorted(map(size_of, buffers)) == [0, 0, LARGE]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pool.refill()
    monkeypatch.undo()
    pool.refill()
    assert list(map(size_of, buffers)) == [LARGE] * 3


def test_a_tape_computes_the_same_after_its_buffers_were_emptied(monkeypatch):
    monkeypatch.setattr(_tape, "MIN_EMPTIED_BYTES", 1)
    x = torch.randn(16, 16)
    program, wanted = record(lambda: [torch.softmax((x @ x).exp() @ x, 1) @ x], [x])
    pool = BufferPool()
    tape = bind(program, [x], buffer_pool=pool)
    with torch.no_grad():
        tape()
        with pool.emptied():
            assert pool._large
            assert not held_bytes(pool)
        tape()
    assert torch.equal(tape.outputs[0], wanted[0])


# -- packs ---------------------------------------------------------------------------------


TRIALS = [Trial(config={"lr": 0.05 * (k + 1)}, seed=k, epochs=3) for k in range(3)]


def trained(task, monkeypatch, *, min_bytes, activations=None):
    """Train trials of which each step and each evaluation is checked."""
    monkeypatch.setattr(_tape, "MIN_EMPTIED_BYTES", min_bytes)
    monkeypatch.setattr(FusedTrial, "is_due", property(lambda _: True))
    backend = FusedBackend(
        task, block=BlockOptions(size=3), activations=activations or ActivationStore(limit_bytes=0)
    )
    backend.budget.share = 1e9
    found = together(backend, TRIALS)
    assert not any(each.error for each in found)
    return found, backend


class Dropped(Toy):
    """Dropout, batch normalisation and batches that differ in size."""

    def network(self, hp):
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)
        )


@pytest.mark.parametrize("task", [Toy, Dropped, Headed])
def test_results_are_the_same_to_the_last_bit(task, monkeypatch):
    found, backend = trained(task(), monkeypatch, min_bytes=1)
    assert backend._buffer_pool._large
    assert backend.budget.num_checks > 3 * 3 * 3, "steps and evaluations"
    wanted, other = trained(task(), monkeypatch, min_bytes=NEVER)
    assert not other._buffer_pool._large
    assert_same(found, wanted)


def test_results_with_kept_activations_are_the_same_to_the_last_bit(monkeypatch):
    found, backend = trained(
        Headed(), monkeypatch, min_bytes=1, activations=ActivationStore(limit_bytes=2**30)
    )
    assert backend.activations.num_bytes
    wanted, _ = trained(
        Headed(), monkeypatch, min_bytes=NEVER, activations=ActivationStore(limit_bytes=2**30)
    )
    assert_same(found, wanted)


def test_nothing_alone_runs_beside_buffers(monkeypatch):
    """Steps and evaluations alone, recordings and dry runs find the buffers emptied."""
    seen = Counter()
    pool = None

    def watched(owner, name):
        own = getattr(owner, name)

        def watching(*args, **kwargs):
            if pool is not None and pool._large:
                assert not held_bytes(pool), name
                seen[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, watching)

    watched(StepCheck, "judge")
    watched(FusedTrial, "evaluate")
    watched(Structure, "record")
    watched(_dry_runs, "dry_run")
    monkeypatch.setattr(_tape, "MIN_EMPTIED_BYTES", 1)
    backend = FusedBackend(Toy(), block=BlockOptions(size=2))
    pool = backend._buffer_pool
    sizes = [8, 8, 12]  # the third trial has a structure of its own, and comes last
    some = [Trial(config={"lr": 0.1, "width": w}, seed=k) for k, w in enumerate(sizes)]
    found = together(backend, some, at_once=2)
    assert not any(each.error for each in found)
    assert set(seen) == {"judge", "evaluate", "record", "dry_run"}


class Deep(Toy):
    """Its activations need much more memory than its parameters."""

    batch_size = 2048

    def data(self, hp):
        x, vx = self.inputs(2048, 1), self.inputs(8, 2)
        return ArrayData(train=(x, self.targets(x)), valid=(vx, self.targets(vx)))

    def network(self, hp):
        hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(nn.Linear(6, 32), *hidden, nn.Linear(32, 1))


def test_a_checked_step_needs_less_memory(monkeypatch):
    def peak(min_bytes):
        """Return the most bytes that tensors have taken since before the back-end was made."""
        monkeypatch.setattr(_tape, "MIN_EMPTIED_BYTES", min_bytes)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            backend = FusedBackend(Deep(), block=BlockOptions(size=1))
            (result,) = together(backend, [Trial(config={"lr": 0.05}, epochs=2)])
        assert result.error is None
        events = seen.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        return max(accumulate(num for _, num in sorted(changes)))

    assert peak(2**16) < 0.7 * peak(NEVER)


def test_buffers_stay_while_a_trial_evaluates_few_samples_alone(monkeypatch):
    """Eight samples without gradients need little beside a step with 2,048."""
    seen = []
    evaluate = FusedTrial.evaluate

    def watching(trial, *args):
        seen.append(held_bytes(backend._buffer_pool))
        return evaluate(trial, *args)

    monkeypatch.setattr(FusedTrial, "evaluate", watching)
    monkeypatch.setattr(_tape, "MIN_EMPTIED_BYTES", 2**16)
    backend = FusedBackend(Deep(), block=BlockOptions(size=2))
    found = together(backend, [Trial(config={"lr": 0.05}, seed=k, epochs=2) for k in range(2)])
    assert not any(each.error for each in found)
    assert seen
    assert all(seen)
