"""Files that trials log: stored once, shared and resumed like metrics, verified when read."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text as text_of

import thrifty as th
from tests.cli.documents import check as check_document
from tests.study.processes import At, die, exit_code, started
from thrifty.cli import _app
from thrifty.core import Artifact, Artifacts, CheckpointError, TaskError, UsageError
from thrifty.integrations.functions._exploration_main import suggested
from thrifty.store import CheckpointFolder, Store
from thrifty.store._plan_files import ArtifactFiles


pytestmark = pytest.mark.slow

ONE = th.Local(threads=1)


@th.trainable
def train(trial):
    """Log the rates so far after epochs 1 and 4, a text before the loop, and one of all trials."""
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]), th.Step(0.1, [4]))
    width = trial.suggest_int("width", 1, 2)
    file = Path(f"{width}-{trial.seed}.txt")
    file.write_text("new")
    trial.log_artifact(file, "note.txt")
    state = {"seen": [], "x": 1.0}
    for epoch in trial.epochs(state):
        state["seen"].append(lr.value)
        state["x"] -= lr.value * state["x"] / width
        if epoch % 3 == 0:
            file.write_text(" ".join(f"{rate:.3g}" for rate in state["seen"]))
            trial.log_artifact(str(file), "rates.txt")
        if epoch == 1:
            file.write_text("warm")
            trial.log_artifact(file, name="note.txt")
        file.unlink(missing_ok=True)  # the copy stays
        yield {"loss": state["x"] ** 2}


def expected(config, reached):
    rates = [th.space.Timeline(config, epochs=6).at(epoch)["lr"] for epoch in range(reached)]
    last = 3 * ((reached - 1) // 3)
    return {
        "note.txt": "new" if reached < 2 else "warm",
        "rates.txt": " ".join(f"{rate:.3g}" for rate in rates[: last + 1]),
    }


def study_of(folder, *, algorithm=None, name="s", task=train, **options):
    return th.Study(
        task,
        algorithm=algorithm or th.GridSearch(max_epochs=6),
        metric="loss",
        mode="min",
        storage=options.pop("storage", f"sqlite:///{folder}/t.db"),
        name=name,
        **options,
    )


def halving():
    return th.SuccessiveHalving(max_epochs=6, num_trials=6, eta=2)


def text(study, trial, name):
    with study.open_artifact(trial, name) as file:
        return file.read().decode()


def check(study):
    for trial in study.trials:
        found = {name: text(study, trial, name) for name in trial.artifacts}
        assert found == (expected(trial.config, trial.epochs) if trial.epochs else {})


def files(folder):
    return sorted(file.name for file in Path(folder).glob("t-checkpoints/*/artifact-*"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_shared_prefixes_have_what_each_trial_alone_would(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs < study.savings.trial_epochs
    check(study)
    check(study_of(tmp_path))
    contents = {t for trial in study.trials for t in expected(trial.config, 6).values()}
    contents |= {"new", "0.1"}
    assert files(tmp_path) == sorted(
        f"artifact-{hashlib.blake2b(each.encode(), digest_size=16).hexdigest()}"
        for each in contents
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_goes_on_keeps_its_files(tmp_path, workers):
    study = study_of(tmp_path, algorithm=halving())
    check(study.run(progress=False, executor=th.Local(workers=workers, threads=1)))


def test_they_are_kept_at_an_address(tmp_path):
    storage = th.Storage(url=f"sqlite:///{tmp_path}/t.db", checkpoints=f"file://{tmp_path}/kept")
    check(study_of(tmp_path, storage=storage).run(progress=False, executor=ONE))


def run(folder, observer=None):
    observers = [] if observer is None else [observer]
    study_of(folder, algorithm=halving()).run(progress=False, executor=ONE, observers=observers)


@pytest.mark.parametrize("count", [4, 17])
def test_killed_and_run_again(tmp_path, count):
    child = started(run, tmp_path, At(count, die))
    assert exit_code(child) == -signal.SIGKILL
    run(tmp_path)
    check(study_of(tmp_path, algorithm=halving()))


def test_a_file_without_a_record_is_removed_by_the_next_run(tmp_path):
    run(tmp_path)
    (folder,) = {file.parent for file in tmp_path.glob("t-checkpoints/*/artifact-*")}
    before = files(tmp_path)
    (folder / f"artifact-{'0' * 32}").write_text("its run was killed before the record")
    (folder / f".artifact-{'1' * 32}.x-1-1-1.tmp").write_text("half")
    study_of(tmp_path, name="other").run(progress=False, executor=ONE)
    assert f"artifact-{'0' * 32}" not in files(tmp_path)
    assert set(before) <= set(files(tmp_path))


def test_gc_keeps_what_a_study_needs_and_removes_the_rest(tmp_path):
    one = th.RandomSearch(max_epochs=6, num_trials=1)
    single = study_of(tmp_path, algorithm=one, name="single")
    single.run(progress=False, executor=ONE)
    whole = study_of(tmp_path, name="whole").run(progress=False, executor=ONE)
    everything = files(tmp_path)
    whole.delete()
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.collect_garbage()
        assert files(tmp_path) == everything  # it can be restored
        looked = store.collect_garbage(older_than_s=0.0, dry_run=True)
        assert files(tmp_path) == everything
        found = store.collect_garbage(older_than_s=0.0)
        assert found.num_bytes == looked.num_bytes > 0  # artifacts count, too
    check(study_of(tmp_path, algorithm=one, name="single"))
    assert set(files(tmp_path)) < set(everything)
    single.delete()
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.collect_garbage(older_than_s=0.0)
    assert files(tmp_path) == []


# -- faults --------------------------------------------------------------------------------


class Full(CheckpointFolder):
    def write_file(self, path, chunks):
        if "artifact-" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_file(path, chunks)


def test_a_full_disk_loses_no_epoch(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("thrifty.run._worker.CheckpointFolder", Full)
    with caplog.at_level(logging.WARNING):
        study = study_of(tmp_path).run(progress=False, executor=ONE)
    assert "cannot write the artifact" in caplog.text
    assert "free some disk space" in caplog.text
    assert {t.state for t in study.trials} == {"done"}
    found = study_of(tmp_path).best_trial.artifacts["note.txt"]
    assert (found.error, found.is_stored) == ("No space left on device", False)
    with pytest.raises(CheckpointError, match="was not stored when it was logged"):
        study.open_artifact(study.best_trial, "note.txt")


def test_a_damaged_file_is_written_again_when_its_content_comes_again(tmp_path):
    folder = tmp_path / "c"
    checkpoints = CheckpointFolder(str(folder))
    files = ArtifactFiles(checkpoints, folder="plan")
    source = tmp_path / "x.txt"
    source.write_text("good")
    found = files.put(source, name="x.txt")
    (stored,) = folder.glob("plan/artifact-*")
    stored.write_text("evil")
    assert files.put(source, name="x.txt") == found
    with files.open(found) as file:
        assert file.read() == b"good"


def test_a_damaged_file_is_noticed(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    trial = study.best_trial
    digest = trial.artifacts["rates.txt"].digest
    (file,) = tmp_path.glob(f"t-checkpoints/*/artifact-{digest}")
    good = file.read_bytes()
    for bad in (good[:-1], good[:-1] + b"x", b""):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"'rates.txt' is damaged"):
            study.open_artifact(trial, "rates.txt")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"'rates.txt' cannot be read from"):
        study.open_artifact(trial, "rates.txt")
    file.symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="symbolic link"):
        study.open_artifact(trial, "rates.txt")


def test_a_digest_that_is_a_path_is_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    stored = ArtifactFiles(CheckpointFolder(str(tmp_path)), folder="plan")
    good = Artifact(name="a", digest="0" * 32, num_bytes=1)
    for digest in ("../../secret", "0" * 31 + "\n", "A" * 32, "", "0" * 64):
        with pytest.raises(CheckpointError, match="which thrifty does not write"):
            stored.open(replace(good, digest=digest))


def test_names_and_trials_that_are_not_there(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=ONE)
    with pytest.raises(UsageError, match=r"has no artifact 'a'; it has: 'note.txt', 'rates.txt'"):
        study.open_artifact(study.best_trial, "a")
    with pytest.raises(UsageError, match="has no trial 99; it has 6"):
        study.open_artifact(99, "a")


def test_a_study_in_memory_says_where_its_files_are(tmp_path):
    study = study_of(tmp_path, storage="sqlite://").run(progress=False, executor=ONE)
    assert study.best_trial.artifacts
    with pytest.raises(UsageError, match="give the study a database"):
        study.open_artifact(study.best_trial, "note.txt")


def test_a_lost_file_is_written_again(tmp_path):
    stored = ArtifactFiles(CheckpointFolder(f"{tmp_path}/kept"), folder="plan")
    (tmp_path / "a").write_bytes(b"ab")
    artifact = stored.put(tmp_path / "a", name="a")
    (file,) = tmp_path.glob("kept/plan/artifact-*")
    for damage in (file.unlink, lambda: file.write_bytes(b"a")):
        damage()
        assert stored.put(tmp_path / "a", name="b").digest == artifact.digest
        with stored.open(artifact) as content:
            assert content.read() == b"ab"


def test_an_empty_file_and_a_large_one(tmp_path):
    stored = ArtifactFiles(CheckpointFolder(f"{tmp_path}/kept"), folder="plan")
    for content in (b"", b"ab" * 5_000_000):
        (tmp_path / "a").write_bytes(content)
        with stored.open(stored.put(tmp_path / "a", name="a")) as file:
            assert file.read() == content


def test_a_file_that_changes_while_it_is_copied(tmp_path, monkeypatch):
    stored = ArtifactFiles(CheckpointFolder(f"{tmp_path}/kept"), folder="plan")
    contents = iter([[b"a"], [b"b"]])
    monkeypatch.setattr("thrifty.store._plan_files._chunks", lambda _: iter(next(contents)))
    with pytest.raises(TaskError, match="changes while it is copied"):
        stored.put(tmp_path / "a", name="a")
    assert list(tmp_path.glob("kept/plan/*")) == []


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/etc/passwd", "a\nb", "\x1b[31m",
                                  "a\0", "\u202eexe", "n" * 256, 3])  # fmt: skip
def test_names_that_are_refused(tmp_path, name):
    (tmp_path / "a").write_text("a")
    with pytest.raises(TaskError, match=r"printable characters without path separators, got"):
        Artifacts().log(tmp_path / "a", name=name, max_bytes=9)


def test_files_that_are_refused(tmp_path):
    def log(path, **options):
        Artifacts().log(path, **{"name": None, "max_bytes": 9, **options})

    with pytest.raises(TaskError, match="there is no such file in"):
        log("missing")
    with pytest.raises(TaskError, match="must be a file, got a folder"):
        log(tmp_path)
    with pytest.raises(TaskError, match="must be a file, got something else"):
        log("/dev/null")
    (tmp_path / "a").write_text("0123456789")
    with pytest.raises(TaskError, match="may have 9 bytes, got 10; log a smaller"):
        log(tmp_path / "a")
    log(tmp_path / "a", max_bytes=10)
    with pytest.raises(TaskError, match="cannot be read"):
        log("a\0b", name="a")
    with pytest.raises(TaskError, match="cannot be read"):
        log(f"{tmp_path}/a/b", name="a")


def test_after_the_yield_is_an_error(tmp_path):
    @th.trainable
    def late(trial):
        trial.suggest_int("width", 1, 2)
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}
            trial.log_artifact("a")

    study = study_of(tmp_path, task=late).run(progress=False, executor=ONE)
    assert "calls trial.log_artifact('a', ...) after its yield" in study.trials[0].error


def test_before_training_files_are_only_checked(tmp_path):
    @th.trainable
    def early(trial):
        trial.suggest_int("width", 1, 2)
        trial.log_artifact("missing.txt")
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}

    with pytest.raises(TaskError, match="there is no such file"):
        suggested(early.function, {})


def test_objectives_log_files(tmp_path):
    def objective(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        Path("x.txt").write_text(f"{x}")
        trial.log_artifact("x.txt")
        return x

    study = th.optimize(objective, n_trials=4, storage=f"sqlite:///{tmp_path}/t.db", progress=False)
    for trial in study.trials:
        assert text(study, trial, "x.txt") == f"{trial.config['x']}"


# -- the command ---------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    study_of(tmp_path).run(progress=False, executor=ONE)
    return f"sqlite:///{tmp_path}/t.db"


def said(capsys, *words):
    _app.main(args=["artifacts", "s", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_shows_and_saves_them(tmp_path, trained, capsys):
    lines = said(capsys, "--storage", trained).splitlines()
    assert len(lines) == 12
    assert lines[0] == "trial 0: note.txt  4 B"
    assert len(said(capsys, "--storage", trained, "--trial", "2").splitlines()) == 2
    out = said(capsys, "--storage", trained, "--trial", "2", "--save", "out")
    assert f"saved to {Path('out/2/rates.txt')}" in out
    (trial,) = [t for t in study_of(tmp_path).trials if t.number == 2]
    assert Path("out/2/rates.txt").read_text() == expected(trial.config, 6)["rates.txt"]
    assert "saved to" in said(capsys, "--storage", trained, "--trial", "2", "--save", "out")
    Path("out/2/note.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"note.txt exists already, with other content; name"):
        said(capsys, "--storage", trained, "--trial", "2", "--save", "out")
    assert Path("out/2/note.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="has no trial 99"):
        said(capsys, "--storage", trained, "--trial", "99")
    Path("file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        said(capsys, "--storage", trained, "--save", "file/x")


def test_a_damaged_file_does_not_keep_the_others_from_being_saved(tmp_path, trained, capsys):
    damaged = study_of(tmp_path).trials[0].artifacts["rates.txt"].digest
    for file in tmp_path.glob(f"t-checkpoints/*/artifact-{damaged}"):
        file.write_text("damage")
    of_each = {t.number: t.artifacts["rates.txt"].digest for t in study_of(tmp_path).trials}
    bad = [number for number, digest in of_each.items() if digest == damaged]
    with pytest.raises(CheckpointError) as caught:
        said(capsys, "--storage", trained, "--save", "out")
    lines = str(caught.value).splitlines()
    what = "1 artifact was" if len(bad) == 1 else f"{len(bad)} artifacts were"
    assert lines[0] == f"{what} not saved:"
    assert lines[1].startswith(f"trial {bad[0]}: artifact 'rates.txt' is damaged")
    assert "rates.txt" in capsys.readouterr().out
    saved = {str(each.relative_to("out")) for each in Path("out").glob("*/*")}
    everything = {f"{n}/{name}" for n in of_each for name in ("note.txt", "rates.txt")}
    assert saved == everything - {f"{number}/rates.txt" for number in bad}
    asked = ["artifacts", "s", "--storage", trained, "--save", "out", "--json"]
    assert _app.main(args=asked, standalone_mode=False) == 2
    document = json.loads(capsys.readouterr().out)
    check_document(document, "artifacts")
    failed = [each for each in document["artifacts"] if each["save_error"]]
    assert [each["trial"] for each in failed] == bad
    assert all(each["saved"] is None and "is damaged" in each["save_error"] for each in failed)


def test_many_that_are_not_saved_are_counted(trained, capsys):
    Path("file").write_text("")
    with pytest.raises(UsageError, match="12 artifacts were not saved") as caught:
        said(capsys, "--storage", trained, "--save", "file/x")
    assert str(caught.value).endswith("and 7 more")


def test_the_best_trial_is_shown_with_its_files(tmp_path, trained, capsys):
    best = study_of(tmp_path).best_trial
    _app.main(args=["best", "s", "--storage", trained], standalone_mode=False)
    assert "artifact note.txt (4 B)" in capsys.readouterr().out
    _app.main(args=["best", "s", "--storage", trained, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    check_document(document, "best")
    (trial,) = document["trials"]
    expected_files = [each.to_json() for each in best.artifacts.values()]
    assert trial["artifacts"] == expected_files
    assert {each["name"] for each in expected_files} == {"note.txt", "rates.txt"}


def test_the_document_of_the_command(trained, capsys):
    found = json.loads(said(capsys, "--storage", trained, "--save", "out", "--json"))
    check_document(found, "artifacts")
    assert [Path(each["saved"]).exists() for each in found["artifacts"]] == [True] * 12
    assert {each["error"] for each in found["artifacts"]} == {""}


def test_a_study_without_artifacts(tmp_path, capsys):
    @th.trainable
    def bare(trial):
        trial.suggest_int("width", 1, 2)
        for _epoch in trial.epochs({}):
            yield {"loss": 1.0}

    study_of(tmp_path, task=bare).run(progress=False, executor=ONE)
    assert said(capsys, "--storage", f"sqlite:///{tmp_path}/t.db") == "no artifacts\n"


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", ".."])
def test_names_in_a_database_that_are_paths_are_not_written(tmp_path, trained, capsys, name):
    stored = [{"name": name, "digest": "0" * 32, "num_bytes": 1, "error": ""}]
    with create_engine(trained).begin() as connection:
        connection.execute(text_of("UPDATE epochs SET artifacts = :a"), {"a": json.dumps(stored)})
    with pytest.raises(TaskError, match="without path separators"):
        said(capsys, "--storage", trained, "--save", "out")
    assert not list(Path("out").glob("**/*")) if Path("out").exists() else True


def test_terminals_and_unstored_files(tmp_path, trained, capsys):
    stored = [{"name": "\x1b[31m", "digest": "0" * 32, "num_bytes": 1, "error": "full \x1b[31m"}]
    with create_engine(trained).begin() as connection:
        connection.execute(text_of("UPDATE epochs SET artifacts = :a"), {"a": json.dumps(stored)})
    out = said(capsys, "--storage", trained, "--save", "out")
    assert "\\x1b[31m  1 B  not stored: full \\x1b[31m" in out
    assert "\x1b" not in out
