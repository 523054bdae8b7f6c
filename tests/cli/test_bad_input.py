"""Bad input gives one message and exit code 2: never a traceback, and never a silent success."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.documents import check
from thrifty.cli import main


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
TASK = """
import torch
import thrifty as th
from thrifty.testing import LineTask

class Odd(LineTask):
    batch_size = "batch"
    def model(self, hp):
        return torch.nn.Linear(1, hp.width)

task = Odd()
"""

FILES = {
    "study.py": STUDY,
    "trains.py": STUDY.replace("t.db", "n.db") + "study.run(progress=False)\n",
    "chain.py": TASK + STUDY.replace("t.db", "n.db").rstrip() + ".run(progress=False)\n",
    "two.py": STUDY + STUDY.replace("study =", "other =").replace('"line"', '"second"'),
    "empty.py": "",
    "syntax.py": "def f(:\n",
    "raises.py": "raise ValueError('the data are missing')\n",
    "exits.py": "import sys; sys.exit(3)\n",
    "imports.py": "import no_such_module\n",
    "null.py": "x = '\0'\n",
    "metric.py": STUDY.replace('metric="mse"', 'metric="nope"').replace("t.db", "m.db"),
    "space.py": STUDY.replace("th.Choice([0.1, th.Step(0.1, [2])])", "[0.1]"),
    "address.py": STUDY.replace("sqlite:///t.db", "nonsense"),
    "task.py": TASK,
    "numbers.txt": "1,2,3\n",
    "list.json": "[1, 2]",
    "half.json": '[{"lr": 0.1}',
    "nested.json": "[" * 3000,
    "prices.csv": "a,b\n1,2\n",
    "empty.csv": "",
    "text.db": "no database " * 100,
}

DB = ["--storage", "sqlite:///t.db"]
NO_DB = ["--storage", "sqlite:///nothere.db"]
HALF = ["--trial", "0", "--after", "2"]
TIMED = ["--steps", "10", "--hp", "width=1", "--hp", "batch=8", "--hp", "lr=0.1"]


def config(text: str) -> list[str]:
    return ["study.py", "--config", text]


BAD: list[tuple[list[str], str]] = [
    ([""], "No such command"),
    (["nope"], "No such command 'nope'"),
    (["bogus"], "No such command 'bogus'"),
    (["runn"], "No such command 'runn'. Did you mean 'run'?"),
    (["bets", "line"], "No such command 'bets'. Did you mean 'best'?"),
    # files
    (["run"], "Missing argument 'FILE'"),
    (["run", ""], "does not exist"),
    (["run", "nothere.py"], "does not exist"),
    (["run", "folder"], "is a directory"),
    (["run", "empty.py"], "does not define a study"),
    (["run", "syntax.py"], "SyntaxError"),
    (["run", "raises.py"], "ValueError: the data are missing"),
    (["run", "exits.py"], "SystemExit: 3"),
    (["run", "imports.py"], "No module named 'no_such_module'"),
    (["run", "null.py"], "null bytes"),
    (["run", "numbers.txt"], "is not a Python file"),
    (["run", "metric.py"], "the study's metric 'nope'"),
    (["run", "space.py"], "did you mean Choice([0.1])?"),
    (["run", "address.py"], "not a database address"),
    (["run", "two.py"], "pick one with --name"),
    (["run", "two.py", "--name", "third"], "does not define study 'third'"),
    (["run", "study.py", "extra"], "unexpected extra argument"),
    (["run", "study.py", "--no-such-option"], "No such option"),
    (["plan", "nothere.py"], "does not exist"),
    (["plan", "task.py"], "does not define a study"),
    (["plan", "study.py", "--name", "other"], "does not define study 'other'"),
    # files that train at their top level
    (["plan", "trains.py"], "trains.py calls study.run() while `thrifty plan` loads it; put the c"),
    (["cost", "trains.py", "--config", '{"lr": 0.1}'], "while `thrifty cost` loads it"),
    (["try", "trains.py", "--config", '{"lr": 0.1}'], "while `thrifty try` loads it"),
    (["rent", "trains.py"], "while `thrifty rent` loads it"),
    (["rent", "chain.py", *TIMED], "while `thrifty rent` loads it"),
    # numbers
    (["run", "study.py", "--workers", "0"], "Invalid value for '--workers': 0 is not"),
    (["run", "study.py", "--workers", "-1"], "not in the range x>=1"),
    (["run", "study.py", "--workers", "two"], "is not a whole number"),
    (["run", "study.py", "--workers", "1.5"], "is not a whole number"),
    (["run", "study.py", "--threads", "0"], "Invalid value for '--threads': 0 is not"),
    (["run", "study.py", "--threads", "x"], "is not a whole number"),
    (["run", "study.py", "--epoch-timeout", "0"], "'--epoch-timeout': 0.0 is not a finite"),
    (["run", "study.py", "--epoch-timeout", "nan"], "a finite number above 0"),
    (["run", "study.py", "--epoch-timeout", "inf"], "a finite number above 0"),
    (["run", "study.py", "--stop-epochs", "0"], "'--stop-epochs': 0 is not"),
    (["run", "study.py", "--stop-seconds", "-1"], "a finite number above 0"),
    (["run", "study.py", "--stop-seconds", "nan"], "a finite number above 0"),
    (["run", "study.py", "--target", "nan"], "a finite number"),
    (["run", "study.py", "--target", "high"], "is not a number"),
    (["resume", "line", *DB, "--workers", "0"], "not in the range x>=1"),
    (["plot", "line", "curves", *DB, "--dpi", "0"], "not in the range"),
    (["cost", *config('{"lr": 0.1}'), "--epochs", "0"], "not in the range"),
    (["cost", *config('{"lr": 0.1}'), "--epochs", "5000"], "no more than max_epochs"),
    (["try", *config('{"lr": 0.1}'), "--epochs", "-2"], "not in the range"),
    (["dashboard", "--port", "99999"], "not in the range"),
    (["dashboard", "study.py"], "'study.py' is a Python file, not a database address; give the st"),
    (["dashboard", "--port", "x"], "is not a whole number"),
    # configurations
    (["cost", "study.py"], "name a configuration"),
    (["cost", *config("{")], "is not JSON"),
    (["cost", *config("[]")], "a configuration is an object"),
    (["cost", *config("{}")], "lacks lr"),
    (["cost", *config('{"lr": 5}')], "lr=5 is not in"),
    (["cost", *config('{"lr": "0.1"}')], "lr='0.1' is not in"),
    (["cost", *config('{"lr": null}')], "lr=None is not in"),
    (["cost", *config('{"lr": NaN}')], "not a finite number"),
    (["cost", *config('{"lr": 0.1, "lr": 0.2}')], "it has 'lr' twice"),
    (["cost", *config('{"lr": 0.1, "extra": 1}')], "'extra' is not in the space"),
    (["cost", *config('{"lr": {"schedule": "Step"}}')], "needs value"),
    (["cost", *config('{"lr": {"schedule": "Nope", "fields": {}}}')], "unknown schedule 'Nope'"),
    (["cost", *config('{"lr": {"schedule": "__class__", "fields": {}}}')], "unknown schedule"),
    (["cost", "study.py", "--configs", "list.json"], "a configuration is an object"),
    (["cost", "study.py", "--configs", "half.json"], "is not JSON"),
    (["cost", "study.py", "--configs", "nested.json"], "maximum recursion depth"),
    (["cost", "study.py", "--configs", "nothere.json"], "No such file"),
    (["cost", "study.py", "--configs", "folder"], "Is a directory"),
    (["cost", *config('{"lr": 0.1}'), "--storage", "nonsense"], "not a database address"),
    (["try", "study.py"], "name a configuration"),
    (["try", *config('{"lr": 7}')], "lr=7 is not in"),
    (["try", *config('{"lr": 0.1}'), "--as", "line"], "a different study 'line'"),
    (["try", *config('{"lr": 0.1}'), "--as", ""], "give the study a name"),
    # databases and studies
    (["status", "--storage", ""], "not a database address"),
    (["status", "--storage", "nonsense"], "'nonsense' is not a database address; did you mean"),
    (["status", "--storage", "http://localhost"], "'http' is not a database"),
    (["status", "--storage", "mysql://localhost/none"], "'mysql' is not a database"),
    (["status", "--storage", "postgresql://localhost:1/none"], "does not answer"),
    (["status", "--storage", "sqlite:///text.db"], "not a thrifty database"),
    (["status", "--storage", "sqlite:///folder"], "cannot write"),
    (["status", "--storage", "sqlite:///no/such/folder/x.db"], "there is no database"),
    (["status", *NO_DB], "there is no database"),
    (["status", *DB, "--name", "nope"], "no study 'nope'"),
    (["status", *DB, "--name", ""], "no study ''"),
    (["best", *DB], "Missing argument 'NAME'. The database has: line."),
    (["best", *NO_DB], "Missing argument 'NAME'."),
    (["best", "", *DB], "no study ''"),
    (["best", "nope", *DB], "no study 'nope'; it has: line"),
    (["best", "line", *NO_DB], "there is no database"),
    (["delete", "--yes"], "Missing argument 'NAME'"),
    (["delete", "nope", *DB, "--yes"], "no study 'nope'"),
    (["delete", "line", *NO_DB, "--yes"], "there is no database"),
    (["restore", "nope", *DB], "no deleted study is called 'nope'"),
    (["restore", "--as", "x", *DB], "needs the NAME"),
    (["restore", *NO_DB], "there is no database"),
    (["restore", "nope", "--as", " ", *DB], "give the study a name"),
    (["gc", *NO_DB], "there is no database"),
    (["gc", *DB, "--older-than", "-1"], "not in the range"),
    (["gc", *DB, "--older-than", "old"], "is not a number"),
    (["gc", *DB, "--older-than", "nan"], "give a number of days"),
    (["gc", *DB, "--checkpoints", "nowhere://x"], "cannot be kept at"),
    (["explain", "nope", *DB], "no study 'nope'"),
    (["explain", "line", "nope", *DB], "no study 'nope'"),
    (["importance", "nope", *DB], "no study 'nope'"),
    (["importance", "line", *DB, "--method", "magic"], "not one of"),
    (["importance", "line", *DB, "--level", "none"], "not one of"),
    (["plot", "nope", "curves", *DB], "no study 'nope'"),
    (["plot", "line", "nokind", *DB], "not one of"),
    (["plot", "line", "histroy", *DB], "Did you mean 'history'?"),
    (["resume", "nope", *DB], "no study 'nope'"),
    (["resume", "line", *NO_DB], "there is no database"),
    (["export", "nope", *DB, "--out", "x.csv"], "no study 'nope'"),
    (["stop", "line", *DB], "is done; only a study that has work left can stop"),
    (["stop", "line", *DB, "--trial", "0"], "only trials of a study that has work left"),
    (["stop", "line", *DB, "--trial", "9"], "no trial 9"),
    (["stop", "line", *DB, "--trial", "x"], "is not a whole number"),
    (["stop", "nope", *DB], "no study 'nope'"),
    (["note", "line", *DB], "Missing argument"),
    (["note", "line", " ", *DB], "a note needs a text"),
    (["tag", "line", "a\nb", *DB], "in one line"),
    (["tag", "line", "never", *DB, "--remove"], "no tag"),
    (["tag", "line", "good", *DB, "--trial", "-1"], "no trial -1"),
    (["acts", "nope", *DB], "no study 'nope'"),
    (["logs", "line", *DB], "Missing option"),
    (["logs", "line", *DB, "--trial", "9"], "has no trial 9"),
    (["logs", "line", *DB, "--trial", "-1"], "has no trial -1"),
    (["logs", "line", *DB, "--trial", "0", "--last", "0"], "0 is not in the range x>=1"),
    (["logs", "nope", *DB, "--trial", "0"], "no study 'nope'"),
    (["extend", "line", *DB], "Missing option"),
    (["extend", "line", *DB, "--epochs", "0"], "0 is not in the range x>=1"),
    (["extend", "line", *DB, "--epochs", "4"], "4 epochs already, and got --epochs 4"),
    (["extend", "nope", *DB, "--epochs", "9"], "no study 'nope'"),
    (["branch", "line", *DB], "Missing option"),
    (["enqueue", "line", *DB], "Missing option"),
    (["enqueue", "line", *DB, "--config", "{"], "is not JSON"),
    (["enqueue", "line", *DB, "--config", "[1]"], "a configuration is an object"),
    (["enqueue", "line", *DB, "--config", '{"lr": 77}'], "lr=77 is not in"),
    (["enqueue", "nope", *DB, "--config", "{}"], "no study 'nope'"),
    (["branch", "nope", *DB, "--trial", "0", "--after", "2"], "no study 'nope'"),
    (["branch", "line", *DB, "--trial", "9", "--after", "2"], "has no trial 9"),
    (
        ["branch", "line", *DB, "--trial", "0", "--after", "4"],
        "--after 4: a trial of 4 epochs can b",
    ),
    (
        ["branch", "line", *DB, "--trial", "0", "--after", "2"],
        "give --scale NAME=NUMBER or --change ",
    ),
    (["branch", "line", *DB, *HALF, "--scale", "lr"], "write NAME=VALUE"),
    (["branch", "line", *DB, *HALF, "--scale", "lr=x"], "--scale of 'lr' must be a number, got"),
    (["branch", "line", *DB, *HALF, "--scale", "lr=1", "--scale", "lr=2"], "has lr twice"),
    (["branch", "line", *DB, *HALF, "--scale", "lr=2", "--change", "lr=2"], "in scale and in"),
    (["branch", "line", *DB, *HALF, "--change", "rate=2"], "has no 'rate'"),
    (["branch", "line", *DB, *HALF, "--change", 'lr="high"'], "cannot become 'high'"),
    (["branch", "line", *DB, *HALF, "--change", "lr=[1, 2]"], "cannot become (1, 2)"),
    (["branch", "line", *DB, *HALF, "--change", "lr=true"], "cannot become True"),
    (["branch", "line", *DB, *HALF, "--change", 'lr={"schedule": "No"}'], "unknown schedule"),
    # what is written
    (["plot", "line", "curves", *DB, "--out", "x.nope"], "its extension must be one of"),
    (["plot", "line", "curves", *DB, "--out", "no/such/x.png"], "there is no folder"),
    (["plot", "line", "curves", *DB, "--out", "folder"], "is a directory"),
    (["export", "line", *DB], "say what to write"),
    (["export", "line", *DB, "--format", "xml"], "not one of"),
    (["export", "line", *DB, "--out", "x.nope"], "its extension must be one of"),
    (["export", "line", *DB, "--out", "no/such/x.csv"], "cannot write"),
    (["export", "line", *DB, "--csv", "folder"], "is a directory"),
    (["export", "line", *DB, "--optuna", "t.db"], "t.db exists"),
    (["export", "line", *DB, "--adapter", "out"], "has no adapter"),
    (["export", "line", *DB, "--adapter", "out", "--trial", "99"], "no trial 99"),
    (["export", "line", *DB, "--trial", "x"], "is not a whole number"),
    # rent
    (["rent", "nothere.py"], "does not exist"),
    (["rent", "task.py", *TIMED, "--steps", "0"], "not in the range"),
    (["rent", "task.py", *TIMED, "--batch", "0"], "not in the range"),
    (["rent", "task.py", "--hp", "lr"], "write NAME=VALUE"),
    (["rent", "task.py", "--hp", "lr=0.1"], "give --hp batch=32"),
    (["rent", "task.py", *TIMED, "--hp", "batch=x"], "its batch size failed with ValueError"),
    (["rent", "task.py", *TIMED, "--hp", "lr=x"], "whose value is the text 'x'"),
    (["rent", "task.py", *TIMED, "--hp", "width=x"], "its model failed with TypeError"),
    (["rent", "task.py", *TIMED, "--hp", "width=-1"], "its model failed with RuntimeError"),
    (["rent", "task.py", *TIMED, "--hp", "width=3"], "a step failed with "),
    (["rent", "task.py", *TIMED, "--catalogue", "prices.csv"], "lacks the columns"),
    (["rent", "task.py", *TIMED, "--catalogue", "empty.csv"], "is empty"),
    (["rent", "task.py", *TIMED, "--catalogue", "nothere.csv"], "does not exist"),
    (["rent", "task.py", *TIMED, "--deadline", "soon"], "write 90m, 6h, 2d"),
    (["rent", "task.py", *TIMED, "--deadline", "-1h"], "write 90m, 6h, 2d"),
    (["rent", "task.py", *TIMED, "--budget", "-5"], "no sum of dollars"),
    (["rent", "task.py", *TIMED, "--budget", "nan"], "no sum of dollars"),
    (["rent", "task.py", *TIMED, "--cloud", "nowhere"], "no offer has cloud"),
    (["rent", "task.py", *TIMED, "--region", "nowhere"], "no offer has region"),
    (["rent", "task.py", *TIMED, "--accelerator", "H9000"], "no offer has accelerator"),
    (["rent", "task.py", *TIMED, "--max-nodes", "0"], "not in the range"),
    (["rent", "task.py", *TIMED, "--quota", "x"], "write NAME=NUMBER"),
    (["rent", "task.py", *TIMED, "--quota", "x=-1"], "no whole number"),
    (["rent", "task.py", *TIMED, "--evictions", "-1"], "not in the range"),
    (["rent", "task.py", *TIMED, "--precision", "int4"], "not one of"),
    (["rent", "task.py", *TIMED, "--profile", "list.json"], "holds no profile"),
    (["rent", "task.py", *TIMED, "--profile", "nothere.json"], "does not exist"),
    # servers
    (["catalogue", "nope"], "No such command"),
    (["dashboard", "--storage", "nonsense"], "not a database address"),
    (["dashboard", *DB, "--host", "no.such.host.invalid"], "cannot listen"),
    (["dashboard", *DB, "--host", "0.0.0.0", "--token", ""], "at least 16 characters"),
    (["dashboard", "sqlite:///t.db", *DB], "give one of them"),
    (["completion"], "Missing argument"),
    (["completion", "csh"], "not one of"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        thrifty("run", "study.py", "--quiet")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files, besides the database of a study that fails when it trains.

    SQLite's own files beside a database may come and go when it is read.
    """
    files = (path for path in folder.iterdir() if path.is_file() and "m.db" not in path.name)
    files = (path for path in files if not path.name.endswith(("-shm", "-wal")))
    return {path.name: path.read_bytes() for path in files}


def thrifty(*words: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["thrifty", *words])
        try:
            main()
        except SystemExit as leaving:
            return leaving.code
    return 0


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_message_says_what_is_wrong(folder, monkeypatch, capsys, words, told):
    monkeypatch.chdir(folder)
    before = contents(folder)
    code = thrifty(*words, "--json")
    printed = capsys.readouterr()
    error = check(json.loads(printed.out), "")["error"]
    assert told in error["message"]
    assert code == 2
    assert "Traceback" not in printed.err
    assert contents(folder) == before


def test_only_a_close_command_is_suggested(capsys):
    thrifty("bogus")
    assert "Did you mean" not in capsys.readouterr().err
    thrifty("stauts")
    assert "Did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["nope"], ["run"], ["run", "empty.py"], ["best", "line", *NO_DB]]
)
def test_every_error_begins_alike(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    thrifty(*words)
    said = capsys.readouterr().err
    assert "error: " in [line[:7] for line in said.splitlines()]
    assert "Error: " not in said
    assert said.endswith("\n")
    assert not said.endswith("\n\n")


def test_there_are_a_hundred():
    assert len({tuple(words) for words, _ in BAD}) == len(BAD) >= 100
