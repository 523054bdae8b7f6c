"""A study may get more trials, and longer ones, under its own name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

import thrifty as th
from tests.study.helpers import SOLO, Count, trained
from tests.study.processes import At, die, exit_code, started
from thrifty.core import (
    AlgorithmError,
    StudyMismatchError,
    StudyNotFoundError,
    SystemClock,
    UsageError,
)
from thrifty.store import Store, _studies
from thrifty.store._records import ActApplied
from thrifty.store._steering_requests import ask_longer
from thrifty.study import StudyEnded
from thrifty.study._extension import extension_of
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow

GROWING = {
    "random": lambda num: th.RandomSearch(max_epochs=3, num_trials=num),
    "median": lambda num: th.MedianStopping(max_epochs=3, num_trials=num),
    "asha": lambda num: th.ASHA(max_epochs=3, num_trials=num),
    "sub-sampling": lambda num: th.SubSampling(max_epochs=3, num_trials=num),
    "freeze-thaw": lambda num: th.FreezeThaw(max_epochs=3, num_trials=num),
}


def study_of(folder, algorithm, *, name="line"):
    return th.Study(
        LineTask(),
        th.Space(lr=th.Float(0.01, 0.3)),
        algorithm=algorithm,
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
    )


@pytest.mark.parametrize("kind", GROWING)
def test_a_study_that_is_done_gets_more_trials(tmp_path, kind):
    first = study_of(tmp_path, GROWING[kind](4)).run(progress=False)
    before = [(trial.config, trial.value) for trial in first.trials]
    more = study_of(tmp_path, GROWING[kind](9))
    assert len(more.trials) == 4
    more.run(progress=False)
    assert len(more.trials) == 9
    assert [trial.config for trial in more.trials][:4] == [config for config, _ in before]
    assert more.run(progress=False).savings == more.savings


def test_random_search_that_grows_is_the_larger_one(tmp_path):
    for num in (2, 5, 9):
        study = study_of(tmp_path, GROWING["random"](num)).run(progress=False)
    at_once = study_of(tmp_path, GROWING["random"](9), name="at once").run(progress=False)
    assert len(study.trials) == len(at_once.trials) == 9


def test_a_study_that_was_stopped_grows_too(tmp_path):
    study_of(tmp_path, GROWING["random"](4)).run(progress=False, stop=th.StopWhen(epochs=5))
    assert len(study_of(tmp_path, GROWING["random"](6)).run(progress=False).trials) == 6


@pytest.mark.parametrize(
    "algorithm",
    [
        th.RandomSearch(max_epochs=3, num_trials=3),
        th.RandomSearch(max_epochs=2, num_trials=9),
        th.RandomSearch(max_epochs=4, num_trials=3),
        th.RandomSearch(max_epochs=3, num_trials=9, sampler=th.TPESampler()),
        th.MedianStopping(max_epochs=3, num_trials=9),
        th.GridSearch(max_epochs=3),
    ],
)
def test_any_other_change_is_another_study(tmp_path, algorithm):
    study_of(tmp_path, GROWING["random"](4)).run(progress=False)
    with pytest.raises(StudyMismatchError, match="algorithm was 'RandomSearch"):
        study_of(tmp_path, algorithm).run(progress=False)


def test_where_rungs_depend_on_the_number_of_trials_it_cannot_grow(tmp_path):
    study_of(tmp_path, th.SuccessiveHalving(max_epochs=3, num_trials=3)).run(progress=False)
    with pytest.raises(StudyMismatchError, match="algorithm was 'SuccessiveHalving"):
        study_of(tmp_path, th.SuccessiveHalving(max_epochs=3, num_trials=9)).run(progress=False)


# -- longer trials -----------------------------------------------------------------------

LONGER = {
    "grid": lambda epochs: th.GridSearch(max_epochs=epochs, levels=3),
    "random": lambda epochs: th.RandomSearch(max_epochs=epochs, num_trials=5),
    "halving": lambda epochs: th.SuccessiveHalving(max_epochs=epochs, num_trials=9, eta=2),
}
# Two pairs of trials are the same for 4 epochs, and part after.
SPACE = th.Space(
    lr=th.Choice([0.3, th.Step(0.3, every=5), th.Step(0.3, every=2), th.Step(0.3, [2])])
)


def of_length(folder, epochs, *, kind="grid", name="line", space=SPACE, seeds=1, **storage):
    return th.Study(
        LineTask(),
        space,
        algorithm=LONGER[kind](epochs),
        metric="mse",
        mode="min",
        storage=th.Storage(url=f"sqlite:///{folder}/t.db", **storage),
        name=name,
        seeds=seeds,
    )


def records(study):
    return [
        (trial.config, trial.state, trial.epochs, trial.curve, trial.value)
        for trial in study.trials
    ]


def at_once(folder, epochs, **options):
    """Return what the study records and trains that has this length from the beginning."""
    (folder / "other").mkdir(exist_ok=True)
    study = of_length(folder / "other", epochs, **options)
    return trained(study), records(study)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", LONGER)
@pytest.mark.parametrize(("stop", "seeds"), [(None, 1), (7, 1), (7, 2)])
def test_a_longer_study_is_the_one_that_was_longer_from_the_beginning(tmp_path, kind, stop, seeds):
    short = of_length(tmp_path, 4, kind=kind, seeds=seeds)
    first = trained(short, stop=None if stop is None else th.StopWhen(epochs=stop))
    longer = of_length(tmp_path, 8, kind=kind, seeds=seeds)
    second = trained(longer)
    total, expected = at_once(tmp_path, 8, kind=kind, seeds=seeds)
    assert records(longer) == expected
    assert first + second == total  # nothing was trained twice
    assert longer.savings.unique_epochs == total
    assert trained(of_length(tmp_path, 8, kind=kind, seeds=seeds)) == 0


def test_a_study_becomes_longer_twice_and_gets_more_trials_with_it(tmp_path):
    for epochs, num in ((2, 3), (5, 3), (9, 5)):
        study = study_of(tmp_path, th.RandomSearch(max_epochs=epochs, num_trials=num))
        study.run(progress=False)
    assert [trial.epochs for trial in study.trials] == [9] * 5
    assert [act.text for act in study.acts] == ["max_epochs from 2 to 5", "max_epochs from 5 to 9"]


def _killed(folder, epochs, count):
    of_length(folder, epochs).run(progress=False, executor=SOLO, observers=[At(count, die)])


@pytest.mark.parametrize("count", [1, 9, 20])
def test_a_longer_study_that_is_killed_goes_on(tmp_path, count):
    of_length(tmp_path, 4).run(progress=False, executor=SOLO)
    assert exit_code(started(_killed, tmp_path, 8, count)) == -9
    longer = of_length(tmp_path, 8)
    longer.run(progress=False, executor=SOLO)
    assert records(longer) == at_once(tmp_path, 8)[1]


@pytest.mark.parametrize("kind", ["asha", "stopping", "median", "sub-sampling"])
def test_algorithms_that_wait_for_nobody_go_on_at_the_rung_where_trials_have_ended(tmp_path, kind):
    kinds = {
        "asha": lambda epochs: th.ASHA(max_epochs=epochs, num_trials=9, eta=2),
        "stopping": lambda epochs: th.StoppingASHA(max_epochs=epochs, num_trials=9, eta=2),
        "median": lambda epochs: th.MedianStopping(max_epochs=epochs, num_trials=9),
        "sub-sampling": lambda epochs: th.SubSampling(max_epochs=epochs, num_trials=9, eta=2),
    }
    short = study_of(tmp_path, kinds[kind](4)).run(progress=False)
    before = [(trial.config, trial.curve) for trial in short.trials]
    count = Count()
    longer = study_of(tmp_path, kinds[kind](8)).run(progress=False, observers=[count])
    assert max(trial.epochs for trial in longer.trials) == 8
    pairs = list(zip(before, longer.trials, strict=True))
    assert all(trial.config == config for (config, _), trial in pairs)
    assert all(trial.curve[: len(curve)] == curve for (_, curve), trial in pairs)
    assert count.epochs == sum(trial.epochs - len(curve) for (_, curve), trial in pairs)


@pytest.mark.parametrize(
    "schedule",
    [
        th.Cosine(0.1),
        th.REX(0.1),
        th.Linear(0.1),
        th.WSD(0.1, cooldown=2),
        th.Warmup(2, th.Cosine(th.Float(0.1, 0.3))),
    ],
)
def test_a_schedule_that_depends_on_the_length_is_refused(tmp_path, schedule):
    space = th.Space(lr=th.Choice([0.1, schedule]))
    of_length(tmp_path, 4, space=space).run(progress=False)
    longer = of_length(tmp_path, 8, space=space)
    said = "cannot be extended from max_epochs=4 to 8: the schedule"
    with pytest.raises(StudyMismatchError, match=said):
        longer.run(progress=False)
    with pytest.raises(StudyMismatchError, match="'lr' depends on max_epochs"):
        longer.plan()
    other = of_length(tmp_path, 8, space=space, name="other")
    assert trained(other) < other.savings.unique_epochs  # prefixes are shared as the error says


def test_a_branch_whose_schedule_depends_on_the_length_is_refused(tmp_path):
    study = of_length(tmp_path, 4).run(progress=False)
    study.enqueue_trial(study.branch(0, after=2, change={"lr": th.Linear(0.3)}))
    study.run(progress=False)
    with pytest.raises(StudyMismatchError, match=r"a schedule of trial 4 depends on max_epochs"):
        of_length(tmp_path, 8).run(progress=False)
    with pytest.raises(StudyMismatchError, match="cannot go on to 8"):
        study.extension(max_epochs=8)


@pytest.mark.parametrize(
    ("algorithm", "longer", "why"),
    [
        (
            th.ASHA(max_epochs=9, num_trials=4),
            th.ASHA(max_epochs=16, num_trials=4),
            (
                "rungs (1, 3, 9), which would be (1, 3, 16), so its past decisions do not hold; "
                "27 epochs or more would keep them"
            ),
        ),
        (
            th.SuccessiveHalving(max_epochs=8, num_trials=4),
            th.SuccessiveHalving(max_epochs=9, num_trials=4),
            "rungs (1, 8), which would be (1, 3, 9)",
        ),
        (
            th.MedianStopping(max_epochs=8, num_trials=4, grace_epochs=2, interval=4),
            th.MedianStopping(max_epochs=12, num_trials=4, grace_epochs=2, interval=4),
            "MedianStopping judges trials at (2, 6, 10, 12) then, and not at 8",
        ),
        (
            th.Hyperband(max_epochs=3),
            th.Hyperband(max_epochs=9),
            "Hyperband may have decided otherwise with more than 3",
        ),
        (
            th.FreezeThaw(max_epochs=3, num_trials=4),
            th.FreezeThaw(max_epochs=9, num_trials=4),
            "FreezeThaw may have decided otherwise",
        ),
        (
            th.FixedWidthSubSampling(max_epochs=3, num_trials=4),
            th.FixedWidthSubSampling(max_epochs=9, num_trials=4),
            "FixedWidthSubSampling may have decided otherwise",
        ),
    ],
)
def test_rungs_that_would_be_others_are_refused(tmp_path, algorithm, longer, why):
    study_of(tmp_path, algorithm).run(progress=False)
    with pytest.raises(StudyMismatchError, match=re.escape(why)):
        study_of(tmp_path, longer).run(progress=False)


def test_a_ladder_is_refused(tmp_path):
    space = th.Ladder(horizons=[2, 4], rates=[0.1], shapes=["linear"])
    of_length(tmp_path, 4, space=space).run(progress=False)
    with pytest.raises(StudyMismatchError, match="of a Ladder end at horizons of their own"):
        of_length(tmp_path, 8, space=space).run(progress=False)


def test_a_longer_study_that_shares_its_plan_with_others(tmp_path):
    trained(of_length(tmp_path, 4, shared=True))
    longer = of_length(tmp_path, 8, shared=True)
    assert longer.plan().epochs_to_train == 15
    assert trained(longer) == 15
    assert records(longer) == at_once(tmp_path, 8)[1]


def test_what_was_tried_of_a_shorter_study_goes_on_under_its_name(tmp_path):
    config = {"lr": 0.3}
    assert trained(of_length(tmp_path, 4).only([config])) == 4
    longer = of_length(tmp_path, 8)
    some = longer.only([config, {"lr": th.Step(0.3, every=2)}], epochs=4)
    assert some.name == "line-only-4"
    assert trained(some) == 2  # the second one parts after two epochs
    assert [trial.epochs for trial in some.trials] == [4, 4]
    assert trained(longer.only([config])) == 4


def test_trials_that_are_told_go_on_from_the_state_that_they_name(tmp_path):
    def tell_all(epochs):
        study = th.Study(
            th.External("a robot"),
            th.Space(speed=th.Choice([0.1, 0.5])),
            algorithm=th.GridSearch(max_epochs=epochs),
            metric="way",
            storage=f"sqlite:///{tmp_path}/t.db",
            name="robot",
        )
        told = 0
        while trial := study.ask():
            way = states.get(trial.resume, 0.0)
            more = True
            while more:
                way, told = way + trial.config["speed"], told + 1
                more = study.tell(trial, {"way": way})
            states[trial.state] = way
        study.end_asking()
        return told, [trial.value for trial in study.trials]

    states: dict[str, float] = {}
    assert tell_all(2) == (4, [0.2, 1.0])
    told, values = tell_all(5)
    assert (told, values) == (6, [pytest.approx(0.5), pytest.approx(2.5)])


@th.trainable
def halving_x(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]), th.Step(0.1, every=5))
    state = {"x": 1.0}
    for _epoch in trial.epochs(state):
        state["x"] *= 1 - lr.value
        yield {"x": state["x"]}


def test_a_training_function_goes_on_in_its_loop(tmp_path):
    def study(folder, epochs):
        folder.mkdir(exist_ok=True)
        return th.Study(
            halving_x,
            algorithm=th.GridSearch(max_epochs=epochs),
            metric="x",
            mode="min",
            storage=f"sqlite:///{folder}/t.db",
            name="function",
        )

    first = trained(study(tmp_path / "a", 4))
    second = trained(study(tmp_path / "a", 8))
    assert first + second == trained(study(tmp_path / "b", 8))
    assert records(study(tmp_path / "a", 8)) == records(study(tmp_path / "b", 8))


def test_a_trial_that_was_enqueued_after_the_end_goes_on_too(tmp_path):
    algorithm = {n: th.SuccessiveHalving(max_epochs=n, num_trials=4, eta=2) for n in (4, 8)}
    study = study_of(tmp_path, algorithm[4]).run(progress=False)
    study.enqueue_trial({"lr": 0.2})
    assert study.run(progress=False).trials[-1].epochs == 4
    assert study_of(tmp_path, algorithm[8]).run(progress=False).trials[-1].epochs == 8


def test_trials_that_failed_or_were_stopped_stay_so(tmp_path):
    study = of_length(tmp_path, 4)
    study.run(progress=False, stop=th.StopWhen(epochs=2))
    study.stop(0)
    longer = of_length(tmp_path, 8).run(progress=False)
    assert next(trial.state for trial in longer.trials) == "stopped"
    assert [trial.epochs for trial in longer.trials][1:] == [8, 8, 8]


def test_a_study_does_not_become_shorter(tmp_path):
    short = of_length(tmp_path, 4)
    of_length(tmp_path, 8).run(progress=False)
    with pytest.raises(StudyMismatchError, match="cannot become shorter"):
        short.run(progress=False)
    assert [trial.epochs for trial in short.trials] == [8] * 4  # it can still be read


def test_the_price_is_told_before(tmp_path):
    study = of_length(tmp_path, 4).run(progress=False)
    found = study.extension(max_epochs=8)
    assert str(found) == (
        "from 4 epochs to 8 epochs: 4 trials may go on\n6 epochs known, at most 15 epochs to train"
    )
    count = Count()
    assert study.extend(max_epochs=8) == found
    assert study.algorithm.max_epochs == 8
    study.run(progress=False, observers=[count])
    assert count.epochs == 15
    assert [(act.kind, act.text) for act in study.acts] == [("extend", "max_epochs from 4 to 8")]


@pytest.mark.parametrize("epochs", [1, 5])
def test_trials_that_are_not_finished_are_counted(tmp_path, epochs):
    study = of_length(tmp_path, 4)
    before = Count()
    study.run(progress=False, stop=th.StopWhen(epochs=epochs), observers=[before])
    trials = study.trials
    num_ended = sum(trial.epochs == 4 for trial in trials)
    found = study.extension(max_epochs=8)
    assert (found.num_trials, found.num_unfinished) == (num_ended, len(trials) - num_ended)
    assert "not finished and go on with the next run (thrifty resume)" in str(found)
    assert ("may go on" in str(found)) == bool(num_ended)
    assert found.known_epochs == before.epochs
    study.extend(max_epochs=8)
    count = Count()
    assert [trial.epochs for trial in study.run(progress=False, observers=[count]).trials] == [
        8
    ] * 4
    assert len(trials) < 4 or count.epochs == found.most_epochs_to_train


def test_states_that_are_gone_are_part_of_the_price(tmp_path):
    study = of_length(tmp_path, 4).run(progress=False)
    ledger = study._current_ledger()
    for node in ledger.plan.nodes:
        node.checkpoints.clear()
    found = extension_of(ledger, before=4, after=8)
    assert (found.epochs_again, found.most_epochs_to_train) == (6, 21)
    assert "states are missing, so 6 epochs are trained again" in str(found)


def test_a_longer_study_whose_files_are_gone_is_still_the_same(tmp_path):
    study = of_length(tmp_path, 4).run(progress=False)
    with Store.open(study.storage.url, create=False) as store:
        for ref in store.plans.load(store.studies.get("line").plan).checkpoints:
            store.checkpoints.delete(ref)
    longer = of_length(tmp_path, 8)
    assert trained(longer) > 15
    assert records(longer) == at_once(tmp_path, 8)[1]


def test_a_study_is_extended_only_if_it_is_there_and_shorter(tmp_path):
    study = of_length(tmp_path, 4)
    with pytest.raises(StudyNotFoundError):
        study.extend(max_epochs=8)
    study.run(progress=False)
    with pytest.raises(UsageError, match="trains 4 epochs already, and got max_epochs=4"):
        study.extend(max_epochs=4)
    with pytest.raises(UsageError, match="trains 4 epochs already"):
        study.extension(max_epochs=3)
    assert not study.acts


def test_the_stored_length_is_found_again(tmp_path):
    of_length(tmp_path, 4).run(progress=False).extend(max_epochs=8)
    study = of_length(tmp_path, 4)
    assert study.as_stored().algorithm.max_epochs == 8
    assert [each.epochs for each in study.as_stored().run(progress=False).trials] == [8] * 4
    assert of_length(tmp_path, 9).as_stored().algorithm.max_epochs == 9


# -- requests for longer trials ----------------------------------------------------------


def request(study, *lengths):
    """Queue requests as the dashboard does, which does not know the study's code."""
    with Store.open(study.storage.url, create=False) as store:
        for length in lengths:
            ask_longer(store, study.name, max_epochs=length)


