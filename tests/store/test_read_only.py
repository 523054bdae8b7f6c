"""This process can read databases and folders that it may not write."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, text
from starlette.testclient import TestClient

from tests.store.test_migrations import copied, old_database
from tests.strangers import as_stranger, public_folder, take_away_writing
from tests.study.helpers import SOLO, make_study
from thrifty.cli import _app
from thrifty.cli._doctor import _storage
from thrifty.cli._options import _study_names
from thrifty.core import StudyMismatchError
from thrifty.store import Store, Views
from thrifty.store._engine import ReadOnlyFile
from thrifty.study import _repository
from thrifty.web import create_app


pytestmark = pytest.mark.slow


@pytest.fixture
def folder():
    with public_folder() as made:
        yield made


@pytest.fixture
def url(folder):
    """Return the address of a finished study in a folder without write permission."""
    make_study(folder).run(progress=False, executor=SOLO)
    take_away_writing(folder)
    return f"sqlite:///{folder}/t.db"


def output_of(*words: str) -> tuple[int, str]:
    os.chdir("/")
    result = CliRunner().invoke(_app, list(words))
    return result.exit_code, result.output + repr(result.exception or "")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status"], "9 done"),
        (["status", "--name", "s"], "9 done"),
        (["best", "s"], "lr ="),
        (["export", "s", "--format", "json"], '"state": "done"'),
        (["export", "s", "--format", "csv"], "number,state"),
    ],
)
def test_commands_read(url, words, expected):
    code, output = as_stranger(output_of, *words, "--storage", url)
    assert code == 0, output
    assert expected in output


def trials_of(folder: Path) -> list[float | None]:
    return [trial.value for trial in make_study(folder).trials]


def test_trials_are_read(folder, url):
    expected = trials_of(folder)
    assert len(expected) == 9
    assert as_stranger(trials_of, folder) == expected


def read_by_another_file(folder: Path) -> int:
    study = make_study(folder)
    study.file = folder / "elsewhere.py"
    return len(study.run(progress=False).trials)


def test_a_study_that_is_done_is_read_by_another_file(folder, url):
    assert as_stranger(read_by_another_file, folder) == 9


def model_of(folder: Path) -> float:
    train_alone = vars(_repository)["train_alone"]

    def from_its_checkpoint(*args, state, **options):
        assert state is not None, "it is trained again"
        return train_alone(*args, state=state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_repository, "train_alone", from_its_checkpoint)
        model = make_study(folder).best_trial.load_model()
    return next(model.parameters()).sum().item()


def test_checkpoints_are_read(folder, url):
    expected = model_of(folder)
    assert as_stranger(model_of, folder) == expected


def run_again(folder: Path) -> int:
    return len(make_study(folder).run(progress=False).trials)


def test_a_study_that_is_done_is_only_read_by_run(folder, url):
    assert as_stranger(run_again, folder) == 9


def write_to(url: str) -> None:
    with Store.open(url, create=False) as store:
        store.trash.put(store.studies.get("s"), who="me")


def test_writing_is_refused_in_words(url):
    said = as_stranger(write_to, url)
    assert said.startswith("StoreWriteError: cannot write to")
    assert "choose a writable place" in said


def looked_at(url: str) -> list[str]:
    with TestClient(create_app(url), base_url="http://localhost") as client:
        return [s["name"] for s in client.get("/api/studies").json()["studies"]]


def test_the_dashboard_reads(url):
    assert as_stranger(looked_at, url) == ["s"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("look", [_storage, _study_names])
def test_the_doctor_and_completion_read(url, look):
    found = as_stranger(look, url)
    assert "it can be read, but it cannot be written" in str(found) or found == ["s"]


def test_only_the_file_may_be_unwritable(folder):
    make_study(folder).run(progress=False, executor=SOLO)
    (folder / "t.db").chmod(0o444)
    folder.chmod(0o777)
    url = f"sqlite:///{folder}/t.db"
    assert as_stranger(looked_at, url) == ["s"]
    assert as_stranger(write_to, url).startswith("StoreWriteError")


def summary_of(url: str) -> list[tuple[str, str]]:
    with Store.open(url, create=False) as store:
        return [(s.name, s.state) for s in store.studies.list()]


def names_while_open(url: str) -> list[str]:
    with Views.open(url) as views:
        return [view.name for view in views.studies.list()]


def test_what_another_user_writes_meanwhile_is_seen(folder):
    """A read-only reader sees another user's writes, also those in the log beside the file."""
    make_study(folder).run(progress=False, executor=SOLO)
    url = f"sqlite:///{folder}/t.db"
    with Store.open(url) as store, store._engine.connect() as keeps_it_open:
        keeps_it_open.execute(text("SELECT 1"))
        store.studies.create("new", plan=1, spec={"metric": "mse", "mode": "min"})
        assert (folder / "t.db-wal").stat().st_size > 0
        take_away_writing(folder)
        assert as_stranger(names_while_open, url) == ["s", "new"]


