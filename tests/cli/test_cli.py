from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from thrifty.cli import COMMANDS, _app, main
from thrifty.cli._demo import _dashboard
from thrifty.store import Store


pytestmark = pytest.mark.slow


STUDY = """
import thrifty as th
from thrifty.testing import LineTask

study = th.Study(
    LineTask(), th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
    algorithm=th.GridSearch(max_epochs=4),
    metric="mse", mode="min", storage="sqlite:///t.db", name="line",
)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("line_study.py").write_text(STUDY)
    return tmp_path


def thrifty(*args: str, monkeypatch, fails: bool = False) -> None:
    monkeypatch.setattr(sys, "argv", ["thrifty", *args])
    if not fails:
        main()
        return
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2


def test_plan_run_status_best(folder, monkeypatch, capsys):
    thrifty("plan", "line_study.py", monkeypatch=monkeypatch)
    assert "8 trial-epochs" in capsys.readouterr().out
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    assert "6 epochs trained for 8 trial-epochs" in capsys.readouterr().out
    thrifty("status", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "2 (2 done)" in said
    assert re.search(r"training +[\d.]+ s\n", said)
    thrifty("best", "line", "--storage", "sqlite:///t.db", "--json", monkeypatch=monkeypatch)
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["reached"] == {"epochs": 4}
    thrifty("best", "line", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    assert "lr = " in capsys.readouterr().out
    thrifty("resume", "line", "--storage", "sqlite:///t.db", "--quiet", monkeypatch=monkeypatch)
    assert "best of 2 trials" in capsys.readouterr().out


def test_only_commands_that_train_load_a_file_that_trains(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--quiet", "--stop-epochs", "2", monkeypatch=monkeypatch)
    Path("line_study.py").write_text(f"{STUDY}study.run(progress=False)\n")
    for words in (("importance", "line"), ("extend", "line", "--epochs", "9")):
        thrifty(*words, *STORAGE, monkeypatch=monkeypatch, fails=True)
        said = capsys.readouterr().err
        assert f"line_study.py calls study.run() while `thrifty {words[0]}` loads it; put " in said
        assert 'put the call under `if __name__ == "__main__":`' in said
        assert "Traceback" not in said
    thrifty("resume", "line", *STORAGE, "--quiet", monkeypatch=monkeypatch)
    assert "best of 2 trials" in capsys.readouterr().out
    # Now nothing is left to train, so that its run only reads.
    thrifty("plan", "line_study.py", monkeypatch=monkeypatch)
    assert "8 trial-epochs" in capsys.readouterr().out
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)


def test_a_study_with_two_names_in_its_file_is_one(folder, monkeypatch, capsys):
    Path("two.py").write_text(f"{STUDY}\nfor each in (study,):\n    each\n")
    for options in ((), ("--name", "line")):
        thrifty("plan", "two.py", *options, monkeypatch=monkeypatch)
        assert "8 trial-epochs" in capsys.readouterr().out


def test_studies_of_one_name_in_a_file(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    Path("line_study.py").write_text(STUDY + STUDY.replace("study =", "other ="))
    thrifty("importance", "line", *STORAGE, monkeypatch=monkeypatch, fails=True)
    said = capsys.readouterr().err
    assert "defines 2 studies of the name 'line'; give each a name of its own" in said
    assert "--name" not in said


def test_a_name_that_is_not_in_the_file(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--name", "nope", monkeypatch=monkeypatch, fails=True)
    said = capsys.readouterr().err
    assert "line_study.py does not define study 'nope'; it defines 'line'" in said


def test_export_writes_a_table_and_a_database_of_optuna(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    options = ("--storage", "sqlite:///t.db", "--csv", "t.csv", "--optuna", "o.db")
    thrifty("export", "line", *options, monkeypatch=monkeypatch)
    assert Path("t.csv").read_text().splitlines()[0] == (
        "number,state,epochs,value,metrics_train_loss,error,params_lr"
    )
    assert Path("o.db").exists()


SEVERAL = """
import thrifty as th
from tests.study.helpers import Sized

