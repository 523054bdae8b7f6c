from __future__ import annotations

from thrifty.store import failure_groups
from thrifty.store._reports import failure_lines


def errors(*messages: str) -> dict[int, tuple[str, str, str]]:
    return {n: ("error", message, f"trace {n}") for n, message in enumerate(messages)}


def test_messages_that_differ_only_in_numbers_are_one_error():
    (group,) = failure_groups(errors("took 12 MB at 0x7f1a", "took 3.5e+2 MB at 0x00b2"))
    assert (group.trials, group.traceback) == ((0, 1), "trace 0")
    assert str(group) == "trials 0, 1 failed: took 12 MB at 0x7f1a"


def test_digits_within_names_count():
    assert len(failure_groups(errors("no 'layer1'", "no 'layer2'", "no 'layer12'"))) == 3


def test_the_most_frequent_error_is_first_and_many_trials_are_counted():
    lines = failure_lines(failure_groups(errors("b", *["a"] * 21, "b")))
    assert lines == ["trials 1, 2, 3 and 18 more failed: a", "trials 0, 22 failed: b"]


def test_the_rarest_of_many_errors_are_only_counted():
    lines = failure_lines(failure_groups(errors(*"aabbccddeefghg")))
    assert len(lines) == 6
    assert lines[-1] == "4 more trials failed with 3 other errors"
    assert failure_lines(failure_groups(errors(*"aabbcde")))[-1] == "trial 6 failed: e"
    one = failure_lines(failure_groups(errors(*"abcdef")))[-1]
    assert one == "1 more trial failed with another error"


def test_a_long_message_is_one_short_line():
    (line,) = failure_lines(failure_groups(errors(f"first\nsecond {'x' * 9000}")))
    assert line.startswith("trial 0 failed: first second")
    assert len(line) < 400
