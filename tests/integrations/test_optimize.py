"""An Optuna objective runs as it is: same values, nothing trained twice, errors that say what."""

from __future__ import annotations

import contextvars
import os
import random
import re
import textwrap
import threading
import time

import numpy as np
import optuna
import pytest
import torch

import thrifty as th
from tests.study.processes import run_script
from thrifty.core import StateError, StudyMismatchError, TaskError, UsageError
from thrifty.integrations.functions import _exploration_main, _loop_trial, _objective
from thrifty.integrations.functions._exploration_main import ObjectiveAsker
from thrifty.integrations.functions._loop_trial import MAX_WAITING
from thrifty.integrations.functions._objective import ObjectiveRun
from thrifty.integrations.functions._optimize import what_would_be_shared
from thrifty.search import History, Stop, StoppingASHA
from thrifty.study import TrialResult


def optimized(objective, *, n_trials=6, **options):
    options = {"storage": "sqlite://", "progress": False, **options}
    return th.optimize(objective, n_trials=n_trials, **options)


def square(trial):
    return (trial.suggest_float("x", -1.0, 1.0) - 0.3) ** 2


def curve(trial):
    """Report nine times; the random numbers go on from one report to the next."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (user code may)
    random.seed(0)
    x = trial.suggest_float("x", 0.1, 1.0)
    value = 0.0
    for step in range(9):
        drawn = torch.rand(()).item() + np.random.rand() + random.random()  # noqa: NPY002
        value = x / (step + 1) + 1e-3 * drawn
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def of_optuna(objective, config):
    return objective(optuna.trial.FixedTrial(config))


def test_values_are_those_of_optuna():
    study = optimized(square)
    assert len(study.trials) == 6
    for trial in study.trials:
        assert trial.value == of_optuna(square, trial.config)
    assert study.best_trial.value == min(trial.value for trial in study.trials)


def test_the_random_streams_of_an_objective_go_on_between_its_reports():
    study = optimized(curve, max_epochs=9, prune=False)
    for trial in study.trials:
        assert trial.epochs == 9
        assert trial.value == of_optuna(curve, trial.config)


def test_an_objective_draws_nothing_from_the_streams_of_the_caller():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    optimized(curve, max_epochs=9, n_trials=3)
    assert torch.equal(torch.rand(3), expected)


def test_unseeded_objectives_are_reproducible():
    def noisy(trial):
        return trial.suggest_float("x", 0, 1) + torch.rand(()).item()

    first, second = optimized(noisy), optimized(noisy)
    assert [t.value for t in first.trials] == [t.value for t in second.trials]


def test_maximize_and_enqueue():
    study = optimized(square, direction="maximize", enqueue=[{"x": -1.0}, {"x": 0.3}])
    assert [t.config for t in study.trials][:2] == [{"x": -1.0}, {"x": 0.3}]
    assert study.best_trial.config == {"x": -1.0}


def test_pruned_trials_end_and_the_others_are_not_trained_twice(tmp_path):
    calls = tmp_path / "calls"

    def counted(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        for step in range(9):
            with calls.open("a") as file:
                file.write(f"{x}\n")
            trial.report(x, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x

    space = th.Space(x=th.Float(0.0, 1.0))
    study = optimized(counted, n_trials=12, max_epochs=9, space=space)
    epochs = {trial.config["x"]: trial.epochs for trial in study.trials}
    lines = calls.read_text().split()
    assert {x: lines.count(str(x)) for x in epochs} == epochs
    assert set(epochs.values()) > {9}
    assert study.savings.unique_epochs == len(lines) == sum(epochs.values())
    assert study.best_trial.epochs == 9


@pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
def test_what_is_pruned_depends_on_what_is_reported(direction, sign):
    def reports(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        for step in range(3):
            trial.report(sign * x, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return sign * x

    values = [0.5, 0.4, 0.3, 0.9, 0.8, 0.2, 0.7, 0.1]
    study = optimized(
        reports, n_trials=8, max_epochs=3, direction=direction, enqueue=[{"x": x} for x in values]
    )
    assert [trial.config["x"] for trial in study.trials] == values
    went_on = [trial.config["x"] for trial in study.trials if trial.epochs == 3]
    assert went_on == [0.5, 0.4, 0.3, 0.2, 0.1]  # each was the best that had come as far
    assert study.best_trial.config == {"x": 0.1}


def test_it_says_what_a_training_function_would_share(capsys, caplog):
    caplog.set_level("INFO")
    optimized(curve, max_epochs=9, n_trials=12)
    (said,) = [r.getMessage() for r in caplog.records if "training function" in r.getMessage()]
    assert re.match(r"\d+ trials were stopped, after \d+ epochs in all, and cannot go on\.", said)
    optimized(square, n_trials=2, progress=True)
    assert "An objective has no state" in capsys.readouterr().err


def test_a_pruned_objective_runs_its_own_cleanup():
    ended, pruned = [], []

    def careful(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        try:
            for step in range(9):
                trial.report(x, step)
                if trial.should_prune():
                    pruned.append(x)
                    raise optuna.TrialPruned
            return x
        finally:
            ended.append(x)

    study = optimized(careful, n_trials=12, max_epochs=9, space=th.Space(x=th.Float(0.0, 1.0)))
    assert sorted(ended) == sorted(trial.config["x"] for trial in study.trials)
    assert sorted(pruned) == sorted(t.config["x"] for t in study.trials if t.epochs < 9)
    assert not [each for each in threading.enumerate() if each.name.startswith("thrifty-careful")]


def test_an_objective_that_never_asks_ends_at_its_report():
    ended = []

    def deaf(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        try:
            for step in range(9):
                trial.report(x, step)
            return x
        except Exception:  # noqa: BLE001 (must not catch the end)
            raise AssertionError from None
        finally:
            ended.append(x)

    study = optimized(deaf, n_trials=12, max_epochs=9, space=th.Space(x=th.Float(0.0, 1.0)))
    assert sorted(ended) == sorted(trial.config["x"] for trial in study.trials)
    assert not [trial for trial in study.trials if trial.state == "failed"]


def test_the_best_trial_has_returned_its_value():
    """What is reported may be on another scale than what is returned."""

    def rising(trial):
        x = trial.suggest_float("x", 0, 1)
        for step in range(4):
            trial.report(x + step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x + 10

    study = optimized(rising, n_trials=8, max_epochs=4)
    ended = [trial for trial in study.trials if trial.epochs == 4]
    assert len(ended) < 8
    assert study.best_trial.value == min(trial.value for trial in ended) >= 10


def test_what_torch_keeps_for_a_thread_is_that_of_the_caller():
    seen = []

    def looks(trial):
        trial.suggest_float("x", 0, 1)
        seen.append((torch.is_grad_enabled(), torch.empty(1).device.type, VARIABLE.get()))
        return 1.0

    run = ObjectiveRun(
        looks, th.HyperParameters({"x": 1}), name="looks", seed=0, device=torch.device("cpu")
    )
    token = VARIABLE.set("mine")
    torch.set_default_device("meta")
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            run.advance(to_end=True)
    finally:
        torch.set_default_device(None)
        VARIABLE.reset(token)
    assert seen == [(False, "meta", "mine")]
    optimized(looks, n_trials=1, space=th.Space(x=th.Float(0, 1)))
    assert seen[-1] == (True, "cpu", None)


VARIABLE = contextvars.ContextVar("variable", default=None)


def test_choices_are_the_objects_that_were_given():
    hidden = [[64], [64, 32], None, True, 1]

    def nested(trial):
        found = trial.suggest_categorical("hidden", hidden)
        assert any(found is each for each in hidden)
        return 1.0

    study = optimized(nested, n_trials=8, space=th.Space(hidden=th.Choice(hidden)))
    assert not [trial.error for trial in study.trials if trial.state == "failed"]


def test_whole_numbers_may_be_floats():
    def lenient(trial):
        return trial.suggest_int("n", 1.0, 9.0, step=2.0) + trial.suggest_int("m", 3.0, 3.0)

    study = optimized(lenient)
    assert repr(study.space) == repr(th.Space(n=th.Int(1, 9, step=2), m=th.Choice([3])))


def test_few_runs_look_for_the_suggestions(tmp_path):
    calls = tmp_path / "calls"

    def writes(trial):
        with calls.open("a") as file:
            file.write("called\n")
        kind = trial.suggest_categorical("kind", ["a", "b", "c"])
        if kind == "a":
            trial.suggest_int("depth", 1, 64)
        trial.suggest_categorical("many", [str(i) for i in range(20_000)])
        return trial.suggest_float("lr", 1e-5, 1, log=True)

    study = optimized(writes, n_trials=3, sampler=th.RandomSampler())
    assert not [trial.error for trial in study.trials if trial.state == "failed"]
    assert len(calls.read_text().split()) == 3 + 3


def test_a_failure_after_the_suggestions_is_one_of_trials():
    def fragile(trial):
        trial.suggest_float("x", 0, 1)
        raise RuntimeError("later")

    study = optimized(fragile, n_trials=2)
    assert all("later" in trial.error for trial in study.trials)


def test_what_no_process_can_get_is_said():
    lock = threading.Lock()

    def locked(trial):
        with lock:
            return trial.suggest_float("x", 0, 1)

    with pytest.raises(TaskError, match="give the study a space"):
        optimized(locked)


def test_a_run_that_is_interrupted_ends_at_its_next_report(monkeypatch):
    steps = []

    def endless(trial):
        for step in range(10**6):
            steps.append(step)
            trial.report(1.0, step)

    run = ObjectiveRun(
        endless, th.HyperParameters({"x": 1}), name="endless", seed=0, device=torch.device("cpu")
    )
    run.advance(to_end=False)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._call._paused, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.advance(to_end=True)
    run._call._thread.join(30)
    assert run.has_ended
    assert len(steps) < 10**6


def test_more_and_fewer_reports_than_epochs():
    def several(trial):
        num = trial.suggest_int("num", 1, 8)
        for step in range(num):
            trial.report(step, step)
            trial.report(100.0, step)  # Optuna ignores it, too
        return -num

    study = optimized(
        several,
        n_trials=8,
        max_epochs=4,
        prune=False,
        sampler=th.GridSampler(),
        space=th.Space(num=th.Int(1, 8)),
    )
    for trial in study.trials:
        num = trial.config["num"]
        assert trial.value == -num
        assert trial.curve == (*range(min(num, 3)), *[-num] * (4 - min(num, 3)))


def test_user_attributes_that_are_numbers_are_metrics():
    def counted(trial):
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("size", 3)
        trial.set_user_attr("text", "t")
        assert trial.user_attrs == {"size": 3, "text": "t"}
        assert trial.params == {"x": x}
        return x

    study = optimized(counted)
    assert not [trial for trial in study.trials if trial.state == "failed"]


def test_old_names_of_suggestions():
    def old(trial):
        return (
            trial.suggest_uniform("a", 0, 1)
            + trial.suggest_loguniform("b", 1e-3, 1)
            + trial.suggest_discrete_uniform("c", 0, 1, 0.25)
            + trial.suggest_float("d", 2.0, 2.0)
            + trial.suggest_int("e", 3, 3)
        )

    study = optimized(old)
    assert repr(study.space) == repr(
        th.Space(
            a=th.Float(0, 1),
            b=th.Float(1e-3, 1, log=True),
            c=th.Float(0, 1, step=0.25),
            d=th.Choice([2.0]),
            e=th.Choice([3]),
        )
    )


def test_conditions_are_found():
    def conditional(trial):
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            return trial.suggest_float("x", 0, 1)
        return sum(trial.suggest_int(f"n{i}", 1, 100) for i in range(trial.suggest_int("d", 1, 3)))

    study = optimized(conditional, n_trials=20)
    assert not [trial for trial in study.trials if trial.state == "failed"]
    for trial in study.trials:
        assert trial.value == of_optuna(conditional, trial.config)
        assert ("x" in trial.config) == (trial.config["kind"] == "a")


def test_what_is_suggested_late_is_drawn_and_said(caplog):
    def late(trial):
        x = trial.suggest_float("x", 0, 1)
        trial.report(x, 0)
        return x + trial.suggest_float("late", 1, 2)

    _objective._SAID.clear()
    study = optimized(late)
    assert not [trial for trial in study.trials if trial.state == "failed"]
    assert all(1 <= trial.value <= 3 for trial in study.trials)
    assert len({trial.value - trial.config["x"] for trial in study.trials}) == 6
    assert [r for r in caplog.records if "'late'" in r.getMessage()]


def test_a_failing_trial_does_not_end_the_study():
    def fragile(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        if x > 0.5:
            raise ValueError(f"too large: {x}")
        return x

    study = optimized(fragile, n_trials=10, sampler=th.RandomSampler())
    states = {trial.state for trial in study.trials}
    assert states == {"done", "failed"}
    failed = [trial for trial in study.trials if trial.state == "failed"]
    assert all("too large" in trial.error for trial in failed)


def test_an_error_that_is_not_caught_ends_the_study():
    def fragile(trial):
        if trial.suggest_float("x", 0.0, 1.0) > 0.5:
            raise ValueError("too large")
        return 1.0

    with pytest.raises(StateError, match=r"raised ValueError: too large.*catch="):
        optimized(fragile, n_trials=10, catch=KeyError, sampler=th.RandomSampler())
    optimized(fragile, n_trials=10, catch=(KeyError, ValueError), sampler=th.RandomSampler())


def test_objectives_that_prune_themselves_fail():
    def unsure(trial):
        if trial.suggest_float("x", 0.0, 1.0) > 0.5:
            raise optuna.TrialPruned
        return 1.0

    study = optimized(unsure, n_trials=10, sampler=th.RandomSampler())
    assert {trial.state for trial in study.trials} == {"done", "failed"}
    assert "pruned itself" in next(t.error for t in study.trials if t.state == "failed")


def test_values_that_are_no_numbers():
    def nothing(trial):
        trial.suggest_float("x", 0, 1)

    study = optimized(nothing, n_trials=2)
    assert all("returns None; give a number" in trial.error for trial in study.trials)

    def report(trial):
        trial.suggest_float("x", 0, 1)
        trial.report("high", 0)

    study = optimized(report, n_trials=2, space=th.Space(x=th.Float(0, 1)))
    assert all("trial.report('high', ...)" in trial.error for trial in study.trials)


def test_what_an_exit_does():
    def leaves(trial):
        trial.suggest_float("x", 0, 1)
        raise SystemExit(3)

    study = optimized(leaves, n_trials=2, space=th.Space(x=th.Float(0, 1)))
    assert all("raise an Exception" in trial.error for trial in study.trials)


def test_ranges_that_depend_on_answers_are_refused():
    def moving(trial):
        high = trial.suggest_int("high", 1, 3)
        return trial.suggest_float("x", 0, high)

    with pytest.raises(th.SpaceError, match=r"'x' from .* for some answers"):
        optimized(moving)
    study = optimized(
        moving, space=th.Space(high=th.Int(1, 3), x=th.Float(2.0, 3)), sampler=th.RandomSampler()
    )
    failed = [trial for trial in study.trials if trial.config["high"] < trial.config["x"]]
    assert failed
    assert all("differs from that found when the space was inferred" in t.error for t in failed)

    def twice(trial):
        trial.suggest_float("x", 0, 1)
        return trial.suggest_float("x", 0, 2)

    study = optimized(twice, n_trials=2)
    assert all("twice with different values" in trial.error for trial in study.trials)


def test_attributes_that_optuna_has_and_thrifty_does_not():
    def curious(trial):
        trial.suggest_float("x", 0, 1)
        return trial.datetime_start

    study = optimized(curious, n_trials=2, space=th.Space(x=th.Float(0, 1)))
    assert all("trial.datetime_start is not among" in trial.error for trial in study.trials)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "minimize"),
        ({"catch": 3}, "exception class"),
        ({"catch": (ValueError, int)}, "exception class"),
        ({"n_trials": 0}, "n_trials=0"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"timeout": -1}, "seconds"),
        ({"sampler": 3}, "sampler"),
        ({"enqueue": [{"y": 1}]}, "y"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(th.ThriftyError, match=message):
        optimized(square, **options)
    with pytest.raises(UsageError, match="function of a trial"):
        optimized(3)


def test_objectives_that_fail_or_suggest_nothing():
    def broken(trial):
        raise RuntimeError("no data")

    with pytest.raises(TaskError, match=r"fails before .*RuntimeError: no data"):
        optimized(broken)

    def constant(trial):
        return 1.0

    with pytest.raises(th.SpaceError, match="suggests nothing"):
        optimized(constant)


def test_an_objective_is_asked_no_longer_than_it_suggests(tmp_path):
    """The run that trains for hours is ended; one that needs longer to suggest is waited for."""
    mark = tmp_path / "trained"

    def slow(trial):
        time.sleep(0.5)
        trial.suggest_float("x", 0, 1)
        time.sleep(60)
        mark.touch()

    asker = ObjectiveAsker(slow, name="slow")
    began = time.monotonic()
    assert [name for name, _, _ in asker.suggested({})] == ["x"]
    assert [name for name, _, _ in asker.suggested({})] == ["x"]
    assert time.monotonic() - began < 30
    assert not mark.exists()


def test_an_objective_that_suggests_nothing_in_time(monkeypatch):
    monkeypatch.setattr(_exploration_main, "FIRST_S", 0.3)
    with pytest.raises(TaskError, match="has suggested nothing in"):
        ObjectiveAsker(lambda trial: time.sleep(60), name="late").suggested({})


def test_how_a_run_that_looks_for_suggestions_ends():
    def ended_by(what):
        def objective(trial):
            trial.suggest_float("x", 0, 1)
            return what(trial)

        return ObjectiveAsker(objective, name="ends").suggested({"x": 0.5})

    def prunes(trial):
        assert not trial.should_prune()
        raise optuna.TrialPruned

    def fails(trial):
        raise ValueError

    expected = [("x", th.Float(0, 1), 0.5)]
    for what in (lambda trial: 1.0, lambda trial: trial.report(1.0, 0), prunes, fails, _exits):
        assert repr(ended_by(what)) == repr(expected)


def _exits(trial):
    os._exit(3)


def test_a_study_goes_on_where_it_was_stopped(tmp_path):
    url = f"sqlite:///{tmp_path}/o.db"
    optimized(square, n_trials=3, storage=url)
    study = optimized(square, n_trials=8, storage=url)
    assert len(study.trials) == 8
    assert study.savings.unique_epochs == 8


def test_a_run_that_was_stopped_half_way_begins_again(tmp_path):
    """An objective has no state: what had begun is trained from its start, with the same value."""
    url = f"sqlite:///{tmp_path}/o.db"

    options = {"max_epochs": 9, "prune": False, "storage": url, "n_trials": 2}
    slow = th.Space(x=th.Float(0.1, 1.0))
    study = optimized(curve, timeout=1e-6, space=slow, **options)
    study = optimized(curve, space=slow, **options)
    assert all(trial.epochs == 9 for trial in study.trials)
    for trial in study.trials:
        assert trial.value == of_optuna(curve, trial.config)


def test_workers_and_a_main_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import time

            import optuna
            import thrifty as th


            def objective(trial):
                x = trial.suggest_float("x", 0, 1)
                with open("calls", "a") as file:
                    file.write("called\\n")
                for step in range(9):
                    time.sleep(0.02)
                    trial.report(x + 1 / (step + 1), step)
                    if trial.should_prune():
                        raise optuna.TrialPruned
                return x + 1 / 9


            if __name__ == "__main__":
                study = th.optimize(
                    objective,
                    n_trials=8,
                    max_epochs=9,
                    space=th.Space(x=th.Float(0, 1)),
                    executor=th.Local(workers=2),
                    progress=False,
                )
                done = [trial for trial in study.trials if trial.epochs == 9]
                assert all(t.value == t.config["x"] + 1 / 9 for t in done)
                print(len(study.trials), len(done) > 0, study.best_trial.epochs)
        """)
    )
    code, printed = run_script(program)
    assert code == 0, printed
    assert printed.split() == ["8", "True", "9"]
    # A trial goes on in the worker that has begun it.
    assert len((tmp_path / "calls").read_text().split()) == 8


