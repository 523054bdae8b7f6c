"""Lines that user code logs are kept with their epoch, and never get in the way of training."""

from __future__ import annotations

import gc
import io
import json
import logging
import sys
import threading

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, text as text_of
from sqlalchemy.exc import OperationalError

import thrifty as th
from tests.cli.documents import check as check_document
from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.processes import At, die, exit_code, started
from thrifty.cli import _app
from thrifty.core import (
    LineBuffer,
    LineCapture,
    LogLine,
    StoreError,
    StudyNotFoundError,
    UsageError,
    lines_of,
)
from thrifty.store import LinesLogged, Store
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow

log = logging.getLogger("tests.chatty")
log.setLevel(logging.INFO)  # at import, as workers do

fresh = logging.getLogger("tests.fresh")

SOLO = th.Local(pack="solo")
SPACE = th.Space(lr=th.Choice([0.1, th.Step(0.1, [2]), th.Step(0.1, [3])]))


class Chatty(LineTask):
    """A task that logs once in each epoch."""

    def metrics(self, model, batch):
        log.info("rate so far\x1b[31m")
        return super().metrics(model, batch)


@th.trainable
def told(trial):
    """Log which epoch it is, and fail in one of them."""
    width = trial.suggest_int("width", 1, 3)
    log.info("width %d begins", width)
    state = {"x": 1.0}
    for epoch in trial.epochs(state):
        log.info("width %d in epoch %d", width, epoch + 1)
        if width == 3 and epoch == 2:
            try:
                raise ValueError("too wide")
            except ValueError:
                log.exception("it fails")
                raise
        state["x"] /= width + 1
        yield {"mse": state["x"]}


def study_of(folder, *, task=None, space=SPACE, epochs=4, name="s", **storage):
    task = task or Chatty()
    has_space = task not in (told, late, counting, marking)
    return th.Study(
        task,
        space if has_space else None,
        algorithm=th.GridSearch(max_epochs=epochs),
        metric="mse",
        mode="min",
        name=name,
        storage=th.Storage(url=f"sqlite:///{folder}/t.db", **storage),
    )


def shown(study, trial):
    return [(each.epoch, each.line.text) for each in study.log_lines(trial)]


# -- taking lines from logging -----------------------------------------------------------


def test_what_is_taken_is_what_the_users_logging_lets_through(caplog):
    silent = logging.getLogger("tests.silent")
    silent.setLevel(logging.ERROR)
    with caplog.at_level(logging.INFO, logger="tests.chatty"), LineCapture() as capture:
        silent.warning("not enabled")
        logging.getLogger("thrifty.run").error("one of ours")
        log.info("of %s", "all")
        with lines_of(1):
            log.warning("of one")
            with lines_of(2):
                log.warning("of two")
    log.info("after")
    assert [line.text for line in capture.of(1).take()] == ["of all", "of one"]
    assert [line.text for line in capture.of(2, shared=False).take()] == ["of two"]
    (line,) = capture.of(2, shared=False).take()
    assert (line.level, line.logger) == ("WARNING", "tests.chatty")
    messages = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert messages == ["of all", "of one", "of two", "after"]  # handlers still get everything


def test_a_message_that_cannot_be_made_is_taken_as_it_was_written(quiet):
    with LineCapture() as capture:
        quiet.error("%d epochs", "three")
        quiet.error(object())
        quiet.error({"a": 1})
    texts = [line.text for line in capture.of(0).take()]
    assert texts[0] == "%d epochs"
    assert texts[1] == "<object>"
    assert texts[2] == "{'a': 1}"


def texts(capture, trial=0):
    return [line.text for line in capture.of(trial).take()]


@pytest.fixture
def quiet():
    """A logger whose handler makes no text."""
    logger = logging.Logger("tests.quiet", logging.INFO)  # noqa: LOG001 (pytest does not find it)
    logger.addHandler(logging.NullHandler())
    return logger


class Counting:
    """A value whose text takes a random number, as a lazy one may."""

    def __init__(self):
        self.num_asked = 0

    def __str__(self):
        self.num_asked += 1
        raise SystemExit("must not run")


