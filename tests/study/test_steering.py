"""People stop studies and trials, enqueue, note and tag, also while another process trains."""

from __future__ import annotations

import threading
import time
import types

import pytest

import thrifty as th
from thrifty.core import EpochDone, StoreBusyError, StudyNotFoundError, UsageError
from thrifty.store import Store, StudyMoved
from thrifty.store._steering_requests import ask_longer
from thrifty.study import StudyEnded
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


class AfterEpochs:
    """An observer that does something after a number of epochs, of all trials or of one node."""

    def __init__(self, after, act, *, node=None):
        self.after, self.act, self.num = after, act, 0
        self.node, self.reached = node, 0

    def on_event(self, event):
        if isinstance(event, EpochDone):
            self.num += 1
            if self.node in (None, event.node):
                self.reached += 1
                if self.reached == self.after:
                    self.act()


def study_of(folder, *, algorithm=None, lrs=(0.1, 0.2, 0.3), **options):
    return th.Study(
        LineTask(),
        th.Space(lr=th.Choice(list(lrs))),
        algorithm=algorithm or th.GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name="line",
        **options,
    )


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    """Let the study read acts, and write what others see, after each epoch."""
    monkeypatch.setattr("thrifty.study._loop.LOOK_S", 0.0)
    monkeypatch.setattr("thrifty.study._loop.GROUP_S", 0.0)


def states(study):
    return [trial.state for trial in study.trials]


def run(study, *, after, act, **options):
    return study.run(progress=False, observers=[AfterEpochs(after, act)], **options)


def test_a_study_that_runs_is_stopped_by_another_and_goes_on_later(tmp_path, caplog):
    study, other = study_of(tmp_path), study_of(tmp_path)
    run(study, after=3, act=other.stop, executor=th.Local(pack="solo"))
    assert study.savings.unique_epochs < 12
    (act,) = other.acts
    assert (act.kind, act.trial, act.is_queued) == ("stop", None, False)
    assert f"{act.who} has stopped it" in caplog.text
    assert states(study.run(progress=False)) == ["done"] * 3
    assert study.savings.unique_epochs == 12


@pytest.mark.parametrize("executor", [th.Local(pack="solo"), th.Local(workers=2, pack="solo")])
def test_a_trial_that_is_trained_stops_at_the_end_of_its_epoch(tmp_path, executor):
    whole = th.GridSearch(max_epochs=60)
    study, other = (study_of(tmp_path, algorithm=whole, lrs=[0.1, 0.2]) for _ in range(2))
    counted = AfterEpochs(5, lambda: other.stop(trial=0), node=0)
    study.run(progress=False, observers=[counted], executor=executor)
    assert states(study) == ["stopped", "done"]
    assert 60 < counted.num < 120
    assert not other.acts[0].is_queued
    again, counted = study_of(tmp_path, algorithm=whole, lrs=[0.1, 0.2]), AfterEpochs(0, None)
    again.run(progress=False, observers=[counted])
    assert (states(again), counted.num) == (["stopped", "done"], 0)


def test_what_other_trials_share_with_a_stopped_one_is_trained(tmp_path):
    lrs = [0.1, th.Step(0.1, [3]), th.Step(0.1, [2])]
    study = study_of(tmp_path, lrs=lrs)
    (tmp_path / "alone").mkdir()
    alone = study_of(tmp_path / "alone", lrs=lrs[1:]).run(progress=False)
    run(study, after=2, act=lambda: study.stop(trial=0), executor=th.Local(pack="solo"))
    assert states(study) == ["stopped", "done", "done"]
    assert [t.value for t in study.trials[1:]] == [t.value for t in alone.trials]


def test_a_trial_that_waits_at_a_rung_is_stopped(tmp_path):
    lrs = [0.05 * (k + 1) for k in range(9)]
    algorithm = th.SuccessiveHalving(max_epochs=9, eta=3, num_trials=9)
    study = study_of(tmp_path, algorithm=algorithm, lrs=lrs)
    run(study, after=5, act=lambda: study.stop(trial=0), executor=th.Local(pack="solo"))
    found = states(study)
    assert found[0] == "stopped"
    assert "done" in found
    assert "running" not in found


