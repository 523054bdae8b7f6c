"""The executor on a simulated cluster, whose workers start when there is room and may vanish."""

from __future__ import annotations

import logging
from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from thrifty.core import StageDone, StageFailed, StoreWriteError, UsageError, WorkerLostError
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Report
from thrifty.run._cluster import (
    IDLE_S,
    MAX_STARTS,
    START_S,
    WARN_AGAIN_S,
    ClusterExecutor,
    Turn,
    WorkerEvictedError,
)
from thrifty.run._worker import WorkerSpec
from thrifty.space import Timeline


TIMELINE = Timeline({"lr": 0.1}, epochs=1)


class FakeCluster:
    """Simulated cluster in which nothing happens by itself.

    ``up``, ``work`` and ``kill`` decide what happens to a worker.
    """

    def __init__(self):
        self.now = 0.0
        self.workers = 0
        self.asked = []
        self.dismissed = []
        self.on_board = defaultdict(list)
        self.stopped = set()
        self.told = defaultdict(list)
        self.over = {}
        self.open = {}
        self.gone = ""
        self.closed = False

    def start_worker(self):
        self.workers += 1
        self.asked.append(self.workers - 1)
        return self.workers - 1

    def prepare(self, worker, spec):
        self.told[worker] += spec.refused
        return self._call(worker)

    def advance(self, worker, assignments, *, orders, stop):
        assert worker not in self.open, "one call at a time"
        self.told[worker] += [refusal.key for refusal in orders]
        self.on_board[worker] += [each.number for each in assignments]
        if stop:
            self.stopped.add(worker)
        return self._call(worker)

    def _call(self, worker):
        call = object()
        self.open[worker] = call
        return call

    def wait(self, calls, timeout_s):
        over = [call for call in calls if call in self.over]
        if not over:
            self.now += max(timeout_s, 0.001)
        return over

    def result(self, call):
        result = self.over.pop(call)
        if isinstance(result, Exception):
            raise result
        return result

    def stop_worker(self, worker):
        self.dismissed.append(worker)
        self.open.pop(worker, None)

    def check(self):
        if self.gone:
            raise WorkerLostError(self.gone)

    def close(self):
        self.closed = True

    # -- what a test does

    def end(self, worker, result):
        self.over[self.open.pop(worker)] = result

    def up(self, *workers):
        for worker in workers:
            self.end(worker, "")

    def work(self, worker, *, through=True):
        """End the worker's call and, with ``through``, finish all its assignments."""
        reports = [Report(assignment=n) for n in self.on_board[worker] if through]
        if through:
            self.on_board[worker].clear()
        self.end(worker, Turn(reports=reports))

    def kill(self, worker):
        self.end(worker, WorkerLostError("out of power"))

    def evict(self, worker):
        self.end(worker, WorkerEvictedError("the machine is gone"))


class World:
    """A cluster with an executor; assignments are numbered in the order of their submission."""

    def __init__(self, workers, *, expected=None, epoch_timeout_s=None):
        self.cluster = FakeCluster()
        specs = [
            WorkerSpec(name=f"w{i}", device="cpu", threads=1, checkpoints="", folder="", curves={})
            for i in range(workers)
        ]
        self.executor = ClusterExecutor(
            self.cluster,
            specs,
            expected=workers if expected is None else expected,
            needs="1 GPU",
            epoch_timeout_s=epoch_timeout_s,
            clock=lambda: self.cluster.now,
        )
        self.submitted = 0

    def submit(self, num=1):
        for _ in range(num):
            number, self.submitted = self.submitted, self.submitted + 1
            chain = Chain(
                stages=(Stage(node=number, start=0, stop=1),), timeline=TIMELINE, resume=None
            )
            self.executor.submit(Assignment(number=number, chain=chain, seed=0))

    def fill(self, *, pack_size=1):
        """Submit until no slot is free; return how many were submitted."""
        before = self.submitted
        while self.executor.num_free(pack_size=pack_size):
            self.submit()
        return self.submitted - before

    def poll(self, timeout_s=0.0):
        return self.executor.poll(timeout_s)