def test_a_text_that_no_handler_makes_runs_no_code_of_the_user(quiet):
    value = Counting()
    with LineCapture() as capture:
        quiet.info("%s of %d", value, 3)
        quiet.info("%s", [1, {"a": value}])
        quiet.info("%(a)s and %(b).1f", {"a": value, "b": 2.0})
        quiet.info(value)
        quiet.info("%d", value)
        quiet.info("plain", extra={"note": value})
    assert value.num_asked == 0
    assert texts(capture) == [
        "<Counting> of 3", "[1, {'a': '<Counting>'}]", "<Counting> and 2.0", "<Counting>", "%d",
        "plain",
    ]  # fmt: skip


def test_a_text_that_a_handler_makes_is_made_once(quiet):
    class Lazy:
        num_asked = 0

        def __str__(self):
            self.num_asked += 1
            return f"number {self.num_asked}"

    handler = logging.StreamHandler(io.StringIO())
    quiet.addHandler(handler)
    value = Lazy()
    with LineCapture() as capture:
        quiet.info("%s", value)
    assert value.num_asked == 1
    assert texts(capture) == ["number 1"]


def test_a_filter_of_a_logger_counts(quiet):
    def hide(record):
        record.msg = record.msg.replace("hunter2", "***")
        return "drop" not in record.msg

    quiet.addFilter(hide)
    with LineCapture() as capture:
        quiet.info("token=hunter2")
        quiet.info("drop this")
    assert texts(capture) == ["token=***"]


def test_the_factory_of_records_stays_the_users(quiet):
    before = logging.getLogRecordFactory()
    with LineCapture() as capture:
        assert logging.getLogRecordFactory() is before
        made = logging.makeLogRecord({"msg": "made", "levelno": logging.INFO})
        quiet.handle(made)
        quiet.info("again")
    assert texts(capture) == ["made", "again"]


class Odd(str):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "change",
    [
        {"exc_info": ("a",)},
        {"exc_info": (ValueError, "text", None)},
        {"name": None},
        {"name": Odd("a")},
        {"levelname": Odd("a")},
        {"msg": Odd("a")},
        {"args": {"a": Odd("b")}},
        {"created": "yesterday"},
        {"msg": b"x"},
    ],
    ids=lambda change: "-".join(change),
)
def test_no_record_is_so_odd_that_it_is_an_error(quiet, change):
    record = logging.makeLogRecord({"msg": "text", "levelno": logging.INFO, **change})
    with LineCapture() as capture:
        quiet.handle(record)
        quiet.info("after")
    assert texts(capture)[-1] == "after"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("too wide", 3), "it fails\nValueError: ('too wide', 3)"),
        (KeyError(Odd("a")), "it fails\nKeyError"),
        (StudyNotFoundError("s"), "it fails\nStudyNotFoundError"),
    ],
)
def test_the_error_of_a_line(quiet, error, wanted):
    with LineCapture() as capture:
        quiet.error("it fails", exc_info=error)
    assert texts(capture) == [wanted]


def test_what_logs_while_a_line_is_noted_is_noted_too(quiet):
    """Garbage collection may log anywhere; a lock would be waited for forever."""

    class Dying:
        def __init__(self):
            self.me = self

        def __del__(self):
            quiet.info("gone")

    before = gc.get_threshold()
    with LineCapture() as capture:
        try:
            gc.set_threshold(1, 1, 1)
            for number in range(50):
                Dying()
                quiet.info("number %d", number)
        finally:
            gc.set_threshold(*before)
        gc.collect()
    found = texts(capture)
    assert found.count("gone") == 50
    assert len(found) == 100


def test_lines_of_other_threads_are_of_all_trials(quiet):
    with LineCapture() as capture, lines_of(1):
        thread = threading.Thread(target=quiet.info, args=("of a thread",))
        thread.start()
        thread.join()
        quiet.info("of trial 1")
    assert texts(capture, 1) == ["of a thread", "of trial 1"]
    assert texts(capture, 2) == ["of a thread"]


def test_lines_may_be_read_while_a_thread_logs(quiet):
    ended = threading.Event()

    def log_on():
        while not ended.is_set():
            quiet.info("x")

    before = sys.getswitchinterval()
    thread = threading.Thread(target=log_on)
    with LineCapture() as capture:
        thread.start()
        try:
            sys.setswitchinterval(1e-5)
            for _ in range(300):
                capture.of(0)
        finally:
            sys.setswitchinterval(before)
            ended.set()
            thread.join()
    assert texts(capture)


