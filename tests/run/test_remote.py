"""A worker that trains for as long as one call lasts."""

from __future__ import annotations

import importlib
import math
import sys
import sysconfig
from pathlib import Path

import cloudpickle
import pytest

from thrifty.core import EpochDone, StageDone, StageStarted
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, _cluster
from thrifty.run._cluster import RemoteWorker, user_paths
from thrifty.run._executor import Refusal
from thrifty.run._worker import WorkerSpec
from thrifty.space import Timeline
from thrifty.testing import LineTask


def spec(folder):
    return WorkerSpec(
        name="w",
        device="cpu",
        threads=1,
        checkpoints=str(folder / "c"),
        folder="plan",
        pack="solo",
        curves={},
    )


def assignment(*spans, number=0):
    timeline = Timeline({"lr": 0.1}, epochs=spans[-1][1])
    stages = tuple(Stage(node=number, start=start, stop=stop) for start, stop in spans)
    return Assignment(
        number=number, chain=Chain(stages=stages, timeline=timeline, resume=None), seed=0
    )


@pytest.fixture
def worker(tmp_path):
    worker = RemoteWorker()
    assert worker.prepare(spec(tmp_path), [], cloudpickle.dumps(LineTask())) == ""
    return worker


def kinds(turn):
    return [type(report.event).__name__ for report in turn.reports]


def test_what_begins_a_stage_is_told_before_its_second_epoch(worker):
    first = worker.advance([assignment((0, 1), (1, 3))])
    assert kinds(first)[:3] == ["StageStarted", "EpochDone", "StageStarted"]
    told = first
    while "NoneType" not in kinds(told):
        told = worker.advance([])
    assert worker.advance([]).reports == []


def test_short_epochs_are_told_together(worker, monkeypatch):
    monkeypatch.setattr(_cluster, "TURN_S", math.inf)
    worker.advance([assignment((0, 100))])
    turn = worker.advance([])
    assert kinds(turn)[:99] == ["EpochDone"] * 99
    assert [r.event.epoch for r in turn.reports[:99]] == list(range(2, 101))


def test_a_call_ends_when_its_time_is_up(worker, monkeypatch):
    monkeypatch.setattr(_cluster, "TURN_S", 0.02)
    worker.advance([assignment((0, 1_000_000))])
    turn = worker.advance([])
    assert 0 < len(turn.reports) < 1000
    assert set(kinds(turn)) == {"EpochDone"}


def test_it_takes_more_while_it_trains(worker):
    worker.advance([assignment((0, 1000))])
    turn = worker.advance([assignment((0, 1000), number=1)])
    assert {r.assignment for r in turn.reports if isinstance(r.event, EpochDone)} == {0, 1}
    assert [r.assignment for r in turn.reports if isinstance(r.event, StageStarted)] == [1]


def test_asked_to_stop_it_keeps_its_state(worker):
    worker.advance([assignment((0, 1000))])
    turn = worker.advance([], stop=True)
    reports = list(turn.reports)
    assert reports[-1].event is None
    (done,) = [r.event for r in reports if isinstance(r.event, StageDone)]
    assert done.checkpoint.epoch == done.stop < 1000


def test_a_place_that_cannot_be_written(worker, tmp_path):
    (tmp_path / "c").touch()
    turn = worker.advance([assignment((0, 1))])
    while not turn.unwritable:
        turn = worker.advance([])
    assert str(tmp_path) in turn.unwritable


def test_a_task_that_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "code_of_mine.py").write_text(
        "from thrifty.testing import LineTask\nclass Mine(LineTask):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    task = cloudpickle.dumps(importlib.import_module("code_of_mine").Mine())
    del sys.modules["code_of_mine"]
    sys.path.pop()
    trouble = RemoteWorker().prepare(spec(tmp_path), [], task)
    assert "ModuleNotFoundError: No module named 'code_of_mine'" in trouble
    # The module is found where the study found it.
    assert RemoteWorker().prepare(spec(tmp_path), [str(tmp_path)], task) == ""
    del sys.modules["code_of_mine"]


def test_a_place_of_an_unknown_kind(tmp_path):
    known = spec(tmp_path)
    unknown = WorkerSpec(
        **{name: getattr(known, name) for name in known.__slots__} | {"checkpoints": "nowhere://x"}
    )
    trouble = RemoteWorker().prepare(unknown, [], cloudpickle.dumps(LineTask()))
    assert "nowhere" in trouble


def test_the_user_s_modules_are_sent_and_the_installation_is_not(monkeypatch, tmp_path):
    stdlib = sysconfig.get_path("stdlib")
    zipped = f"/usr/lib/python{sys.version_info.major}{sys.version_info.minor}.zip"
    site = sysconfig.get_path("purelib")
    path = [
        "",
        str(tmp_path),
        "lib",
        stdlib,
        f"{stdlib}/lib-dynload",
        zipped,
        site,
        "/opt/x/dist-packages",
        "/srv/my.zip",
    ]
    monkeypatch.setattr(sys, "path", path)
    here = Path.cwd()
    assert user_paths() == [str(here), str(tmp_path), str(here / "lib"), "/srv/my.zip"]


def test_a_refusal_reaches_the_worker(worker, monkeypatch):
    told = []
    monkeypatch.setattr(
        _cluster.Worker, "refuse", lambda self, key, reason: told.append((key, reason))
    )
    worker.advance([], orders=[Refusal(key="one", reason="it differs")])
    assert told == [("one", "it differs")]