def reporting(trial):
    for step in range(9):
        trial.report(1.0, step)
    return 1.0


def test_runs_that_wait_are_few():
    runs = []
    for i in range(MAX_WAITING + 2):
        run = ObjectiveRun(
            reporting,
            th.HyperParameters({"x": i}),
            name="waits",
            seed=0,
            device=torch.device("cpu"),
        )
        run.advance(to_end=False)
        runs.append(run)
        _objective.WAITING.keep(run)
    assert len(_objective.WAITING) == MAX_WAITING
    assert [run.has_ended for run in runs] == [True] * 2 + [False] * MAX_WAITING
    _objective.WAITING.end_all()
    assert all(run.has_ended for run in runs)


def test_a_run_that_does_not_end_is_said(monkeypatch, caplog):
    monkeypatch.setattr(_loop_trial, "END_S", 0.01)
    release = threading.Event()

    def busy(trial):
        trial.report(1.0, 0)
        trial.should_prune()
        trial.report(1.0, 1)
        release.wait(10)
        return 1.0

    run = ObjectiveRun(
        busy, th.HyperParameters({"x": 1}), name="busy", seed=0, device=torch.device("cpu")
    )
    run.advance(to_end=False)
    run.advance(to_end=False)
    run.stop()
    assert "goes on in the background" in caplog.text
    release.set()
    run._call._thread.join(10)
    assert run.has_ended