def test_captures_of_several_threads_may_begin_and_end_in_any_order():
    mine, other = LineCapture(), LineCapture()
    steps = [threading.Event() for _ in range(3)]

    def second():
        with other:
            steps[0].set()
            steps[1].wait()
            log.warning("of the second thread")
        steps[2].set()

    for _ in range(50):
        for step in steps:
            step.clear()
        thread = threading.Thread(target=second)
        with mine:
            thread.start()
            steps[0].wait()
            log.warning("of the first thread")
        steps[1].set()
        steps[2].wait()
        thread.join()
    assert texts(mine) == ["of the first thread"] * 50
    assert texts(other) == ["of the second thread"] * 50


def test_a_long_epoch_keeps_its_last_lines_and_says_how_many_are_left_out():
    buffer = LineBuffer(max_lines=3)
    for number in range(5):
        buffer.add(LogLine(at=0.0, level="INFO", logger="a", text=str(number)))
    more = LineBuffer(max_lines=3)
    more.extend(buffer)
    texts = [line.text for line in more.take()]
    assert texts == ["2 earlier lines of this epoch left out", "2", "3", "4"]
    assert not more.take()


# -- studies -----------------------------------------------------------------------------


def test_a_line_of_a_shared_epoch_is_one_of_all_trials_that_share_it(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    for trial in study.trials:
        lines = shown(study, trial)
        # once for each batch of the evaluation
        assert sorted({epoch for epoch, _ in lines}) == [1, 2, 3, 4]
        assert {text for _, text in lines} == {r"rate so far\x1b[31m"}
    first, second = (study.log_lines(number) for number in (0, 1))
    of_shared = [each for each in first if each.epoch <= 2]
    assert of_shared == [each for each in second if each.epoch <= 2]
    assert first != second


@pytest.mark.parametrize("executor", [SOLO, th.Local(pack_size=3), th.Local(workers=2)])
def test_each_trainable_has_its_own_lines_in_any_pack_and_process(tmp_path, executor):
    study = study_of(tmp_path, task=told).run(progress=False, executor=executor)
    for trial in study.trials:
        width = trial.config["width"]
        texts = [text for _, text in shown(study, trial) if "begins" not in text]
        last = 3 if width == 3 else 4
        expected = [f"width {width} in epoch {epoch}" for epoch in range(1, last + 1)]
        assert texts[:last] == expected
        assert all(f"width {width}" in text for text in texts[:last])
    failed = next(trial for trial in study.trials if trial.state == "failed")
    assert shown(study, failed)[-1] == (3, "it fails\nValueError: too wide")


@th.trainable
def late(trial):
    """Log in the loop only, where the logger begins to remember which levels are enabled."""
    width = trial.suggest_int("width", 1, 2)
    state = {"x": 1.0}
    for _epoch in trial.epochs(state):
        fresh.warning("width %d", width)
        state["x"] /= width + 1
        yield {"mse": state["x"]}


def test_a_logger_is_no_state_of_a_training_function(tmp_path):
    study = study_of(tmp_path, task=late).run(progress=False, executor=SOLO)
    assert [trial.state for trial in study.trials] == ["done", "done"]


class Collecting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@th.trainable
def counting(trial):
    """Train by how much was logged, which a restored trial would not know."""
    width = trial.suggest_int("width", 1, 2)
    handler = Collecting()
    logger = logging.Logger("tests.counting")  # noqa: LOG001 (one of its own)
    logger.addHandler(handler)
    state = {"x": 1.0}
    for _epoch in trial.epochs(state):
        logger.warning("width %d", width)
        state["x"] /= width + len(handler.records)
        yield {"mse": state["x"]}


@th.trainable
def marking(trial):
    """Keep a number in an attribute of a logger."""
    width = trial.suggest_int("width", 1, 2)
    logger = logging.Logger("tests.marking")  # noqa: LOG001 (one of its own)
    logger.num_epochs = 0
    state = {"x": 1.0}
    for _epoch in trial.epochs(state):
        logger.num_epochs += 1
        state["x"] /= width + logger.num_epochs
        yield {"mse": state["x"]}


@pytest.mark.parametrize(("task", "name"), [(counting, "handler"), (marking, "logger")])
def test_what_users_keep_in_loggers_and_handlers_is_state(tmp_path, task, name):
    study = study_of(tmp_path, task=task)
    study.run(progress=False, executor=SOLO)
    assert [trial.state for trial in study.trials] == ["failed", "failed"]
    assert all(f"changes the variable '{name}'" in trial.error for trial in study.trials)


def test_lines_of_a_fused_pack_are_of_all_its_trials(tmp_path):
    space = th.Space(lr=th.Choice([0.1, 0.2]))
    study = study_of(tmp_path, space=space).run(progress=False, executor=th.Local(pack="fused"))
    # Its Python code runs where it is recorded and checked, not in each step.
    assert all(shown(study, number)[0][0] == 1 for number in (0, 1))


def test_logging_changes_no_result(tmp_path):
    class Silent(LineTask):
        pass

    chatty = study_of(tmp_path).run(progress=False, executor=SOLO)
    silent = study_of(tmp_path, task=Silent(), name="silent").run(progress=False, executor=SOLO)
    assert [t.curve for t in chatty.trials] == [t.curve for t in silent.trials]


def _killed(folder):
    study_of(folder).run(progress=False, executor=SOLO, observers=[At(6, die)])


def test_a_killed_study_goes_on_with_its_lines(tmp_path):
    assert exit_code(started(_killed, tmp_path)) == -9
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    (tmp_path / "other").mkdir()
    other = study_of(tmp_path / "other").run(progress=False, executor=SOLO)
    for number in range(3):
        assert shown(study, number) == shown(other, number)


def test_only_the_last_bytes_are_kept(tmp_path):
    study = study_of(tmp_path, epochs=30, space=th.Space(lr=0.1), log_bytes=1_000)
    study.run(progress=False, executor=SOLO)
    epochs = {each.epoch for each in study.log_lines(0)}
    assert max(epochs) == 30
    assert 1 <= len(epochs) < 10
    engine = create_engine(study.storage.url)
    with engine.connect() as connection:
        total = connection.execute(text_of("SELECT sum(num_bytes) FROM log_lines")).scalar()
    assert total <= 1_000


def test_a_long_epoch_is_cut_to_the_bytes(tmp_path):
    study = study_of(tmp_path, log_bytes=400).run(progress=False, executor=SOLO)
    line = LogLine(at=0.0, level="INFO", logger="a", text="x" * 100)
    with Store.open(study.storage.url) as store:
        info = store.studies.get("s")
        node = store.studies.load(info.id).trials[0].node
        many = LinesLogged(plan=info.plan, node=node, epoch=4, lines=(line,) * 9, max_bytes=400)
        assert store.log_lines.write([many])
        found = [each.line.text for each in store.log_lines.of(info, 0) if each.epoch == 4]
        assert not store.log_lines.of(info, 99)
    assert found == ["7 earlier lines of this epoch left out", "x" * 100, "x" * 100]


def test_nothing_is_kept_if_the_user_says_so(tmp_path):
    study = study_of(tmp_path, log_bytes=0).run(progress=False, executor=SOLO)
    assert not study.log_lines(0)


def test_lines_that_cannot_be_written_do_not_stop_training(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    monkeypatch.setattr("thrifty.store._trial_lines.write_lines", full)
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    assert [trial.epochs for trial in study.trials] == [4, 4, 4]
    assert not study.log_lines(0)
    said = [each for each in caplog.messages if "training goes on" in each]
    assert len(said) == 1  # not for every batch


@needs_postgresql
def test_a_server_keeps_lines_too_and_the_study_becomes_longer(tmp_path, postgresql):  # noqa: F811
    def study(epochs):
        found = study_of(tmp_path, epochs=epochs)
        checkpoints = str(tmp_path / "states")
        found.storage = th.Storage(url=postgresql, checkpoints=checkpoints, log_bytes=2_000)
        return found

    study(4).run(progress=False, executor=SOLO)
    before = [shown(study(4), number) for number in range(3)]
    longer = study(30).run(progress=False, executor=SOLO)
    assert [trial.epochs for trial in longer.trials] == [30] * 3
    for number in range(3):
        lines = shown(longer, number)
        assert lines[-1][0] == 30
        assert lines[: len(before[number])] == before[number]  # a node of its own, with its bytes
        assert len({epoch for epoch, _ in lines}) < 30


@pytest.mark.parametrize("log_bytes", [-1, 1.5, "many", True])
def test_bytes_are_a_whole_number(log_bytes):
    with pytest.raises(UsageError, match="whole number of bytes"):
        th.Storage(log_bytes=log_bytes)
    assert "log_bytes=7" in repr(th.Storage(log_bytes=7))


def test_trials_that_are_not_there_have_no_lines(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    for odd in (3, -1, "0", True, None):
        with pytest.raises(UsageError, match=f"has no trial {odd!r}; it has 3"):
            study.log_lines(odd)
    in_memory = study_of(tmp_path)
    in_memory.storage = th.Storage(url="sqlite://")
    in_memory.run(progress=False, executor=SOLO)
    with pytest.raises(UsageError, match="in memory keeps no log lines"):
        in_memory.log_lines(0)


def test_gc_removes_lines_that_no_study_has(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    one = study_of(tmp_path, space=th.Space(lr=0.1), name="one").run(progress=False)
    kept = shown(one, 0)
    study.delete()
    with Store.open(study.storage.url) as store:
        store.collect_garbage()
        before = _count(study)
        store.collect_garbage(older_than_s=0.0)
    assert _count(study) < before
    assert shown(one, 0) == kept


def _count(study):
    with create_engine(study.storage.url).connect() as connection:
        return connection.execute(text_of("SELECT count(*) FROM log_lines")).scalar()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE log_lines", "no such table"),
        ("ALTER TABLE log_lines RENAME COLUMN lines TO texts", "no such column"),
    ],
)
def test_a_database_that_somebody_has_changed_is_an_error_that_says_so(tmp_path, change, said):
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    with create_engine(study.storage.url).begin() as connection:
        connection.execute(text_of(change))
    with pytest.raises(StoreError, match=f"is damaged or not a thrifty database .*{said}"):
        study.log_lines(0)


# -- the command -------------------------------------------------------------------------


def thrifty(*args):
    return CliRunner().invoke(_app, args, catch_exceptions=False).stdout


def test_the_command_shows_lines_and_escapes_what_a_database_holds(tmp_path):
    study = study_of(tmp_path).run(progress=False, executor=SOLO)
    url = ("--storage", study.storage.url)
    lines = thrifty("logs", "s", "--trial", "1", *url).splitlines()
    assert len(lines) == len(study.log_lines(1))
    assert lines[0].startswith("epoch 1  ")
    assert lines[0].endswith(r"INFO tests.chatty: rate so far\x1b[31m")
    assert len(thrifty("logs", "s", "--trial", "1", "--last", "2", *url).splitlines()) == 2
    document = thrifty("logs", "s", "--trial", "1", *url, "--json")
    check_document(json.loads(document), "logs")
    with create_engine(study.storage.url).begin() as connection:
        bad = r'[{"at": 0.0, "level": "\u001b[2J", "logger": "\u0007", "text": "\u001b[31m"}]'
        connection.execute(text_of("UPDATE log_lines SET lines = :bad"), {"bad": bad})
    said = thrifty("logs", "s", "--trial", "1", *url)
    assert "\x1b" not in said
    assert "\x07" not in said
    silent = study_of(tmp_path, log_bytes=0, name="silent", space=th.Space(lr=0.3))
    silent.run(progress=False, executor=SOLO)
    assert thrifty("logs", "silent", "--trial", "0", *url) == "no log lines\n"


@th.trainable
def beside_others(trial):
    """Log while other code makes loggers of its own, as libraries do when they are first used."""
    trial.suggest_float("lr", 0.1, 0.1)
    state = {"x": 1.0}
    for epoch in trial.epochs(state):
        logging.getLogger(f"tests.made.{epoch}").debug("nothing")
        log.info("epoch %d", epoch)
        state["x"] /= 2
        yield {"x": state["x"]}


def test_loggers_of_others_are_no_state_of_a_function(tmp_path):
    study = th.Study(
        beside_others,
        algorithm=th.GridSearch(max_epochs=3),
        metric="x",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="loggers",
    ).run(progress=False, executor=SOLO)
    assert [trial.state for trial in study.trials] == ["done"]
    assert [each.line.text for each in study.log_lines(0)] == [f"epoch {n}" for n in range(3)]
