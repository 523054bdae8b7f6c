"""Trials that are divided into lanes get the results of trials alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import TOYS, Dropping, Toy
from tests.pack.test_frozen import Headed
from thrifty.core import DivergedError
from thrifty.pack import BlockOptions, FusedBackend, UnverifiedError
from thrifty.pack.fused import _binding, _lanes
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._lanes import UNDIVIDED, Division, Lanes, division
from thrifty.pack.fused._record import record
from thrifty.pack.fused._structure import Structure
from thrifty.pack.fused._tape import Tape


pytestmark = pytest.mark.slow

DOUBLE = 1e-10


@pytest.fixture
def two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "lanes leave the setting of the process as it was"
    torch.set_num_threads(before)


@pytest.fixture
def made(monkeypatch):
    """Divide all programs as finely as possible; return the lanes that are made."""
    monkeypatch.setattr(_lanes, "CALL_S", 1e-15)
    monkeypatch.setattr(_lanes, "CACHED_BYTES", 1)
    monkeypatch.setattr(_lanes, "MAX_SHARED", 1.0)
    made = []

    class Noting(Lanes):
        def __init__(self, tapes, **options):
            made.append([len(each) for each in tapes])
            super().__init__(tapes, **options)

    monkeypatch.setattr(_binding, "Lanes", Noting)
    return made


def fused(task, *, size=8, **options):
    return FusedBackend(task, device="cpu", block=BlockOptions(size=size), **options)


def check(task, trials, *, backend=None, at_once=None):
    found = together(backend or fused(task), trials, at_once=at_once)
    assert_same(found, alone(task, trials), tolerance=DOUBLE)
    assert all(result.error is None for result in found)


def in_double(base, **attributes):
    return type(base.__name__, (base,), {"dtype": torch.float64, **attributes})()


# -- how trials are divided ------------------------------------------------------------------


@pytest.mark.parametrize("lanes", range(1, 8))
@pytest.mark.parametrize("threads", range(1, 4))
@pytest.mark.parametrize("size", [7, 8, 13])
def test_each_trial_is_in_one_lane_and_threads_have_equal_shares(size, lanes, threads):
    divided = Division(lanes=lanes, threads=min(threads, lanes))
    rows = divided.rows(size)
    assert [k for each in rows for k in range(size)[each]] == list(range(size))
    sizes = [each.stop - each.start for each in rows]
    assert max(sizes) - min(sizes) <= 1
    shares = [divided.thread(n) for n in range(lanes)]
    assert sorted(shares) == shares
    assert set(shares) == set(range(divided.threads))


def program_of(compute, *inputs):
    return record(compute, list(inputs))[0]


def products(width, *, size=4, rows=8):
    """Return a program of four products of each of ``size`` trials."""
    x, w = torch.randn(size, rows, width), torch.randn(size, width, width)

    def compute():
        y = x
        for _ in range(4):
            y = y.bmm(w)
        return [y.sum((1, 2))]

    return program_of(compute, x, w)


def test_small_operations_are_not_divided():
    assert division(products(8), size=4, common=(), threads=2) == UNDIVIDED


def test_large_operations_are_divided_among_cores():
    found = division(products(512), size=4, common=(), threads=2)
    assert found == Division(lanes=2, threads=2)
    assert division(products(512), size=4, common=(), threads=1) == UNDIVIDED
    assert division(products(512), size=1, common=(), threads=2) == UNDIVIDED


def test_results_that_are_too_large_for_a_cache_are_divided_once_more():
    program = products(512, rows=4096)
    assert division(program, size=4, common=(), threads=2) == Division(lanes=4, threads=2)
    assert division(program, size=4, common=(), threads=1) == Division(lanes=4, threads=1)


def test_what_all_trials_have_in_common_is_not_computed_twice():
    x, w, v = torch.randn(64, 512), torch.randn(512, 512), torch.randn(4, 512, 512)

    def compute():
        return [(x @ w @ w).expand(4, 64, 512).bmm(v).sum((1, 2))]

    program = program_of(compute, x, w, v)
    assert division(program, size=4, common=(0, 1), threads=2) == UNDIVIDED
    assert division(program, size=4, common=(), threads=2) != UNDIVIDED


def test_programs_that_write_into_what_trials_have_in_common_are_not_divided():
    x, w = torch.randn(4, 64, 512), torch.randn(4, 512, 512)

    def compute():
        x.mul_(2)
        return [x.bmm(w).sum((1, 2))]

    program = program_of(compute, x, w)
    assert division(program, size=4, common=(0,), threads=2) == UNDIVIDED
    assert division(program, size=4, common=(), threads=2) != UNDIVIDED


def test_operations_of_others_stay_in_one_thread():
    program = products(512)
    call = program.calls[0]

    class Other:
        namespace = "mine"
        is_view = False

        def __getattr__(self, name):
            return getattr(call.function, name)

    other = replace(program, calls=(replace(call, function=Other()), *program.calls[1:]))
    assert division(other, size=4, common=(), threads=2) == UNDIVIDED


# -- how lanes run ---------------------------------------------------------------------------


def test_lanes_run_at_the_same_time_without_autograd():
    met = threading.Barrier(2, timeout=60)
    seen = []

    def run():
        met.wait()
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))

    Lanes([[Tape(run, [])], [Tape(run, [])]], cores=2)()
    assert seen == [(False, 1), (False, 1)]


@pytest.mark.parametrize("flushes", [True, False])
def test_lanes_treat_denormals_as_their_caller_does(flushes):
    seen = []

    def run():
        seen.append(bool(torch.tensor(1e-30) * torch.tensor(1e-10) == 0))

    torch.set_flush_denormal(flushes)
    try:
        Lanes([[Tape(run, [])], [Tape(run, [])]], cores=2)()
    finally:
        torch.set_flush_denormal(False)
    assert seen == [flushes] * 2


def test_an_error_of_a_lane_is_raised_when_all_have_ended():
    ended = []

    def fail():
        raise RuntimeError("no memory")

    def run():
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(RuntimeError, match="no memory"):
        Lanes([[Tape(fail, [])], [Tape(run, []), Tape(run, [])]], cores=2)()
    assert ended == [True, True]


def test_ctrl_c_waits_for_lanes():
    """Else a lane would write into states that are being saved, or trained again."""
    ended = []

    def run():
        time.sleep(0.3)
        ended.append(True)

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    begun = threading.Event()
    threading.Thread(target=interrupt).start()

    def last():
        begun.set()
        run()

    with pytest.raises(KeyboardInterrupt):
        Lanes([[Tape(run, [])], [Tape(last, [])]], cores=2)()
    assert ended == [True, True]


def test_threads_that_take_no_more_work_leave_it_to_the_caller(monkeypatch):
    """As at the end of the interpreter, in a thread that has not ended yet."""
    where = []

    def run():
        where.append(threading.current_thread() is threading.main_thread())

    def submit(self, number, work):
        if number:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submits(self, number, work)

    submits = Lanes._submit
    monkeypatch.setattr(Lanes, "_submit", submit)
    Lanes([[Tape(run, [])], [Tape(run, [])]], cores=2)()
    assert where == [False, True]


def test_a_process_that_was_forked_has_lanes_of_its_own():
    lanes = Lanes([[Tape(lambda: None, [])], [Tape(lambda: None, [])]], cores=2)
    lanes()
    child = multiprocessing.get_context("fork").Process(target=lanes)
    child.start()
    child.join(60)
    assert child.exitcode == 0


# -- trials in lanes ---------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.usefixtures("two_cores")
def test_trials_in_lanes_equal_trials_alone(toy, made):
    task = in_double(toy)
    check(task, [Trial(config={"lr": 0.05 / (k + 1)}, seed=k % 2) for k in range(3)])


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_trials(num, threads, made):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(in_double(Dropping), [Trial(config={"lr": 0.05}, seed=k) for k in range(num)])
    finally:
        torch.set_num_threads(before)
    assert made
    assert all(sum(each) == num and len(each) == threads for each in made)


@pytest.mark.usefixtures("two_cores")
def test_trials_that_come_and_go(made):
    trials = [Trial(config={"lr": 0.02 * (k + 1)}, seed=k, epochs=1 + k) for k in range(4)]
    check(in_double(Toy), trials)
    assert {sum(each) for each in made} == {2, 3, 4}


@pytest.mark.usefixtures("two_cores")
def test_batches_of_different_sizes(made):
    trials = [Trial(config={"lr": 0.05, "batch": size}, seed=size) for size in (6, 8, 7)]
    check(in_double(Toy, batch_size="batch"), trials)
    assert made


class Wide(Toy):
    def network(self, hp):
        return nn.Sequential(nn.Linear(6, hp["width"]), nn.Tanh(), nn.Linear(hp["width"], 1))


@pytest.mark.usefixtures("two_cores")
def test_trials_of_different_widths(made):
    trials = [Trial(config={"lr": 0.05, "width": width}, seed=width) for width in (8, 6, 7, 8)]
    check(in_double(Wide), trials)
    assert made


class SameForAll(Toy):
    """One metric depends on the data alone, so it is one number for all trials."""

    def metrics(self, model, batch):
        return {**super().metrics(model, batch), "base": batch[1].var()}


@pytest.mark.usefixtures("two_cores")
def test_metrics_that_are_the_same_for_all_trials(made):
    check(in_double(SameForAll), [Trial(config={"lr": 0.05}, seed=k) for k in range(4)])
    assert made


@pytest.mark.usefixtures("two_cores")
def test_programs_whose_lanes_cannot_be_recorded_run_for_all_trials(made, monkeypatch):
    recorded = Structure.recorded

    def fails(self, variant, **inputs):
        if variant.size < 3:
            raise RuntimeError("boom")
        return recorded(self, variant, **inputs)

    monkeypatch.setattr(Structure, "recorded", fails)
    check(in_double(Toy), [Trial(config={"lr": 0.05}, seed=k) for k in range(3)])
    assert not made


@pytest.mark.usefixtures("two_cores")
def test_divergence_is_that_of_one_trial(made):
    task = in_double(Toy)
    trials = [Trial(config={"lr": lr}, epochs=6) for lr in (0.01, 1e9, 0.02, 0.03)]
    found, wanted = together(fused(task), trials), alone(task, trials)
    assert made
    assert isinstance(wanted[1].error, DivergedError)
    assert isinstance(found[1].error, (DivergedError, UnverifiedError))
    assert_same(found[2:], wanted[2:], tolerance=DOUBLE)


@pytest.mark.parametrize("num", [4, 5])
@pytest.mark.usefixtures("two_cores")
def test_lanes_over_a_kept_trunk(num, made, monkeypatch):
    """The trunk runs once for all lanes; lanes of different sizes would each need their own."""
    monkeypatch.setattr(_lanes, "CACHED_BYTES", 2**20)
    store = ActivationStore(limit_bytes=2**24)
    backend = fused(Headed(), activations=store)
    trials = [Trial(config={"lr": 0.02 * (k + 1)}) for k in range(num)]
    check(Headed(), trials, backend=backend)
    assert bool(made) == (num == 4)
    kept = [found for found in store._kept.values() if not found.is_dropped]
    assert kept


@pytest.mark.parametrize("spoilt", [0, 1])
@pytest.mark.usefixtures("two_cores")
def test_one_trial_of_each_lane_is_compared_with_itself_alone(spoilt, made, monkeypatch):
    bind = _binding.bind

    def binds(program, inputs, *, destinations, lane=0, **options):
        tape = bind(program, inputs, destinations=destinations, lane=lane, **options)
        if lane != spoilt or not destinations:
            return tape

        def run():
            tape()
            destinations[1].mul_(1.5)  # a gradient

        return Tape(run, tape.outputs)

    monkeypatch.setattr(_binding, "bind", binds)
    monkeypatch.setattr(_lanes, "CACHED_BYTES", 2**20)  # two lanes of two trials
    trials = [Trial(config={"lr": 0.05}, seed=k, epochs=1) for k in range(4)]
    found = together(fused(in_double(Toy)), trials)
    assert made
    assert any(isinstance(each.error, UnverifiedError) for each in found)
    wanted = alone(in_double(Toy), trials)
    for one, other in zip(found, wanted, strict=True):
        if one.error is None:
            assert_same([one], [other], tolerance=DOUBLE)


@pytest.mark.parametrize("threads", [1, 2])
def test_lanes_of_one_thread_use_the_same_buffers(threads, made, monkeypatch):
    """Four lanes of one trial each; two of them, or one, run at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = []
        for cached in (1, 2**40):  # divided for the cache, then for the cores only
            monkeypatch.setattr(_lanes, "CACHED_BYTES", cached)
            backend = fused(in_double(Toy))
            together(backend, [Trial(config={"lr": 0.05}, seed=k, epochs=1) for k in range(4)])
            sizes.append(backend._buffer_pool.num_bytes)
    finally:
        torch.set_num_threads(before)
    assert sizes[0] < 0.9 * sizes[1]