def test_a_worker_is_asked_for_when_there_is_work_for_it():
    world = World(3)
    assert world.cluster.asked == []
    assert world.executor.num_free() == 3
    world.submit()
    assert world.cluster.asked == [0]
    assert world.executor.num_free() == 2
    assert world.fill() == 2
    assert world.cluster.asked == [0, 1, 2]
    assert world.poll() == []
    world.cluster.up(0, 1, 2)
    world.poll()
    assert world.cluster.on_board == {0: [0], 1: [1], 2: [2]}


def test_who_has_least_to_do_gets_it_and_who_is_up_first():
    world = World(2)
    world.submit()
    world.cluster.up(0)
    world.poll()
    world.cluster.work(0)
    assert [r.assignment for r in world.poll()] == [0]
    world.submit()
    assert world.cluster.asked == [0]
    world.submit()
    assert world.cluster.asked == [0, 1]
    assert world.executor.num_free(pack_size=3) == 4
    world.submit()
    assert world.cluster.asked == [0, 1]


def test_who_is_up_is_preferred_to_who_will_be():
    world = World(2)
    world.submit(2)
    world.cluster.up(1)
    world.poll()
    for _ in range(2):  # then it takes the one that waited for the other worker
        world.cluster.work(1)
        world.poll()
    world.submit()
    assert world.cluster.on_board[1] == [2]


def test_who_is_starting_is_preferred_to_who_would_have_to():
    world = World(2)
    world.submit(2)
    world.cluster.up(0)
    world.poll()
    world.cluster.work(0)
    world.poll()  # it takes the assignment that waited for the other worker
    world.cluster.kill(0)
    world.poll()
    world.submit()
    assert world.cluster.asked == [0, 1]


def test_a_place_beside_others_is_better_than_one_that_may_never_be():
    world = World(2, expected=1)
    assert world.fill(pack_size=2) == 2
    world.cluster.up(0)
    world.poll()
    assert world.cluster.on_board[0] == [0, 1]


def test_what_comes_while_a_worker_trains_goes_with_its_next_call():
    world = World(1)
    world.executor.num_free(pack_size=3)
    world.submit()
    world.cluster.up(0)
    world.poll()
    world.submit(2)
    assert world.cluster.on_board[0] == [0]
    world.cluster.work(0, through=False)
    assert world.poll() == []
    assert world.cluster.on_board[0] == [0, 1, 2]


def test_the_first_call_has_all_that_has_waited():
    world = World(1)
    assert world.fill(pack_size=3) == 3
    world.cluster.up(0)
    world.poll()
    assert world.cluster.on_board[0] == [0, 1, 2]


def test_a_worker_that_hangs_is_ended_and_another_takes_its_place():
    world = World(1, epoch_timeout_s=100.0)
    world.submit()
    world.cluster.now += 500.0  # the worker takes long to start
    world.cluster.up(0)
    assert world.poll() == []
    assert world.poll(99.0) == []
    failed, last = world.poll(5.0)
    assert (failed.event.kind, last.event) == ("timeout", None)
    assert "no epoch has ended in 100 s" in failed.event.message
    assert world.cluster.dismissed == [0]
    world.submit()
    world.cluster.up(1)
    world.poll()
    assert world.cluster.on_board[1] == [1]


def test_of_several_on_a_worker_that_hangs_each_is_tried_again_alone():
    world = World(1, epoch_timeout_s=100.0)
    assert world.fill(pack_size=2) == 2
    world.cluster.up(0)
    world.poll()
    kinds = [r.event.kind for r in world.poll(200.0) if r.event is not None]
    assert kinds == ["crowded", "crowded"]
    assert world.executor.num_free(pack_size=2) == 1


