"""The CLI shows the file that a database names before it runs it.

It does not run a file that another user may have written.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import text

import thrifty.testing
from tests.strangers import STRANGER, as_stranger, public_folder
from thrifty.cli import _app
from thrifty.core import StudyNotFoundError, UsageError
from thrifty.store import Store
from thrifty.study import Storage


pytestmark = pytest.mark.slow

NAME = pwd.getpwuid(STRANGER).pw_name


STUDY = """
import thrifty as th
from pathlib import Path
from thrifty.testing import LineTask

Path({mark!r}).write_text("it was run")
rates = [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005]
study = th.Study(LineTask(), th.Space(lr=th.Choice(rates)), algorithm=th.GridSearch(max_epochs=1),
                 metric="mse", mode="min", name="s", seed=0, storage={url!r})
"""
COMMANDS = [["resume", "s", "--quiet"], ["importance", "s"], ["plot", "s", "history"]]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


class Scene:
    """A study in a database, whose file leaves a mark when it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.mark = folder, folder / "my_study.py", folder / "mark"
        self.url = f"sqlite:///{folder}/t.db"
        self.file.write_text(STUDY.format(mark=str(self.mark), url=self.url))
        result = self.run("run", str(self.file), "--quiet")
        assert result.exit_code == 0, result.output
        self.mark.unlink()

    def run(self, *words: str):
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            return CliRunner().invoke(_app, list(words))
        finally:
            os.chdir(before)

    def stored(self, *words: str):
        return self.run(*words, "--storage", self.url)

    def names(self, file: object) -> None:
        """Make the database name another file as the study's definition."""
        with Store.open(self.url) as store, store._engine.begin() as connection:
            spec = dict(store.studies.get("s").spec) | {"file": file}
            connection.execute(text("UPDATE studies SET spec = :s"), {"s": json.dumps(spec)})


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_the_file_is_named_before_it_is_run(scene, words):
    result = scene.stored(*words)
    assert result.exit_code == 0, result.output
    assert f"loading {scene.file}, which the database names for study 's'" in result.output
    assert scene.mark.exists()


@pytest.mark.parametrize("before", ["moved", None], ids=["moved", "made in a session"])
def test_a_study_that_is_run_from_another_file_is_loaded_from_there(scene, before):
    scene.names(before)
    moved = scene.file.rename(scene.folder / "elsewhere.py")
    assert scene.stored(*COMMANDS[0]).exit_code != 0
    result = scene.run("run", str(moved), "--quiet")
    assert result.exit_code == 0, result.output
    result = scene.stored(*COMMANDS[0])
    assert result.exit_code == 0, result.output
    assert f"loading {moved}, which the database names" in result.output


def test_a_copy_of_a_file_does_not_take_its_place(scene):
    again = scene.folder / "my_second_study.py"
    again.write_text(scene.file.read_text())
    assert scene.run("run", str(again), "--quiet").exit_code == 0
    assert f"loading {scene.file}, which" in scene.stored(*COMMANDS[0]).output


def test_on_a_shared_database_a_file_may_be_on_another_machine(scene, monkeypatch):
    monkeypatch.setattr(Storage, "is_shared", True)
    moved = scene.file.rename(scene.folder / "elsewhere.py")
    assert scene.run("run", str(moved), "--quiet").exit_code == 0
    assert "is gone" in str(scene.stored(*COMMANDS[0]).exception)


TASK = """
from thrifty.testing import LineTask

class Mine(LineTask):
    pass
"""