study = th.Study(
    Sized(), th.Space(lr=0.1, width=th.Choice([0, 4])), algorithm=th.GridSearch(max_epochs=4),
    metric=["mse", "size"], mode=["min", "min"], constraints={"size": LIMIT},
    storage="sqlite:///t.db", name="two",
)
study.enqueue_trial({"width": 4})
"""


def test_several_objectives(folder, monkeypatch, capsys):
    Path("two_goals.py").write_text(SEVERAL.replace("LIMIT", "20"))
    thrifty("run", "two_goals.py", "--quiet", monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "best of 3 trials" in said
    assert "size" in said
    options = ("two", "--storage", "sqlite:///t.db")
    thrifty("best", *options, "--json", monkeypatch=monkeypatch)
    best = json.loads(capsys.readouterr().out)["trials"]
    assert {trial["values"]["size"] for trial in best} <= {2.0, 13.0}
    assert all(trial["values"]["mse"] == trial["value"] for trial in best)
    thrifty("best", *options, monkeypatch=monkeypatch)
    assert f"trial {best[0]['number']}: mse " in capsys.readouterr().out
    thrifty("status", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    assert "best" in capsys.readouterr().out
    thrifty("export", *options, "--csv", "t.csv", monkeypatch=monkeypatch)
    head = Path("t.csv").read_text().splitlines()[0]
    assert head == (
        "number,state,epochs,value,values_mse,values_size,violation,metrics_train_loss,"
        "metrics_offset,error,params_lr,params_width"
    )


def test_no_trial_keeps_the_constraints(folder, monkeypatch, capsys):
    Path("two_goals.py").write_text(SEVERAL.replace("LIMIT", "1"))
    thrifty("run", "two_goals.py", "--quiet", monkeypatch=monkeypatch, fails=True)
    assert "no trial of study 'two' is feasible" in capsys.readouterr().err
    options = ("two", "--storage", "sqlite:///t.db")
    thrifty("best", *options, monkeypatch=monkeypatch, fails=True)
    assert "has no trial that keeps its constraints" in capsys.readouterr().err
    thrifty("status", *STORAGE, monkeypatch=monkeypatch)
    assert "best        none, because no trial keeps the constraints" in capsys.readouterr().out


def test_stop_conditions(folder, monkeypatch, capsys):
    run = ("run", "line_study.py", "--quiet")
    thrifty(*run, "--stop-epochs", "1", monkeypatch=monkeypatch)
    assert "no trial has reported yet" in capsys.readouterr().out
    thrifty(*run, "--stop-epochs", "4", "--target", "-1", monkeypatch=monkeypatch)
    assert "4 epochs trained" in capsys.readouterr().out
    resume = ("resume", "line", "--storage", "sqlite:///t.db", "--quiet")
    thrifty(*resume, "--stop-seconds", "1e6", monkeypatch=monkeypatch)
    assert "6 epochs trained for 8 trial-epochs" in capsys.readouterr().out
    thrifty(*run, "--stop-epochs", "0", monkeypatch=monkeypatch, fails=True)
    assert "Invalid value for '--stop-epochs': 0 is not in the range" in capsys.readouterr().err


FAILING = """
import thrifty as th
from thrifty.testing import LineTask

class Failing(LineTask):
    def model(self, hp):
        if hp.option >= FIRST:
            raise ValueError("no model for option " + str(hp.option))
        return super().model(hp)

