"""What people ask of a study on the command line: stop, note, tag, branch, and what came of it."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner

import thrifty as th
from tests.cli.documents import check
from tests.cli.test_cli import STUDY, folder  # noqa: F401 (a fixture)
from tests.study.test_steering import AfterEpochs, look_often  # noqa: F401 (a fixture)
from thrifty.cli import _app
from thrifty.cli._options import Pair
from thrifty.cli._train import load_stored_study, load_study
from thrifty.core import StudyMismatchError, UsageError
from thrifty.store import Store
from thrifty.store._steering_requests import ask_longer


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]

DB = ("--storage", "sqlite:///t.db")


def thrifty(*args, answer=None):
    done = CliRunner().invoke(_app, args, input=answer, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def line(folder):  # noqa: F811
    """A study of two trials of four epochs, which has ended."""
    assert "line" in STUDY
    thrifty("run", "line_study.py", "--quiet")


def test_notes_and_tags_and_what_was_asked(line):
    assert thrifty("acts", "line", *DB) == "nothing was asked of line\n"
    assert thrifty("note", "line", "the rate is too high", "--trial", "1", *DB) == "noted\n"
    assert thrifty("tag", "line", "paper", *DB) == "tagged\n"
    assert thrifty("tag", "line", "paper", "--remove", *DB) == "removed\n"
    lines = asked()
    assert [each.partition("  ")[2].partition("  ")[2] for each in lines] == [
        "note trial 1: the rate is too high",
        "tag: paper",
        "untag: paper",
    ]
    document = json.loads(thrifty("acts", "line", *DB, "--json"))
    check(document, "acts")
    assert [each["kind"] for each in document["acts"]] == ["note", "tag", "untag"]


@pytest.mark.parametrize("act", [("note", "line", "as a document"), ("tag", "line", "paper")])
def test_each_of_them_as_a_document(line, act):
    document = json.loads(thrifty(*act, *DB, "--json"))
    assert (document["study"], document["act"]["kind"]) == ("line", act[0])
    assert document["act"]["text"] == act[2]


def run(after, act):
    """Run the study, and do something after an epoch."""
    study = load_stored_study("line", storage=DB[1], trust_file=True)
    observer = AfterEpochs(after, act)
    study.run(progress=False, observers=[observer], executor=th.Local(pack="solo"))
    return [trial.state for trial in study.trials]


def test_a_study_and_a_trial_are_stopped_while_they_train(folder):  # noqa: F811
    thrifty("plan", "line_study.py")
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "1")
    said = []
    run(1, lambda: said.append(thrifty("stop", "line", *DB)))
    states = run(1, lambda: said.append(thrifty("stop", "line", "--trial", "0", *DB)))
    waits = "the process that runs it does so at the end of an epoch"
    assert said == [f"asked to stop the study; {waits}\n", f"asked to stop trial 0; {waits}\n"]
    assert states == ["stopped", "done"]
    acts = [each.partition("  ")[2].partition("  ")[2] for each in asked()]
    assert [each.partition("  ")[0] for each in acts] == ["stop", "stop trial 0"]
    for args in (("stop", "line"), ("stop", "line", "--trial", "0")):
        refused = CliRunner().invoke(_app, [*args, *DB])
        assert isinstance(refused.exception, UsageError)


def test_a_study_waits_and_goes_on(folder):  # noqa: F811
    thrifty("plan", "line_study.py")
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "1")
    said = []

    def go_on():
        while "paused" not in thrifty("status", *DB):
            time.sleep(0.01)
        said.append(thrifty("resume", "line", *DB, "--json"))

    other = threading.Thread(target=go_on)

    def pause():
        said.append(thrifty("pause", "line", *DB))
        other.start()

    states = run(1, pause)
    other.join()
    waits = "the process that runs it does so at the end of an epoch"
    assert said[0] == f"asked to pause the study; {waits}\n"
    document = json.loads(said[1])
    check(document, "pause")
    assert (document["act"]["kind"], document["act"]["queued"]) == ("resume", True)
    assert states == ["done", "done"]
    refused = CliRunner().invoke(_app, ["pause", "line", *DB])
    assert isinstance(refused.exception, UsageError)


def asked():
    return thrifty("acts", "line", *DB).splitlines()


def test_a_branch_shows_what_it_costs_and_asks(line):
    branch = ("branch", "line", *DB, "--trial", "0", "--after", "2", "--scale", "lr=0.5")
    refused = CliRunner().invoke(_app, branch, input="n\n")
    assert refused.exit_code == 1
    assert "enqueue it?" in refused.output
    shown = json.loads(thrifty(*branch, "--json"))
    check(shown, "branch")
    assert not shown["enqueued"]
    assert "enqueued; train it with: thrifty resume line --storage sqlite:///t.db" in thrifty(
        *branch, answer="y\n"
    )
    thrifty("resume", "line", *DB, "--quiet", "--trust-file")
    assert "3 (3 done" in thrifty("status", *DB)


def test_a_number_may_begin_with_its_point():
    pair = Pair(whole=False)
    assert pair.convert("lr=.3", None, None) == ("lr", 0.3)
    assert pair.convert("lr=-.5e-3", None, None) == ("lr", -0.0005)
    assert pair.convert("kind=adam", None, None) == ("kind", "adam")


def test_a_configuration_is_enqueued_and_then_trained(line):
    late = {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2]}}
    given = ("enqueue", "line", *DB, "--trust-file", "--config", json.dumps({"lr": late}))
    shown = json.loads(thrifty(*given, "--json"))
    check(shown, "enqueue")
    assert shown["config"]["lr"]["fields"]["milestones"] == [2]
    assert shown["known_epochs"] == 4
    what = "lr=Step(0.1, (2,)); 4 epochs known; train it with: thrifty resume line"
    assert f"enqueued before, and not again: {what}" in thrifty(*given)
    assert "enqueued: lr=0.1; 4 epochs known" in thrifty(*given[:-1], '{"lr": 0.1}')
    (first, second) = asked()
    assert "enqueue: lr=Step(0.1, (2,))" in first
    assert "enqueue: lr=0.1" in second
    thrifty("resume", "line", *DB, "--quiet", "--trust-file")


def test_an_extension_shows_what_it_costs_and_asks(line):
    extend = ("extend", "line", *DB, "--epochs", "7", "--trust-file")
    refused = CliRunner().invoke(_app, extend, input="n\n")
    assert refused.exit_code == 1
    assert "from 4 epochs to 7 epochs: 2 trials may go on" in refused.output
    assert "extend it?" in refused.output
    shown = json.loads(thrifty(*extend, "--json"))
    check(shown, "extend")
    assert not shown["extended"]
    assert not shown["queued"]
    assert not asked()[0].endswith("max_epochs from 4 to 7")
    said = thrifty(*extend, answer="y\n")
    assert "extended; train it with: thrifty resume line --storage sqlite:///t.db" in said
    assert "extend: max_epochs from 4 to 7" in asked()[0]
    thrifty("resume", "line", *DB, "--quiet", "--trust-file")
    best = json.loads(thrifty("best", "line", *DB, "--json"))
    assert [each["reached"]["epochs"] for each in best["trials"]] == [7]
    twice = json.loads(thrifty(*extend[:-2], "9", "--yes", "--json", "--trust-file"))
    assert (twice["extended"], twice["before"], twice["after"]) == (True, 7, 9)


def test_a_file_that_is_shorter_than_its_study_says_so(line):
    thrifty("extend", "line", *DB, "--epochs", "7", "--trust-file", "--yes")
    with pytest.raises(StudyMismatchError, match="cannot become shorter"):
        thrifty("run", "line_study.py", "--quiet")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_extension_of_a_study_that_runs_is_queued(folder, as_json):  # noqa: F811
    thrifty("plan", "line_study.py")
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "1")
    extend = ("extend", "line", *DB, "--epochs", "7", "--trust-file", "--yes")
    said = []

    def ask():
        said.append(thrifty(*extend, *(["--json"] if as_json else [])))
        said.append(asked()[0].partition("  ")[2].partition("  ")[2])

    assert run(1, ask) == ["done", "done"]
    if as_json:
        document = json.loads(said[0])
        check(document, "extend")
        assert (document["extended"], document["queued"], document["after"]) == (False, True, 7)
    else:
        assert "queued: the process that runs the study goes on with it once it" in said[0]
        assert "write max_epochs=7, too" in said[0]
        assert "extended" not in said[0]
    assert said[1] == "lengthen: max_epochs=7  (queued)"
    acts = json.loads(thrifty("acts", "line", *DB, "--json"))
    check(acts, "acts")
    kinds = [(each["kind"], each["text"], each["queued"]) for each in acts["acts"]]
    assert kinds == [("lengthen", "7", False), ("extend", "max_epochs from 4 to 7", False)]
    best = json.loads(thrifty("best", "line", *DB, "--json"))
    assert [each["reached"]["epochs"] for each in best["trials"]] == [7]


@pytest.mark.parametrize("act", ["stop", "pause"])
def test_resume_takes_back_what_was_asked_while_no_process_ran(folder, act):  # noqa: F811
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "1")
    said = thrifty(act, "line", *DB)
    then = "stops" if act == "stop" else "waits"
    assert said == (
        f"asked to {act} the study; no process runs it, so the next run {then} before it trains; "
        f"take this back, and train, with: thrifty resume line --storage {DB[1]}\n"
    )
    assert asked()[-1].endswith("(queued)")
    done = CliRunner().invoke(_app, ["resume", "line", *DB, "--quiet", "--trust-file"])
    assert done.exit_code == 0
    assert f"took back the request to {act} the study" in done.stderr
    with Store.open(DB[1], create=False) as store:
        assert store.studies.summary("line").state == "done"


def test_resume_of_a_study_whose_file_is_gone_takes_nothing_back(folder):  # noqa: F811
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "1")
    thrifty("stop", "line", *DB)
    (folder / "line_study.py").unlink()
    with pytest.raises(UsageError, match="is gone"):
        thrifty("resume", "line", *DB, "--quiet", "--trust-file")
    assert asked()[-1].endswith("stop  (queued)")


def test_resume_takes_back_a_pause_that_the_process_has_not_applied_yet(folder):  # noqa: F811
    said = []

    def pause_and_resume():
        thrifty("pause", "line", *DB)
        said.append(thrifty("resume", "line", *DB))

    study = load_study(folder / "line_study.py")
    study.run(progress=False, observers=[AfterEpochs(1, pause_and_resume)])
    assert said == ["asked the process that has paused the study to go on\n"]
    assert [trial.state for trial in study.trials] == ["done"] * 2


def test_a_queued_extension_of_a_study_that_is_done_is_trained_by_resume(line):
    with Store.open(DB[1]) as store:
        ask_longer(store, "line", max_epochs=7)
    thrifty("resume", "line", *DB, "--quiet", "--trust-file")
    best = json.loads(thrifty("best", "line", *DB, "--json"))
    assert [each["reached"]["epochs"] for each in best["trials"]] == [7]