def test_a_worker_whose_turns_end_does_not_hang():
    world = World(1, epoch_timeout_s=100.0)
    world.submit()
    world.cluster.up(0)
    world.poll()
    for _ in range(5):
        assert world.poll(80.0) == []
        world.cluster.work(0, through=False)
        assert world.poll() == []


def test_poll_waits_as_long_as_it_may():
    world = World(1)
    world.submit()
    assert world.poll(7.5) == []
    assert 7.5 <= world.cluster.now < 8
    assert world.cluster.open.keys() == {0}


def test_nobody_has_to_wait_for_a_worker_that_is_not_up():
    world = World(2)
    world.submit(2)
    world.cluster.up(1)
    world.poll()
    world.cluster.work(1)
    assert [r.assignment for r in world.poll()] == [1]
    assert world.cluster.on_board[1] == [0]
    world.cluster.up(0)
    world.poll(1.0)
    assert world.cluster.on_board[0] == []
    assert world.cluster.now < 1.0, "a worker is up and idle"


def test_an_idle_worker_takes_who_has_waited_longest():
    world = World(2)
    assert world.fill(pack_size=3) == 6
    world.cluster.up(1)
    world.poll()
    assert world.cluster.on_board[1] == [1, 3, 5]
    world.cluster.work(1)
    world.poll()
    assert world.cluster.on_board[1] == [0]


def test_somebody_can_start_though_there_is_no_room_now():
    world = World(4, expected=0)
    assert world.executor.num_free(pack_size=3) == 1
    world.submit()
    assert world.executor.num_free(pack_size=3) == 0


def test_more_are_asked_for_when_all_are_busy():
    world = World(8, expected=1)
    assert world.executor.num_free() == 1
    world.submit()
    assert world.cluster.asked == [0, 1]
    assert world.executor.num_free() == 0
    world.cluster.up(0, 1)
    assert world.poll(5.0) == []
    assert world.cluster.now < 5.0, "a worker is up"
    assert world.executor.num_free() == 1
    world.submit()
    assert world.cluster.asked == [0, 1, 2, 3]
    world.cluster.up(2, 3)
    world.poll()
    assert world.fill() == 2
    assert world.cluster.asked == list(range(8))


def test_where_there_was_room_once_there_will_be_again():
    world = World(2, expected=1)
    world.submit()
    world.cluster.up(0, 1)
    world.poll()
    world.submit()
    world.cluster.kill(1)
    world.poll()
    assert world.executor.num_free() == 1


def test_as_many_are_asked_for_as_are_up():
    world = World(8, expected=2)
    world.submit(2)
    world.cluster.up(0, 1)
    world.poll()
    world.cluster.work(0)
    world.poll()
    world.submit()
    world.cluster.work(0)
    world.poll()
    world.submit()
    assert len(world.cluster.asked) == 4


def test_who_does_not_come_up_is_not_counted_on():
    world = World(2)
    world.submit()
    world.cluster.up(0)
    world.poll()
    world.executor.num_free(pack_size=2)
    world.submit()
    assert world.executor.num_free(pack_size=2) == 2
    world.cluster.now += START_S
    assert world.executor.num_free(pack_size=2) == 1
    world.cluster.up(1)
    world.poll()
    assert world.executor.num_free(pack_size=2) == 2


def test_that_nobody_comes_up_is_said_now_and_then(caplog):
    world = World(2)
    world.submit()
    with caplog.at_level(logging.WARNING):
        world.poll(START_S - 1)
        assert not caplog.records
        world.poll(3 * START_S)
        (record,) = caplog.records
        assert "no room for one (1 GPU)" in record.getMessage()
        world.poll(WARN_AGAIN_S)
    assert len(caplog.records) == 2


def test_nothing_is_said_as_long_as_somebody_is_up(caplog):
    world = World(2)
    world.submit(2)
    world.cluster.up(0)
    with caplog.at_level(logging.WARNING):
        world.poll(3 * START_S)
    assert not caplog.records