study = th.Study(
    Failing(), th.Space(lr=0.1, option=th.Choice(list(range(7)))),
    algorithm=th.GridSearch(max_epochs=2),
    metric="mse", mode="min", storage="sqlite:///t.db", name="line",
)
"""
STORAGE = ("--storage", "sqlite:///t.db")


def test_a_run_in_which_all_trials_fail_has_exit_code_2(folder, monkeypatch, capsys):
    Path("failing.py").write_text(FAILING.replace("FIRST", "0"))
    for _ in range(2):  # the second run finds a study that is done
        thrifty("run", "failing.py", "--quiet", monkeypatch=monkeypatch, fails=True)
        said = capsys.readouterr().err
        last = said[said.index("error: all 7 trials of study 'line' failed; the first one:") :]
        assert "in model" in last, "the traceback"
        assert last.count("ValueError: no model for option") == 1
    thrifty("status", *STORAGE, monkeypatch=monkeypatch)
    assert "best        none, because all trials that ended have failed" in capsys.readouterr().out
    thrifty("best", "line", *STORAGE, monkeypatch=monkeypatch, fails=True)
    assert "trials 0, 1, 2 and 4 more failed" in capsys.readouterr().err


def test_status_says_each_error_once(folder, monkeypatch, capsys):
    Path("failing.py").write_text(FAILING.replace("FIRST", "2"))
    thrifty("run", "failing.py", "--quiet", monkeypatch=monkeypatch)
    shown = "5 trials failed; thrifty status --name line --traceback"
    assert shown in capsys.readouterr().out
    thrifty("status", *STORAGE, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "trials 2, 3, 4 and 2 more failed: ValueError: no model for option 2" in said
    assert said.count("ValueError") == 1
    thrifty("status", *STORAGE, "--traceback", monkeypatch=monkeypatch)
    assert "trial 2: Traceback" in capsys.readouterr().out


def test_status_and_best_name_the_epoch_at_which_trials_are_compared(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    capsys.readouterr()
    thrifty("status", *STORAGE, monkeypatch=monkeypatch)
    status = capsys.readouterr().out
    thrifty("best", "line", *STORAGE, monkeypatch=monkeypatch)
    number = capsys.readouterr().out.partition(":")[0]
    assert f"({number} after 4 epochs)" in status


def test_a_deleted_study_frees_its_name(folder, monkeypatch, capsys):
    Path("failing.py").write_text(FAILING.replace("FIRST", "0"))
    thrifty("run", "failing.py", "--quiet", monkeypatch=monkeypatch, fails=True)
    Path("mended.py").write_text(FAILING.replace("FIRST", "9"))
    capsys.readouterr()
    thrifty("delete", "line", *STORAGE, "--yes", monkeypatch=monkeypatch)
    undo = "thrifty restore --storage sqlite:///t.db -- line"
    assert f"deleted study line; undo it with: {undo}" in capsys.readouterr().out
    thrifty("run", "mended.py", "--quiet", monkeypatch=monkeypatch)
    assert "best of 7 trials" in capsys.readouterr().out
    thrifty(*shlex.split(undo)[1:], monkeypatch=monkeypatch, fails=True)
    assert "under another name" in capsys.readouterr().err
    thrifty("restore", *STORAGE, monkeypatch=monkeypatch)
    assert "line (" in capsys.readouterr().out
    thrifty("restore", "line", "--as", "failed", *STORAGE, monkeypatch=monkeypatch)
    assert "restored study failed" in capsys.readouterr().out
    thrifty("restore", *STORAGE, monkeypatch=monkeypatch)
    assert "no deleted study can be restored" in capsys.readouterr().out


def test_what_nobody_needs_is_removed(folder, monkeypatch, capsys):
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    thrifty("delete", "line", *STORAGE, "--yes", monkeypatch=monkeypatch)
    capsys.readouterr()
    for more, said in (
        ([], "removed 0 deleted studies and 0 states: 0.0 KiB"),
        (["--older-than", "0", "--dry-run"], "would remove 1 deleted studies and "),
        (["--older-than", "0", "--checkpoints", "elsewhere"], "name it with --checkpoints"),
        (["--older-than", "0"], "removed 0 deleted studies and "),
    ):
        thrifty("gc", *more, *STORAGE, monkeypatch=monkeypatch)
        assert said in capsys.readouterr().out
    assert not list(Path("t-checkpoints").glob("*/*.safetensors"))
    thrifty("run", "line_study.py", "--quiet", monkeypatch=monkeypatch)
    with Store.open("sqlite:///t.db") as store, store.lease(store.studies.get("line")):
        thrifty("gc", *STORAGE, monkeypatch=monkeypatch)
    assert "a process trains there: 1 plans" in capsys.readouterr().out


def test_the_command_to_delete_a_study_works_for_a_name_that_begins_with_a_dash(folder):
    from thrifty.store._address import shell_command  # noqa: PLC0415

    with Store.open("sqlite:///t.db") as store:
        store.studies.create("-x", plan=store.plans.open("x", task="T").id, spec={})
    command = shell_command("delete", name="-x", url="sqlite:///t.db")
    result = CliRunner().invoke(_app, shlex.split(command)[1:], input="y\n")
    assert "deleted study -x" in result.output


@pytest.mark.parametrize(("answer", "is_deleted"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_study_is_deleted_after_a_question(folder, monkeypatch, capsys, answer, is_deleted):
    with Store.open("sqlite:///t.db") as store:
        store.studies.create("s", plan=store.plans.open("x", task="T").id, spec={})
    result = CliRunner().invoke(_app, ["delete", "s", *STORAGE], input=answer)
    assert "delete study s with its 0 trials?" in result.output
    assert (result.exit_code == 0) == is_deleted
    with Store.open("sqlite:///t.db") as store:
        assert (store.studies.find("s") is None) == is_deleted


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "empty.py"), "does not define a study"),
        (("run", "line_study.py", "--name", "other"), "does not define study 'other'"),
        (("run", "two.py"), "defines several studies"),
        (("run", "notes.txt"), "not a Python file"),
        (("status", "--storage", "sqlite:///none.db"), "there is no database"),
        (("best", "none", "--storage", "sqlite:///t.db"), "no study 'none'"),
        (("delete", "none", "--storage", "sqlite:///t.db", "--yes"), "no study 'none'"),
        (("best", "fresh", "--storage", "sqlite:///t.db"), "has no results yet"),
        (("export", "line", "--storage", "sqlite:///t.db"), "say what to write"),
        (("resume", "fresh", "--storage", "sqlite:///t.db"), "is unknown: a session made it"),
        (("run", "missing.py"), "does not exist"),
        (("dance",), "No such command"),
        (("plan", "bracket.py"), "bracket.py cannot be loaded: SyntaxError: '(' was never closed"),
        (("plan", "raises.py"), "raises.py cannot be loaded: line 2: ValueError: mine; mend it"),
        (("plan", "refused.py"), "a whole number"),
    ],
)
def test_errors_are_one_message(folder, monkeypatch, capsys, args, message):
    Path("empty.py").write_text("")
    Path("notes.txt").write_text("")
    Path("bracket.py").write_text("x = (")
    Path("raises.py").write_text("import sys\nraise ValueError('mine')")
    Path("refused.py").write_text("import thrifty as th\nth.StopWhen(epochs=-1)")
    Path("two.py").write_text(STUDY + STUDY.replace("study =", "other =").replace('"line"', '"b"'))
    with Store.open("sqlite:///t.db") as store:
        store.studies.create("fresh", plan=store.plans.open("x", task="T").id, spec={})
    thrifty(*args, monkeypatch=monkeypatch, fails=True)
    said = capsys.readouterr()
    assert message in said.err + said.out
    assert "Traceback" not in said.err


def test_the_list_of_commands_has_whole_sentences(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thrifty", "--help"])
    main()
    said = " ".join(capsys.readouterr().out.split())
    assert "Show how much the study in FILE has to train, before any training." in said
    assert "..." not in said.partition("Commands:")[2]


def test_the_exit_code_is_the_command_s(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thrifty", "doctor", "--extra", "none-such"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1


def test_status_of_two_studies_at_once_is_refused(folder, monkeypatch, capsys):
    thrifty("status", "one", "--name", "two", monkeypatch=monkeypatch, fails=True)
    assert "status got the studies 'one' and 'two'; name one" in capsys.readouterr().err


def test_status_of_an_empty_database(folder, monkeypatch, capsys):
    Store.open("sqlite:///t.db").close()
    thrifty("status", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    assert "no studies yet" in capsys.readouterr().out


def test_status_of_a_study_that_was_killed(folder, monkeypatch, capsys):
    with Store.open("sqlite:///t.db") as store:
        plan = store.plans.open("plan", task="T").id
        store.studies.create("s", plan=plan, spec={"metric": "loss", "mode": "min"})
    thrifty("status", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    assert "interrupted (its process is gone; run it again to go on)" in capsys.readouterr().out


def test_the_help_of_all_commands_is_that_of_each():
    for name, (_, sentence) in COMMANDS.items():
        command = _app.get_command(click.Context(_app), name)
        assert command.name == name
        assert command.get_short_help_str(limit=200) == sentence


def test_the_help_does_not_wait_for_what_commands_need():
    code = """