def test_a_file_gets_the_study_that_a_session_made_of_a_task_from_another_file(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    source = STUDY.format(mark="mark", url="sqlite:///t.db").replace("LineTask()", "Mine()")
    source = source.replace("thrifty.testing import LineTask", "my_task import Mine")
    typed = f"names = {{}}\nexec({source!r}, names)\nnames['study'].run(progress=False)"
    subprocess.run([sys.executable, "-c", typed], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").write_text(source)
    for words in (["run", "mine.py"], ["importance", "s", "--storage", "sqlite:///t.db"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("thrifty"), *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    assert f"loading {tmp_path / 'mine.py'}, which" in done.stderr.decode()


def test_the_file_of_a_study_that_is_gone_cannot_be_set(scene):
    with Store.open(scene.url) as store:
        info = store.studies.get("s")
        scene.stored("delete", "s", "--yes")
        with pytest.raises(StudyNotFoundError):
            store.studies.set_file(info, "elsewhere.py")


def refused(scene: Scene, words: list[str], why: str) -> None:
    result = scene.stored(*words)
    assert isinstance(result.exception, UsageError), result.output
    assert why in str(result.exception)
    assert "--trust-file" in str(result.exception)
    assert str(scene.file) in result.output
    assert not scene.mark.exists(), "it was run"
    result = scene.stored(*words, "--trust-file")
    assert result.exit_code == 0, result.output
    assert scene.mark.exists()


@pytest.mark.sample(1)
@needs_root
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_file_of_another_user_is_refused(scene, words):
    os.chown(scene.file, STRANGER, STRANGER)
    refused(scene, words, f"it belongs to user {NAME}")


@needs_root
def test_a_folder_of_another_user_is_refused(scene):
    os.chown(scene.folder, 54321, STRANGER)
    refused(scene, COMMANDS[0], "its folder belongs to user 54321")


def test_a_file_that_everybody_can_change_is_refused(scene):
    scene.file.chmod(0o666)
    refused(scene, COMMANDS[0], "everybody can change it")


def test_a_folder_that_everybody_can_change_is_refused(scene):
    scene.folder.chmod(0o777)
    refused(scene, COMMANDS[0], "everybody can change its folder")


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", [0o664, 0o600, 0o400])
def test_what_only_my_group_can_change_is_run(scene, mode):
    scene.file.chmod(mode)
    scene.folder.chmod(0o1777)
    assert scene.stored(*COMMANDS[0]).exit_code == 0


def resumed(url: str) -> str:
    os.chdir("/tmp")
    result = CliRunner().invoke(_app, ["importance", "s", "--storage", url])
    return f"{result.output}{result.exception!r}"


@needs_root
def test_files_of_root_are_run():
    with public_folder() as folder:
        scene = Scene(folder)
        scene.mark.write_text("")
        scene.mark.chmod(0o666)
        assert "UsageError" not in as_stranger(resumed, scene.url)
        assert scene.mark.read_text() == "it was run"


@needs_root
def test_a_link_to_a_file_of_another_user_is_refused(scene):
    (scene.folder / "theirs").mkdir(mode=0o755)
    target = scene.folder / "theirs" / "study.py"
    scene.file.rename(target)
    os.chown(target, STRANGER, STRANGER)
    scene.file.symlink_to(target)
    scene.names(str(scene.file))
    refused(scene, COMMANDS[0], f"belongs to user {NAME}")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "file", [None, 5, ["x"], "", "/nowhere.py", "/", "\0", "x" * 10_000, thrifty.testing.__file__]
)
def test_what_is_no_file_is_said_to_be_none(scene, file):
    scene.names(file)
    result = scene.stored(*COMMANDS[0])
    assert isinstance(result.exception, UsageError), result.exception
    assert ("is gone: " if file else "is unknown: a session made it") in str(result.exception)


def started_by_python(folder: Path, text: str, *, name: str = "train.py"):
    """Run a script without ``thrifty run`` and return what another command says of its study."""
    (folder / name).write_text(text)
    subprocess.run([sys.executable, name], cwd=folder, check=True, timeout=120)
    url = f"sqlite:///{folder}/t.db"
    return CliRunner().invoke(_app, ["importance", "s", "--storage", url])


@pytest.mark.parametrize("made", ["at the top level", "in a function"])
def test_a_task_of_a_class_of_thrifty_is_found_in_the_script(tmp_path, made):
    call = STUDY[STUDY.index("th.Study") :].format(url=f"sqlite:///{tmp_path}/t.db")
    start = STUDY[: STUDY.index("study =")].format(mark=str(tmp_path / "mark"))
    if made == "at the top level":
        result = started_by_python(tmp_path, f"{start}study = {call}study.run(progress=False)\n")
        assert result.exit_code == 0, result.output
        return
    body = f"({call.strip()}).run(progress=False)\n"
    result = started_by_python(tmp_path, f"{start}def main():\n    {body}\nmain()\n")
    assert f"{tmp_path / 'train.py'} does not define study 's'" in str(result.exception)


def test_a_study_is_found_in_the_script_that_imports_its_task(tmp_path):
    (tmp_path / "tasks.py").write_text(
        "from thrifty.testing import LineTask\nclass MyTask(LineTask):\n    pass\n"
    )
    text = STUDY.format(mark=str(tmp_path / "mark"), url=f"sqlite:///{tmp_path}/t.db")
    text = text.replace("LineTask()", "tasks.MyTask()") + "study.run(progress=False)\n"
    result = started_by_python(tmp_path, f"import tasks\n{text}")
    assert result.exit_code == 0, result.output


def test_without_a_file_the_command_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = STUDY.format(mark=str(tmp_path / "mark"), url="sqlite:///t.db")
    subprocess.run(
        [sys.executable, "-c", f"{text}study.run(progress=False)"], check=True, timeout=120
    )
    result = CliRunner().invoke(_app, ["resume", "s", "--storage", "sqlite:///t.db"])
    assert "is unknown: a session made it" in str(result.exception)


@pytest.mark.parametrize(
    "program", [["-m", "thrifty.cli"], ["-c", "import thrifty.cli as c\nc.main()"]]
)
def test_a_file_that_trains_when_it_is_loaded_is_the_file_of_its_study(program, tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    file = tmp_path / "trains.py"
    text = STUDY.format(mark=str(tmp_path / "mark"), url=url)
    file.write_text(f"{text}\nstudy.run(progress=False)\n")
    words = [sys.executable, *program, "run", str(file), "--quiet"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    with Store.open(url) as store:
        assert store.studies.get("s").spec["file"] == str(file)
