from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from thrifty.core import StopNow, is_from_user


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGINT)
    yield lambda new: signal.signal(signal.SIGINT, new)
    signal.signal(signal.SIGINT, before)


def raises_stop_now(number, frame):
    raise StopNow


raises_stop_now.raises_stop_now = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        (signal.default_int_handler, True),
        (lambda number, frame: None, True),
        (signal.SIG_IGN, False),
        (signal.SIG_DFL, False),
        (raises_stop_now, False),
    ],
)
def test_whether_it_may_be_the_user_depends_on_who_handles_the_signal(handler, who, expected):
    handler(who)
    assert is_from_user(KeyboardInterrupt()) == expected
    assert is_from_user(StopNow())


def test_in_another_thread_it_is_not_the_user():
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_from_user, KeyboardInterrupt()).result()
        assert pool.submit(is_from_user, StopNow()).result()


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), ValueError()])
def test_other_errors_are_not_the_user(error):
    assert not is_from_user(error)
