from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from itertools import chain
from threading import Barrier, Event, Semaphore, Thread

import pytest

from thrifty.core import OrderedPrefetcher, UsageError, _prefetcher


pytestmark = pytest.mark.slow


def threads_of(iterator):
    return iterator._pool.threads


def ended(threads):
    """Wait until the threads end. If one does not, the test ends by its time limit."""
    for thread in threads:
        thread.join()
    return True


class Gate:
    """A function whose calls block until the test releases them."""

    def __init__(self):
        self.begun = Semaphore(0)
        self.let = Semaphore(0)
        self.numbers = []

    def __call__(self, number):
        self.numbers.append(number)
        self.begun.release()
        self.let.acquire()
        return number

    def wait(self, num):
        for _ in range(num):
            self.begun.acquire()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("num", [0, 1, 20])
def test_everything_comes_once_and_in_order(num, num_threads, depth):
    made = OrderedPrefetcher(lambda n: -n, num, num_threads=num_threads, depth=depth)
    assert list(made) == [-n for n in range(num)]


def test_order_stays_when_the_first_is_the_last_to_be_made():
    others = Semaphore(0)

    def make(number):
        if number == 0:
            for _ in range(3):
                others.acquire()
        else:
            others.release()
        return number

    assert list(OrderedPrefetcher(make, 4, num_threads=2, depth=4)) == [0, 1, 2, 3]


def test_threads_work_at_the_same_time():
    together = Barrier(3)
    made = OrderedPrefetcher(lambda n: together.wait() >= 0, 6, num_threads=3, depth=3)
    assert list(made) == [True] * 6


def test_no_more_than_depth_are_begun_and_not_taken():
    gate = Gate()
    made = OrderedPrefetcher(gate, 10, num_threads=2, depth=3)
    gate.let.release(10)
    gate.wait(3)
    # The fourth item cannot start because its number is not in the queue.
    assert made._pool.wanted.empty()
    assert sorted(gate.numbers) == [0, 1, 2]
    assert next(made) == 0
    gate.wait(1)
    assert made._pool.wanted.empty()
    assert sorted(gate.numbers) == [0, 1, 2, 3]


def test_no_more_threads_than_there_is_to_make():
    made = OrderedPrefetcher(lambda n: n, 2, num_threads=8, depth=8)
    assert len(threads_of(made)) == 2
    assert list(made) == [0, 1]


def fail_at_three(number):
    if number == 3:
        raise ZeroDivisionError("three")
    return number


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_exception_comes_at_its_place(num_threads):
    made = OrderedPrefetcher(fail_at_three, 9, num_threads=num_threads, depth=8)
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="three") as caught:
        next(made)
    assert "fail_at_three" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(made) == []
    assert ended(threads_of(made))


def test_an_exception_holds_nothing_once_it_is_handled():
    made = OrderedPrefetcher(fail_at_three, 9, num_threads=2, depth=8)
    gone = weakref.ref(made)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            list(made)
        del made
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_exceptions_that_are_none_of_a_program_come_too(error):
    def make(number):
        raise error

    with pytest.raises(error):
        list(OrderedPrefetcher(make, 2, num_threads=1, depth=1))


def test_threads_end_with_the_last_number():
    made = OrderedPrefetcher(lambda n: n, 5, num_threads=3, depth=4)
    threads = threads_of(made)
    assert list(made) == list(range(5))
    assert ended(threads)


def test_threads_end_when_the_loop_is_left():
    threads = []
    for _ in (made := OrderedPrefetcher(lambda n: n, 1000, num_threads=3, depth=4)):
        threads = threads_of(made)
        break
    del made
    assert ended(threads)


def test_threads_end_when_the_loop_fails():
    kept = []

    def train():
        made = OrderedPrefetcher(lambda n: n, 1000, num_threads=3, depth=4)
        kept.extend(threads_of(made))
        for number in made:
            if number == 2:
                raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        train()
    assert ended(kept)


