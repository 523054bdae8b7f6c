"""Every command prints one document with ``--json``, which its schema allows, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.documents import check, schema
from tests.study.test_units import in_steps
from thrifty.agents import DOCUMENTS, to_json
from thrifty.cli import COMMANDS, _app, main
from thrifty.study import Study, StudyEnded


pytestmark = pytest.mark.slow

STUDY = """
import os
import thrifty as th
from thrifty.testing import LineTask

print("a study's file prints")

class Talking(LineTask):
    def model(self, hp):
        print("a task prints")
        os.write(1, b"and so does what it calls\\n")
        if hp["lr"] == 0.3:
            raise ValueError("0.3 is odd")
        return super().model(hp)

study = th.Study(
    Talking(),
    th.Space(lr=th.Choice([0.1, th.Step(0.1, [2]), *[0.01 * n for n in range(1, 9)], EXTRA])),
    algorithm=th.GridSearch(max_epochs=4),
    metric="mse", mode="min", storage="sqlite:///t.db", name="line",
)
"""
OTHER = STUDY.replace("0.3 is odd", "0.3 is very odd").replace('"line"', '"other"')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THRIFTY_STORAGE", "sqlite:///t.db")
    Path("line_study.py").write_text(STUDY.replace("EXTRA", "0.2"))
    Path("other_study.py").write_text(OTHER.replace("EXTRA", "0.3"))
    return tmp_path


def printed(capsys, *words, code=0):
    """Return what a command prints, as its document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["thrifty", *words, "--json"])
        left = 0
        try:
            main()
        except SystemExit as leaving:
            left = leaving.code
    said = capsys.readouterr()
    assert left == code, said
    return json.loads(said.out)


def checked(capsys, *words, command=None, code=0):
    """Return the document of a command, after comparing it with its schema."""
    found = printed(capsys, *words, code=code)
    name = command or words[0]
    return check(found, name if not code or name == "doctor" or command else "")