import sys
from thrifty.cli import COMMANDS, main
sys.argv = ["thrifty", "--help"]
try:
    main()
finally:
    assert not {"torch", "sqlalchemy", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "dashboard" in run.stdout


def test_status_does_not_wait_for_torch():
    code = "import sys, thrifty.cli._status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_demo_answers_and_answers_again(folder, monkeypatch, capsys):
    thrifty("demo", "--quiet", monkeypatch=monkeypatch)
    first = capsys.readouterr().out
    assert "81 trials" in first
    assert Path("demo/forest.png").stat().st_size > 10_000
    thrifty("demo", "--quiet", monkeypatch=monkeypatch)
    again = capsys.readouterr().out
    assert first.splitlines()[-5:] == again.splitlines()[-5:]
    assert again.splitlines()[-1].endswith("thrifty dashboard sqlite:///demo/demo.db --open")
    thrifty("demo", "--json", monkeypatch=monkeypatch)
    assert json.loads(capsys.readouterr().out)["written"] == ["demo/forest.png", "demo/curves.png"]
    options = ("--storage", "sqlite:///demo/demo.db")
    thrifty("importance", "digits", *options, monkeypatch=monkeypatch)
    assert "share in what makes trials differ in accuracy" in capsys.readouterr().out
    thrifty("resume", "digits", "--quiet", *options, monkeypatch=monkeypatch)
    assert "best of 81 trials" in capsys.readouterr().out


def test_the_demo_says_how_to_open_the_dashboard(tmp_path, monkeypatch):
    command = "dashboard sqlite:///demo/demo.db --open"
    monkeypatch.setattr("thrifty.cli._demo.shutil.which", lambda _: "/usr/bin/thrifty")
    assert _dashboard(Path("demo")) == f"thrifty {command}"
    monkeypatch.setattr("thrifty.cli._demo.find_spec", lambda _: None)
    assert _dashboard(Path("demo")) == f"thrifty {command} (first install the extra 'web')"
    # without the environment on the PATH, as after `make demo`
    monkeypatch.setattr("thrifty.cli._demo.shutil.which", lambda _: None)
    monkeypatch.setattr("thrifty.cli._demo.sys.executable", str(tmp_path / "python"))
    (tmp_path / "thrifty").touch()
    assert _dashboard(Path("demo")).startswith(f"{tmp_path / 'thrifty'} {command}")


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("2", "2 (2 stopped in training, at epoch 2)"),
        ("5", "2 (1 done, 1 stopped in training, at epoch 3)"),
    ],
)
def test_status_of_a_stopped_study_says_at_which_epoch(folder, monkeypatch, capsys, stop, said):
    """No trial is called running when no process trains it."""
    options = ("--quiet", "--stop-epochs", stop)
    thrifty("run", "line_study.py", *options, monkeypatch=monkeypatch)
    capsys.readouterr()
    thrifty("status", "--storage", "sqlite:///t.db", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert f"trials      {said}" in shown
    assert "running" not in shown


def test_cost_and_try(folder, monkeypatch, capsys):
    words = ("line_study.py", "--config", '{"lr": 0.1}')
    thrifty("cost", *words, monkeypatch=monkeypatch)
    assert "4 epochs to train of 4; 0 known already" in capsys.readouterr().out
    thrifty("try", *words, "--quiet", monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "lr = 0.1" in said
    assert "these are trials of study line-only-4" in said
    thrifty("cost", *words, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert re.search(r"lr = 0.1 +4 of 4 epochs +\S+ +line-only-4", said)
    assert "0 epochs to train of 4, about 0.0 s; 4 known already" in said
    thrifty("try", *words, "--storage", "sqlite:///u.db", "--as", "mine", monkeypatch=monkeypatch)
    assert "these are trials of study mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name a configuration with --config"),
        (("--config", "lr=1"), "--config 'lr=1' is not JSON"),
        (("--config", "[1]"), "a configuration is an object"),
        (("--config", '{"lr": 0.7}'), "lr=0.7 is not in"),
        (("--config", "{}"), "lacks lr"),
        (("--configs", "object.json"), "--configs is a JSON list"),
        (("--configs", "bytes.json"), "--configs cannot be read"),
        (("--configs", "deep.json"), "is not JSON"),
        (("--config", '{"lr": NaN}'), "nan is not a finite number"),
        (("--config", '{"lr": {"schedule": "Step", "fields": null}}'), "cannot be read"),
        (("--config", '{"lr": 0.1}', "--epochs", "5"), "no more than max_epochs"),
    ],
)
@pytest.mark.parametrize("command", ["cost", "try"])
def test_bad_configurations(folder, monkeypatch, capsys, command, words, told):
    Path("object.json").write_text("{}")
    Path("bytes.json").write_bytes(b"[\xff]")
    Path("deep.json").write_text("[" * 100_000)
    thrifty(command, "line_study.py", *words, monkeypatch=monkeypatch, fails=True)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-epochs", "4"], "limit what --allow-run allows"),
        (["--allow-run"], "--allow-run needs a FILE"),
        (["no.py"], "does not exist"),
        (["line_study.py", "--allow-run", "--max-seconds", "nan"], "give a number of seconds"),
        (["line_study.py", "--allow-run", "--max-seconds", "inf"], "give a number of seconds"),
        (["line_study.py", "--storage", "nonsense"], "not a database address"),
    ],
)
def test_a_server_for_agents_that_cannot_begin(folder, monkeypatch, capsys, words, told):
    thrifty("mcp", *words, monkeypatch=monkeypatch, fails=True)
    assert told in capsys.readouterr().err


def test_a_server_for_agents_needs_an_extra(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp", None)
    thrifty("mcp", monkeypatch=monkeypatch, fails=True)
    assert "[mcp]" in capsys.readouterr().err
