"""``thrifty completion``: scripts for shells, and completed names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from tests.cli.test_cli import thrifty
from thrifty.cli import _app
from thrifty.cli._options import complete_storage, complete_study, completion_command
from thrifty.store import Store


pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, names in (("thrifty.db", ["line", "lime"]), ("a b.db", ["tea"])):
        with Store.open(f"sqlite:///{file}") as store:
            plan = store.plans.open("x", task="T").id
            for name in names:
                store.studies.create(name, plan=plan, spec={})
    return tmp_path


def studies(incomplete="", **params):
    ctx = click.Context(completion_command)
    ctx.params = params
    return [item.value for item in complete_study(ctx, completion_command.params[0], incomplete)]


def storages(incomplete):
    ctx = click.Context(completion_command)
    return [item.value for item in complete_storage(ctx, completion_command.params[0], incomplete)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(monkeypatch, capsys, shell):
    thrifty("completion", shell, monkeypatch=monkeypatch)
    script = capsys.readouterr().out
    assert f"_THRIFTY_COMPLETE={shell}_complete" in script
    assert ("COMP_WORDBREAKS" in script) == (shell == "bash")


def test_studies_newest_first(folder):
    assert studies() == ["lime", "line"]
    assert studies("lin") == ["line"]
    assert studies("x") == []


def test_the_database_is_the_one_that_the_line_or_the_environment_names(folder, monkeypatch):
    assert studies(storage="sqlite:///a b.db") == ["tea"]
    monkeypatch.setenv("THRIFTY_STORAGE", "sqlite:///a b.db")
    assert studies() == ["tea"]
    assert studies(storage="sqlite:///thrifty.db") == ["lime", "line"]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///none.db",
        "sqlite:///text.db",
        "sqlite://",
        "nonsense",
        "oracle+none://x",
        "postgresql://localhost:1/x",
    ],
)
def test_a_key_pressed_in_passing_breaks_and_makes_nothing(folder, url):
    (folder / "text.db").write_text("no database" * 100)
    before = sorted(folder.iterdir())
    assert studies(storage=url) == []
    assert sorted(folder.iterdir()) == before


def test_files_of_databases(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "x.sqlite").touch()
    (folder / ".hidden.db").touch()
    (folder / "notes.txt").touch()
    assert storages("sqlite:///") == ["sqlite:///a b.db", "sqlite:///deep/", "sqlite:///thrifty.db"]
    assert storages("sqlite:///th") == ["sqlite:///thrifty.db"]
    assert storages("sqlite:///deep/") == ["sqlite:///deep/x.sqlite"]
    assert storages("sqlite:///.h") == ["sqlite:///.hidden.db"]
    assert storages(f"sqlite:///{folder}/th") == [f"sqlite:///{folder}/thrifty.db"]
    assert "sqlite:////tmp/" in storages("sqlite:////tm")
    assert storages("sqlite:///none/") == []
    assert storages("sq") == storages("sqlite:///")
    assert storages("post") == ["postgresql+psycopg://"]
    assert storages("")[-1] == "postgresql+psycopg://"
    assert storages("mysql") == []


def test_the_command_line_as_a_whole(folder):
    complete = BashComplete(_app, {}, "thrifty", "_THRIFTY_COMPLETE")
    assert {"run", "export"} <= {i.value for i in complete.get_completions([], "")}
    args = ["export", "--storage", "sqlite:///a b.db"]
    assert [item.value for item in complete.get_completions(args, "")] == ["tea"]
    assert "parquet" in [i.value for i in complete.get_completions(["export", "--format"], "")]


DRIVE = """
source script.sh
COMP_WORDS=(thrifty export li)
COMP_CWORD=2
_thrifty_completion thrifty export li
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself_completes_a_study(folder, monkeypatch, capsys):
    thrifty("completion", "bash", monkeypatch=monkeypatch)
    Path("script.sh").write_text(capsys.readouterr().out)
    # An executable on the path, as an installation creates it.
    Path("thrifty").write_text(f"#!{sys.executable}\nfrom thrifty.cli import main\nmain()\n")
    Path("thrifty").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", DRIVE],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["lime", "line"]
