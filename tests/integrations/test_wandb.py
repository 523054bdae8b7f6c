from __future__ import annotations

import json
import os
import sys

import pytest

from tests.integrations.streams import advanced, began, first_run, second_run, tell
from thrifty.core import UsageError
from thrifty.integrations import WandB
from thrifty.study import StudyEnded, TrialBegan


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_warning(caplog, request):
    """Assert that loggers can write all that tests give them."""
    yield
    if "warning" not in request.node.name:
        assert "does not write" not in caplog.text


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def logger(folder):
    return WandB(project="p", mode="offline", folder=folder)


def log_records(data, *, block=32768):
    """Yield the records of a file in LevelDB's log format, after the 7 bytes of W&B's own head."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def records(folder):
    """Return what each offline run has written, in the order of writing.

    Items are (run, config, [(step, metrics)], exit code).
    """
    import wandb  # noqa: PLC0415
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    # The W&B service writes the last bytes when it ends.
    wandb.teardown()

    out = []
    for file in sorted(
        folder.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns
    ):
        run, config, steps, code = None, {}, [], None
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = run or record.run
                config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            elif kind == "history":
                items = {
                    (i.key or i.nested_key[0]): json.loads(i.value_json)
                    for i in record.history.item
                }
                steps.append((items["_step"], items.get("mse")))
            elif kind == "exit":
                code = record.exit.exit_code
        out.append((run, config, steps, code))
    return out


def by_name(folder):
    return {
        run.display_name: (run, config, steps, code) for run, config, steps, code in records(folder)
    }


def test_each_trial_is_a_run_of_the_studys_group(tmp_path):
    tell(logger(tmp_path), first_run())
    found = by_name(tmp_path)
    assert sorted(found) == [f"digits {t}" for t in range(4)]
    run, config, steps, code = found["digits 0"]
    assert (run.run_group, run.job_type, run.project, code) == ("digits", "trial", "p", 0)
    assert steps == [(1, 0.5), (2, 0.4), (3, 0.3)]
    assert {k: v for k, v in config.items() if not k.startswith("_")} == {
        "lr": "Step(0.1, (3,))", "width": 64, "norm": True, "name": "a b", "none": "None",
    }  # fmt: skip
    assert found["digits 2"][3] == 1, "a failed trial is a failed run"


def test_a_trial_that_goes_on_has_the_same_id_in_each_run(tmp_path):
    tell(logger(tmp_path / "a"), first_run())
    tell(logger(tmp_path / "b"), second_run())
    tell(
        logger(tmp_path / "c"),
        [
            began(key="f" * 16),
            TrialBegan(trial=3, config={}),
            advanced(3, 1, [0.1]),
            StudyEnded(state="done"),
        ],
    )
    first, second, other = (by_name(tmp_path / f)["digits 3"][0].run_id for f in "abc")
    assert first == second != other


def test_more_trials_than_may_be_open_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.integrations._trackers.MAX_OPEN_RUNS", 1)
    tell(
        logger(tmp_path),
        [
            began(),
            *(TrialBegan(trial=t, config={}) for t in range(2)),
            *(advanced(t, epoch, [t + epoch / 10]) for epoch in (1, 2) for t in range(2)),
            StudyEnded(state="stopped"),
        ],
    )
    found = [(run.display_name, steps) for run, _, steps, _ in records(tmp_path)]
    assert sorted(found) == [
        ("digits 0", [(1, 0.1)]), ("digits 0", [(2, 0.2)]), ("digits 1", [(1, 1.1)]),
        ("digits 1", [(2, 1.2)]),
    ]  # fmt: skip


def test_modes_are_known():
    with pytest.raises(UsageError, match="mode is 'off'; it is"):
        WandB(project="p", mode="off")


class Server:
    """A stand-in for the library and a server that knows of three epochs of each run."""

    class Settings(dict):
        def __init__(self, **options):
            super().__init__(options)

    def __init__(self):
        self.inits, self.logged, self.step, self.summary = [], [], 4, {}

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, metrics, *, step):
        self.logged.append((step, metrics["mse"]))

    def finish(self, exit_code=0):
        self.summary["code"] = exit_code


def test_a_run_that_the_server_knows_goes_on_where_it_stands(monkeypatch):
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server)
    tell(WandB(project="p", entity="us"), second_run())
    assert server.logged == [(4, 0.2), (5, 0.1)]
    (options,) = server.inits
    assert (options["resume"], options["reinit"], options["entity"]) == (
        "allow",
        "create_new",
        "us",
    )
    assert (options["mode"], options["dir"]) == (None, None)
    assert server.summary == {"state": "done", "error": "", "code": 0}
