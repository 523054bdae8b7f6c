"""A trial's page has what its code has logged, as text."""

from __future__ import annotations

import json
import logging

import pytest
from sqlalchemy import create_engine, text

import thrifty as th
from thrifty.testing import LineTask

from .conftest import SCRIPT, opened


pytestmark = pytest.mark.slow

log = logging.getLogger("tests.page")
log.setLevel(logging.INFO)


class Chatty(LineTask):
    def metrics(self, model, batch):
        log.info("<b>bold</b> %s", SCRIPT)
        return super().metrics(model, batch)


@pytest.fixture
def database(tmp_path):
    th.Study(
        Chatty(),
        th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
        algorithm=th.GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="s",
    ).run(progress=False, executor=th.Local(pack="solo"))
    return tmp_path / "t.db"


def lines(client, trial):
    return client.get(f"/api/studies/1/trials/{trial}").json()["log_lines"]


def test_the_lines_of_a_trial_are_text_of_json(database):
    with opened(database) as client:
        first, second = lines(client, 0), lines(client, 1)
    assert {each["epoch"] for each in first} == {1, 2, 3, 4}
    assert first[0]["text"] == f"<b>bold</b> {SCRIPT}"
    assert (first[0]["level"], first[0]["logger"]) == ("INFO", "tests.page")
    assert [e for e in first if e["epoch"] <= 2] == [e for e in second if e["epoch"] <= 2]


def test_what_a_database_holds_is_made_printable_and_cut(database):
    line = {"at": 0.0, "level": "\x1b[2J", "logger": "\u202e", "text": "x" * 9_000 + "\x1b"}
    with create_engine(f"sqlite:///{database}").begin() as connection:
        connection.execute(text("UPDATE log_lines SET lines = :a"), {"a": json.dumps([line] * 300)})
    with opened(database) as client:
        found = lines(client, 0)
    assert len(found) == 200
    assert all(each["level"] == r"\x1b[2J" and "\u202e" not in each["logger"] for each in found)
    assert all(len(each["text"]) < 5_000 and "\x1b" not in each["text"] for each in found)
