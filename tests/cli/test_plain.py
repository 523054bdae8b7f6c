"""The command line prints names, values and errors as plain text."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

import thrifty
from tests.study.helpers import make_study
from thrifty import cli
from thrifty.cli._options import cell, complete_study, say
from thrifty.core import ThriftyError, UsageError, plain_logger
from thrifty.store import Store
from thrifty.study._session import Progress


pytestmark = pytest.mark.slow


ODD = {
    "markup": "[red]alarm[/red][link=https://evil.example]x[/link]",
    "closing": "[/]",
    "colour": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "clear": "\x9b2J",
    "line": "first\nsecond\rthird",
    "bell": "\a\b\x7f\0",
    "right to left": "\u202egnp.exe",
    "separators": "\u2028\u2029\x85",
    "half": "\ud800",
    "backslash": "ends with \\",
    "emoji": ":skull: [bold]x",
}
"""Texts with a meaning to a terminal or to rich, and texts with none."""

STUDY = """
import thrifty as th
from thrifty.testing import LineTask
ODD = {odd!r}

class Task(LineTask):
    def metrics(self, model, batch):
        return {{ODD: self.loss(model, batch)}}

    def loss(self, model, batch):
        if self.fails:
            raise RuntimeError(ODD)
        return super().loss(model, batch)

    def adapt(self, model, hp):
        super().adapt(model, hp)
        self.fails = hp[ODD] == "fails"

    fails = False

space = {{"lr": th.Choice([0.1, 0.05, 0.02, 0.01]), ODD: th.Choice([ODD, "b", "fails"])}}
study = th.Study(Task(), th.Space(**space),
                 algorithm=th.GridSearch(max_epochs=2), metric=ODD, mode="min", name=ODD, seed=0,
                 storage={url!r})
"""

NAMES = {
    "markup": ODD["markup"] + ODD["closing"] + ODD["emoji"],
    "escapes": "".join(ODD[n] for n in ("colour", "title", "clear", "right to left", "separators")),
    "line": ODD["line"] + ODD["backslash"],
}
"""Names of a study, its metric and a hyper-parameter.

A command line takes only some of the texts.
"""


def run(capsys, *words: str, code: int = 0) -> str:
    """Return all that a command prints, as a terminal would get it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["thrifty", *words])
        patch.setenv("COLUMNS", "200")
        left: str | int | None = 0
        try:
            cli.main()
        except SystemExit as leaving:
            left = leaving.code
    said = capsys.readouterr()
    assert left == code, said
    return said.out + said.err


def assert_plain(text: str, odd: str = "") -> None:
    left = {c for c in text if not c.isprintable() and c not in "\n\t"}
    assert not left, f"{left!r} in {text!r}"
    if "[" in odd and "alarm" in odd:
        assert "[red]alarm[/red]" in text


@pytest.fixture(params=NAMES)
def odd(request):
    return NAMES[request.param]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/t.db"


@pytest.fixture
def file(tmp_path, odd, url):
    path = tmp_path / "odd_study.py"
    path.write_text(STUDY.format(odd=odd, url=url), encoding="utf-8")
    return path


@pytest.fixture
def done(capsys, file, odd):
    said = run(capsys, "run", str(file), "--threads", "1")
    assert_plain(said, odd)
    assert "4 trials failed" in said
    return file


COMMANDS = [
    ["status"],
    ["status", "--name", "NAME"],
    ["best", "NAME"],
    ["best", "NAME", "--json"],
    ["importance", "NAME", "--trust-file"],
    ["importance", "NAME", "--level", "coordinate", "--trust-file"],
    ["resume", "NAME", "--trust-file"],
    ["export", "NAME", "--format", "csv"],
    ["export", "NAME", "--format", "json"],
]


@pytest.mark.sample(1)
def test_every_command(capsys, caplog, done, odd, url, tmp_path):
    for words in COMMANDS:
        given = [odd if word == "NAME" else word for word in words]
        assert_plain(run(capsys, *given, "--storage", url))
    for ending in ("csv", "json", "parquet"):
        out = tmp_path / f"trials.{ending}"
        assert_plain(run(capsys, "export", odd, "--out", str(out), "--storage", url))
    assert_plain(run(capsys, "plan", str(done)))
    config = json.dumps({"lr": 0.1, odd: "b"})
    assert_plain(run(capsys, "cost", str(done), "--config", config), odd)
    assert_plain(run(capsys, "try", str(done), "--config", config, "--quiet"), odd)
    assert_plain(run(capsys, "export", odd, "--optuna", f"{tmp_path}/o.db", "--storage", url))
    assert_plain(caplog.text)
    assert_plain(
        run(
            capsys,
            "plot",
            odd,
            "history",
            "--out",
            f"{tmp_path}/h.png",
            "--storage",
            url,
            "--trust-file",
        )
    )


