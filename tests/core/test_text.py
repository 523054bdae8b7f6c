from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from thrifty.core import error_text, error_traceback, plain_text
from thrifty.core._errors import MESSAGE_CHARS, TRACEBACK_CHARS


class UnspeakableError(Exception):
    """An error whose text cannot be read."""

    def __init__(self, reason: BaseException | None = None) -> None:
        super().__init__()
        self.reason = reason or RuntimeError("no")

    def __str__(self) -> str:
        raise self.reason

    __repr__ = __str__


class OddError(SyntaxError):
    """An error that fails to be formatted, because its attributes have wrong types or raise."""

    offset = property(lambda self: 1 / 0)
    end_offset = text = lineno = offset


class Chatty(str):
    """A subclass of str that overrides how a text is read."""

    __slots__ = ()

    def __iter__(self):
        raise SystemExit(3)

    def __len__(self):
        raise SystemExit(3)

    def __str__(self):
        return self


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


HOSTILE = [
    ValueError("\ud800 half a pair"),
    ValueError("nul \0 and bell \a"),
    ValueError("\x1b]0;title\x07\x1b[2J\x9b31m"),
    ValueError("\u202egnp.exe"),
    ValueError("x" * 5_000_000),
    ValueError(Chatty("text")),
    UnspeakableError(),
    UnspeakableError(SystemExit(3)),
    UnspeakableError(GeneratorExit()),
    OddError("odd"),
    type("\x1b[31m", (Exception,), {})("x"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    SystemExit(3),
    ExceptionGroup("many", [ValueError("\0")]),
]


@pytest.mark.parametrize("error", HOSTILE, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("describe", [error_text, error_traceback])
def test_every_error_can_be_described_kept_and_shown(error, describe):
    text = describe(raised(error))
    assert text
    assert len(text) < 2 * TRACEBACK_CHARS
    text.encode("utf-8")
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert json.loads(json.dumps(text)) == text


def test_the_text_of_an_error_is_what_it_says():
    assert error_text(ValueError("a\nb")) == "ValueError: a\nb"
    assert error_text(ValueError()) == "ValueError"
    assert "RuntimeError" in error_text(UnspeakableError())
    assert "test_text.py" in error_traceback(raised(ValueError("a")))


def test_of_a_long_text_both_ends_stay():
    text = error_text(ValueError(f"begin{'x' * 5_000_000}end"))
    assert text.startswith("ValueError: begin")
    assert text.endswith("end")
    assert "characters left out" in text
    assert plain_text("x" * 105, limit=100) == "x" * 105, "the note would be longer"
    assert len(text) < MESSAGE_CHARS + 100


@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_whatever_is_given_is_printable(text):
    shown = plain_text(text)
    shown.encode("utf-8")
    assert "\n" not in shown
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)


@pytest.mark.parametrize("text", ["größer", "学習率", "a b\u3000c", "λ=0.1", "🙂", r"C:\new"])
def test_what_people_write_stays(text):
    assert plain_text(text) == text


def test_what_is_plain_stays_plain():
    once = plain_text("\x1b[31m\ud800")
    assert plain_text(once) == once
    assert plain_text("a\nb\tc", lines=True) == "a\nb\tc"
    assert plain_text("a\nb\tc") == r"a\nb\tc"
    assert plain_text(0.5) == "0.5"