def said(study):
    return [(act.kind, act.text, act.is_queued, act.answer) for act in study.acts]


EXTENDED = ("extend", "max_epochs from 4 to 8", False, "")


@pytest.mark.parametrize("stop", [None, 7])
def test_a_request_is_applied_by_the_next_run(tmp_path, stop):
    short = of_length(tmp_path, 4)
    first = trained(short, stop=None if stop is None else th.StopWhen(epochs=stop))
    request(short, 8)
    assert said(short) == [("lengthen", "8", True, "")]
    study = of_length(tmp_path, 4)
    second = trained(study)
    total, expected = at_once(tmp_path, 8)
    assert records(study) == expected
    assert first + second == total
    assert study.algorithm.max_epochs == 8
    assert said(study) == [("lengthen", "8", False, ""), EXTENDED]
    assert study.acts[1].who == study.acts[0].who
    assert trained(study) == 0
    assert len(study.acts) == 2


def test_a_plan_counts_a_request_and_writes_nothing(tmp_path):
    short = of_length(tmp_path, 4)
    trained(short)
    assert short.plan().epochs_to_train == 0
    request(short, 8, 6)
    study = of_length(tmp_path, 4)
    found = study.plan()
    assert found == of_length(tmp_path, 8).plan()
    assert found.epochs_to_train > 0
    assert study.algorithm.max_epochs == 4
    assert all(act.is_queued for act in study.acts)
    assert trained(study) == found.epochs_to_train
    assert study.plan().epochs_to_train == 0