def test_documents_of_a_study(folder, capsys):
    plan = checked(capsys, "plan", "line_study.py")
    assert (plan["num_trials"], plan["trial_epochs"], plan["unique_epochs"]) == (11, 44, 42)
    found = checked(capsys, "run", "line_study.py", "--stop-epochs", "8")
    assert not found["done"]
    found = checked(capsys, "run", "line_study.py")
    assert found["done"]
    assert found["trials"] == {"done": 11}
    assert found["savings"]["unique_epochs"] == 42
    assert found["savings"]["unreported_epochs"] == 0
    assert checked(capsys, "resume", "line")["best"] == found["best"]
    [study] = checked(capsys, "status")["studies"]
    assert study["trials"] == {"done": 11}
    assert study["best"]["trial"] == found["best"][0]["number"]
    best = checked(capsys, "best", "line")
    assert best["trials"] == found["best"]
    known = checked(capsys, "plan", "line_study.py")
    assert (known["known_epochs"], known["epochs_to_train"]) == (42, 0)
    shares = checked(capsys, "importance", "line")["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    for words in (["plot", "line", "history"], ["export", "line", "--out", "t.parquet"]):
        for file in checked(capsys, *words)["written"]:
            assert Path(file).stat().st_size
    assert checked(capsys, "delete", "line", "--yes")["deleted"] == "line"
    assert checked(capsys, "status")["studies"] == []
    found = checked(capsys, "restore")
    assert (found["restored"], [s["name"] for s in found["deleted"]]) == (None, ["line"])
    looked = checked(capsys, "gc", "--older-than", "0", "--dry-run")
    assert looked["dry_run"]
    assert [each["num_trials"] for each in looked["studies"]] == [11]
    found = checked(capsys, "restore", "line", "--as", "again")
    assert (found["restored"], found["deleted"]) == ("again", [])
    assert checked(capsys, "best", "again")["trials"] == best["trials"]
    checked(capsys, "delete", "again", "--yes")
    assert checked(capsys, "gc")["studies"] == []
    found = checked(capsys, "gc", "--older-than", "0")
    assert found == {**looked, "dry_run": False, "studies": found["studies"]}
    assert found["num_states"] > 0
    assert checked(capsys, "restore")["deleted"] == []


def test_documents_of_acts(folder, capsys):
    checked(capsys, "run", "line_study.py", "--stop-epochs", "8")
    noted = checked(capsys, "note", "line", "a\x1b[31mred note", "--trial", "1")
    assert noted["act"]["kind"] == "note"
    assert "\x1b" not in noted["act"]["text"]
    checked(capsys, "tag", "line", "good")
    stopped = checked(capsys, "stop", "line", "--trial", "3")["act"]
    assert (stopped["kind"], stopped["trial"], stopped["queued"]) == ("stop trial", 3, True)
    checked(capsys, "run", "line_study.py")
    found = checked(capsys, "acts", "line")["acts"]
    assert [act["queued"] for act in found] == [False] * 3
    assert checked(capsys, "status")["studies"][0]["trials"] == {"done": 10, "stopped": 1}
    checked(capsys, "tag", "line", "good", "--remove")
    assert checked(capsys, "acts", "line")["acts"][-1]["kind"] == "untag"


def test_documents_of_failures_and_of_two_studies(folder, capsys):
    checked(capsys, "run", "line_study.py")
    found = checked(capsys, "run", "other_study.py")
    assert [error["trials"] for error in found["errors"]] == [[10]]
    assert "0.3 is very odd" in found["errors"][0]["message"]
    [status] = checked(capsys, "status", "--name", "other", "--traceback")["studies"]
    assert "ValueError" in status["errors"][0]["traceback"]
    assert status["trials"] == {"done": 10, "failed": 1}
    explained = checked(capsys, "explain", "line")
    assert explained["studies"] == ["line", "other"]
    assert explained["shares"] == "nothing"
    assert any("model" in each for each in explained["differences"])


SEVERAL = """
import thrifty as th
from tests.study.helpers import Sized

study = th.Study(
    Sized(), th.Space(lr=0.1, width=th.Choice([0, 4])), algorithm=th.GridSearch(max_epochs=4),
    metric=["mse", "size"], mode=["min", "min"], storage="sqlite:///t.db", name="two", seeds=SEEDS,
)
"""


@pytest.mark.parametrize("seeds", [1, 3])
def test_documents_of_several_objectives_and_seeds(folder, capsys, seeds):
    Path("two.py").write_text(SEVERAL.replace("SEEDS", str(seeds)))
    found = checked(capsys, "run", "two.py")
    best = checked(capsys, "best", "two")
    assert best["mode"] == ["min", "min"]
    assert best["metric"] == ["mse", "size"]
    for trial, other in zip(best["trials"], found["best"], strict=True):
        assert set(trial["values"]) == {"mse", "size"}
        assert trial["seeds"] == other["seeds"] == seeds
        assert (trial["sd"] is None) == (seeds == 1)
        assert trial["sd"] == pytest.approx(other["sd"])
        assert trial["config"] == other["config"]


def test_a_document_counts_in_the_units_of_its_study(tmp_path, monkeypatch, capsys):
    study = in_steps(tmp_path).run(progress=False)
    monkeypatch.setenv("THRIFTY_STORAGE", study.storage.url)
    assert checked(capsys, "best", study.name)["trials"][0]["reached"] == {"epochs": 4, "steps": 24}
    [status] = checked(capsys, "status")["studies"]
    assert status["requested"] == {"epochs": 8, "steps": 48}
    assert status["trained"] == {"epochs": 6, "steps": 36}


def test_documents_of_configurations(folder, capsys):
    config = '{"lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2]}}}'
    words = ["line_study.py", "--config", config, "--config", '{"lr": 0.1}']
    cost = checked(capsys, "cost", *words)
    assert (cost["trial_epochs"], cost["epochs_to_train"]) == (8, 6)
    found = checked(capsys, "try", *words, "--epochs", "3")
    again = checked(capsys, "try", *words, "--epochs", "3", "--as", "again")
    assert {each for trial in again["trials"] for each in trial["trained_by"]} == {found["study"]}
    assert [trial["reached"] for trial in found["trials"]] == [{"epochs": 3}] * 2
    assert found["trials"][0]["config"]["lr"]["fields"]["milestones"] == [2]
    cost = checked(capsys, "cost", *words)
    assert (cost["known_epochs"], cost["epochs_to_train"]) == (4, 2)
    assert [each["trained_by"] for each in cost["configs"]] == [["line-only-3"]] * 2
    Path("configs.json").write_text(json.dumps([{"lr": 0.3}]))
    failed = checked(
        capsys, "try", "other_study.py", "--configs", "configs.json", code=2, command="try"
    )
    assert failed["trials"][0]["state"] == "failed"
    assert "0.3 is very odd" in failed["errors"][0]["message"]
    resumed = checked(capsys, "resume", "line-only-3")
    assert resumed["trials"] == {"paused": 2}


def test_documents_without_a_study(folder, capsys):
    assert checked(capsys, "completion", "zsh")["shell"] == "zsh"
    offers = checked(capsys, "catalogue", "show", "--cloud", "gcp", command="catalogue show")
    assert {offer["cloud"] for offer in offers["offers"]} == {"gcp"}
    doctor = checked(capsys, "doctor", "--extra", "nonsense", code=1)
    assert not doctor["ok"]


def test_a_dashboard_says_where_it_is(folder, capsys, monkeypatch):
    checked(capsys, "run", "line_study.py", "--stop-epochs", "1")
    monkeypatch.setattr("thrifty.web._serve.Server.run", lambda self: self.socket.close())
    monkeypatch.setattr(os, "nice", lambda by: by)
    assert checked(capsys, "dashboard", "--port", "0")["address"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (["best", "nothing"], "StudyNotFoundError", "there is no database t.db"),
        (["best"], "UsageError", "NAME"),
        (["best", "--nonsense"], "UsageError", "--nonsense"),
        (["nonsense"], "UsageError", "nonsense"),
        (["delete", "line"], "UsageError", "--yes"),
        (["export", "line", "--format", "csv"], "UsageError", "--out"),
        (["plan", "no.py"], "UsageError", "no.py"),
        (["status", "--storage", "nothing://x"], "UsageError", "nothing"),
    ],
)
def test_an_error_is_a_document(folder, capsys, words, kind, told):
    found = checked(capsys, *words, code=2)["error"]
    assert found["kind"] == kind
    assert told in found["message"]


