"""``thrifty explain``: why studies share, or do not."""

from __future__ import annotations

import pytest

from tests.cli.test_cli import thrifty
from tests.study.helpers import SOLO, SPACE, make_study
from thrifty.space import Choice, Constant, Space, Step
from thrifty.store import Store


def task(training, evaluation=None, version=3) -> dict:
    return {"version": version, "training": training, "evaluation": evaluation or {}}


STUDIES = {
    "a": ("p", task({"function f": "#1", "attribute x": "1"}, {"function m": "#5"}), 0),
    "same": ("p", task({"function f": "#1", "attribute x": "1"}, {"function m": "#5"}), 0),
    "metrics": ("q", task({"function f": "#1", "attribute x": "1"}, {"function m": "#6"}), 0),
    "training": ("r", task({"function f": "#2", "attribute x": "2", "class C": "#3"}), 0),
    "seed": ("s", task({"function f": "#1", "attribute x": "1"}, {"function m": "#5"}), 1),
    "version": ("t", task({"function f": "#1", "attribute x": "1"}, {"function m": "#5"}, 4), 0),
    "old": ("u", {"class": "A", "source": "1"}, 0),
    "older": ("v", {"class": "A", "source": "2"}, 0),
}


@pytest.fixture
def url(tmp_path):
    address = f"sqlite:///{tmp_path}/t.db"
    with Store.open(address) as store:
        for name, (plan, content, seed) in STUDIES.items():
            made = store.plans.open(plan, task="T").id
            store.studies.create(name, plan=made, spec={"task": content, "seed": seed})
    return address


@pytest.fixture
def explain(url, monkeypatch, capsys):
    def said(*names: str, fails: bool = False) -> str:
        thrifty("explain", *names, "--storage", url, monkeypatch=monkeypatch, fails=fails)
        streams = capsys.readouterr()
        return streams.err if fails else streams.out

    return said


def test_studies_of_one_plan(explain):
    assert explain("a", "same") == (
        "studies 'a' and 'same' have one search plan: what their trials have in common is trained "
        "once; so far they have no epochs in common\n"
    )


def test_how_many_epochs_studies_of_one_plan_have_in_common(tmp_path, monkeypatch, capsys):
    short = Space(lr=Choice([Constant(0.1), Step(0.1, [2])]), width=0)
    for name, space in (("one", SPACE), ("two", short), ("three", Space(lr=0.7, width=0))):
        make_study(tmp_path, space=space, name=name).run(executor=SOLO, progress=False)
    for other, common in (("two", "10 epochs"), ("three", "no epochs")):
        url = f"sqlite:///{tmp_path}/t.db"
        thrifty("explain", "one", other, "--storage", url, monkeypatch=monkeypatch)
        assert capsys.readouterr().out.endswith(f"once; so far they have {common} in common\n")


def test_studies_with_other_metrics(explain):
    assert explain("a", "metrics") == (
        "studies 'a' and 'metrics' train the same; kept states are evaluated again, for their "
        "metrics differ:\n  function m: differs\n"
    )


def test_studies_that_train_something_else(explain):
    assert explain("a", "training").splitlines() == [
        "studies 'a' and 'training' share nothing:",
        "  attribute x: 1 and 2",
        "  class C: only in 'training'",
        "  function f: differs",
        "  function m: only in 'a'",
    ]


def test_studies_of_other_seeds_and_versions(explain):
    assert "seed: 0 and 1" in explain("a", "seed")
    assert "thrifty has changed between them" in explain("a", "version")
    assert "'old' was made by an older version" in explain("a", "old")
    assert "source: 1 and 2" in explain("old", "older")


def test_by_default_the_study_that_is_most_alike(explain):
    assert "studies 'training' and 'version'" in explain("training")
    assert "studies 'metrics' and" in explain("metrics")
    assert "studies 'old' and 'older'" in explain("old")


def test_a_study_alone(tmp_path, monkeypatch, capsys):
    url = f"sqlite:///{tmp_path}/one.db"
    with Store.open(url) as store:
        store.studies.create("a", plan=store.plans.open("p", task="T").id, spec={})
    thrifty("explain", "a", "--storage", url, monkeypatch=monkeypatch, fails=True)
    assert "has no other study than 'a'" in capsys.readouterr().err


def test_a_study_that_is_not_there(explain):
    assert "has no study 'b'" in explain("b", fails=True)