def test_a_plan_ignores_a_request_that_cannot_be_done(tmp_path):
    study = of_length(tmp_path, 4, space=th.Space(lr=th.Cosine(0.1)))
    trained(study)
    request(study, 8)
    assert study.plan().epochs_to_train == 0


@pytest.mark.parametrize("shared", [None, True])
def test_a_study_that_runs_goes_on_with_a_request_in_the_same_run(tmp_path, shared):
    study, other = (of_length(tmp_path, 4, shared=shared) for _ in range(2))
    found, ends = [], []

    class Watch:
        def on_event(self, event):
            ends.extend([event.state] if isinstance(event, StudyEnded) else [])

    extend = At(9, lambda: found.append(other.extend(max_epochs=8)))
    num = trained(study, observers=[extend, Watch()])
    total, expected = at_once(tmp_path, 8)
    assert found[0].is_queued
    assert str(found[0]).endswith("goes on with it once it has trained, or the next run does")
    assert other.algorithm.max_epochs == 4
    assert records(study) == expected
    assert num == total
    assert ends == ["done", "done"]
    assert said(study) == [("lengthen", "8", False, ""), EXTENDED]


def test_a_run_that_is_stopped_leaves_a_request_to_the_next(tmp_path):
    study = of_length(tmp_path, 4)
    first = trained(study, observers=[At(9, lambda: request(study, 8))], stop=th.StopWhen(epochs=3))
    assert said(study) == [("lengthen", "8", True, "")]
    assert first + trained(study) == at_once(tmp_path, 8)[0]
    assert said(study)[0] == ("lengthen", "8", False, "")


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_time_to_stop_counts_from_the_beginning_of_the_run(tmp_path, seconds):
    class Late(SystemClock):
        late_s = 0.0

        def monotonic(self):
            return super().monotonic() + self.late_s

    class AtTheEnd:
        def on_event(self, event):
            if isinstance(event, StudyEnded) and not study.acts[-1].answer:
                study._clock.late_s = seconds

    study = of_length(tmp_path, 4)
    study._clock = Late()
    begin = At(9, lambda: request(study, 8))
    num = trained(study, observers=[begin, AtTheEnd()], stop=th.StopWhen(seconds=1e6))
    assert said(study)[0] == ("lengthen", "8", False, "")
    assert (num == at_once(tmp_path, 8)[0]) == (seconds == 0.0)