def test_errors_are_printed_as_plain_text(capsys, done, odd, url):
    assert_plain(run(capsys, "best", f"{odd}x", "--storage", url, code=2))
    assert_plain(run(capsys, "plan", str(done), "--name", odd[::-1], code=2))
    assert_plain(run(capsys, "export", odd, "--format", odd, code=2))
    done.write_text(done.read_text(encoding="utf-8") + "raise RuntimeError(ODD)", encoding="utf-8")
    assert "RuntimeError" in run(capsys, "plan", str(done), code=2)


def test_a_defect_of_ours_is_plain_too(capsys, monkeypatch, url, odd):
    def fail(*_, **__):
        raise KeyError(odd + ODD["colour"])

    monkeypatch.setattr(Store, "open", fail)
    said = run(capsys, "status", "--storage", url, code=1)
    assert_plain(said)
    assert "KeyError" in said


def test_rows_that_somebody_else_wrote(capsys, tmp_path):
    """The command line prints plain text whatever states, workers and errors the database holds."""
    study = make_study(tmp_path).run(progress=False)
    everything = "".join(ODD.values()).replace("\ud800", "").replace("\0", "")
    with Store.open(study.storage.url) as store, store._engine.begin() as connection:
        for statement in (
            "UPDATE studies SET name = ?, state = 'x' || ?1",
            "UPDATE trials SET state = ? WHERE number = 1",
            "UPDATE epochs SET worker = ?",
            "UPDATE plans SET task = ?",
        ):
            connection.exec_driver_sql(statement, (everything,))
    for words in (["status"], ["best", everything], ["export", everything, "--format", "csv"]):
        assert_plain(run(capsys, *words, "--storage", study.storage.url))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_values_in_tables_and_lines(capsys, odd):
    say(odd)
    assert_plain(capsys.readouterr().out)
    out = io.StringIO()
    Console(file=out, width=500, color_system=None).print(cell(odd))
    assert_plain(out.getvalue())
    assert ("[" in odd) <= ("[" in out.getvalue())


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_logs_are_plain_text(caplog, odd):
    logger = plain_logger("thrifty.test")
    logger.warning("study %s: %r", odd, ODD)
    logger.warning(odd.replace("%", "%%"))
    assert_plain(caplog.text)
    logging.getLogger("thrifty.test").filters.clear()


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_our_errors(odd):
    assert_plain(str(UsageError(f"no {odd}")))
    assert_plain(str(ThriftyError(odd)))


@pytest.fixture(scope="module")
def trained_study(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("study"))
    study.run(progress=False)
    return study


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_the_progress_display(odd, trained_study):
    study = trained_study
    ledger = study._reader.current(study._repository())
    ledger.goals = type(study.goals)(metrics=(odd,), modes=("min",), constraints=())
    bar = Progress(odd, ledger, clock=study._clock)
    bar._draw(ledger, elapsed_s=1.0)
    out = io.StringIO()
    for shown in bar._bar.get_renderables():
        Console(file=out, width=1000, color_system=None).print(shown)
    assert_plain(out.getvalue())
    assert ("[" in odd) <= ("[" in out.getvalue())


def test_names_that_are_not_plain_are_not_completed(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/t.db"
    monkeypatch.setenv("THRIFTY_STORAGE", url)
    with Store.open(url) as store:
        plan = store.plans.open("p", task="T").id
        for name in ("plain", *NAMES.values()):
            store.studies.create(name, plan=plan, spec={})
    context = cli._app.make_context("thrifty", ["status"], resilient_parsing=True)
    found = [item.value for item in complete_study(context, None, "")]
    assert "plain" in found
    assert_plain("".join(found))
    assert NAMES["line"] not in found


def test_all_that_is_printed_goes_through_one_function():
    """Commands print with ``say`` and ``cell``, and modules log with ``plain_logger``."""
    root = Path(thrifty.__file__).parent
    allowed = {
        "cli/_options.py",
        "cli/_status.py",  # JSON, which is plain
        "cli/_doctor.py",
        "cli/_rent/_command.py",  # a script
    }
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        source = path.read_text(encoding="utf-8")
        if name.startswith("cli/") and name not in allowed:
            assert "click.echo" not in source, name
            assert "click.secho" not in source, name
        made = [
            ast.unparse(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
        ]
        assert not any(each.startswith("logging.getLogger") for each in made), name