def test_a_defect_is_a_document(folder, capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("a defect")

    monkeypatch.setattr("thrifty.store.Store.open", fail)
    assert "a defect" in checked(capsys, "status", code=1)["error"]["message"]


def test_only_the_document_is_on_standard_output(folder):
    """In a process of its own: what a file, a task, and code in C print goes elsewhere."""
    words = [sys.executable, "-m", "thrifty.cli", "run", "line_study.py", "--workers", "2"]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["done"]
    assert "a study's file prints" in done.stderr
    assert "and so does what it calls" in done.stderr


def test_numbers_that_json_lacks_are_null():
    assert json.loads(to_json({"a": [float("inf"), {"b": float("nan")}], "c": 1.5})) == {
        "a": [None, {"b": None}],
        "c": 1.5,
    }


def test_every_command_has_a_document():
    found = set()
    for name in set(COMMANDS) - {"mcp"}:  # its tools have documents
        command = _app.get_command(None, name)
        below = getattr(command, "commands", None)
        for each in [name] if below is None else [f"{name} {sub}" for sub in below]:
            found.add(each)
            option = command if below is None else below[each.split()[1]]
            assert any(parameter.name == "as_json" for parameter in option.params), each
    assert found == set(DOCUMENTS)


def test_every_field_is_described():
    for command in DOCUMENTS:
        found = schema(command)
        for part in (found, *found.get("$defs", {}).values()):
            assert part["description"], command
            for name, field in part["properties"].items():
                described = field.get("description", "") or name == "schema_version"
                assert described, (command, name)
                assert re.fullmatch(r"[a-z_0-9]+", name)


@pytest.mark.parametrize(
    ("output", "told"), [("/dev/full", "cannot write to standard output"), (None, "")]
)
def test_an_output_that_cannot_be_written(folder, output, told):
    words = [sys.executable, "-m", "thrifty.cli", "completion", "zsh", "--json"]
    if output is None:  # closed by the caller
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    with Path(output or os.devnull).open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert told in done.stderr
    assert done.returncode == (2 if told else 0)


def test_an_interrupted_run_without_results_says_so_in_a_document(folder, capsys, monkeypatch):
    """All of its trials have failed when Ctrl-C comes."""
    Path("line_study.py").write_text(STUDY.replace('hp["lr"] == 0.3', "True").replace("EXTRA", "1"))

    def interrupted(self, **options):
        found = run(self, **options)
        for observer in options["observers"]:
            observer.on_event(StudyEnded(state="stopped", signal=2))
        return found

    run = Study.run
    monkeypatch.setattr(Study, "run", interrupted)
    found = printed(capsys, "run", "line_study.py", code=130)
    assert "failed" in check(found, "")["error"]["message"]


def test_a_study_that_is_named_like_some_of_another_is_found(folder, capsys):
    both = STUDY.replace("EXTRA", "0.2") + "\nother = study.only([], epochs=3)\n"
    Path("line_study.py").write_text(both)
    assert checked(capsys, "plan", "line_study.py", "--name", "line-only-3")["num_trials"] == 0