def refused_study(folder, kind):
    algorithm = th.ASHA(max_epochs=9, num_trials=4) if kind == "rungs" else LONGER["grid"](9)
    lr = th.Cosine(0.1) if kind == "schedule" else 0.2
    return th.Study(
        LineTask(),
        th.Space(lr=th.Choice([0.1, lr])),
        algorithm=algorithm,
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name="line",
    )


REFUSED = {
    "rungs": (16, "which would be (1, 3, 16)"),
    "schedule": (16, "of 'lr' depends on max_epochs, so the first 9 epochs would have other"),
    "shorter": (10, "trains 12 epochs already, and got max_epochs=10"),
}


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_request_that_cannot_be_done_is_answered_and_training_goes_on(
    tmp_path, kind, is_running, caplog
):
    length, why = REFUSED[kind]
    study = refused_study(tmp_path, kind)
    if is_running:
        begin = At(9, lambda: request(study, length))
        num = trained(study, observers=[begin])
    else:
        num = trained(study, stop=th.StopWhen(epochs=3))
        request(study, length)
    if kind == "shorter":
        with Store.open(study.storage.url) as store:
            store.acts.answer([ActApplied(act=act.id) for act in study.acts])
        study.extend(max_epochs=12)
        with Store.open(study.storage.url) as store:
            info = store.studies.get("line")
            store.acts.add(info, "lengthen", trial=None, text="10", who="a friend")
    num += trained(study)
    (tmp_path / "other").mkdir()
    same = refused_study(tmp_path / "other", kind)
    if kind == "shorter":
        same = same._longer(12)
    assert num == trained(same)
    assert records(study) == records(same)
    act = next(act for act in reversed(study.acts) if act.kind == "lengthen")
    assert not act.is_queued
    assert why in act.answer
    assert study.algorithm.max_epochs == (12 if kind == "shorter" else 9)


