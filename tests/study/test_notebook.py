"""What a notebook shows of a study, its forecast, its trials and its plots."""

from __future__ import annotations

import builtins
import logging
import re
from html.parser import HTMLParser

import pytest

from tests.study.helpers import SOLO, Sized, StopAfter, make_study
from tests.study.synthetic import trials_of
from thrifty.core import StoreUnreachableError, UsageError
from thrifty.search import GridSearch, Hyperband, RandomSearch, SuccessiveHalving
from thrifty.space import Choice, Float, Space, Step
from thrifty.store import Store
from thrifty.study import Storage, _session
from thrifty.study._reader import Trials
from thrifty.study._results import MAX_ROWS
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


SMALL = Space(lr=Choice([0.1, Step(0.1, [2])]))
TWO = {"task": Sized(), "metric": ["mse", "size"], "mode": ["min", "min"]}


class Page(HTMLParser):
    """The texts of a fragment; closing tags must match opening ones."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    @property
    def facts(self) -> dict[str, str]:
        return {row[0]: "".join(row[1:]) for row in self.rows}


def page(value) -> Page:
    return Page(value._repr_html_())


def failing(error: str) -> LineTask:
    class Fails(LineTask):
        def loss(self, model, batch):
            raise ValueError(error)

    return Fails()


# -- a study ---------------------------------------------------------------------------


def test_a_study_that_has_not_run_is_shown_and_nothing_is_created(tmp_path):
    facts = page(make_study(tmp_path)).facts
    assert facts["state"] == "not run yet"
    assert facts["metric"] == "mse (min)"
    assert "GridSearch(max_epochs=6" in facts["algorithm"]
    assert not list(tmp_path.iterdir())


def test_a_study_that_is_done_shows_its_best_trial_and_its_savings(tmp_path):
    study = make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)
    facts, best = page(study).facts, study.best_trial
    assert facts["state"] == "done"
    assert facts["trials"] == "2 trials: 2 done"
    assert facts["best"] == f"mse {best.value:.6g}, trial {best.number} at epoch 6"
    assert facts["lr"] == str(best.config["lr"])
    assert facts["savings"] == str(study.savings)


def test_a_study_shows_where_it_stands_while_it_runs_and_when_it_was_stopped(tmp_path):
    study, other, seen = make_study(tmp_path), make_study(tmp_path), []

    class Look:
        def on_event(self, event):
            seen.append((page(study).facts, page(other).facts))

    study.run(progress=False, executor=SOLO, observers=[StopAfter(6), Look()])
    assert {here["state"] for here, _ in seen} == {"running"}
    assert {elsewhere["state"] for _, elsewhere in seen} == {"running"}
    assert any(" running" in here["trials"] for here, _ in seen)
    assert page(other).facts["state"] == "stopped; run it again to go on"


@pytest.mark.parametrize("storage", ["sqlite://", None], ids=["memory", "file"])
def test_a_study_without_a_best_trial_says_why(tmp_path, storage):
    options = {} if storage is None else {"storage": storage}
    study = make_study(tmp_path, space=SMALL, task=failing("<no>\nmore"), **options)
    facts = page(study.run(progress=False, executor=SOLO)).facts
    assert facts["trials"] == "2 trials: 2 failed"
    assert "has no results, because all trials that ended have failed: " in facts["best"]
    assert "<no>" in facts["best"]


def test_several_objectives_show_the_pareto_front(tmp_path):
    study = make_study(tmp_path, **TWO).run(progress=False, executor=SOLO)
    found = page(study)
    assert found.facts["metric"] == "mse (min), size (min)"
    assert found.facts["best"] == "the Pareto front"
    head = ["trial", "state", "epochs", "mse", "size", "lr", "width", "dropout"]
    start = found.rows.index(head) + 1
    numbers = [int(row[0]) for row in found.rows[start:]]
    assert sorted(numbers) == [trial.number for trial in study.best_trials]


def test_constraints_are_shown(tmp_path):
    study = make_study(tmp_path, task=Sized(), space=SMALL, constraints={"size": 1})
    assert page(study).facts["constraints"] == "size at most 1"
    facts = page(study.run(progress=False, executor=SOLO)).facts
    assert "no trial of study 's' is feasible" in facts["best"]
    assert page(study.trials).rows[0][:5] == ["trial", "state", "epochs", "mse", "violation"]


def test_a_password_is_not_shown(tmp_path):
    study = make_study(tmp_path, storage="postgresql+psycopg://me:secret99@127.0.0.1:1/x")
    text = study._repr_html_()
    assert "secret99" not in text
    assert "postgresql+psycopg://me:***@127.0.0.1:1/x" in text


@pytest.mark.parametrize("address", ["thrifty.db", "postgresql+psycopg://host:secret99/x"])
def test_what_is_no_database_address_is_said_as_by_a_run(tmp_path, address):
    study = make_study(tmp_path, storage=address)
    with pytest.raises(UsageError) as raised:
        study.run(progress=False)
    assert page(study).facts["state"] == f"cannot be read: {raised.value}"
    assert "secret99" not in study._repr_html_()


def test_a_database_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "t.db").write_text("this is no database, but it is long enough to be read as one")
    assert page(make_study(tmp_path)).facts["state"].startswith("cannot be read: ")


def test_a_different_study_of_the_same_name_is_not_shown_as_this_one(tmp_path):
    make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)
    facts = page(make_study(tmp_path)).facts
    assert "has a different study 's'" in facts["state"]
    assert "best" not in facts


def test_a_database_that_does_not_answer_leaves_what_was_read(tmp_path, monkeypatch):
    study = make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)

    def away(*args, **options):
        raise StoreUnreachableError("no server answers")

    monkeypatch.setattr(Store, "open", away)
    facts = page(study).facts
    assert facts["state"] == "unknown; its database does not answer"
    assert facts["trials"] == "2 trials: 2 done"


def test_what_a_user_wrote_is_escaped_and_cut(tmp_path):
    space = Space(lr=0.1, note=Choice(["<script>\x1b[31m", "a" * 10_000]))
    study = make_study(tmp_path, space=space, name="<b>&\x07")
    study.run(progress=False, executor=SOLO)
    for text in (study._repr_html_(), study.trials._repr_html_()):
        assert "<script>" not in text
        assert "<b>" not in text
        assert "\x1b" not in text
        assert len(text) < 10_000
    assert r"<script>\x1b[31m" in {cell for row in page(study.trials).rows for cell in row}


# -- trials ----------------------------------------------------------------------------


def many(num: int, **options) -> Trials:
    trials = trials_of(Space(lr=Float(0.1, 1.0)), lambda config, rng: config["lr"], num=num)
    goals = make_study("", **options).goals
    return Trials(trials, goals=goals)


def test_trials_show_the_ten_best_and_how_to_get_all():
    trials = many(134)
    found = page(trials)
    assert len(found.rows) == 1 + MAX_ROWS
    best = sorted(trials, key=lambda t: t.value)[:MAX_ROWS]
    assert [int(row[0]) for row in found.rows[1:]] == [t.number for t in best]
    text = trials._repr_html_()
    assert "… and 124 more: list(study.trials) or study.trials_dataframe()" in text
    assert "134 trials: 134 done, best mse first" in text


def test_trials_are_a_list(tmp_path):
    study = make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)
    assert study.trials == list(study.trials)
    assert [trial.number for trial in study.trials[:1]] == [0]
    assert isinstance(study.trials, list)


def test_failed_trials_come_last_with_their_error(tmp_path):
    class Some(LineTask):
        def model(self, hp):
            if hp.width == 4:
                raise ValueError("too <wide>")
            return super().model(hp)

    study = make_study(tmp_path, space=Space(lr=0.1, width=Choice([4, 0])), task=Some())
    study.run(progress=False, executor=SOLO)
    rows = page(study.trials).rows
    assert [row[0] for row in rows[1:]] == ["1", "0"]
    assert "too <wide>" in rows[2][1]
    failed = page(study.trials[0])
    assert "too <wide>" in failed.facts["error"]
    assert "Traceback" in study.trials[0]._repr_html_()
    assert ("details", {}) in failed.tags
    assert "\n" not in str(study.trials[0])
    assert "too <wide>" in str(study.trials[0])


def test_a_trial_is_printed_in_one_line(tmp_path):
    study = make_study(tmp_path, space=SMALL, algorithm=GridSearch(max_epochs=3))
    best = study.run(executor=SOLO, progress=False).best_trial
    assert re.fullmatch(r"trial [01]: done after 3 epochs, mse=\S+, lr=.+", str(best))
    shown = str(best).split("mse=")[1].split(",")[0]
    assert float(shown) == pytest.approx(best.values["mse"], rel=1e-2)


def test_many_hyper_parameters_are_counted_not_shown(tmp_path):
    names = {f"h{i}": float(i) for i in range(40)}
    study = make_study(tmp_path, space=Space(lr=Choice([0.1, 0.02]), **names))
    study.run(progress=False, executor=SOLO)
    assert "… and 33 more hyper-parameters: trial.config" in study.trials._repr_html_()
    assert "… and 21 more hyper-parameters: study.best_trial.config" in study._repr_html_()
    assert "… and 21 more hyper-parameters: trial.config" in study.best_trial._repr_html_()


def test_tables_name_their_columns_and_set_no_colours(tmp_path):
    study = make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)
    for value in (study, study.trials, study.best_trial):
        tags = page(value).tags
        assert {attrs["scope"] for tag, attrs in tags if tag == "th"} <= {"row", "col"}
        assert any(tag == "caption" for tag, _ in tags)
        styles = " ".join(attrs.get("style", "") for _, attrs in tags)
        assert set(re.findall(r"[a-z-]*color:\w+|background", styles)) <= {"color:inherit"}


# -- the forecast ------------------------------------------------------------------------


def test_a_forecast_shows_its_text_everywhere(tmp_path):
    forecast = make_study(tmp_path).plan()
    assert repr(forecast) == str(forecast)
    text = forecast._repr_html_()
    assert text.count("<li>") == len(str(forecast).splitlines())


def test_numbers_that_depend_on_made_up_results_are_called_estimates(tmp_path):
    study = make_study(tmp_path, algorithm=Hyperband(max_epochs=6, eta=2))
    first, unique, rate, last = str(study.plan()).splitlines()
    assert re.fullmatch(r"[\d,]+ trials, about [\d,]+ trial-epochs", first)
    assert re.fullmatch(r"about [\d,]+ unique epochs to train \(.* in simulations\)", unique)
    assert re.fullmatch(r"merge rate about .*: sharing saves about \d+% of the .*", rate)
    assert last == "estimate: the algorithm reacts to results, so thrifty simulated them"


def test_the_rest_of_a_study_that_was_stopped_is_an_estimate(tmp_path):
    study = make_study(tmp_path, algorithm=Hyperband(max_epochs=6, eta=2))
    study.run(progress=False, executor=SOLO, observers=[StopAfter(3)])
    known, time, _ = str(study.plan()).splitlines()[3:]
    assert re.fullmatch(r"about \d+ epochs known already: about \d+ left to train", known)
    assert time.startswith("forecast: about ")


def test_which_epochs_made_up_results_ask_for_is_an_estimate(tmp_path):
    one = Space(lr=Choice([0.1]))
    make_study(tmp_path, space=one).run(progress=False, executor=SOLO)
    halving = SuccessiveHalving(max_epochs=6, num_trials=4, eta=2)
    rates = Space(lr=Float(0.01, 0.1))
    study = make_study(tmp_path, space=rates, algorithm=halving, name="t")
    study.enqueue_trial({"lr": 0.1})
    forecast = study.plan()
    assert forecast.exact
    assert not forecast.known_exact
    _, unique, _, why, known, time, last = str(forecast).splitlines()
    assert why.startswith("nothing shared: trials differ from epoch 1 on in lr")
    assert "about" not in unique
    assert re.match(r"about \d+ epochs known already: about \d+ left", known)
    assert time.startswith("forecast: about")  # an earlier study has timed its epochs
    assert last.startswith("estimate: ")


def test_the_plan_of_a_study_that_is_done_invents_nothing(tmp_path):
    study = make_study(tmp_path, algorithm=Hyperband(max_epochs=6, eta=2))
    study.run(progress=False, executor=SOLO)
    forecast = make_study(tmp_path, algorithm=Hyperband(max_epochs=6, eta=2)).plan()
    assert forecast.exact
    assert forecast.num_trials == len(study.trials)
    assert forecast.trial_epochs == study.savings.trial_epochs
    assert forecast.unique_epochs == forecast.known_epochs == study.savings.unique_epochs
    assert f"{forecast.known_epochs} epochs known already: nothing left to train" in str(forecast)
    assert "forecast:" not in str(forecast)


def test_the_plan_of_one_epoch_of_one_trial_has_no_plurals(tmp_path):
    study = make_study(tmp_path, space=Space(lr=Choice([0.1])), algorithm=GridSearch(max_epochs=1))
    trials, unique, _ = str(study.plan()).splitlines()
    assert (trials, unique) == ("1 trial, 1 trial-epoch", "1 unique epoch to train")
    study.run(progress=False, executor=SOLO)
    assert str(study.plan()).endswith("\n1 epoch known already: nothing left to train")


def test_a_configuration_that_was_enqueued_since_is_forecast(tmp_path):
    study = make_study(tmp_path, space=SMALL)
    study.run(progress=False, executor=SOLO)
    assert study.plan().epochs_to_train == 0
    study.enqueue_trial({"lr": 0.1})
    assert study.plan().num_trials == 3


# -- running again -----------------------------------------------------------------------


KNOWN = r"study 's': 10 of 10 epochs known from this study \(\d{4}-\d\d-\d\d\); nothing to train"


@pytest.mark.parametrize("shared", [False, True])
def test_running_a_finished_study_again_says_that_nothing_is_left(tmp_path, capsys, shared):
    storage = Storage(url=f"sqlite:///{tmp_path}/t.db", shared=shared)
    study = make_study(tmp_path, space=SMALL, storage=storage).run(progress=False)
    capsys.readouterr()
    study.run()
    assert re.fullmatch(KNOWN, capsys.readouterr().err.strip())
    study.run(progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_finished_study_whose_trials_failed_says_that_nothing_is_left(tmp_path, capsys):
    study = make_study(tmp_path, space=SMALL, task=failing("no"))
    study.run(progress=False, executor=SOLO)
    capsys.readouterr()
    study.run()
    assert "study 's': 2 of 2 trials failed; nothing to train" in capsys.readouterr().err


def test_the_log_has_the_line_where_the_terminal_has_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    study = make_study(tmp_path, space=SMALL).run(progress=False, executor=SOLO)
    study.run(progress=False)
    assert re.fullmatch(KNOWN, caplog.messages[-1])


# -- figures and progress ------------------------------------------------------------------


PLOTS = {
    "plot_learning_curves": {},
    "plot_forest": {},
    "plot_history": {},
    "plot_importance": {},
    "plot_parallel": {},
    "plot_slice": {},
    "plot_contour": {"names": ["lr", "momentum"]},
    "plot_pareto": {},
}


@pytest.fixture(scope="module")
def plotted(tmp_path_factory):
    space = Space(lr=Float(0.01, 0.1), momentum=Float(0.0, 0.9))
    folder = tmp_path_factory.mktemp("plots")
    algorithm = RandomSearch(max_epochs=2, num_trials=12)
    study = make_study(folder, space=space, algorithm=algorithm, **TWO)
    return study.run(progress=False, executor=SOLO)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_shows_itself(plotted, name):
    figure = getattr(plotted, name)(**PLOTS[name])
    assert figure._repr_png_()[1:4] == b"PNG"


def test_each_plot_is_checked(plotted):
    of_ladders = {"plot_scaling_law"}
    found = {name for name in dir(plotted) if name.startswith("plot_")}
    assert found == set(PLOTS) | of_ladders


class ZMQInteractiveShell:
    """What rich takes for a Jupyter kernel."""


def test_a_notebook_without_ipywidgets_gets_the_bar_at_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(_session, "find_spec", lambda name: None)
    make_study(tmp_path, space=SMALL).run(executor=SOLO)
    assert "10/10 unique epochs" in capsys.readouterr().err
