"""What checks cost: as a share of time, as solo time, and in the choice of a back-end."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.devices import here
from tests.pack._drive import Trial
from tests.pack._toys import Toy
from tests.pack.test_auto import fused_slots, is_fused
from thrifty.pack import AutoBackend, EpochPlan, FusedBackend, TimeShare, borrowed_streams
from thrifty.pack.backends._fusion_policy import CHECK_STEPS, CHECKED_STEPS
from thrifty.pack.fused._checking import StepCheck
from thrifty.pack.verify import Difference
from thrifty.testing import VirtualClock


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


STEPS, CHECKS = 3, CHECKED_STEPS * CHECK_STEPS
"""Number of steps in an epoch of ``Toy``, and the number of steps checked."""
TRIALS = [Trial(config={"lr": 0.05}, seed=k) for k in range(3)]
WRONG = Difference(what="the loss", found=1.0, allowed=0.0, is_rounding_possible=False)


def epochs(backend, num, *, slots=range(3), **options):
    """Train some epochs."""
    values = TRIALS[0].member.values
    with borrowed_streams():
        for epoch in range(num):
            outcomes = backend.step({
                slot: EpochPlan(epoch=epoch, values=values, **options) for slot in slots
            })
            assert not any(isinstance(outcome, Exception) for outcome in outcomes.values())


def failing(monkeypatch):
    monkeypatch.setattr(StepCheck, "_judge", lambda *_, **__: WRONG)


# -- shares --------------------------------------------------------------------------------


def test_the_shares_of_a_step_are_what_it_took(monkeypatch):
    clock = VirtualClock()

    def ticking():
        clock.advance(1.0)  # the more a step does, the more often it reads the time
        return clock.monotonic()

    monkeypatch.setattr(time, "perf_counter", ticking)
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    fused_slots(backend, TRIALS)
    began = clock.monotonic()
    epochs(backend, 1)
    spent = clock.monotonic() - began
    shares = backend.shares
    # The first tick brings the time at which the step begins.
    assert sum(share.seconds for share in shares.values()) == pytest.approx(spent - 1.0)
    assert sum(share.checks for share in shares.values()) == pytest.approx(backend.checks.spent_s)
    assert 0 < shares[0].checks < shares[0].seconds


def test_trials_alone_pay_for_no_checks_of_packs():
    backend = AutoBackend(Toy(), device=here(), prefer="concatenated")
    fused_slots(backend, TRIALS)
    epochs(backend, 1)
    assert [share.checks for share in backend.shares.values()] == [0.0] * 3


def test_a_trial_beside_a_pack_pays_for_itself_only():
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    trials = [replace(TRIALS[0].member, alone=True), *(t.member for t in TRIALS[1:])]
    for slot, member in enumerate(trials):
        backend.put(slot, member)
    assert [is_fused(backend, slot) for slot in range(3)] == [False, True, True]
    epochs(backend, 1)
    assert backend.shares[0].checks == 0.0 < backend.shares[1].checks
    assert backend.shares[1] == backend.shares[2] != backend.shares[0]


def test_shares_add_up():
    one = TimeShare(seconds=2.0, checks=1.0)
    assert one.plus(one) == TimeShare(seconds=4.0, checks=2.0)


# -- solo time -----------------------------------------------------------------------------


def test_the_time_alone_comes_from_checked_steps(monkeypatch):
    original = StepCheck._judge

    def judge(self, *args, **options):
        found = original(self, *args, **options)
        if self.solo_s is not None:
            self.solo_s = 2.0
        return found

    monkeypatch.setattr(StepCheck, "_judge", judge)
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    fused_slots(backend, TRIALS)
    values = TRIALS[0].member.values
    assert backend.alone_time(0, values) is None
    epochs(backend, 2)
    alone = backend.alone_time(0, values)
    assert STEPS * 2.0 < alone.seconds < STEPS * 2.0 + 1.0
    assert alone.low <= alone.seconds <= alone.high


def test_a_step_that_makes_the_state_of_its_optimizer_is_not_timed():
    backend = FusedBackend(Toy(), device=here())
    seen = []
    for slot, trial in enumerate(TRIALS):
        backend.put(slot, trial.member)
    backend.solo_times.note_step = lambda key, seconds: seen.append(seconds)
    plans = {slot: EpochPlan(epoch=0, values=TRIALS[0].member.values) for slot in range(3)}
    with borrowed_streams():
        backend.step(plans)
    # Each trial is checked at its first and its last step.
    assert backend.budget.num_checks >= 2 * len(TRIALS)
    assert len(seen) <= backend.budget.num_checks - 2 * len(TRIALS) + len(TRIALS)


# -- the choice ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_epochs", "wins"), [(1, False), (2, False), (100, True)])
def test_trials_too_short_to_pay_for_checks_train_in_turn(measure, num_epochs, wins):
    measuring = measure({1: 0.5, 4: 1.0})
    trials = [replace(t.member, stop=num_epochs) for t in TRIALS]
    backend = AutoBackend(Toy(), device=here())
    for slot, member in enumerate(trials):
        backend.put(slot, member)
    assert [is_fused(backend, slot) for slot in range(3)] == [wins] * 3
    assert bool(measuring.calls) == wins


def test_an_unknown_number_of_epochs_counts_as_one(measure):
    measure({1: 0.01})
    assert fused_slots(AutoBackend(Toy(), device=here())) == []


def test_what_is_gained_must_exceed_what_checks_cost(measure):
    # Fusing gains one step in ten, so it pays back after ten times as many steps as the checks
    # cost.
    measure({1: 0.9})
    num_epochs = 10 * (CHECKS + 1) / STEPS
    found = []
    for factor in (0.5, 1.5):
        backend = AutoBackend(Toy(), device=here())
        backend.put(0, replace(TRIALS[0].member, stop=round(factor * num_epochs)))
        found.append(is_fused(backend, 0))
    assert found == [False, True]


def test_epochs_that_are_left_count_when_a_trial_is_asked_again(measure):
    measure({1: 0.5, 4: 1.0})
    backend = AutoBackend(Toy(), device=here())
    fused_slots(backend, TRIALS)
    epochs(backend, 1, stop=2)
    assert not is_fused(backend, 0)
    epochs(backend, 1, stop=100)
    assert is_fused(backend, 0)


def test_fused_is_fused_whatever_checks_cost():
    assert fused_slots(AutoBackend(Toy(), device=here(), prefer="fused"), TRIALS) == [0, 1, 2]


# -- refused structures --------------------------------------------------------------------


def refused(monkeypatch, task):
    told = []
    with monkeypatch.context() as patch:
        failing(patch)
        backend = AutoBackend(
            task, device=here(), prefer="fused", on_refused=lambda key, why: told.append((key, why))
        )
        fused_slots(backend, TRIALS)
        plans = {s: EpochPlan(epoch=0, values=TRIALS[0].member.values) for s in range(3)}
        with borrowed_streams():
            backend.step(plans)
    return told


def test_a_failed_check_is_told_once(monkeypatch, caplog):
    ((_, reason),) = refused(monkeypatch, Toy())
    assert reason == str(WRONG)
    assert not caplog.records


def test_a_refused_structure_is_not_fused_by_another_back_end(monkeypatch, caplog):
    told = dict(refused(monkeypatch, Toy()))
    assert (
        fused_slots(AutoBackend(Toy(), device=here(), prefer="fused", refused=told), TRIALS) == []
    )
    assert not caplog.records
    wide = [Trial(config={"lr": 0.05, "width": 9})]
    assert fused_slots(AutoBackend(Toy(), device=here(), prefer="fused", refused=told), wide) == [0]


def test_a_refused_structure_has_the_same_key_each_time(monkeypatch):
    assert refused(monkeypatch, Toy()) == refused(monkeypatch, Toy())


def test_trials_under_way_are_checked_when_another_worker_refuses_them(monkeypatch):
    ((key, reason),) = refused(monkeypatch, Toy())
    backend = AutoBackend(Toy(), device=here(), prefer="fused")
    fused_slots(backend, TRIALS)
    epochs(backend, 1)
    assert all(backend.trial(slot).is_step_verified for slot in range(3))
    backend.refuse("another", reason)
    assert all(backend.trial(slot).is_step_verified for slot in range(3))
    backend.refuse(key, reason)
    assert not any(backend.trial(slot).is_step_verified for slot in range(3))
    assert fused_slots(backend, [replace(TRIALS[0], seed=9)]) == []