def test_acts_are_applied_once_across_a_kill_and_stay_in_the_order_of_decisions(tmp_path):
    study = study_of(tmp_path)
    run(study, after=2, act=study.stop, executor=th.Local(pack="solo"))
    study.stop(trial=2)  # no process runs it: the next one applies it
    assert study.acts[-1].is_queued
    study.run(progress=False)
    assert states(study) == ["done", "done", "stopped"]
    assert [act.is_queued for act in study.acts] == [False, False]
    with pytest.raises(UsageError, match="is done"):
        study.stop(trial=0)


def test_what_is_enqueued_while_a_study_runs_is_trained_in_this_run(tmp_path):
    study = study_of(tmp_path, algorithm=th.RandomSearch(max_epochs=4, num_trials=2))
    other = study_of(tmp_path, algorithm=th.RandomSearch(max_epochs=4, num_trials=2))
    run(study, after=3, act=lambda: other.enqueue_trial({"lr": 0.3}))
    assert states(study) == ["done"] * 3
    assert study.trials[-1].config == {"lr": 0.3}


@pytest.mark.parametrize("kind", ["stop", "pause"])
def test_a_request_that_comes_as_a_run_ends_does_not_hold_the_next_run(tmp_path, kind):
    study = study_of(tmp_path)

    class AsksLate:
        def on_event(self, event):
            if isinstance(event, StudyEnded):
                with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
                    info = store.studies.get("line")
                    store.acts.add(info, kind, trial=None, text="", who="me@here")

    observers = [AfterEpochs(2, study.stop), AsksLate()]
    study.run(progress=False, observers=observers, executor=th.Local(pack="solo"))
    assert [act.answer for act in study.acts] == ["", "the run had ended"]
    assert states(study.run(progress=False)) == ["done"] * 3


def test_a_stop_of_a_study_that_no_process_runs_is_applied_by_the_next_one(tmp_path, caplog):
    study = study_of(tmp_path)
    run(study, after=5, act=study.stop, executor=th.Local(pack="solo"))
    trained = study.savings.unique_epochs
    act = study.stop()
    assert act.is_queued
    counted = AfterEpochs(1, lambda: None)
    caplog.set_level("INFO")
    study.run(progress=False, observers=[counted])
    assert counted.num == 0
    assert "known from this study" in caplog.text
    assert "nothing to train" not in caplog.text
    assert f"{act.who} has stopped it; run it again to go on" in caplog.text
    assert not study.acts[-1].is_queued
    assert study.savings.unique_epochs == trained
    assert states(study.run(progress=False)) == ["done"] * 3


def test_a_stop_of_a_run_that_is_killed_before_it_ends_stops_the_next_one(tmp_path):
    class KilledError(BaseException):
        pass

    class KilledAfterTheRequest(AfterEpochs):
        def on_event(self, event):
            super().on_event(event)
            if self.num == self.after + 2:
                raise KilledError

    study = study_of(tmp_path, algorithm=th.GridSearch(max_epochs=60))
    dies = KilledAfterTheRequest(2, study.stop)
    with pytest.raises(KilledError):
        study.run(progress=False, observers=[dies], executor=th.Local(workers=2, pack="solo"))
    assert study.acts[0].is_queued
    counted = AfterEpochs(1, lambda: None)
    study.run(progress=False, observers=[counted])
    assert counted.num == 0
    assert not study.acts[0].is_queued
    assert states(study.run(progress=False)) == ["done"] * 3


def test_a_stop_that_comes_between_two_trainings_of_a_run_is_applied(tmp_path):
    study = study_of(tmp_path)

    class AsksBetween:
        def on_event(self, event):
            if isinstance(event, StudyEnded) and event.state == "done" and not study.acts:
                with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
                    ask_longer(store, "line", max_epochs=9)
                study.stop()

    study.run(progress=False, observers=[AsksBetween()])
    assert {act.kind: act.answer for act in study.acts if act.kind != "extend"} == {
        "lengthen": "",
        "stop": "",
    }
    assert [trial.epochs for trial in study.trials] == [4] * 3


def test_a_run_that_is_about_to_stop_cannot_be_resumed(tmp_path):
    study = study_of(tmp_path)
    said = []

    def stop_and_resume():
        study.stop()
        with pytest.raises(UsageError, match="is about to stop; wait until") as caught:
            study.resume()
        said.append(caught.value)

    run(study, after=2, act=stop_and_resume, executor=th.Local(pack="solo"))
    assert said


