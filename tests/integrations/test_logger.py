from __future__ import annotations

import importlib
import logging
import sys
from collections import Counter
from threading import Event as Flag

import pytest
from hypothesis import given, strategies as st

import thrifty.integrations
from tests.integrations.streams import advanced, began, first_run, second_run, tell
from thrifty.core import EpochDone, MissingExtraError, UsageError
from thrifty.integrations import MLflow, TensorBoard, WandB
from thrifty.integrations._logger import MAX_FAILURES, Logger, OpenRuns, plain, safe_name
from thrifty.study import StudyBegan, StudyEnded


class Recorder(Logger):
    """Logger that writes to a list and raises for each event for which ``fails`` is true."""

    def __init__(self, fails=lambda event: False, *, patience_s=10.0):
        super().__init__(patience_s=patience_s)
        self.seen = []
        self.fails = fails

    def open(self, event):
        if self.fails("open"):
            raise OSError("no such place")
        return self

    def take(self, event):
        if self.fails(event):
            raise OSError("disk is full")
        self.seen.append(event)


def test_all_is_there_and_nothing_else():
    assert set(thrifty.integrations.__all__) <= set(dir(thrifty.integrations))
    assert thrifty.integrations.TensorBoard.__name__ == "TensorBoard"
    with pytest.raises(AttributeError, match="no attribute 'Tensorbored'"):
        thrifty.integrations.Tensorbored  # noqa: B018


def test_a_logger_gets_all_events_of_the_stream_in_order():
    logger = Recorder()
    tell(logger, first_run() + second_run())
    assert logger.seen == first_run() + second_run()


def test_what_workers_report_is_nothing_for_a_logger():
    logger = Recorder()
    epoch = EpochDone(node=0, epoch=1, metrics={}, seconds=0.1, worker="w")
    tell(logger, [epoch, began(), epoch, StudyEnded(state="done")])
    assert logger.seen == [began(), StudyEnded(state="done")]


def test_a_failure_costs_its_event_and_one_warning(caplog):
    bad = [advanced(0, 1, [0.5, 0.4]), advanced(0, 3, [0.3])]
    logger = Recorder(lambda event: event in bad)
    tell(logger, first_run())
    assert logger.seen == [event for event in first_run() if event not in bad]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "Recorder does not write: OSError: disk is full; the study goes on, its log will have gaps"
    ]


def test_a_tracker_that_fails_again_and_again_is_left_alone():
    tried = Counter()
    logger = Recorder(
        lambda event: tried.update(["all"]) or not isinstance(event, StudyBegan | str)
    )
    tell(logger, first_run())
    assert tried["all"] == 2 + MAX_FAILURES
    tell(logger, second_run())
    assert tried["all"] == 2 * (2 + MAX_FAILURES), "the next run tries again"


def test_failures_now_and_then_are_no_reason_to_leave_it_alone():
    events = [
        began(),
        *(advanced(0, epoch, [0.5]) for epoch in range(1, 21)),
        StudyEnded(state="done"),
    ]
    bad = events[2::3]
    assert len(bad) > MAX_FAILURES
    logger = Recorder(lambda event: event in bad)
    tell(logger, events)
    assert logger.seen == [event for event in events if event not in bad]


def test_a_tracker_that_cannot_be_opened_is_one_warning(caplog):
    logger = Recorder(lambda event: event == "open")
    tell(logger, first_run())
    assert not logger.seen
    assert [r.getMessage().split(";")[0] for r in caplog.records] == [
        "Recorder does not write: OSError: no such place"
    ]


def test_the_study_never_waits_for_longer_than_it_was_told_to(caplog):
    go_on = Flag()
    logger = Recorder(lambda event: not go_on.wait(), patience_s=0.01)
    try:
        tell(logger, first_run())
        assert "is not done after 0.01 s, with 1" in caplog.text
    finally:
        go_on.set()


def test_a_run_that_never_said_how_it_ended_is_ended_by_the_next_one():
    logger = Recorder()
    tell(logger, [began(), began(resumed=True), StudyEnded(state="done")])
    ended = [StudyEnded(state=state) for state in ("failed", "done")]
    assert logger.seen == [began(), ended[0], began(resumed=True), ended[1]]


@pytest.mark.parametrize("patience_s", [-1, "soon", True])
def test_patience_is_a_number_of_seconds(patience_s):
    with pytest.raises(UsageError, match="patience_s is"):
        Recorder(patience_s=patience_s)


@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_open_runs_are_the_ones_written_to_last(trials, limit):
    opened, closed = Counter(), Counter()
    runs = OpenRuns(
        lambda trial: opened.update([trial]) or trial,
        lambda trial: closed.update([trial]),
        limit=limit,
    )
    for num, trial in enumerate(trials, start=1):
        assert runs[trial] == trial
        still_open = {t for t in opened if opened[t] > closed[t]}
        assert still_open == set(list(dict.fromkeys(reversed(trials[:num])))[:limit])
    runs.close()
    assert opened == closed


def test_the_run_written_to_longest_ago_is_closed_first():
    closed = []
    runs = OpenRuns(str, closed.append, limit=2)
    for trial in (1, 2, 1, 3):
        runs[trial]
    assert closed == ["2"]
    assert runs.pop(1) == "1"
    runs.close()
    assert closed == ["2", "3"]


@given(st.text(), st.text())
def test_safe_names_are_names_of_files_and_differ(one, other):
    safe = safe_name(one)
    assert 0 < len(safe) <= 107
    assert not set("/\\") & set(safe)
    assert safe.strip(".")
    assert safe.isascii()
    assert (safe_name(other) == safe) == (one == other)


def test_plain_values_stay_and_others_are_written_down():
    assert plain({"a": 1, "b": 0.5, "c": "x", "d": False, "e": None, "f": (1, 2)}) == {
        "a": 1, "b": 0.5, "c": "x", "d": False, "e": "None", "f": "(1, 2)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "modules", "package", "extra"),
    [
        (
            lambda: TensorBoard("x"), ["torch.utils.tensorboard", "tensorboardX"], "tensorboard",
            "tensorboard"
        ),
        (MLflow, ["mlflow.tracking"], "mlflow-skinny", "mlflow"),
        (lambda: WandB(project="p"), ["wandb"], "wandb", "wandb"),
    ],
)  # fmt: skip
def test_a_library_that_is_missing_is_named(make, modules, package, extra, monkeypatch):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*\.\[{extra}\]"):
        make()


def test_scikit_learn_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "thrifty.integrations.sklearn._search", raising=False)
    with pytest.raises(MissingExtraError, match=r"scikit-learn is not installed.*\.\[sklearn\]"):
        importlib.import_module("thrifty.integrations.sklearn._search")
