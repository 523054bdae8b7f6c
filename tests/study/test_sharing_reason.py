"""A plan and the savings of trials that share nothing say why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thrifty as th
from tests.study.helpers import SOLO
from thrifty.space import Timeline
from thrifty.study._sharing_reason import WHAT_SHARES, why_nothing_is_shared
from thrifty.testing import LineTask


def study_of(tmp_path, *, name="s", seeds=1, **space):
    return th.Study(
        LineTask(),
        th.Space(**space),
        algorithm=th.GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name=name,
        seeds=seeds,
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_constants_are_named(tmp_path, seeds):
    study = study_of(tmp_path, lr=th.Choice([0.1, 0.2]), width=th.Choice([0, 4]), seeds=seeds)
    reason = (
        "nothing shared: trials differ from epoch 1 on in lr, width, which are constants; "
        f"schedules that begin alike share ({WHAT_SHARES})"
    )
    assert reason in str(study.plan()).splitlines()
    study.run(progress=False, executor=SOLO)
    assert str(study.savings).endswith(f"; {reason}")
    assert reason in str(study.plan()).splitlines()


def test_schedules_that_begin_otherwise_are_named(tmp_path):
    rates = th.Choice([th.Step(0.1, [2]), th.Step(0.2, [2])])
    study = study_of(tmp_path, lr=rates, width=4)
    assert f"nothing shared: trials differ from epoch 1 on in lr ({WHAT_SHARES})" in str(
        study.plan()
    )


def test_where_an_epoch_is_shared_nothing_is_said(tmp_path):
    study = study_of(tmp_path, lr=th.Choice([0.1, th.Step(0.1, [2])])).run(
        progress=False, executor=SOLO
    )
    for text in (study.plan(), study.savings):
        assert "nothing shared" not in str(text)


def test_one_trial_has_nothing_to_share_with(tmp_path):
    study = study_of(tmp_path, lr=0.1)
    study.run(progress=False, executor=SOLO)
    for text in (study.plan(), study.savings):
        assert "nothing shared" not in str(text)


def test_the_page_that_says_what_shares_is_there():
    page, _, anchor = WHAT_SHARES.partition("#")
    text = (Path(__file__).parents[2] / page).read_text()
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_equal_trials_have_no_reason():
    assert why_nothing_is_shared([Timeline({"lr": 0.1}, epochs=4)] * 2) == ""
