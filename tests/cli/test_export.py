"""``thrifty export``: trials as a table."""

from __future__ import annotations

import csv
import errno
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.cli.test_cli import thrifty
from thrifty.cli._export import _finite
from thrifty.core import MissingExtraError, UsageError
from thrifty.store._reports import columns, frame


pytestmark = pytest.mark.slow


STUDY = """
import thrifty as th
from thrifty.testing import FaultyTask

space = th.Space(
    lr=th.Choice([0.1, th.Step(0.1, [2])]), width=th.Choice([0, 4]), fault=th.Choice(["", "nan"]),
)
study = th.Study(
    FaultyTask(), space, algorithm=th.GridSearch(max_epochs=3), METRIC,
    storage="sqlite:///t.db", name="line",
)
"""
ONE = 'metric="mse", mode="min"'
TWO = 'metric=["mse", "train_loss"], mode=["min", "min"], constraints={"mse": 100.0}'
STORAGE = ("--storage", "sqlite:///t.db")


@pytest.fixture(scope="module", params=[ONE, TWO], ids=["one", "two"])
def trained(request, tmp_path_factory):
    """Return a folder with a finished study; some trials have failed."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "exported.py").write_text(STUDY.replace("METRIC", request.param))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        thrifty("run", "exported.py", "--quiet", monkeypatch=monkeypatch)
    return folder, request.param is TWO


@pytest.fixture
def two(trained, monkeypatch):
    """Return whether the study has two objectives and a constraint."""
    monkeypatch.chdir(trained[0])
    return trained[1]


@pytest.fixture
def export(two, monkeypatch, capsys):
    def run(*args):
        capsys.readouterr()
        thrifty("export", "line", *STORAGE, *args, monkeypatch=monkeypatch)
        return capsys.readouterr().out

    return run


def test_json_has_configurations_as_the_database_has_them(export, two):
    trials = json.loads(export("--format", "json"))
    assert [trial["number"] for trial in trials] == list(range(8))
    for trial in trials:
        nan = trial["config"]["fault"] == "nan"
        assert trial["state"] == ("failed" if nan else "done")
        assert trial["epochs"] == (0 if nan else 3)
        assert ("nan" in trial["error"]) == nan
        assert (trial["value"] is None) == nan
        assert ("values" in trial) == ("violation" in trial) == two
    assert any(isinstance(trial["config"]["lr"], dict) for trial in trials)


def test_csv_is_printed_or_written(export):
    printed = export("--format", "csv")
    assert export("--out", "a.csv") == "wrote a.csv\n"
    assert export("--csv", "b.csv") == "wrote b.csv\n"
    assert Path("a.csv").read_text() == Path("b.csv").read_text() == printed
    rows = list(csv.DictReader(printed.splitlines()))
    assert [row["state"] for row in rows].count("done") == 4
    assert {row["params_lr"] for row in rows} == {"0.1", "Step(0.1, (2,))"}


def test_a_full_disk_leaves_the_former_file(export, two, monkeypatch, capsys):
    export("--out", "a.csv")
    before = Path("a.csv").read_bytes()

    def half(path, data):
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", half)
        thrifty("export", "line", *STORAGE, "--out", "a.csv", monkeypatch=full, fails=True)
    assert "cannot write a.csv: No space left on device" in capsys.readouterr().err
    assert Path("a.csv").read_bytes() == before
    assert not [each for each in Path().iterdir() if each.name.endswith(".tmp")]


def test_parquet_has_columns_of_one_type(export, two):
    import polars  # noqa: PLC0415

    export("--out", "t.parquet")
    table = polars.read_parquet("t.parquet")
    assert table.height == 8
    types = dict(zip(table.columns, map(str, table.dtypes), strict=True))
    assert types["number"] == types["epochs"] == types["params_width"] == "Int64"
    assert types["value"] == "Float64"
    assert types["params_lr"] == types["state"] == "String"
    assert ("values_train_loss" in types) == ("violation" in types) == two


def test_all_say_the_same(export):
    import polars  # noqa: PLC0415

    export("--out", "t.parquet")
    table = polars.read_parquet("t.parquet")
    trials = json.loads(export("--format", "json"))
    rows = list(csv.DictReader(export("--format", "csv").splitlines()))
    for name in ("number", "state", "epochs", "value"):
        told = [trial[name] for trial in trials]
        assert table[name].to_list() == told
        assert [row[name] for row in rows] == ["" if each is None else str(each) for each in told]


def test_all_tables_have_the_columns_of_the_data_frame(export, two):
    import polars  # noqa: PLC0415

    wanted = runpy.run_path("exported.py")["study"].trials_dataframe()
    export("--out", "t.parquet")
    rows = list(csv.DictReader(export("--format", "csv").splitlines()))
    assert polars.read_parquet("t.parquet").columns == list(wanted.columns) == list(rows[0])
    name = "violation" if two else "metrics_train_loss"
    assert [float(row[name]) for row in rows if row["state"] == "done"] == list(
        wanted[name][wanted["state"] == "done"]
    )


def test_a_format_outvotes_an_ending(export):
    export("--format", "json", "--out", "t.txt")
    assert len(json.loads(Path("t.txt").read_text())) == 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "say what to write: --csv FILE, --format csv, json or parquet"),
        (("--out", "t.doc"), "its extension must be one of .csv, .json, .parquet"),
        (("--format", "parquet"), "name a file with --out FILE"),
        (("--out", "none/t.csv"), "cannot write none/t.csv: No such file"),
        (("--optuna", "none/t.db"), "there is no folder none; make it first"),
    ],
)
def test_what_is_wrong_is_said(two, monkeypatch, capsys, args, message):
    thrifty("export", "line", *STORAGE, *args, monkeypatch=monkeypatch, fails=True)
    assert message in capsys.readouterr().err


def test_polars_may_be_absent(two, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "polars", None)
    args = ("export", "line", *STORAGE, "--out", "none.parquet")
    thrifty(*args, monkeypatch=monkeypatch, fails=True)
    assert "polars is not installed" in capsys.readouterr().err


def test_a_study_that_is_not_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("undone.py").write_text(STUDY.replace("METRIC", ONE))
    args = ("run", "undone.py", "--quiet", "--stop-epochs", "4")
    thrifty(*args, monkeypatch=monkeypatch)
    capsys.readouterr()
    thrifty("export", "line", *STORAGE, "--format", "json", monkeypatch=monkeypatch)
    trials = json.loads(capsys.readouterr().out)
    assert "done" in {trial["state"] for trial in trials}
    assert "waiting" not in {trial["state"] for trial in trials}


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES), max_size=6))
def test_columns_are_of_one_type_and_lose_nothing(rows):
    table = columns(rows)
    assert set(table) == {name for row in rows for name in row}
    for name, column in table.items():
        assert len({type(value) for value in column if value is not None}) <= 1
        for row, value in zip(rows, column, strict=True):
            given_value = row.get(name)
            same = value == given_value or value == str(given_value)
            assert (value is None and given_value is None) or same


def test_whole_numbers_and_others_are_numbers_together():
    assert columns([{"a": 1}, {"a": 0.5}, {"a": None}]) == {"a": [1.0, 0.5, None]}
    assert columns([{"a": 1}, {"a": True}]) == {"a": ["1", "True"]}


def test_json_has_no_number_that_is_none():
    assert [_finite(value) for value in (math.inf, math.nan, None, 1.5)] == [None, None, None, 1.5]


def test_a_frame_of_each_library():
    rows = [{"lr": 0.1, "n": 1}, {"lr": "REX", "n": None}]
    assert frame(rows, backend="pandas").shape == frame(rows, backend="polars").shape == (2, 2)
    assert frame(rows)["lr"].tolist() == [0.1, "REX"]
    assert frame(rows, backend="polars")["lr"].to_list() == ["0.1", "REX"]
    assert math.isnan(frame(rows)["n"][1])


def test_a_library_that_is_not_there(monkeypatch):
    with pytest.raises(UsageError, match="it is one of 'pandas', 'polars'"):
        frame([], backend="excel")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pandas is not installed"):
        frame([])


def test_several_seeds_are_in_status_best_and_exports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("seeded.py").write_text(STUDY.replace("METRIC", ONE + ", seeds=3"))
    thrifty("run", "seeded.py", "--quiet", monkeypatch=monkeypatch)
    best = runpy.run_path("seeded.py")["study"].best_trial
    capsys.readouterr()
    thrifty("status", *STORAGE, monkeypatch=monkeypatch)
    assert "after 3 epochs, mean of 3 seeds)" in capsys.readouterr().out
    thrifty("best", "line", *STORAGE, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "mean of 3 seeds, sd " in said
    assert f"with a probability of {best.certainty:.0%}" in said
    thrifty("best", "line", *STORAGE, "--json", monkeypatch=monkeypatch)
    (found,) = json.loads(capsys.readouterr().out)["trials"]
    assert (found["seeds"], found["sd"], found["certainty"]) == (3, best.sd, best.certainty)
    for kind in ("csv", "json", "parquet"):
        thrifty("export", "line", *STORAGE, "--out", f"t.{kind}", monkeypatch=monkeypatch)
    table = csv.DictReader(Path("t.csv").read_text().splitlines())
    (row,) = (r for r in table if r["number"] == str(best.number))
    assert (float(row["sd"]), row["seeds"]) == (best.sd, "3")
    rows = json.loads(Path("t.json").read_text())
    assert rows[best.number]["sd"] == best.sd
    assert all(row["sd"] is None for row in rows if not row["epochs"])
    pl = pytest.importorskip("polars")
    assert pl.read_parquet("t.parquet")["seeds"].max() == 3


def test_columns_of_hyper_parameters_have_names_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("named.py").write_text(
        "import thrifty as th\n"
        "@th.trainable\n"
        "def train(trial):\n"
        "    value = trial.suggest_categorical('value', [3, 4])\n"
        "    epochs = trial.suggest_categorical('epochs', [1, 0])\n"
        "    rate = 1 / epochs\n"
        "    for epoch in trial.epochs():\n"
        "        yield {'loss': value}\n"
        "space = th.Space(value=th.Choice([3, 4]), epochs=th.Choice([1, 0]))\n"
        "study = th.Study(train, space, algorithm=th.GridSearch(max_epochs=2), metric='loss',\n"
        "    mode='min', storage='sqlite:///t.db', name='named')\n"
    )
    thrifty("run", "named.py", "--quiet", monkeypatch=monkeypatch)
    capsys.readouterr()
    thrifty("export", "named", *STORAGE, "--format", "csv", monkeypatch=monkeypatch)
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert len(set(header)) == len(header)
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert {(each["params_value"], each["params_epochs"]) for each in found} == {
        ("3", "1"), ("4", "1"), ("3", "0"), ("4", "0"),
    }  # fmt: skip
    for each in found:
        assert each["value"] == (
            "" if each["params_epochs"] == "0" else each["params_value"] + ".0"
        )
        assert ("division by zero" in each["error"]) == (each["params_epochs"] == "0")