@pytest.mark.parametrize("kind", ["stop", "pause"])
def test_a_request_that_no_process_has_seen_can_be_taken_back(tmp_path, kind):
    study = study_of(tmp_path)
    run(study, after=2, act=study.stop, executor=th.Local(pack="solo"))
    getattr(study, kind)()
    study.resume()
    with pytest.raises(UsageError, match="not paused"):
        study.resume()
    assert states(study.run(progress=False)) == ["done"] * 3
    assert not any(act.is_queued for act in study.acts)


def test_a_study_that_was_paused_while_no_process_ran_it_waits_and_says_so(tmp_path, caplog):
    study, other = study_of(tmp_path), study_of(tmp_path)
    run(study, after=2, act=study.stop, executor=th.Local(pack="solo"))
    act = other.pause()
    with pytest.raises(UsageError, match="paused already"):
        other.pause()
    counted = AfterEpochs(1, lambda: None)
    running = threading.Thread(target=study.run, kwargs={"progress": False, "observers": [counted]})
    running.start()
    waiting_for(lambda: state_of(tmp_path) == "paused")
    assert counted.num == 0
    assert f"{act.who} paused it before this run" in caplog.text
    assert f"thrifty resume line --storage sqlite:///{tmp_path}/t.db" in caplog.text
    other.resume()
    running.join()
    assert states(study) == ["done"] * 3


def test_a_trial_that_is_done_meanwhile_is_said(tmp_path):
    study = study_of(tmp_path)
    run(study, after=2, act=study.stop, executor=th.Local(pack="solo"))
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        for number in (0, 0, 7):
            info = store.studies.get("line")
            store.acts.add(info, "stop trial", trial=number, text="", who="me@here")
    study.run(progress=False)
    answers = [act.answer for act in study.acts[-3:]]
    assert answers[1:] == ["trial 0 is stopped already", "there is no trial 7"]


def test_notes_and_tags(tmp_path):
    study = study_of(tmp_path)
    assert study.acts == []
    with pytest.raises(StudyNotFoundError):
        study.note("before it exists")
    study.run(progress=False)
    study.note("  the baseline \n of June ")
    study.tag("good")
    study.tag("odd", trial=1)
    study.tag("odd", trial=1)
    study.untag("good")
    assert study.tags == {1: ["odd"]}
    assert study.acts[0].text == "the baseline \n of June"
    assert "@" in study.acts[0].who


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda s: s.note(" "), "a note needs a text"),
        (lambda s: s.tag(""), "a tag needs a text"),
        (lambda s: s.tag("two\nlines"), "in one line"),
        (lambda s: s.untag("never"), "no tag never to remove|no tag 'never' to remove"),
        (lambda s: s.note("x", trial=3), "has no trial 3; it has 3, counted from 0"),
        (lambda s: s.note("x", trial=-1), "no trial -1"),
        (lambda s: s.note("x", trial=True), "no trial True"),
        (lambda s: s.stop(), "is done; only a study that has work left can stop"),
        (lambda s: s.pause(), "is done; only a study that has work left can pause"),
        (lambda s: s.stop(trial=0), "only trials of a study that has work left"),
    ],
)
def test_a_bad_act_is_an_error(tmp_path, act, told):
    study = study_of(tmp_path).run(progress=False)
    with pytest.raises(UsageError, match=told):
        act(study)
    assert study.acts == []


