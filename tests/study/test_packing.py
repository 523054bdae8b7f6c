"""Studies whose workers train several trials at a time."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.study.helpers import SPACE, make_study, records
from thrifty.core import Calibrated, EpochDone, PackShrunk, StageFailed
from thrifty.pack import AutoBackend
from thrifty.perf import PackCurve
from thrifty.run import Local
from thrifty.search import SuccessiveHalving
from thrifty.space import Choice, Constant, MultiStep, Space
from thrifty.store import Store
from thrifty.testing import FaultyTask


SOLO = Local(pack="solo")
CURVES = [
    PackCurve(backend="solo", step_s={1: 1e-3}),
    PackCurve(backend="fused", step_s={1: 0.8e-3, 4: 1e-3}),
]


class Seen:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


@pytest.fixture
def calibrate(monkeypatch):
    """Made-up curves, at once; the calls are counted."""
    calls = []

    def measure(task, member, **options):
        calls.append(member)
        return CURVES

    monkeypatch.setattr("thrifty.pack._judge.calibrate", measure)
    for price in ("PRICE_S", "PRICE_STEPS"):
        monkeypatch.setattr(f"thrifty.pack._judge.{price}", 0, raising=False)
    return calls


def run(folder, *, executor=None, observers=(), **options):
    folder.mkdir(exist_ok=True)
    study = make_study(folder, **options)
    return study.run(progress=False, executor=executor, observers=observers)


def assert_same_records(found, wanted):
    """The same trials and epochs; metrics up to rounding."""
    assert found[0] == wanted[0]
    assert found[3] == wanted[3]
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one.number, one.config, one.parent) == (
            other.number,
            other.config,
            other.parent,
        )
    mine, theirs = ({(n, e): m for n, e, m in each[2]} for each in (found, wanted))
    assert mine.keys() == theirs.keys()
    for key, metrics in mine.items():
        assert metrics == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("halving", [False, True])
def test_auto_leaves_the_records_of_solo(tmp_path, calibrate, halving):
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=9, eta=2) if halving else None
    seen = Seen()
    packed = run(tmp_path / "auto", observers=[seen], algorithm=algorithm)
    solo = run(tmp_path / "solo", executor=SOLO, algorithm=algorithm)
    assert calibrate
    assert seen.of(Calibrated)
    assert_same_records(records(packed), records(solo))


def test_savings_by_sharing_and_by_packing(tmp_path, calibrate):
    seen = Seen()
    study = run(tmp_path, observers=[seen], executor=Local(pack_size=4))
    timed = [e for e in seen.of(EpochDone) if e.seconds_alone is not None]
    assert timed
    assert all(e.seconds_alone == pytest.approx(4e-3) for e in timed)  # 4 steps of 1 ms
    with Store.open(study.storage.url) as store:
        kept = {(e.node, e.epoch): e.seconds_alone for e in store.plans.load(1).epochs}
    assert kept == {(e.node, e.epoch): e.seconds_alone for e in seen.of(EpochDone)}
    savings = study.savings
    assert savings.shared_factor > 1.0
    assert savings.seconds_shared == pytest.approx(
        sum(
            e.seconds if e.seconds_alone is None else e.seconds_alone
            for e in seen.of(EpochDone)
        )
    )
    assert savings.packed_factor == pytest.approx(
        savings.seconds_shared / sum(e.seconds for e in seen.of(EpochDone))
    )
    assert f"{savings.packed_factor:.2f}x by packing" in str(savings)
    again = make_study(tmp_path)
    assert again.savings.packed_factor == pytest.approx(savings.packed_factor)


def test_a_second_study_does_not_measure_again(tmp_path, calibrate):
    first = run(tmp_path)
    num_measured = len(calibrate)
    assert num_measured
    with Store.open(first.storage.url) as store:
        assert len(store.curves.all()) == num_measured
    seen = Seen()
    run(tmp_path, name="another", seed=1, observers=[seen])
    assert len(calibrate) == num_measured
    assert seen.of(EpochDone)
    assert seen.of(Calibrated)


class StopAfter:
    def __init__(self, epochs):
        self._left = epochs

    def on_event(self, event):
        if isinstance(event, EpochDone):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("pack", ["fused", "concatenated"])
@pytest.mark.parametrize("epochs", [1, 6, 13])
def test_stopping_with_several_trials_on_board(tmp_path, pack, epochs):
    local = Local(pack=pack, pack_size=4)
    whole = run(tmp_path / "whole", executor=SOLO)
    num_epochs = whole.savings.unique_epochs
    first, rest = Seen(), Seen()
    stopped = run(tmp_path / "parts", executor=local, observers=[first, StopAfter(epochs)])
    with Store.open(stopped.storage.url) as store:
        assert store.studies.get("s").state == "stopped"
    study = run(tmp_path / "parts", executor=local, observers=[rest])
    trained = [{(e.node, e.epoch) for e in seen.of(EpochDone)} for seen in (first, rest)]
    assert not trained[0] & trained[1]
    assert len(first.of(EpochDone)) + len(rest.of(EpochDone)) == num_epochs
    assert_same_records(records(study), records(whole))


def faulty(fault):
    return Space(
        lr=Choice([0.05, 0.02]),
        fault=Choice([Constant(""), MultiStep(["", fault], milestones=[2])]),
        width=Choice([0, 3]),
    )


@pytest.mark.parametrize("pack", ["fused", "concatenated"])
@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_only_faulty_trials_fail(tmp_path, pack, fault):
    local = Local(pack=pack, pack_size=4)
    study = run(tmp_path, task=FaultyTask(), space=faulty(fault), executor=local)
    states = {bool(t.config["fault"].values(2, 3, epochs=6)[0]): t.state for t in study.trials}
    assert states == {False: "done", True: "failed"}
    assert len(study.trials) == 8


def is_faulty(trial):
    return isinstance(trial.config["fault"], MultiStep)


def test_only_those_that_kill_their_workers_fail(tmp_path):
    seen = Seen()
    faults = [Constant(fault) for fault in ("", "none", "not this one")]
    study = run(
        tmp_path,
        task=FaultyTask(),
        space=Space(lr=0.05, fault=Choice([*faults, MultiStep(["", "die"], milestones=[2])])),
        executor=Local(workers=2, threads=1, pack="concatenated", pack_size=4),
        observers=[seen],
    )
    assert {(is_faulty(t), t.state) for t in study.trials} == {
        (False, "done"),
        (True, "failed"),
    }
    assert all("killed by signal 9" in t.error for t in study.trials if is_faulty(t))
    kinds = {event.kind for event in seen.of(StageFailed)}
    assert kinds == {"crowded", "lost"}


def test_packs_shrink_for_the_rest_of_the_study(tmp_path, monkeypatch):
    original, sizes = AutoBackend.step, []

    def crowded(self, plans):
        sizes.append(len(self._where))
        if len(self._where) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, plans)

    seen = Seen()
    solo = run(tmp_path / "solo", executor=SOLO)
    monkeypatch.setattr(AutoBackend, "step", crowded)
    study = run(
        tmp_path / "packed",
        executor=Local(pack="concatenated", pack_size=6),
        observers=[seen],
        space=SPACE,
    )
    assert seen.of(PackShrunk)
    shrunk = min(event.size for event in seen.of(PackShrunk))
    assert shrunk <= 3
    assert max(sizes[sizes.index(max(sizes)) + 1 :]) <= 3
    assert_same_records(records(study), records(solo))