def test_a_worker_that_vanishes():
    world = World(2)
    world.submit(2)
    world.cluster.up(0, 1)
    world.poll()
    world.cluster.kill(0)
    failed, last = world.poll()
    assert isinstance(failed.event, StageFailed)
    assert failed.event.kind == "lost"
    assert "worker w0 ended unexpectedly (out of power)" in failed.event.message
    assert last == Report(assignment=0)
    assert world.cluster.dismissed == [0]
    assert world.executor.num_free() == 1
    world.submit()
    assert world.cluster.asked == [0, 1, 2]
    world.cluster.up(2)
    world.poll()
    assert world.cluster.on_board[2] == [2]


def test_what_was_not_on_board_yet_is_not_lost():
    world = World(1)
    world.executor.num_free(pack_size=2)
    world.submit()
    world.cluster.up(0)
    world.poll()
    world.submit()
    world.cluster.kill(0)
    failed, _ = world.poll()
    assert (failed.assignment, failed.event.kind) == (0, "lost")
    assert world.cluster.asked == [0, 1]
    world.cluster.up(1)
    world.poll()
    assert world.cluster.on_board[1] == [1]


def test_a_worker_that_vanishes_while_it_starts_is_replaced():
    world = World(1)
    world.submit()
    for worker in range(MAX_STARTS - 1):
        world.cluster.kill(worker)
        assert world.poll() == []
    world.cluster.up(MAX_STARTS - 1)
    world.poll()
    assert world.cluster.on_board[MAX_STARTS - 1] == [0]


def test_workers_that_always_vanish_while_they_start():
    world = World(1)
    world.submit()
    for worker in range(MAX_STARTS - 1):
        world.cluster.kill(worker)
        world.poll()
    world.cluster.kill(MAX_STARTS - 1)
    with pytest.raises(WorkerLostError, match=r"3 in a row .* out of power"):
        world.poll()


def test_machines_that_go_while_workers_start_are_no_failed_starts():
    """Machines that vanish while workers start do not count as failed starts.

    One machine takes all workers that were starting there with it.
    """
    world = World(1)
    world.submit()
    for worker in range(3 * MAX_STARTS):
        world.cluster.evict(worker)
        assert world.poll() == []
    world.cluster.up(3 * MAX_STARTS)
    world.poll()
    assert world.cluster.on_board[3 * MAX_STARTS] == [0]


def test_a_worker_that_vanishes_with_its_machine():
    world = World(1)
    assert world.fill(pack_size=2) == 2
    world.cluster.up(0)
    world.poll()
    world.cluster.evict(0)
    reports = world.poll()
    assert [r.event.kind for r in reports if r.event] == ["evicted", "evicted"]
    assert "worker w0 ended unexpectedly (the machine is gone)" in reports[0].event.message
    assert world.executor.num_free(pack_size=2) == 2


def test_starts_that_fail_now_and_then_do_not_add_up():
    world = World(1)
    for worker in range(0, 10, 2):
        world.submit()
        world.cluster.kill(worker)
        world.poll()
        world.cluster.up(worker + 1)
        world.poll()
        world.cluster.kill(worker + 1)
        assert len(world.poll()) == 2


def test_a_task_that_cannot_be_loaded():
    world = World(1)
    world.submit()
    world.cluster.end(0, "Traceback: no module named mine")
    with pytest.raises(UsageError, match=r"(?s)working_dir.*no module named mine"):
        world.poll()


def test_a_place_that_cannot_be_written_is_raised_after_what_was_told():
    world = World(1)
    world.submit()
    world.cluster.up(0)
    world.poll()
    done = StageDone(node=0, start=0, stop=1, worker="w0")
    told = [Report(assignment=0, event=done)]
    world.cluster.end(0, Turn(reports=told, unwritable="the disk is full"))
    assert world.poll() == told
    with pytest.raises(StoreWriteError, match="the disk is full"):
        world.poll()