def test_two_people_at_a_time(tmp_path):
    study = study_of(tmp_path, algorithm=th.GridSearch(max_epochs=40))

    def both():
        threads = [threading.Thread(target=study.stop, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run(study, after=3, act=both, executor=th.Local(pack="solo"))
    assert states(study) == ["stopped", "stopped", "done"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("after", "stopped"), [(2, (0, 2, 4)), (6, (1,)), (6, (5,)), (9, (0, 2, 4)), (9, (5,))]
)
def test_the_others_go_on_in_rounds_and_generations(tmp_path, after, stopped):
    """A stopped trial waits for no decision, and no other trial waits for it."""
    algorithms = {
        "rounds": th.FixedWidthSubSampling(max_epochs=8, num_trials=6),
        "generations": th.PopulationBasedTraining(
            max_epochs=8, population=6, interval=2, explore=("lr",)
        ),
    }
    for name, algorithm in algorithms.items():
        folder = tmp_path / name
        folder.mkdir()

        def study(folder=folder, algorithm=algorithm):
            return th.Study(
                LineTask(),
                th.Space(lr=th.Float(0.01, 0.2)),
                algorithm=algorithm,
                metric="mse",
                mode="min",
                storage=f"sqlite:///{folder}/t.db",
                name="line",
            )

        one = th.Local(pack="solo")
        study().run(progress=False, executor=one, stop=th.StopWhen(epochs=after))
        known = study()
        for number in stopped:
            known.stop(trial=number)
        found = study().run(progress=False, executor=one)
        assert all(found.trials[number].state == "stopped" for number in stopped)
        done = [trial for trial in found.trials if trial.state == "done"]
        assert {trial.epochs for trial in done} == {8}
        assert len(done) >= (1 if name == "rounds" else 4)
        again = study().run(progress=False, executor=one)
        assert states(again) == states(found)


# -- pauses ----------------------------------------------------------------------------------


def waiting_for(found):
    """Return once something holds that another thread brings about."""
    while not found():
        time.sleep(0.01)


def state_of(folder):
    with Store.open(f"sqlite:///{folder}/t.db") as store:
        return store.studies.summary("line").state


@pytest.mark.parametrize("executor", [th.Local(pack="solo"), th.Local(workers=2, pack="solo")])
def test_a_study_that_is_paused_trains_nothing_until_it_goes_on(tmp_path, monkeypatch, executor):
    rests = threading.Event()

    def sleep(seconds):
        rests.set()  # the loop sleeps once no worker trains any more
        time.sleep(seconds)

    monkeypatch.setattr("thrifty.study._loop.time", types.SimpleNamespace(sleep=sleep))
    study, other = (study_of(tmp_path, algorithm=th.GridSearch(max_epochs=40)) for _ in range(2))
    counted = AfterEpochs(5, other.pause)
    running = threading.Thread(
        target=study.run, kwargs={"progress": False, "observers": [counted], "executor": executor}
    )
    running.start()
    waiting_for(lambda: counted.num >= 5 and state_of(tmp_path) == "paused")
    rests.wait()
    at_rest = counted.num
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        plan = store.studies.get("line").plan
        before = len(store.plans.load(plan).epochs)
        with pytest.raises(UsageError, match="paused already"):
            other.pause()
        other.tag("seen")  # what comes next is read, too
        waiting_for(lambda: not any(act.is_queued for act in other.acts))
        assert len(store.plans.load(plan).epochs) == before
        with pytest.raises(StoreBusyError, match="stop that process"):
            other.delete()
    assert at_rest == counted.num < 120
    assert other.resume().is_queued
    running.join()
    assert states(study) == ["done"] * 3
    assert counted.num == study.savings.unique_epochs == 120
    assert [act.kind for act in other.acts] == ["pause", "tag", "resume"]
    with pytest.raises(UsageError, match="not paused"):
        other.resume()
    with pytest.raises(UsageError, match="is done"):
        other.pause()


def test_a_paused_study_can_be_stopped(tmp_path):
    study, other = study_of(tmp_path), study_of(tmp_path)
    counted = AfterEpochs(2, other.pause)
    running = threading.Thread(
        target=study.run,
        kwargs={"progress": False, "observers": [counted], "executor": th.Local(pack="solo")},
    )
    running.start()
    waiting_for(lambda: counted.num >= 2 and state_of(tmp_path) == "paused")
    other.stop()
    running.join()
    assert state_of(tmp_path) == "stopped"
    assert states(study.run(progress=False)) == ["done"] * 3, "the pause was that run's"
    assert study.savings.unique_epochs == 12


def test_a_paused_study_whose_process_is_gone_is_interrupted(tmp_path):
    study = study_of(tmp_path)
    run(study, after=2, act=study.stop, executor=th.Local(pack="solo"))
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        info = store.studies.get("line")
        store.record([StudyMoved(study=info.id, state="paused")])
        with store.lease(info):
            assert store.studies.summary("line").state == "paused"
        assert store.studies.summary("line").state == "interrupted"
    with pytest.raises(UsageError, match="not paused"):
        study.resume()


def test_a_pause_that_waits_counts(tmp_path):
    study, other = study_of(tmp_path), study_of(tmp_path)
    told = []

    def asks():
        other.pause()
        for ask in (other.pause, other.resume, other.resume):
            try:
                ask()
            except UsageError as error:
                told.append(str(error).partition(": ")[2] or str(error))

    assert states(run(study, after=2, act=asks, executor=th.Local(pack="solo"))) == ["done"] * 3
    assert len(told) == 2
    assert "paused already" in told[0]
    assert "not paused" in told[1]
    assert [act.kind for act in other.acts] == ["pause", "resume"]
