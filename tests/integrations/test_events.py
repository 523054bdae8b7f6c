from __future__ import annotations

import signal
from collections import defaultdict

import pytest

from thrifty.search import ASHA, GridSearch, Hyperband, PopulationBasedTraining, RandomSearch
from thrifty.space import Choice, Float, MultiStep, Space, Step
from thrifty.study import (
    StopWhen,
    Study,
    StudyBegan,
    StudyEnded,
    TrialAdvanced,
    TrialBegan,
    TrialEnded,
    TrialEvent,
)
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


SPACE = Space(lr=Choice([0.1, Step(0.1, [2]), Step(0.1, [4]), 0.02, Step(0.02, [2])]))


class Heard:
    """Observer that records the events of a study."""

    def __init__(self):
        self.events = []

    def on_event(self, event):
        if isinstance(event, TrialEvent):
            self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def make(folder, *, task=None, algorithm=None, space=SPACE, name="s"):
    return Study(
        task or LineTask(),
        space,
        algorithm=algorithm or GridSearch(max_epochs=6),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
    )


def run(study, **options):
    heard = Heard()
    study.run(progress=False, observers=[heard], **options)
    return heard


ALGORITHMS = [
    GridSearch(max_epochs=6),
    Hyperband(max_epochs=9),
    ASHA(max_epochs=6, num_trials=7),
    RandomSearch(max_epochs=6, num_trials=4),
    PopulationBasedTraining(max_epochs=6, population=4, interval=2, explore=("lr",)),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_the_stream_tells_all_that_the_study_knows(tmp_path, algorithm):
    space = Space(lr=Float(0.01, 0.1)) if isinstance(algorithm, PopulationBasedTraining) else SPACE
    study = make(tmp_path, algorithm=algorithm, space=space)
    heard = run(study)
    assert heard.of(StudyBegan) == heard.events[:1]
    assert heard.of(StudyEnded) == heard.events[-1:]
    assert [e.trial for e in heard.of(TrialBegan)] == list(range(len(study.trials)))
    curves = defaultdict(list)
    best = None
    for event in heard.of(TrialAdvanced):
        assert event.first_epoch == len(curves[event.trial]) + 1
        curves[event.trial] += [metrics["mse"] for _, metrics in event.epochs()]
        assert event.epoch == len(curves[event.trial])
        assert event.value == curves[event.trial][-1]
        assert event.best == (best is None or event.value < best)
        best = event.value if event.best else best
    ended = {e.trial: e.state for e in heard.of(TrialEnded)}
    for trial in study.trials:
        assert tuple(curves[trial.number]) == trial.curve
        assert ended.get(trial.number, "paused") == trial.state
    shared = sum(e.shared_epochs for e in heard.of(TrialAdvanced))
    assert shared == study.savings.epochs
    assert heard.events[-1] == StudyEnded(
        state="done", best_trial=study.best_trial.number, best_value=study.best_trial.value
    )


def test_each_trial_begins_before_anything_else_of_it(tmp_path):
    begun = set()
    for event in run(make(tmp_path, algorithm=Hyperband(max_epochs=9))).events:
        if isinstance(event, TrialBegan):
            begun.add(event.trial)
        elif hasattr(event, "trial"):
            assert event.trial in begun


def test_what_a_trial_is_is_told_at_its_beginning(tmp_path):
    study = make(tmp_path)
    heard = run(study)
    assert [e.config for e in heard.of(TrialBegan)] == [t.config for t in study.trials]
    (began,) = heard.of(StudyBegan)
    assert (began.study, began.metrics, began.modes, began.resumed) == (
        "s",
        ("mse",),
        ("min",),
        False,
    )


@pytest.mark.parametrize("epochs", [1, 3, 8, 13])
def test_a_resumed_run_goes_on_where_the_last_one_was(tmp_path, epochs):
    first = run(make(tmp_path, algorithm=Hyperband(max_epochs=9)), stop=StopWhen(epochs=epochs))
    assert first.events[-1].state == "stopped"
    study = make(tmp_path, algorithm=Hyperband(max_epochs=9))
    second = run(study)
    assert [e.resumed for e in first.of(StudyBegan) + second.of(StudyBegan)] == [False, True]
    assert first.of(StudyBegan)[0].key == second.of(StudyBegan)[0].key
    reached = {e.trial: e.epoch for e in first.of(TrialAdvanced)}
    over = {e.trial for e in first.of(TrialEnded)}
    known = {e.trial for e in first.of(TrialBegan)}
    again = {e.trial: e.epoch for e in second.of(TrialBegan) if e.trial in known}
    assert again == {trial: reached.get(trial, 0) for trial in known - over}
    curves = defaultdict(list)
    for event in first.of(TrialAdvanced) + second.of(TrialAdvanced):
        assert event.first_epoch == len(curves[event.trial]) + 1, "each epoch once"
        curves[event.trial] += event.metrics
    for trial in study.trials:
        assert tuple(m["mse"] for m in curves[trial.number]) == trial.curve


def test_a_study_of_the_same_name_has_another_key(tmp_path):
    keys = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        keys.add(run(make(tmp_path / folder)).events[0].key)
    assert len(keys) == 2


def test_a_failed_trial_says_why(tmp_path):
    space = Space(
        lr=0.1,
        fault=Choice([
            "",
            MultiStep(["", "raise"], milestones=[2]),
            MultiStep(["", "nan"], milestones=[1]),
        ]),
    )
    heard = run(make(tmp_path, task=FaultyTask(), space=space))
    ended = {e.trial: e for e in heard.of(TrialEnded)}
    assert [ended[t].state for t in range(3)] == ["done", "failed", "failed"]
    assert "the task's own error" in ended[1].message
    assert "the training loss of epoch 2 is nan" in ended[2].message
    assert ended[0].message == ""


def test_the_end_names_the_signal_that_stopped_the_run(tmp_path):
    class CtrlC(Heard):
        def on_event(self, event):
            super().on_event(event)
            if isinstance(event, TrialAdvanced) and len(self.of(TrialAdvanced)) == 1:
                signal.raise_signal(signal.SIGINT)

    heard = CtrlC()
    make(tmp_path).run(progress=False, observers=[heard])
    stopped = run(make(tmp_path, name="another"), stop=StopWhen(epochs=1)).events[-1]
    ends = [(end.state, end.signal) for end in (heard.events[-1], stopped)]
    assert ends == [("stopped", signal.SIGINT), ("stopped", None)]
    assert run(make(tmp_path)).events[-1].signal is None


def test_an_error_ends_the_stream_too(tmp_path):
    class Stumbles(Heard):
        def on_event(self, event):
            super().on_event(event)
            if isinstance(event, TrialAdvanced):
                raise RuntimeError("over a stone")

    heard = Stumbles()
    with pytest.raises(RuntimeError, match="over a stone"):
        make(tmp_path).run(progress=False, observers=[heard])
    assert heard.events[-1].state == "failed"


def test_a_study_that_is_done_has_nothing_to_tell(tmp_path):
    run(make(tmp_path))
    assert run(make(tmp_path)).events == []


def test_a_study_in_which_all_fails_has_no_best(tmp_path):
    heard = run(make(tmp_path, task=FaultyTask(), space=Space(lr=0.1, fault="raise")))
    assert heard.events[-1] == StudyEnded(state="done")