def test_a_branch_that_depends_on_the_length_is_the_answer_to_a_request(tmp_path):
    study = of_length(tmp_path, 4).run(progress=False)
    study.enqueue_trial(study.branch(0, after=2, change={"lr": th.Linear(0.3)}))
    study.run(progress=False)
    request(study, 8)
    assert trained(study) == 0
    branch, act = study.acts
    assert branch.kind == "branch"
    assert act.answer == (
        "a schedule of trial 4 depends on max_epochs, so its first 4 epochs would have other values"
    )


def test_an_objective_has_the_length_of_its_reports(tmp_path):
    def objective(trial):
        x = trial.suggest_float("x", -1.0, 1.0)
        for step in range(3):
            trial.report(x * step, step)
        return x

    url = f"sqlite:///{tmp_path}/t.db"
    options = {"max_epochs": 3, "n_trials": 2, "prune": False, "progress": False}
    study = th.optimize(objective, name="line", storage=url, **options)
    with pytest.raises(StudyMismatchError, match="reports a fixed number of times"):
        study.extension(max_epochs=6)
    request(study, 6)
    study.run(progress=False)
    assert "reports a fixed number of times" in study.acts[0].answer
    assert [trial.epochs for trial in study.trials] == [3, 3]


@pytest.mark.parametrize("lengths", [(6, 8), (8, 6), (8, 8)])
def test_of_several_requests_the_largest_counts_and_all_are_answered(tmp_path, lengths):
    study = of_length(tmp_path, 4).run(progress=False)
    request(study, *lengths)
    trained(study)
    assert records(study) == at_once(tmp_path, 8)[1]
    counts = "a request for 8 epochs counts"
    answers = sorted(act.answer for act in study.acts)
    assert answers == ["", "", counts]
    assert [act.text for act in study.acts if act.kind == "extend"] == ["max_epochs from 4 to 8"]
    assert not any(act.is_queued for act in study.acts)