def test_a_cluster_that_is_gone():
    world = World(1)
    world.submit()
    world.cluster.gone = "no answer"
    with pytest.raises(WorkerLostError, match="no answer"):
        world.poll()
    world.executor.close()


def test_a_stop_ends_what_has_not_begun_at_once():
    world = World(3)
    world.submit(3)
    world.cluster.up(0, 1)
    world.poll()
    world.executor.stop()
    # An assignment that has not begun ends at once.
    assert world.poll(5.0) == [Report(assignment=2)]
    assert world.cluster.now < 1.0
    assert not world.cluster.stopped
    world.cluster.work(0, through=False)
    world.poll()
    assert world.cluster.stopped == {0}
    world.cluster.work(0)
    world.cluster.work(1)
    assert {r.assignment for r in world.poll()} == {0, 1}
    assert all(2 not in numbers for numbers in world.cluster.on_board.values())


def test_who_has_nothing_to_do_for_long_makes_room():
    world = World(2)
    world.submit(2)
    world.cluster.up(0, 1)
    world.poll()
    world.cluster.work(0)
    world.poll()
    world.poll(IDLE_S / 2)
    assert world.cluster.dismissed == []
    world.poll(IDLE_S)
    assert world.cluster.dismissed == [0]
    assert world.executor.num_free() == 1
    world.submit()
    assert world.cluster.asked == [0, 1, 2]


def test_nothing_to_do():
    world = World(2)
    assert world.poll(10.0) == []
    assert world.cluster.now == 0.0


def test_closing_dismisses_all_workers():
    world = World(3)
    world.submit(2)
    world.cluster.up(0)
    world.poll()
    world.executor.close()
    assert sorted(world.cluster.dismissed) == [0, 1]
    assert world.cluster.closed


def happens(world, what, which):
    """Let one thing happen to a worker of the cluster, if there is a worker to which it can."""
    up = [w for w in world.cluster.open if w in workers_up(world)]
    starting = [w for w in world.cluster.open if w not in up]
    able = starting if what == "up" else up
    if able:
        getattr(world.cluster, what)(able[which % len(able)])


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["up", "work", "kill", "evict"]), st.integers(0, 3))),
)
@settings(deadline=None)
def test_whatever_happens_each_assignment_has_one_last_word(workers, expected, size, steps):
    """A study that submits whenever a slot is free never hangs, and loses nothing."""
    world = World(workers, expected=min(expected, workers))
    ended = []

    def poll():
        ended.extend(r.assignment for r in world.poll(0.1) if r.event is None)

    for what, which in steps:
        world.fill(pack_size=size)
        assert len(ended) < world.submitted, "the study would think that it is done"
        happens(world, what, which)
        poll()
    while len(ended) < world.submitted:  # in the end all workers start and work
        for worker in list(world.cluster.open):
            happens(world, "work" if worker in workers_up(world) else "up", 0)
        poll()
    assert sorted(ended) == list(range(world.submitted))


def workers_up(world):
    return {handle.worker for handle in world.executor._handles if handle.up}


def test_all_workers_learn_once_that_a_structure_is_refused():
    world = World(3, expected=2)
    world.submit(2)
    world.cluster.up(0)
    world.poll()
    world.executor.refuse("one", "it differs")  # 0 trains, 1 is starting, 2 comes later
    world.cluster.up(1)
    world.poll()
    world.cluster.work(0, through=False)
    world.poll()
    world.cluster.work(0, through=False)
    world.cluster.work(1, through=False)
    world.poll()
    assert [world.cluster.told[0], world.cluster.told[1]] == [["one"], ["one"]]
    world.cluster.kill(0)
    world.poll()
    world.submit(2)
    world.cluster.up(2)
    world.poll()
    assert world.cluster.told[2] == ["one"]
