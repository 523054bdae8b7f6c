"""The progress display of a run ends with the numbers that the study reports afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.study.helpers import WIDE, StopAfter, make_study
from thrifty.run import Local
from thrifty.study._ledger import Ledger


ONE = Local(workers=1, threads=1, pack="solo")


def last_numbers(err):
    """Return the epochs done and saved of the last progress line."""
    done = re.findall(r"(\d+)/\d+ unique", err)[-1]
    saved = re.findall(r"(\d+) epochs saved", err)[-1]
    return int(done), int(saved)


@pytest.mark.parametrize("stop_after", [None, 5, 20])
def test_the_last_line_has_the_numbers_of_the_savings(tmp_path, capfd, stop_after):
    study = make_study(tmp_path)
    observers = [] if stop_after is None else [StopAfter(stop_after)]
    study.run(executor=ONE, observers=observers)
    found = study.savings
    done, saved = last_numbers(capfd.readouterr().err)
    assert done == found.unique_epochs + found.unreported_epochs
    assert f": {saved} saved;" in str(found)


class SavedEpochs:
    """Observer that notes the epochs which the bar would show as saved, after each event."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gross: list[int] = []
        """The same without the epochs that were trained again."""
        self.ledger: Any = None

    def on_event(self, event) -> None:
        self.seen.append(self.ledger.epochs.num_saved)
        self.gross.append(self.seen[-1] + sum(num for num, _ in self.ledger.epochs.again.values()))


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", ["first", "second"])
def test_epochs_saved_fall_only_if_epochs_are_trained_again(tmp_path, monkeypatch, name, seeds):
    if name == "second":  # it knows some epochs from another study
        make_study(tmp_path, seeds=seeds).run(executor=ONE, progress=False)
    study = make_study(tmp_path, name=name, space=WIDE, seeds=seeds)
    note = SavedEpochs()
    made = Ledger.__init__

    def init(self, *args, **options):
        made(self, *args, **options)
        note.ledger = self

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "__init__", init)
        study.run(executor=ONE, observers=[note], progress=False)
    assert note.gross == sorted(note.gross)
    if name == "first":
        assert note.seen == note.gross
    assert f": {note.seen[-1]} saved;" in str(study.savings)


def test_epochs_that_no_trial_has_reported(tmp_path):
    study = make_study(tmp_path)
    study.run(executor=ONE, observers=[StopAfter(1)], progress=False)
    found = study.savings
    assert (found.unique_epochs, found.unreported_epochs) == (0, 1)
    besides = f"; 1 epochs ({found.seconds_unreported:.1f} s) trained besides, reported by no trial"
    assert str(found).endswith(besides)
    study.run(executor=ONE, progress=False)
    assert study.savings.unreported_epochs == 0
    assert "no trial" not in str(study.savings)
    again = make_study(tmp_path, name="again")
    again.run(executor=ONE, progress=False)
    assert again.savings.unreported_epochs == 0


def test_a_run_without_training_shows_no_bar(tmp_path, capfd):
    make_study(tmp_path).run(executor=ONE, progress=False)
    other = make_study(tmp_path, name="other")
    other.run(executor=ONE)
    err = capfd.readouterr().err
    assert "nothing to train" in err
    assert "unique" not in err
    assert "saved" not in err