def test_of_several_requests_the_largest_that_can_be_done_counts(tmp_path, monkeypatch):
    def why_not(algorithm, before):
        return "ten is too many" if algorithm.max_epochs == 10 else ""

    monkeypatch.setattr(th.GridSearch, "why_not_longer", why_not)
    study = of_length(tmp_path, 4).run(progress=False)
    request(study, 6, 10, 8)
    study.run(progress=False)
    assert [trial.epochs for trial in study.trials] == [8] * 4
    answers = ["a request for 8 epochs counts", "ten is too many", "", ""]
    assert [act.answer for act in study.acts] == answers


def _dies_in_the_transaction(folder):
    def dying(*_, **__):
        die()

    _studies.write_applied = dying
    trained(of_length(folder, 4))


def _dies_after_it(folder, count):
    trained(of_length(folder, 4), observers=[At(count, die)])


@pytest.mark.parametrize("count", [None, 1, 9])
def test_a_request_is_applied_once_across_a_kill(tmp_path, count):
    short = of_length(tmp_path, 4).run(progress=False, executor=SOLO)
    request(short, 8)
    if count is None:
        child = started(_dies_in_the_transaction, tmp_path)
    else:
        child = started(_dies_after_it, tmp_path, count)
    assert exit_code(child) == -9
    assert said(short) == (
        [("lengthen", "8", True, "")] if count is None else [("lengthen", "8", False, ""), EXTENDED]
    )
    study = of_length(tmp_path, 4).as_stored()
    assert study.algorithm.max_epochs == (4 if count is None else 8)
    trained(study)
    assert records(study) == at_once(tmp_path, 8)[1]
    assert said(study) == [("lengthen", "8", False, ""), EXTENDED]


