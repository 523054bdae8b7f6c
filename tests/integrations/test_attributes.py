"""What trials say besides their metrics belongs to epochs: shared, resumed and killed alike."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import optuna
import polars
import pytest
from sqlalchemy import create_engine, text

import thrifty as th
from tests.cli.documents import check as check_document
from tests.depth import draws
from tests.study.processes import At, die, exit_code, started
from thrifty.cli import _app
from thrifty.core import TaskError
from thrifty.integrations import optuna_storage
from thrifty.integrations.functions._exploration_main import suggested
from thrifty.space import Timeline


pytestmark = pytest.mark.slow

ONE = th.Local(threads=1)
RATES = (0.1, th.Step(0.1, [2]), th.Step(0.1, [4]), th.Step(0.1, [2, 5], gamma=0.5))


@th.trainable
def train(trial):
    """Say in each epoch which rates led here, in words; "note" is set before and in the loop."""
    lr = trial.suggest_schedule("lr", *RATES)
    width = trial.suggest_int("width", 1, 2)
    trial.set_user_attr("width", f"{width} wide")
    trial.set_user_attr("note", "new")
    state = {"seen": [], "x": 1.0}
    for epoch in trial.epochs(state):
        state["seen"].append(lr.value)
        state["x"] -= lr.value * state["x"] / width
        if epoch == 1:
            trial.set_user_attr("note", {"warm": True, "at": epoch})
        if epoch % 3 == 0:
            trial.set_user_attr("path", [f"{rate:.3g}" for rate in state["seen"]])
        yield {"loss": state["x"] ** 2}


def expected(config, reached):
    """Return the attributes of a trial that is trained alone, from the definition."""
    if not reached:
        return {}
    timeline = Timeline(config, epochs=6)
    rates = [timeline.at(epoch)["lr"] for epoch in range(reached)]
    last = 3 * ((reached - 1) // 3)
    return {
        "width": f"{config['width']} wide",
        "note": "new" if reached < 2 else {"warm": True, "at": 1},
        "path": [f"{rate:.3g}" for rate in rates[: last + 1]],
    }


def study_of(folder, *, algorithm=None, name="s", task=train, **options):
    return th.Study(
        task,
        algorithm=algorithm or th.GridSearch(max_epochs=6),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
        **options,
    )


def halving():
    return th.SuccessiveHalving(max_epochs=6, num_trials=8, eta=2)


def check(study):
    assert [t.user_attrs for t in study.trials] == [
        expected(t.config, t.epochs) for t in study.trials
    ]


def test_shared_prefixes_say_what_each_trial_alone_would(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs < study.savings.trial_epochs
    check(study)
    check(study_of(tmp_path))  # read from the database


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_goes_on_keeps_what_it_has_said(tmp_path, workers):
    # Its prologue runs again where it goes on, and sets "note" again.
    study = study_of(tmp_path, algorithm=halving())
    study.run(progress=False, executor=th.Local(workers=workers, threads=1))
    assert {t.epochs for t in study.trials} > {6}
    check(study)


def run(folder, observer=None):
    observers = [] if observer is None else [observer]
    study_of(folder, algorithm=halving()).run(progress=False, executor=ONE, observers=observers)


@pytest.mark.parametrize("count", range(4, 4 + 9 * draws(2, 5), 9))
def test_killed_and_run_again(tmp_path, count):
    child = started(run, tmp_path, At(count, die))
    assert exit_code(child) == -signal.SIGKILL
    run(tmp_path)
    check(study_of(tmp_path, algorithm=halving()))


def test_an_epoch_that_is_trained_again_keeps_its_first_attributes(tmp_path):
    run(tmp_path)
    for file in tmp_path.glob("t-checkpoints/**/*.safetensors"):
        file.unlink()
    grown = th.GridSearch(max_epochs=6)
    study = study_of(tmp_path, algorithm=grown, name="other").run(progress=False, executor=ONE)
    assert study.savings.retrained_epochs
    check(study)
    check(study_of(tmp_path, algorithm=halving()))


def test_several_seeds_show_those_of_the_first(tmp_path):
    @th.trainable
    def sown(trial):
        trial.suggest_int("width", 1, 2)
        trial.set_user_attr("seed", str(trial.seed))
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}

    study = study_of(tmp_path, task=sown, seeds=2, seed=5).run(progress=False, executor=ONE)
    assert {t.user_attrs["seed"] for t in study.trials} == {"5"}


def test_a_failed_trial_keeps_those_of_what_it_has_reached(tmp_path):
    @th.trainable
    def failing(trial):
        trial.suggest_int("width", 1, 2)
        for epoch in trial.epochs({}):
            trial.set_user_attr("epoch", [epoch])
            if epoch == 4:
                raise RuntimeError("odd")
            yield {"loss": 1.0}

    study = study_of(tmp_path, task=failing, algorithm=halving()).run(progress=False, executor=ONE)
    for trial in study.trials:
        assert trial.user_attrs == ({"epoch": [trial.epochs - 1]} if trial.epochs else {})


# -- what is refused -----------------------------------------------------------------------


def failed(task, folder):
    study = study_of(folder, task=task).run(progress=False, executor=ONE)
    return "\n".join(t.error for t in study.trials)


def test_after_the_yield_is_an_error(tmp_path):
    @th.trainable
    def late(trial):
        trial.suggest_int("width", 1, 2)
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}
            trial.set_user_attr("note", "late")

    assert "calls trial.set_user_attr('note', ...) after its yield" in failed(late, tmp_path)


def test_what_is_no_json_is_an_error_before_training(tmp_path):
    @th.trainable
    def odd(trial):
        trial.suggest_int("width", 1, 2)
        trial.set_user_attr("model", object())
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}

    with pytest.raises(TaskError, match="the value has a object"):
        suggested(odd.function, {})


def test_what_is_too_large_fails_the_trial(tmp_path):
    @th.trainable
    def large(trial):
        trial.suggest_int("width", 1, 2)
        for _epoch in trial.epochs({}):
            trial.set_user_attr("log", "a" * 100_000)
            yield {"loss": 1.0}

    assert "may take 65,536 bytes as JSON, got 100,007" in failed(large, tmp_path)


def test_what_a_function_says_where_it_ends_early(tmp_path):
    @th.trainable
    def short(trial):
        trial.suggest_int("width", 1, 2)
        state = {"n": 0}
        for epoch in trial.epochs(state):
            if state["n"] == 2:
                trial.set_user_attr("stopped", f"at {epoch}")
                return
            state["n"] += 1
            yield {"loss": 1.0 / state["n"]}

    study = study_of(tmp_path, task=short).run(progress=False, executor=ONE)
    assert [t.user_attrs for t in study.trials] == [{"stopped": "at 2"}] * 2


# -- objectives ----------------------------------------------------------------------------


def described(trial):
    x = trial.suggest_float("x", 0.0, 1.0)
    trial.set_user_attr("half", "low" if x < 0.5 else "high")
    for step in range(4):
        trial.set_user_attr("steps", [step, {"x": x}])
        trial.report(x / (step + 1), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("size", 3)
    return x


def test_objectives_keep_texts_lists_and_dicts(tmp_path):
    study = th.optimize(
        described, n_trials=9, max_epochs=4, storage=f"sqlite:///{tmp_path}/t.db", progress=False
    )
    assert any(t.epochs < 4 for t in study.trials)
    for trial in study.trials:
        x, found = trial.config["x"], trial.user_attrs
        assert found["half"] == ("low" if x < 0.5 else "high")
        assert found["steps"] == [min(trial.epochs - 1, 3), {"x": x}]
        assert found.get("size") == (3 if trial.epochs == 4 else None)
    view = optuna.load_study(study_name="described", storage=optuna_storage(study.storage.url))
    assert [
        {key: value for key, value in t.user_attrs.items() if not key.startswith("thrifty:")}
        for t in view.trials
    ] == [t.user_attrs for t in study.trials]


def test_what_an_objective_cannot_keep_fails_its_trial():
    def odd(trial):
        x = trial.suggest_float("x", 0, 1)
        trial.report(x, 0)
        trial.set_user_attr("model", object())
        return x

    study = th.optimize(odd, n_trials=2, storage="sqlite://", progress=False)
    assert {t.state for t in study.trials} == {"failed"}
    assert "trial.set_user_attr('model', ...): the value has a object" in study.trials[0].error


# -- where they are read -------------------------------------------------------------------


def test_data_frames_and_notebooks_show_them(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    frame = study.trials_dataframe()
    assert list(frame["user_attrs_width"]) == [t.user_attrs["width"] for t in study.trials]
    assert list(study.trials_dataframe(backend="polars")["user_attrs_width"]) == list(
        frame["user_attrs_width"]
    )
    assert "attribute width" in study.best_trial._repr_html_()


def test_what_is_returned_is_a_copy(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    study.best_trial.user_attrs["note"]["warm"] = False
    check(study)


def test_they_are_in_the_row_of_their_epoch(tmp_path):
    study_of(tmp_path).run(progress=False, executor=ONE)
    with create_engine(f"sqlite:///{tmp_path}/t.db").connect() as connection:
        query = "SELECT epoch, attributes FROM epochs ORDER BY node, epoch"
        rows = connection.execute(text(query)).all()
    assert {epoch for epoch, said in rows if said is not None} == {1, 2, 4}


HOSTILE = {"\x1b[31mred": "\x1b]0;title\x07", "<b>": "<script>", "long": "a" * 5_000}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    @th.trainable
    def odd(trial):
        trial.suggest_int("width", 1, 2)
        for key, value in HOSTILE.items():
            trial.set_user_attr(key, value)
        trial.set_user_attr("not finite", [float("nan"), float("inf")])
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}

    folder = tmp_path_factory.mktemp("hostile")
    study = study_of(folder, task=odd).run(progress=False, executor=ONE)
    assert "<script>" not in study.best_trial._repr_html_()
    return f"sqlite:///{folder}/t.db"


def said(capsys, *words):
    _app.main(args=list(words), standalone_mode=False)
    return capsys.readouterr().out


def test_the_best_trial_is_shown_with_them(hostile, capsys):
    out = said(capsys, "best", "s", "--storage", hostile)
    assert "attribute \\x1b[31mred = \\x1b]0;title\\x07" in out
    assert "characters left out" in out
    assert "\x1b" not in out


def test_documents_have_them(hostile, capsys):
    found = check_document(
        json.loads(said(capsys, "best", "s", "--storage", hostile, "--json")), "best"
    )
    assert found["trials"][0]["user_attrs"] == HOSTILE | {"not finite": [None, None]}


def test_exported_tables_have_them(hostile, tmp_path, capsys):
    files = [str(tmp_path / f"t.{kind}") for kind in ("csv", "json", "parquet")]
    for file in files:
        said(capsys, "export", "s", "--storage", hostile, "--out", file)
    with Path(files[0]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["user_attrs_<b>"] == "<script>"
    assert rows[0]["user_attrs_not finite"] == "[NaN, Infinity]"
    (first, _) = json.loads(Path(files[1]).read_text())
    assert first["user_attrs"] == HOSTILE | {"not finite": [None, None]}
    assert polars.read_parquet(files[2])["user_attrs_<b>"].to_list() == ["<script>"] * 2
