"""Whether a remote process still answers."""

from __future__ import annotations

import threading

from thrifty.run._cluster import Pulse


class Far:
    """A simulated remote process, and a clock."""

    def __init__(self):
        self.now = 0.0
        self.calls = 0
        self.error = None
        self.silence = threading.Event()
        self.silence.set()
        self.pulse = Pulse(self.ask, every_s=5, patience_s=30, clock=lambda: self.now)

    def ask(self):
        self.calls += 1
        self.silence.wait()
        if self.error is not None:
            raise self.error

    def check(self, now):
        """Return what the pulse reports once any answer has arrived."""
        self.now = now
        said = self.pulse.check()
        asking = self.pulse._asking
        if asking is not None and self.silence.is_set():
            asking.join()
        return said


def test_it_asks_now_and_then():
    far = Far()
    assert [far.check(now) for now in (0, 4, 5, 6, 9, 10, 1000, 1001)] == [""] * 8
    assert far.calls == 3


def test_an_answer_that_never_comes():
    far = Far()
    far.check(5)
    far.silence.clear()
    try:
        assert [far.check(now) for now in (10, 20, 39)] == [""] * 3
        assert far.check(40) == "no answer for 35 s"
        assert far.calls == 2
    finally:
        far.silence.set()


def test_it_may_come_late():
    far = Far()
    far.silence.clear()
    far.check(5)
    far.check(30)
    far.silence.set()
    far.pulse._asking.join()
    assert [far.check(now) for now in range(31, 100)] == [""] * 69


def test_errors_are_no_answer():
    far = Far()
    far.error = ConnectionError("refused\n  it")
    said = [far.check(now) for now in range(41)]
    assert said[:31] == [""] * 31
    assert said[40] == "refused it for 40 s"
    far.error = None


def test_an_error_without_words():
    far = Far()
    far.error = ConnectionError()
    assert [far.check(now) for now in range(41)][40] == "ConnectionError for 40 s"


def test_errors_pass():
    far = Far()
    far.error = ConnectionError("refused it")
    assert {far.check(now) for now in range(20)} == {""}
    far.error = None
    assert {far.check(now) for now in range(20, 100)} == {""}