def test_threads_end_when_the_iterator_is_garbage():
    cycle = [OrderedPrefetcher(lambda n: n, 1000, num_threads=3, depth=4)]
    threads = threads_of(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert ended(threads)


def test_closing_ends_threads_and_iteration():
    made = OrderedPrefetcher(lambda n: n, 1000, num_threads=3, depth=4)
    next(made)
    made.close()
    made.close()
    assert ended(threads_of(made))
    assert list(made) == []


def test_what_is_being_made_when_it_ends_is_the_last():
    gate = Gate()
    made = OrderedPrefetcher(gate, 1000, num_threads=2, depth=9)
    threads = threads_of(made)
    gate.wait(2)
    made.close()
    gate.let.release(1000)
    assert ended(threads)
    assert sorted(gate.numbers) == [0, 1]


def test_two_at_once_know_nothing_of_each_other():
    first, second = (
        OrderedPrefetcher(lambda n, k=k: k + n, 6, num_threads=2, depth=2) for k in (0, 100)
    )
    pairs = list(zip(first, second, strict=True))
    assert pairs == [(n, 100 + n) for n in range(6)]


def test_an_iterator_may_be_shared_by_threads():
    made = OrderedPrefetcher(lambda n: n, 300, num_threads=2, depth=4)
    seen = [[] for _ in range(3)]
    threads = [Thread(target=lambda mine: mine.extend(made), args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    assert ended(threads)
    assert sorted(chain.from_iterable(seen)) == list(range(300))
    assert all(mine == sorted(mine) for mine in seen)


def test_nothing_of_a_finished_iteration_is_kept():
    class Value:
        pass

    made = OrderedPrefetcher(lambda n: Value(), 3, num_threads=1, depth=3)
    gone = [weakref.ref(value) for value in made]
    assert ended(threads_of(made))
    assert [value() for value in gone[:2]] == [None, None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_threads():
    made = OrderedPrefetcher(lambda n: n, 1000, num_threads=1, depth=2)
    next(made)
    child = os.fork()
    if child == 0:
        try:
            next(made)
        except UsageError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(made) == 1


def run_python(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )


LOOP = """
from thrifty.core import OrderedPrefetcher
made = OrderedPrefetcher(lambda n: n, 10**9, num_threads=2, depth=4)
for number in made:
    if number == 3:
        raise SystemExit(5)
"""


def test_the_interpreter_ends_in_the_midst_of_an_iteration():
    ran = run_python(LOOP)
    assert (ran.returncode, ran.stderr) == (5, "")


AT_EXIT = """
import atexit
from threading import Event
from thrifty.core import OrderedPrefetcher
begun, ending = Event(), Event()
def make(number):
    begun.set()
    ending.wait()
    print("made", sum(range(10**7)))
made = OrderedPrefetcher(make, 5, num_threads=1, depth=5)
begun.wait()
# what is registered last is called first
atexit.register(ending.set)
"""


def test_the_interpreter_waits_for_what_is_being_made():
    # A thread that returns from C++ to an interpreter that is shutting down aborts the process.
    ran = run_python(AT_EXIT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "made 49999995000000\n", "")


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread() or os.name == "nt",
    reason="signals go to the main thread",
)
def test_waiting_can_be_interrupted():
    waiting, interrupted = Event(), Event()

    def make(number):
        waiting.wait()
        # Again and again, because a signal that comes just before the main thread begins to wait
        # for a lock does not wake it. To the main thread: the kernel may give a signal for the
        # process to any thread.
        while not interrupted.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def interrupt(*_):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    made = OrderedPrefetcher(make, 1, num_threads=1, depth=1)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- it may come at once
            waiting.set()
            next(made)
    finally:
        signal.signal(signal.SIGINT, before)
    made.close()
    assert ended(threads_of(made))


def test_the_exit_waits_for_threads_that_have_no_work_any_more(monkeypatch):
    """A thread that has let go of its pool still has some steps to go, and no one else knows it."""
    joined = []
    made = OrderedPrefetcher(lambda number: number, 4, num_threads=2, depth=2)
    threads, pool = threads_of(made), weakref.ref(made._pool)
    assert list(made) == [0, 1, 2, 3]
    del made
    while pool() is not None:
        gc.collect()
    for thread in threads:
        monkeypatch.setattr(thread, "join", lambda thread=thread: joined.append(thread))
    _prefetcher._end_all()
    assert set(threads) <= set(joined)
