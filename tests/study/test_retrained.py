"""Milestones drawn from an interval share what they can; savings count what was really trained."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.study.helpers import make_study, trained
from thrifty.core import EpochDone
from thrifty.search import RandomSampler, RandomSearch, Sampler
from thrifty.space import Float, Int, Space, Step
from thrifty.study._housekeeping import PassedStates


pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class OneByOne(Sampler):
    """Sampler that draws when a worker is free, so that branch points come late."""

    adapts: ClassVar[bool] = True

    def sample(self, history, space, *, num, rng):
        return RandomSampler().sample(history, space, num=num, rng=rng)


ALGORITHM = RandomSearch(max_epochs=8, num_trials=8, sampler=OneByOne())


def interval(folder, milestones, **options):
    space = Space(lr=Step(0.1, milestones))
    return make_study(folder, space=space, algorithm=ALGORITHM, **options)


@pytest.mark.parametrize("milestones", [[Float(2, 7)], [1, Float(2, 7)], [Int(2, 7)]])
def test_trials_that_come_later_train_nothing_again(tmp_path, milestones):
    study = interval(tmp_path, milestones)
    num = trained(study)
    savings = study.savings
    assert num == savings.unique_epochs < savings.trial_epochs
    assert savings.retrained_epochs == 0
    assert num == sum(s.stop - s.start for s in study.forest())


def test_an_interval_costs_few_checkpoints(tmp_path):
    trained(interval(tmp_path, [Float(2, 7)]))
    kept = {path.stem for path in tmp_path.glob("t-checkpoints/*/*.safetensors")}
    assert len(kept) <= ALGORITHM.num_trials + len(range(2, 8))


class Seconds:
    total = 0.0

    def on_event(self, event):
        if isinstance(event, EpochDone):
            self.total += event.seconds


def test_savings_count_epochs_that_were_trained_again(tmp_path, monkeypatch):
    # No checkpoint is kept for branches.
    monkeypatch.setattr("thrifty.plan._stages.Agenda.cuts", lambda *args, stop: set())
    study, seconds = interval(tmp_path, [Float(2, 7)]), Seconds()
    num = trained(study, observers=[seconds])
    savings = study.savings
    assert savings.retrained_epochs > 0
    assert savings.unique_epochs == num
    assert savings.seconds == pytest.approx(seconds.total)
    assert f"({savings.retrained_epochs} of them again)" in str(savings)
    monkeypatch.undo()
    assert interval(tmp_path, [Float(2, 7)]).savings == savings


def test_where_checkpoints_are_lost_savings_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(PassedStates, "find", lambda self, ledger: ())
    study = make_study(tmp_path, space=Space(lr=Step(0.1, [2])))
    before = trained(study)
    for path in tmp_path.glob("t-checkpoints/*/*"):
        path.unlink()
    later = make_study(tmp_path, space=Space(lr=Step(0.1, [2, 4])), name="later")
    assert before == 6
    num = trained(later)
    assert later.savings.unique_epochs == num + 4
    assert later.savings.retrained_epochs == 4
