"""Studies with Auto: the choice is made once, told, recorded and kept."""

import logging

import pytest

import thrifty as th
from thrifty.core import StudyMismatchError
from thrifty.search import Auto, CheckedASHA, CheckedBOSS, WideBOSS, _auto_algorithm
from thrifty.store import Store
from thrifty.testing import LineTask


SPACE = th.Space(lr=th.Float(0.01, 0.1), scale=th.Float(0.5, 1.0))


def study(tmp_path, **options):
    auto = {"max_epochs": 9, "num_trials": 6, **options}
    return th.Study(
        LineTask(),
        SPACE,
        algorithm=auto.pop("algorithm", None) or Auto(**auto),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="line",
    )


def started(tmp_path, *, workers, **options):
    """Return a study that was stopped after its first epochs."""
    found = study(tmp_path, workers=workers, **options)
    return found.run(stop=th.StopWhen(epochs=2), progress=False)


def spec_of(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        return store.studies.get("line").spec


def test_a_resumed_study_keeps_its_choice_with_other_workers(tmp_path):
    assert isinstance(started(tmp_path, workers=8).algorithm, CheckedASHA)
    resumed = study(tmp_path, workers=1).run(progress=False)
    assert resumed.algorithm == CheckedASHA(max_epochs=9, num_trials=6)
    assert len(resumed.trials) == 6


@pytest.mark.parametrize("workers", [1, 8])
def test_a_study_of_an_older_version_goes_on_with_its_choice(tmp_path, monkeypatch, workers):
    reason = "one worker trains one round after the other"
    with monkeypatch.context() as older:
        older.setattr(_auto_algorithm, "_rule", lambda *_, **__: ("WideBOSS", reason))
        _auto_algorithm._chosen.cache_clear()
        stopped = started(tmp_path, workers=1)
    _auto_algorithm._chosen.cache_clear()
    assert spec_of(tmp_path)["auto"] == {"choice": "WideBOSS", "reason": reason}
    before = [trial.config for trial in stopped.trials]
    resumed = study(tmp_path, workers=workers)
    assert f"Auto has chosen WideBOSS: {reason}" in str(resumed.plan(memory=False))
    resumed.run(progress=False)
    assert type(resumed.algorithm) is WideBOSS
    assert spec_of(tmp_path)["auto"]["choice"] == "WideBOSS"
    assert [trial.config for trial in resumed.trials[: len(before)]] == before
    given = study(tmp_path / "given", algorithm=WideBOSS(max_epochs=9, num_trials=6))
    assert [(t.config, t.epochs) for t in given.run(progress=False).trials] == [
        (t.config, t.epochs) for t in resumed.trials
    ]


def test_the_executor_says_for_how_many_workers(tmp_path):
    found = study(tmp_path).run(executor=th.Local(workers=2), progress=False)
    assert found.algorithm == CheckedASHA(max_epochs=9, num_trials=6)


def test_a_plan_pins_nothing_and_shows_the_recorded_choice(tmp_path):
    assert "Auto has chosen CheckedBOSS: one worker" in str(study(tmp_path).plan(memory=False))
    started(tmp_path, workers=8)
    assert "Auto has chosen CheckedASHA: 8 workers" in str(study(tmp_path).plan(memory=False))
    study(tmp_path).run(progress=False)
    assert "Auto has chosen CheckedASHA: 8 workers" in str(study(tmp_path).plan(memory=False))


def test_the_choice_is_recorded_and_told(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="thrifty"):
        started(tmp_path, workers=8)
    reason = "8 workers never wait for each other"
    assert f"study 'line': Auto has chosen CheckedASHA: {reason}" in caplog.text
    spec = spec_of(tmp_path)
    assert spec["auto"] == {"choice": "CheckedASHA", "reason": reason}
    assert spec["algorithm"] == repr(CheckedASHA(max_epochs=9, num_trials=6))


def test_the_choice_is_printed_beside_the_progress_bar(tmp_path, capsys):
    study(tmp_path).run()
    assert "study 'line': Auto has chosen CheckedBOSS: one worker" in capsys.readouterr().err


def test_the_chosen_algorithm_may_be_written_out_later(tmp_path):
    chosen = started(tmp_path, workers=8).algorithm
    assert len(study(tmp_path, algorithm=chosen).run(progress=False).trials) == 6


def test_a_study_of_a_given_algorithm_is_another_one(tmp_path):
    study(tmp_path, algorithm=CheckedASHA(max_epochs=9, num_trials=6)).run(progress=False)
    with pytest.raises(StudyMismatchError, match=r"algorithm was 'CheckedASHA.* and is 'Auto"):
        study(tmp_path).run(progress=False)


def test_two_processes_that_choose_differently_have_one_choice(tmp_path, monkeypatch):
    late = study(tmp_path, workers=1)
    make = type(late._repository()).make

    def made_meanwhile(*args, **kwargs):
        monkeypatch.undo()
        started(tmp_path, workers=8)
        return make(*args, **kwargs)

    monkeypatch.setattr(type(late._repository()), "make", made_meanwhile)
    assert isinstance(late.run(progress=False).algorithm, CheckedASHA)


def test_more_trials_and_epochs_go_on_as_with_the_chosen_algorithm(tmp_path):
    started(tmp_path, workers=8).run(progress=False)
    longer = study(tmp_path, max_epochs=27, num_trials=8).run(progress=False)
    assert longer.algorithm == CheckedASHA(max_epochs=27, num_trials=8)
    assert longer.best_trial.epochs == 27
    assert str(longer.plan(memory=False)).startswith("8 trials")


def test_why_not_longer_is_that_of_the_chosen_algorithm(tmp_path):
    started(tmp_path, workers=1)
    with pytest.raises(StudyMismatchError, match="CheckedBOSS may have decided otherwise"):
        study(tmp_path, max_epochs=27).run(progress=False)


def test_a_stored_study_can_be_extended(tmp_path):
    study(tmp_path, workers=8).run(progress=False)
    study(tmp_path).extend(max_epochs=27)
    assert study(tmp_path).as_stored().run(progress=False).best_trial.epochs == 27


def test_a_simulation_chooses_for_its_workers(tmp_path):
    one, eight = (study(tmp_path).simulate(workers=num, epoch_s=1.0) for num in (1, 8))
    given = study(tmp_path, algorithm=CheckedBOSS(max_epochs=9, num_trials=6))
    assert one.busy_s == given.simulate(workers=1, epoch_s=1.0).busy_s
    given = study(tmp_path, algorithm=CheckedASHA(max_epochs=9, num_trials=6))
    assert eight.busy_s == given.simulate(workers=8, epoch_s=1.0).busy_s


def test_an_enqueued_trial_is_the_first(tmp_path):
    found = study(tmp_path)
    found.enqueue_trial({"lr": 0.05, "scale": 0.7})
    assert found.run(progress=False).trials[0].config == {"lr": 0.05, "scale": 0.7}
