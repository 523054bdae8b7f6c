from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import thrifty
from thrifty.cli._plots import KINDS


pytestmark = pytest.mark.slow


STUDY = """
import thrifty as th
from thrifty.testing import LineTask

space = th.Space(
    lr=th.Choice([
        th.Constant(th.Float(0.01, 0.2, log=True)), th.Step(th.Float(0.01, 0.2, log=True), [2])
    ]),
    dropout=th.Float(0.0, 0.5),
)
study = th.Study(
    LineTask(), space, algorithm=th.RandomSearch(max_epochs=3, num_trials=12),
    metric="mse", mode="min",
    storage="sqlite:///t.db", name="line",
)
"""
STORAGE = ("--storage", "sqlite:///t.db")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a finished study."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "line_pictures.py").write_text(STUDY)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        thrifty("run", "line_pictures.py", "--quiet", monkeypatch=monkeypatch)
    return folder


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_importance_has_a_bar_for_each(folder, monkeypatch, capsys):
    thrifty("importance", "line", *STORAGE, monkeypatch=monkeypatch)
    first, basis, *rows = capsys.readouterr().out.splitlines()
    assert "mse" in first
    assert basis == "fanova: mse after epoch 3 of 12 trials (12 done)"
    shares = {row.split()[0]: float(row.split()[1].rstrip("%")) for row in rows}
    assert set(shares) == {"lr", "dropout"}
    assert sum(shares.values()) == pytest.approx(100, abs=0.2)
    assert "█" in rows[0]


def test_importance_of_coordinates(folder, monkeypatch, capsys):
    thrifty("importance", "line", *STORAGE, "--level", "coordinate", monkeypatch=monkeypatch)
    assert "lr[1].value" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("pareto", "scaling-law")])
def test_every_kind_of_picture_is_written(folder, monkeypatch, capsys, kind):
    thrifty("plot", "line", kind, *STORAGE, "--dpi", "40", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == f"wrote {kind}.png\n"
    assert Path(f"{kind}.png").read_bytes()[1:4] == b"PNG"


def test_the_ending_says_the_format(folder, monkeypatch):
    out = ("--out", "history.svg")
    thrifty("plot", "line", "history", *STORAGE, *out, monkeypatch=monkeypatch)
    assert "<svg" in Path("history.svg").read_text()


def test_the_database_may_be_named_from_elsewhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = ("--storage", f"sqlite:///{folder}/t.db")
    thrifty("plot", "line", "curves", *storage, monkeypatch=monkeypatch)
    assert Path("curves.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("importance", "none"), "no study 'none'"),
        (("importance", "line", "--method", "ped-anova"), "needs 20 trials"),
        (("importance", "line", "--method", "tea"), "'tea' is not one of"),
        (("plot", "line", "pareto"), "has no Pareto front"),
        (("plot", "line", "scaling-law"), "add horizons to the ladder"),
        (("plot", "line", "tea"), "'tea' is not one of"),
        (("plot", "line", "history", "--out", "a.doc"), "its extension must be one of"),
        (("plot", "line", "history", "--out", "no/a.png"), "there is no folder"),
    ],
)
def test_errors_are_one_message(folder, monkeypatch, capsys, args, message):
    thrifty(*args, *STORAGE, monkeypatch=monkeypatch, fails=True)
    said = capsys.readouterr()
    assert message in said.err + said.out
    assert "Traceback" not in said.err