CRASH = """
import os, sys
from thrifty.store import Store
store = Store.open(sys.argv[1])
store.studies.create("new", plan=1, spec={"metric": "mse", "mode": "min"})
os._exit(1)
"""


def test_the_log_of_a_crash_is_read(folder):
    make_study(folder).run(progress=False, executor=SOLO)
    url = f"sqlite:///{folder}/t.db"
    subprocess.run([sys.executable, "-c", CRASH, url], check=False)
    (folder / "t.db-shm").unlink()
    assert (folder / "t.db-wal").stat().st_size > 0
    take_away_writing(folder)
    assert as_stranger(names_while_open, url) == ["s", "new"]
    assert not list(folder.glob("*-shm"))


def curves_of(folder: Path, storage: str) -> list[tuple[float, ...]]:
    return [trial.curve for trial in make_study(folder, storage=storage).trials]


def test_a_database_of_an_earlier_version_is_read_from_a_copy(folder, monkeypatch):
    study = make_study(folder).run(progress=False, executor=SOLO)
    old = f"sqlite:///{folder}/old.db"
    old_database(old, "0002", monkeypatch)
    copied(study.storage.url, old, monkeypatch)
    expected = [trial.curve for trial in study.trials]
    take_away_writing(folder)
    assert as_stranger(curves_of, folder, old) == expected
    with create_engine(old).connect() as connection:
        query = text("SELECT version_num FROM thrifty_version")
        assert connection.execute(query).scalar() == "0002"


def test_writing_to_the_copy_is_refused(folder, monkeypatch):
    study = make_study(folder).run(progress=False, executor=SOLO)
    old = f"sqlite:///{folder}/old.db"
    old_database(old, "0002", monkeypatch)
    copied(study.storage.url, old, monkeypatch)
    take_away_writing(folder)
    assert as_stranger(write_to, old).startswith("StoreWriteError")


def opened(url: str) -> str:
    with Store.open(url, create=False):
        return "it opens"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"no database at all " * 100, "damaged or not a thrifty database"), (b"", "cannot write")],
)
def test_what_is_no_database_is_said_to_be_none(folder, content, said):
    (folder / "t.db").write_bytes(content)
    take_away_writing(folder)
    assert said in as_stranger(opened, f"sqlite:///{folder}/t.db")


def test_a_folder_that_cannot_even_be_looked_into(folder):
    (folder / "closed").mkdir()
    Store.open(f"sqlite:///{folder}/closed/t.db").close()
    (folder / "closed").chmod(0o700)
    said = as_stranger(opened, f"sqlite:///{folder}/closed/t.db")
    assert "cannot look for the database" in said or os.geteuid() != 0


def test_copies_go_with_whoever_made_them(folder, monkeypatch):
    Store.open(f"sqlite:///{folder}/t.db").close()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    source = ReadOnlyFile(folder / "t.db", timeout_s=1.0)
    copy = source.changeable_copy()
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT count(*) FROM studies").fetchone() == (0,)
    connection.close()
    source.close()
    assert not copy.parent.exists()


def test_a_study_is_compared_before_anything_is_written(folder, url):
    with pytest.raises(StudyMismatchError):
        make_study(folder, seed=1).run(progress=False)
