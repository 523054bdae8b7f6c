from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from thrifty.core import _heap, gc_frozen, thaw_heap
from thrifty.core._heap import SPARED_S


pytestmark = pytest.mark.slow


class Ring:
    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch):
    """Start without frozen objects; afterwards freeze what the session had frozen."""
    monkeypatch.setattr(_heap, "_FROZEN_BY_OTHERS", threading.Event())
    gc.unfreeze()
    gc.disable()  # it must not run by itself in between
    yield
    gc.enable()
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_garbage_of_before_waits_and_that_of_within_does_not():
    before = weakref.ref(Ring())
    with gc_frozen():
        within = weakref.ref(Ring())
        gc.collect()
        assert (before() is None, within() is None) == (False, True)
    gc.collect()
    assert before() is None


def test_a_long_run_finds_the_garbage_of_before(monkeypatch):
    class Timer(threading.Thread):
        def __init__(self, seconds, function):
            super().__init__(target=function)
            assert seconds == SPARED_S

        def start(self):
            """Do nothing: the test decides when it runs."""

        def cancel(self):
            """Do nothing: it is too late."""

    timers = []
    monkeypatch.setattr(
        threading, "Timer", lambda *given: timers.append(Timer(*given)) or timers[0]
    )
    before = weakref.ref(Ring())
    with gc_frozen():
        gc.collect()
        assert before() is not None
        timers[0].run()
        gc.collect()
        assert before() is None


def test_an_error_thaws_it():
    with pytest.raises(ZeroDivisionError), gc_frozen():
        _ = 1 / 0


def test_a_heap_that_somebody_has_frozen_stays_so_and_is_counted_once(monkeypatch):
    gc.freeze()
    try:
        with gc_frozen():
            pass
        assert gc.get_freeze_count() > 0
        with monkeypatch.context() as patch:
            patch.delattr(gc, "get_freeze_count")
            with gc_frozen():
                pass
    finally:
        gc.unfreeze()


def test_a_run_within_a_run_leaves_the_heap_to_the_outer_one():
    with gc_frozen():
        with gc_frozen():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with gc_frozen():
        assert gc.get_freeze_count() > 0


def test_a_heap_that_had_to_be_thawed_is_frozen_by_the_next_run():
    gc.freeze()
    with gc_frozen():  # notes that others have frozen it
        pass
    thaw_heap()
    with gc_frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_a_command_ends_without_a_last_look_at_all_objects():
    # what is registered first runs last
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "from thrifty.cli import main\n"
        "sys.argv = ['thrifty', '--help']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_nothing_is_collected_while_a_public_name_is_imported():
    code = """
import gc, thrifty.core
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
thrifty.Space
gc.callbacks.clear()
print(collections.count("start"), gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_collections, is_enabled = done.stdout.split()
    # one may follow as soon as the collector is on again
    assert (int(num_collections) <= 1, is_enabled) == (True, "True")
