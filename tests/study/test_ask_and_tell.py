"""A study is asked what to train, and told the results: the same records as if it had trained."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest

import thrifty as th
from thrifty.core import UsageError
from thrifty.run import _ask_tell
from thrifty.run._ask_tell import AskTell
from thrifty.testing import LineTask


MADE: list[th.Study] = []


@pytest.fixture(autouse=True)
def ended():
    """End what a test has left open: its thread would look at the database for ever."""
    yield
    while MADE:
        MADE.pop().end_asking()


def make(storage="sqlite://", *, algorithm=None, space=None, name="game", **options):
    study = th.Study(
        th.External("a game"),
        space or th.Space(skill=th.Float(0.0, 1.0)),
        algorithm=algorithm or th.ASHA(max_epochs=9, num_trials=9),
        metric="score",
        storage=storage,
        name=name,
        **options,
    )
    MADE.append(study)
    return study


def score(config, epoch):
    return config["skill"] * (epoch + 1)


def play(study, *, limit=math.inf):
    """Train all trials of a study; return their configurations, first and last epochs."""
    asked = []
    while len(asked) < limit and (trial := study.ask()):
        asked.append((trial.config["skill"], trial.start, trial.stop))
        while study.tell(trial, {"score": score(trial.config, trial.epoch)}):
            pass
    return asked


def test_each_trial_has_what_was_told():
    study = make()
    asked = play(study)
    assert len(study.trials) == 9
    for trial in study.trials:
        assert trial.curve == tuple(score(trial.config, epoch) for epoch in range(trial.epochs))
    assert sum(stop - start for _, start, stop in asked) == study.savings.unique_epochs
    assert study.ask() is None


def test_a_trial_goes_on_from_where_it_was():
    states = {}
    study = make()
    while trial := study.ask():
        reached = states[trial.resume] if trial.resume else (trial.config["skill"], 0)
        assert reached == (trial.config["skill"], trial.start)
        while study.tell(trial, score(trial.config, trial.epoch)):
            assert trial.state is None
        states[trial.state] = (trial.config["skill"], trial.epoch)
        assert trial.epoch == trial.stop
    assert 9 in {epoch for _, epoch in states.values()}


def test_common_beginnings_are_asked_for_once():
    space = th.Space(skill=th.Choice([th.Step(1.0, [2]), th.Step(1.0, [4]), 1.0]))
    study = make(algorithm=th.GridSearch(max_epochs=6), space=space)
    kept, trained = {}, 0
    while trial := study.ask():
        values = kept[trial.resume] if trial.resume else ()
        assert len(values) == trial.start
        more = True
        while more:
            values = (*values, score(trial.config, trial.epoch))
            more = study.tell(trial, values[-1])
            trained += 1
            if trial.state:
                kept[trial.state] = values
    assert trained == study.savings.unique_epochs == 6 + 4 + 2
    for trial in study.trials:
        timeline = th.Timeline(trial.config, epochs=6)
        assert trial.curve == tuple(score(timeline.at(epoch), epoch) for epoch in range(6))
        assert trial.curve in kept.values()


def test_several_are_asked_for_before_they_are_told():
    study = make(algorithm=th.RandomSearch(max_epochs=2, num_trials=5))
    trials = [study.ask() for _ in range(5)]
    assert len({trial.config["skill"] for trial in trials}) == 5
    for _ in range(2):
        for trial in reversed(trials):
            study.tell(trial, score(trial.config, trial.epoch))
    assert study.ask() is None
    assert [t.epochs for t in study.trials] == [2] * 5


def test_those_who_ask_at_once_get_different_trials():
    study = make(algorithm=th.SuccessiveHalving(max_epochs=9, num_trials=9))
    names = []

    def work():
        names.extend(play(study))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(names) == len(set(names)) == 9 + 3 + 1
    assert max(trial.epochs for trial in study.trials) == 9


def test_a_number_is_the_metric_and_other_metrics_are_kept():
    study = make(algorithm=th.RandomSearch(max_epochs=1, num_trials=2))
    study.tell(study.ask(), 3)
    study.tell(study.ask(), {"score": 4, "size": 7})
    assert [trial.values for trial in study.trials] == [{"score": 3.0}, {"score": 4.0}]


def test_a_trial_that_has_failed():
    study = make(algorithm=th.RandomSearch(max_epochs=3, num_trials=2))
    trial = study.ask()
    assert study.tell(trial, 1.0)
    assert not study.tell(trial, error="the motor is hot")
    with pytest.raises(UsageError, match="has ended"):
        study.tell(trial, 1.0)
    play(study)
    assert [t.state for t in study.trials] == ["failed", "done"]
    assert "the motor is hot" in study.trials[0].error


def test_values_that_are_not_finite_make_a_trial_fail():
    study = make(algorithm=th.RandomSearch(max_epochs=1, num_trials=2))
    study.tell(study.ask(), math.nan)
    play(study)
    assert [t.state for t in study.trials] == ["failed", "done"]


def test_a_study_is_not_done_because_ask_comes_after_the_loop_has_looked():
    """If no call of ask waits when the loop looks, the algorithm is not asked for more trials."""
    executor = AskTell(opened=[]).open(
        th.External("game"), checkpoints="memory://asked", folder="plan"
    )
    assert executor.num_free() == 0
    asking = threading.Thread(target=executor.ask)
    asking.start()
    with executor._changed:
        assert executor._changed.wait_for(lambda: executor._num_asking, 60)
    assert executor.may_be_asked
    assert executor.num_free() == 1
    assert not executor.may_be_asked
    executor.close()
    asking.join(60)
    assert not asking.is_alive()


def test_it_goes_on_in_another_process(tmp_path):
    """A process that ends without a word has told what it has told."""
    program = textwrap.dedent(f"""
        import thrifty as th
        from tests.study.test_ask_and_tell import make, play
        study = make("sqlite:///{tmp_path}/t.db")
        play(study, limit=4)
        trial = study.ask()
        study.tell(trial, 0.5)
    """)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    study = make(f"sqlite:///{tmp_path}/t.db")
    told = sum(trial.epochs for trial in study.trials)
    assert told >= 5
    asked = play(study)
    assert sum(stop - start for _, start, stop in asked) == study.savings.unique_epochs - told


def test_two_studies_of_one_task_share_what_was_told(tmp_path):
    url, space = f"sqlite:///{tmp_path}/t.db", th.Space(skill=th.Choice([0.1, 0.2]))
    grid = th.GridSearch(max_epochs=3)
    assert len(play(make(url, algorithm=grid, space=space))) == 2
    assert play(make(url, algorithm=grid, space=space, name="again")) == []
    other = th.Study(
        th.External("a game", version="2"),
        space,
        algorithm=grid,
        metric="score",
        storage=url,
        name="another game",
    )
    assert len(play(other)) == 2


def test_a_stopped_trial_is_told_so(tmp_path):
    search = th.RandomSearch(max_epochs=100_000, num_trials=1)
    study = make(f"sqlite:///{tmp_path}/t.db", algorithm=search)
    trial, is_asked = study.ask(), False
    while study.tell(trial, 1.0):
        if not is_asked:
            with suppress(UsageError):  # until the trial is in the database
                study.stop(0)
                is_asked = True
    assert is_asked
    assert trial.state
    assert study.ask() is None
    assert [t.state for t in study.trials] == ["stopped"]


def test_what_cannot_be_asked_or_told():
    study = th.Study(
        LineTask(),
        th.Space(lr=0.1),
        algorithm=th.GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage="sqlite://",
        name="line",
    )
    with pytest.raises(UsageError, match=r"LineTask is trained by run\(\)"):
        study.ask()
    study = make()
    with pytest.raises(UsageError, match="without a trial"):
        study.tell(None, 1.0)
    with pytest.raises(UsageError, match="is trained elsewhere"):
        study.run(progress=False)
    trial = study.ask()
    with pytest.raises(UsageError, match="'score' is None"):
        study.tell(trial, {"score": None})
    with pytest.raises(UsageError, match="'score' is 'high'"):
        study.tell(trial, "high")
    with pytest.raises(UsageError, match="metrics of a trial, or the error"):
        study.tell(trial)
    assert "skill" in repr(trial)


def test_what_is_enqueued_while_it_is_asked(tmp_path):
    search = th.RandomSearch(max_epochs=1, num_trials=3)
    study = make(f"sqlite:///{tmp_path}/t.db", algorithm=search)
    study.tell(study.ask(), 1.0)
    study.enqueue_trial({"skill": 0.75})
    play(study)
    assert 0.75 in [trial.config["skill"] for trial in study.trials]
    study = make()
    study.tell(study.ask(), 1.0)
    with pytest.raises(UsageError, match="before the first ask"):
        study.enqueue_trial({"skill": 0.75})


def test_who_waits_for_results_is_told_so(monkeypatch, caplog):
    monkeypatch.setattr(_ask_tell, "SAY_S", 0.01)
    study = make(algorithm=th.SuccessiveHalving(max_epochs=9, num_trials=3))
    first = [study.ask() for _ in range(3)]
    assert study.ask(wait=False) is None
    thread = threading.Thread(target=lambda: play(study))
    thread.start()
    while "ask() waits" not in caplog.text:
        time.sleep(0.01)
    for trial in first:
        study.tell(trial, score(trial.config, trial.epoch))
    thread.join(60)
    assert max(trial.epochs for trial in study.trials) == 9


def test_who_asks_a_study_that_is_paused_need_not_wait(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    first = make(url)
    first.tell(first.ask(), 1.0)
    first.end_asking()
    second, found = make(url), []
    second.pause()
    thread = threading.Thread(target=lambda: found.append(first.ask(wait=False)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [None]
    second.resume()
    assert first.ask() is not None
    first.end_asking()


def test_an_error_of_the_run_reaches_who_asks(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    first = make(url)
    first.ask()
    with pytest.raises(th.StoreBusyError):
        make(url).ask()


def test_a_study_is_handed_over(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    first, second = make(url), make(url)
    first.end_asking()  # nothing has begun
    play(first, limit=2)
    first.end_asking()
    told = sum(trial.epochs for trial in second.trials)
    asked = play(second)
    assert told + sum(stop - start for _, start, stop in asked) == second.savings.unique_epochs
    assert first.ask() is None


@pytest.mark.parametrize("num_told", [0, 1])
def test_a_metric_that_is_missing_leaves_the_trial_open(num_told):
    study = make(algorithm=th.RandomSearch(max_epochs=2, num_trials=1), constraints={"cost": 9.0})
    trial = study.ask()
    for _ in range(num_told):
        study.tell(trial, {"score": 1.0, "cost": 2.0})
    with pytest.raises(UsageError, match=r"'score', 'cost' is missing; .* \(score, cost\)"):
        study.tell(trial, {"other": 1.0})
    with pytest.raises(UsageError, match="'cost' is missing"):
        study.tell(trial, 3.0)
    assert (trial.epoch, study.trials[0].error) == (num_told, "")
    while study.tell(trial, {"score": 1.0, "cost": 2.0}):
        pass
    assert (study.trials[0].state, study.trials[0].epochs) == ("done", 2)


def test_attributes_are_told_with_an_epoch(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    study = make(url, algorithm=th.RandomSearch(max_epochs=2, num_trials=3))
    while trial := study.ask():
        said = {"log": [trial.epoch], "host": "lab"} if trial.epoch else {"log": "first"}
        study.tell(trial, 1.0, user_attrs=said)
        while study.tell(trial, 1.0, user_attrs={"log": [trial.epoch]}):
            pass
    study.end_asking()
    assert [t.user_attrs for t in make(url).trials] == [{"log": [1]}] * 3


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"user_attrs": {"a": {1}}}, r"user_attrs=\{'a': \.\.\.\}\): the value has a set"),
        ({"user_attrs": [1]}, r"user_attrs=\[1\]\): give a dict"),
    ],
)
def test_attributes_that_cannot_be_told(said, told):
    study = make()
    trial = study.ask()
    with pytest.raises(UsageError, match=told):
        study.tell(trial, 1.0, **said)
    with pytest.raises(UsageError, match="a failed trial has none; leave user_attrs out"):
        study.tell(trial, error="broken", user_attrs={})
    assert study.tell(trial, 1.0) in (True, False)
