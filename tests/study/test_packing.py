"""Studies whose workers train several trials at a time."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
import torch

from tests.study.helpers import WIDE, make_study, records
from thrifty.core import Calibrated, EpochDone, PackShrunk, Refused, StageFailed, StageStarted
from thrifty.pack import SGD, ArrayData, AutoBackend, FusedBackend, StateCheck, Task
from thrifty.pack.backends._fusion_policy import FusionPolicy
from thrifty.pack.fused._checking import StepCheck
from thrifty.pack.verify import CheckBudget, Difference
from thrifty.perf import PackCurve
from thrifty.run import Local
from thrifty.search import GridSearch, SuccessiveHalving
from thrifty.space import Choice, Constant, MultiStep, Space
from thrifty.store import Store
from thrifty.study import StopWhen
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


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
    """Replace calibration by instant, simulated curves; return the recorded calls."""
    calls = []

    def measure(task, member, **options):
        calls.append(member)
        return CURVES

    monkeypatch.setattr("thrifty.pack.backends._fusion_policy.calibrate", measure)
    for price in ("PRICE_S", "PRICE_STEPS"):
        monkeypatch.setattr(f"thrifty.pack.backends._fusion_policy.{price}", 0, raising=False)
    # These trials are too short to pay for checks.
    monkeypatch.setattr("thrifty.pack.backends._fusion_policy._price", lambda *_, **__: 0.0)
    return calls


def run(folder, *, executor=None, observers=(), **options):
    folder.mkdir(exist_ok=True)
    study = make_study(folder, **{"space": WIDE, **options})
    return study.run(progress=False, executor=executor, observers=observers)


def assert_same_records(found, wanted):
    """Assert that trials and epochs are the same; metrics up to rounding."""
    assert found[0] == wanted[0]
    assert found[3] == wanted[3]
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one.number, one.config, one.parent) == (other.number, other.config, other.parent)
    mine, theirs = ({(n, e): m for n, e, m in each[2]} for each in (found, wanted))
    assert mine.keys() == theirs.keys()
    for key, metrics in mine.items():
        assert metrics == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("halving", [False, True])
def test_auto_leaves_the_records_of_solo(tmp_path, calibrate, halving):
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=9, eta=2) if halving else None
    seen = Seen()
    packed = run(tmp_path / "auto", observers=[seen], algorithm=algorithm)
    solo = run(tmp_path / "solo", executor=SOLO, algorithm=algorithm)
    assert calibrate
    assert seen.of(Calibrated)
    assert_same_records(records(packed), records(solo))


@pytest.fixture
def steady(monkeypatch):
    """Make each solo step take a second."""
    original = StepCheck._judge

    def judge(self, *args, **options):
        found = original(self, *args, **options)
        self.solo_s = 1.0
        return found

    monkeypatch.setattr(StepCheck, "_judge", judge)


def stored(study):
    with Store.open(study.storage.url) as store:
        return store.plans.load(1).epochs


def test_savings_by_sharing_and_by_packing(tmp_path, steady):
    seen = Seen()
    study = run(tmp_path, observers=[seen], executor=Local(pack="fused", pack_size=4))
    done = seen.of(EpochDone)
    for name in ("seconds_checks", "seconds_alone", "seconds_alone_low", "seconds_alone_high"):
        kept = {(e.node, e.epoch): getattr(e, name) for e in stored(study)}
        assert kept == {(e.node, e.epoch): getattr(e, name) for e in done}
    # Four steps of a second, and an evaluation; not the simulated calibration.
    assert all(e.seconds_alone == pytest.approx(4.0, abs=0.5) for e in done)
    assert all(e.seconds_alone_low <= e.seconds_alone <= e.seconds_alone_high for e in done)
    savings = study.savings
    assert savings.packed_epochs == len(done)
    assert savings.unmeasured_epochs == 0
    assert savings.seconds_shared == pytest.approx(sum(e.seconds_alone for e in done))
    assert savings.packed_factor == pytest.approx(
        savings.seconds_shared / sum(e.seconds for e in done)
    )
    low, high = savings.packed_interval
    assert low <= savings.packed_factor <= high
    if round(low, 2) <= 1 <= round(high, 2):
        assert "packing made no measurable difference" in str(savings)
    else:
        assert f"{savings.packed_factor:.2f}x by packing ({low:.2f} to {high:.2f})" in str(savings)
    assert make_study(tmp_path).savings == savings


def test_checks_are_a_part_of_the_seconds(tmp_path):
    seen = Seen()
    study = run(tmp_path, observers=[seen], executor=Local(pack="fused", pack_size=4))
    done = seen.of(EpochDone)
    assert all(0.0 <= e.seconds_checks < e.seconds for e in done)
    savings = study.savings
    assert savings.seconds_checks == pytest.approx(sum(e.seconds_checks for e in done))
    assert savings.seconds == pytest.approx(sum(e.seconds for e in done))
    assert 0.0 < savings.seconds_checks < savings.seconds
    assert "of it for checks" in str(savings)


def test_the_checks_of_a_state_count_in_the_last_epoch_of_a_stage(tmp_path, monkeypatch):
    original = StateCheck.check

    def check(self, *args, **options):
        original(self, *args, **options)
        self.budget.spend(100.0)

    monkeypatch.setattr(StateCheck, "check", check)
    seen = Seen()
    study = run(tmp_path, observers=[seen], executor=SOLO)
    checked = [e for e in seen.of(EpochDone) if e.seconds_checks]
    assert 0 < len(checked) < len(seen.of(EpochDone))
    assert all(100.0 < e.seconds_checks < e.seconds for e in checked)
    assert all(e.seconds_alone < 100.0 for e in checked)
    assert study.savings.seconds_checks == pytest.approx(sum(e.seconds_checks for e in checked))


def test_nothing_is_said_of_seconds_saved_that_were_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.pack.verify._reference.MIN_SAMPLES", 10**6)
    study = run(tmp_path, executor=Local(pack="fused", pack_size=4))
    savings = study.savings
    assert savings.unmeasured_epochs == savings.packed_epochs > 0
    assert savings.seconds_alone is savings.seconds_shared is None
    assert savings.shared_factor is savings.packed_factor is savings.packed_interval is None
    assert savings.epochs > 0
    text = str(savings)
    assert f"{savings.epochs} saved" in text
    assert "instead of" not in text
    assert "packing" not in text


def test_epochs_of_trials_that_were_alone_need_no_measurement(tmp_path):
    savings = run(tmp_path, executor=SOLO).savings
    assert savings.packed_epochs == savings.unmeasured_epochs == 0
    assert savings.seconds_shared == pytest.approx(savings.seconds - savings.seconds_checks)
    assert "x by sharing" in str(savings)


# -- refused structures --------------------------------------------------------------------


WRONG = Difference(what="the loss", found=1.0, allowed=0.0, is_rounding_possible=False)


class Failing(LineTask):
    """Task whose pack checks fail wherever it is copied to, also in worker processes."""

    def __init__(self):
        self.label = "fails"  # copying skips __setstate__ for an object without attributes

    def __setstate__(self, state):
        vars(self).update(state)
        StepCheck._judge = lambda *_, **__: WRONG


@pytest.mark.parametrize("workers", [1, 2])
def test_a_structure_that_fails_a_check_is_not_fused_again(tmp_path, monkeypatch, caplog, workers):
    space = Space(lr=Choice([0.1, 0.05, 0.02, 0.01]))
    local = Local(workers=workers, threads=1, pack="fused", pack_size=2)
    monkeypatch.setattr(StepCheck, "_judge", StepCheck._judge)  # monkeypatch restores it later
    task, seen = Failing(), Seen()
    study = run(tmp_path, task=task, executor=local, observers=[seen], space=space)
    keys = {event.key for event in seen.of(Refused)}
    assert len(keys) == 1
    said = [r.getMessage() for r in caplog.records if "not fused" in r.getMessage()]
    assert len(said) == 1
    with Store.open(study.storage.url) as store:
        kept = store.plans.refusals(1)
    assert kept.keys() == keys
    assert next(iter(kept.values())) in said[0]
    # This is another study of the plan.
    caplog.clear()
    placed = []
    original = FusedBackend.place
    monkeypatch.setattr(FusedBackend, "place", lambda *args: (original(*args), placed.append(args)))
    other = Space(lr=Choice([0.1, 0.2, 0.3]))
    one = Local(threads=1, pack="fused", pack_size=2)
    again = run(tmp_path, task=task, name="b", executor=one, space=other)
    assert all(trial.state == "done" for trial in again.trials)
    assert not placed
    assert not caplog.records
    with Store.open(study.storage.url) as store:
        assert store.plans.refusals(1) == kept


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


def test_a_study_that_is_long_packs_from_its_first_epoch(tmp_path, calibrate, monkeypatch):
    monkeypatch.setattr("thrifty.pack.backends._fusion_policy.PRICE_STEPS", 1)
    monkeypatch.setattr(FusionPolicy, "_has_paid", lambda *_: False)
    seen = Seen()
    space = Space(lr=Choice([0.01 * n for n in range(1, 9)]))
    run(tmp_path, space=space, algorithm=GridSearch(max_epochs=6), observers=[seen])
    kinds = [type(event) for event in seen.events]
    before = kinds[: kinds.index(EpochDone)]
    assert before.index(Calibrated) < before.index(StageStarted)
    assert before.count(StageStarted) == 4


def test_a_study_that_is_short_never_measures(tmp_path, calibrate, monkeypatch):
    monkeypatch.setattr("thrifty.pack.backends._fusion_policy.PRICE_STEPS", 100)
    monkeypatch.setattr(FusionPolicy, "_has_paid", lambda *_: False)
    run(tmp_path)
    assert not calibrate


class StopAfter:
    def __init__(self, epochs):
        self._left = epochs

    def on_event(self, event):
        if isinstance(event, EpochDone):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("pack", "epochs"), [("fused", 6), ("concatenated", 1), ("fused", 13)])
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


@pytest.mark.sample(2)
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
    assert {(is_faulty(t), t.state) for t in study.trials} == {(False, "done"), (True, "failed")}
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
        space=WIDE,
    )
    assert seen.of(PackShrunk)
    shrunk = min(event.size for event in seen.of(PackShrunk))
    assert shrunk <= 3
    assert max(sizes[sizes.index(max(sizes)) + 1 :]) <= 3
    assert_same_records(records(study), records(solo))


class Resets(LineTask):
    """A task whose model gets new weights, which are drawn, after some epochs."""

    def adapt(self, model, hp):
        super().adapt(model, hp)
        if hp.reset:
            torch.nn.init.normal_(next(model.parameters()))


def test_what_adapt_draws_does_not_depend_on_where_a_trial_is_trained(tmp_path):
    def trials(name, *, pack="solo", stop=None, lrs=(0.1, 0.05)):
        study = make_study(
            tmp_path,
            task=Resets(),
            name=name,
            storage=f"sqlite:///{tmp_path}/{name}.db",
            algorithm=GridSearch(max_epochs=4),
            space=Space(lr=Choice(list(lrs)), reset=MultiStep([0, 1, 0], milestones=[2, 3])),
        )
        if stop is not None:
            study.run(progress=False, executor=Local(pack=pack), stop=StopWhen(epochs=stop))
        return [t.curve for t in study.run(progress=False, executor=Local(pack=pack)).trials]

    whole = trials("solo")
    assert trials("stopped", stop=3) == whole
    assert trials("other", lrs=[0.05, 0.1]) == whole[::-1]
    for found, expected in zip(trials("fused", pack="fused"), whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


class Subset(Task):
    """A task with metrics over a random part of each batch."""

    optimizer = SGD(lr="lr")
    batch_size = 32

    def draw(self, num):
        return np.random.permutation(num)[:20]  # noqa: NPY002

    def data(self, hp):
        x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] > 0).long()
        return ArrayData(train=(x, y), valid=(x, y))

    def model(self, hp):
        layers = (torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        return torch.nn.Sequential(*layers)

    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        rows = self.draw(len(x))
        return {"mse": self.loss(model, (x[rows], y[rows]))}


class PythonsSubset(Subset):
    def draw(self, num):
        return random.sample(range(num), min(num, 20))


@pytest.mark.parametrize("task", [Subset, PythonsSubset])
def test_metrics_that_draw_are_those_of_trials_alone(tmp_path, monkeypatch, task):
    """Also where there is no time for later checks."""
    monkeypatch.setattr(CheckBudget, "allows", lambda self, seconds: False)

    def curves(executor):
        study = make_study(
            tmp_path,
            task=task(),
            storage=f"sqlite:///{tmp_path}/{executor.pack}.db",
            algorithm=GridSearch(max_epochs=4),
            space=Space(lr=Choice([0.1, 0.05, 0.02])),
        ).run(progress=False, executor=executor)
        return [trial.curve for trial in study.trials]

    fused = curves(Local(pack="fused", pack_size=8))
    for found, alone in zip(fused, curves(SOLO), strict=True):
        assert found == pytest.approx(alone, rel=1e-4)