def test_stopping_asha_decides_at_once():
    algorithm = StoppingASHA(max_epochs=9, num_trials=9)
    space, history = th.Space(x=th.Float(0, 1)), History()
    rng = np.random.default_rng(0)
    while True:
        decisions = algorithm.ask(history, space, num=1, rng=rng)
        if not decisions:
            break
        for decision in decisions:
            number = history.record_decision(decision)
            if not isinstance(decision, Stop):
                history.record_scores(number, [float(-number % 5)] * decision.target)
    assert len(history) == 9
    assert {trial.state for trial in history} <= {"stopped", "waiting"}
    assert all(t.reached == 9 for t in history if t.state == "waiting")
    assert history[0].reached == 9


def test_epochs_of_stopped_trials_are_counted_together():
    def said(*epochs):
        trials = [
            TrialResult(number=0, config={}, state="stopped", epochs=each, value=None, curve=())
            for each in epochs
        ]
        return what_would_be_shared(trials, max_epochs=6).partition(" An objective")[0]

    assert said(1, 3, 6) == "2 trials were stopped, after 4 epochs in all, and cannot go on."
    assert said(3, 6) == "1 trial was stopped, after 3 epochs, and cannot go on."
    assert said(6).startswith("An objective")


def test_another_function_of_the_same_name_needs_a_name(tmp_path):
    storage = f"sqlite:///{tmp_path}/t.db"
    optimized(square, n_trials=2, storage=storage)

    def other(trial):
        return trial.suggest_float("y", 0.0, 1.0)

    other.__name__ = other.__qualname__ = "square"
    with pytest.raises(StudyMismatchError) as raised:
        optimized(other, n_trials=2, storage=storage)
    assert str(raised.value).startswith("th.optimize names its study after the function, and a ")
    assert 'th.optimize(square, name="NAME", ...)' in str(raised.value)
    assert "has a different study" in str(raised.value)
    with pytest.raises(StudyMismatchError, match=r"^sqlite:.* has a different study 'square'"):
        optimized(other, n_trials=2, storage=storage, name="square")
    numbers = {"n_trials": np.int32(2), "max_epochs": np.int64(1)}
    assert len(optimized(other, **numbers, storage=storage, name="mine").trials) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": None}, r"optimize\(max_epochs=None\): give a whole .* how often a trial"),
        ({"max_epochs": 0}, r"optimize\(max_epochs=0\): give a whole number, 1 or more"),
        ({"max_epochs": True}, r"optimize\(max_epochs=True\): give a whole number"),
        ({"n_trials": None}, r"optimize\(n_trials=None\): give a whole .* and timeout="),
    ],
)
def test_numbers_of_trials_and_reports(options, message):
    with pytest.raises(UsageError, match=message):
        optimized(square, **options)


def test_an_argument_of_optuna_has_advice():
    with pytest.raises(TypeError, match=r"optimize\(\) has no argument 'n_jobs'; write executor="):
        optimized(square, n_jobs=2)