def test_a_loop_that_asks_leaves_a_request_to_the_next(tmp_path):
    study = th.Study(
        th.External("a robot"),
        th.Space(speed=th.Choice([0.1, 0.5])),
        algorithm=th.GridSearch(max_epochs=2),
        metric="way",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="robot",
    )

    def tell_all():
        while trial := study.ask():
            while study.tell(trial, {"way": 1.0}):
                if not study.acts:
                    request(study, 3)
        return [trial.epochs for trial in study.trials]

    assert tell_all() == [2, 2]
    assert study.acts[0].is_queued
    assert tell_all() == [3, 3]
    assert not study.acts[0].is_queued


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "8", None, 1_000_001])
def test_a_bad_number_is_not_requested(tmp_path, length):
    study = of_length(tmp_path, 4).run(progress=False)
    with pytest.raises(UsageError, match="whole number from 1 to 1,000,000, got "):
        request(study, length)
    with pytest.raises(UsageError, match="trains 4 epochs already, and got max_epochs=4"):
        request(study, 4)
    assert not study.acts


# -- what an algorithm, a unit or a database cannot have -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfGrid(th.GridSearch):
    """A grid whose first half alone goes on to the end."""

    def ask(self, history, space, *, num, rng):
        found = list(th.GridSearch.ask(self, history, space, num=num, rng=rng))
        return [d for d in found if d.config is not None][: max(0, 2 - len(history))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaysSo(HalfGrid):
    def why_not_longer(self, before):
        return ""


def test_a_class_of_the_user_says_itself_that_it_may_become_longer(tmp_path):
    of_algorithm(tmp_path, HalfGrid(max_epochs=2)).run(progress=False)
    with pytest.raises(StudyMismatchError, match=r"HalfGrid may have.*define why"):
        of_algorithm(tmp_path, HalfGrid(max_epochs=4)).run(progress=False)
    of_algorithm(tmp_path, SaysSo(max_epochs=2), name="b").run(progress=False)
    study = of_algorithm(tmp_path, SaysSo(max_epochs=4), name="b").run(progress=False)
    assert len(study.trials) == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMostFour(th.GridSearch):
    def __post_init__(self):
        if self.max_epochs > 4:
            raise ValueError("at most four")


class Plain(th.RandomSearch):
    def __init__(self):
        th.RandomSearch.__init__(self, max_epochs=2, num_trials=1)


@pytest.mark.parametrize("algorithm", [AtMostFour(max_epochs=2), Plain()])
def test_an_algorithm_that_cannot_have_the_length_is_named(tmp_path, algorithm):
    study = of_algorithm(tmp_path, algorithm).run(progress=False)
    with pytest.raises(UsageError, match=f"{type(algorithm).__name__} cannot be made with"):
        study.extend(max_epochs=8)
    assert study.run(progress=False).trials


def test_a_length_in_steps_is_one_of_the_study(tmp_path):
    study = of_algorithm(tmp_path, th.GridSearch(max_epochs=th.steps(8))).run(progress=False)
    assert str(study.extension(max_epochs=th.steps(16))).startswith("from 8 steps (2 epochs) to 16")
    with pytest.raises(UsageError, match="max_epochs"):
        study.extension(max_epochs=th.steps(17))


def test_a_length_that_no_database_keeps_is_refused(tmp_path):
    study = of_algorithm(tmp_path, th.GridSearch(max_epochs=2)).run(progress=False)
    with pytest.raises(AlgorithmError, match="at most 2,147,483,647"):
        study.extend(max_epochs=10**20)


def of_algorithm(folder, algorithm, *, name="s"):
    return th.Study(
        LineTask(),
        th.Space(lr=th.Choice([0.1, 0.2])),
        algorithm=algorithm,
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
    )
