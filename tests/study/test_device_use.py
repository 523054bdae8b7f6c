"""What workers have used is shown where it was measured, and nowhere else."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from sqlalchemy import create_engine, text

import thrifty as th
from tests.cli.documents import check as check_document
from tests.web.conftest import opened
from thrifty.cli import _app
from thrifty.cli._status import _worker_lines
from thrifty.run._alone import device_use
from thrifty.store import Store
from thrifty.store._epoch_times import worker_use
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


@pytest.fixture
def study(tmp_path):
    return th.Study(
        LineTask(),
        th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
        algorithm=th.GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="s",
    )


def used(study):
    with Store.open(study.storage.url, create=False) as store:
        return store.studies.workers(store.studies.get("s"))


def forget(study):
    with create_engine(study.storage.url).begin() as connection:
        connection.execute(text("UPDATE stages SET device = NULL, peak_bytes = NULL"))


def thrifty(*args):
    return CliRunner().invoke(_app, args, catch_exceptions=False).stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_has_its_device_its_busy_time_and_its_peak_memory(study, workers):
    study.run(progress=False, executor=th.Local(workers=workers, pack="solo"))
    found = used(study)
    assert 1 <= len(found) <= workers
    assert sum(each.num_stages for each in found) == len(study.forest())
    for each in found:
        assert each.device == "cpu"
        assert 10e6 < each.peak_bytes < 100e9  # a process that has torch
        assert 0 < each.busy_s <= each.seconds + 1e-6


def test_on_a_gpu_it_is_what_pytorch_has_allocated_and_nothing_is_reset(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12_345)
    monkeypatch.delattr(torch.cuda, "reset_peak_memory_stats")
    found = device_use(torch.device("cuda", 0))
    assert (found.device, found.peak_bytes) == ("cuda:0 (Card)", 12_345)


def test_what_cannot_be_measured_is_unknown(monkeypatch):
    monkeypatch.setattr("importlib.import_module", _no_module)
    assert device_use(torch.device("cpu")).peak_bytes is None
    assert device_use(torch.device("meta")).peak_bytes is None


def _no_module(name):
    raise ImportError(name)


def test_a_peak_is_the_highest_and_unknown_ones_are_left_out():
    def stage(began, seconds, peak):
        return SimpleNamespace(started_at=began, seconds=seconds, device=None, peak_bytes=peak)

    found = worker_use("w", [stage(0.0, 4.0, None), stage(1.0, 1.0, 7), stage(6.0, 2.0, 5)])
    assert (found.peak_bytes, found.busy_s, found.seconds, found.device) == (7, 6.0, 8.0, None)


def test_the_status_of_one_study_shows_workers(study):
    study.run(progress=False, executor=th.Local(workers=1))
    url = ("--storage", study.storage.url)
    assert "worker" not in thrifty("status", *url)
    said = thrifty("status", "--name", "s", *url)
    assert "device cpu: busy" in said
    assert re.search(r" [MG]iB", said)
    document = json.loads(thrifty("status", "--name", "s", *url, "--json"))
    check_document(document, "status")
    (worker,) = document["studies"][0]["workers"]
    assert (worker["device"], worker["num_stages"]) == ("cpu", used(study)[0].num_stages)
    assert json.loads(thrifty("status", *url, "--json"))["studies"][0]["workers"] is None
    forget(study)
    said = thrifty("status", "--name", "s", *url)
    assert "device not recorded" in said
    assert "peak memory not measured" in said


def test_many_workers_are_cut():
    one = {"device": "cpu", "num_stages": 1, "busy_s": 1.0, "seconds": 0.0, "peak_bytes": 3_000_000}
    lines = list(_worker_lines([{"worker": f"w{n}", **one} for n in range(20)]))
    assert len(lines) == 17
    assert lines[0] == "w0, device cpu: busy 1.0 s of 0.0 s, peak memory 2.9 MiB"
    assert lines[-1] == "and 4 more; --json lists them"


def test_the_dashboard_has_workers_and_the_time_of_a_trial(study, tmp_path):
    study.run(progress=False, executor=th.Local(workers=1, pack="solo"))
    with create_engine(study.storage.url).connect() as connection:
        rows = connection.execute(text("SELECT node, epoch, seconds FROM epochs")).all()
    with opened(tmp_path / "t.db") as client:
        (worker,) = client.get("/api/studies/1/workers").json()["workers"]
        first, second = (client.get(f"/api/studies/1/trials/{n}").json() for n in (0, 1))
    assert worker["device"] == "cpu"
    assert worker["peak_bytes"] == used(study)[0].peak_bytes
    of = {(row.node, row.epoch): row.seconds for row in rows}
    assert first["seconds"] == pytest.approx(sum(of[0, epoch] for epoch in (1, 2, 3, 4)))
    shared = of[0, 1] + of[0, 2]
    assert second["seconds"] == pytest.approx(shared + of[1, 3] + of[1, 4])
    forget(study)
    with opened(tmp_path / "t.db") as client:
        (worker,) = client.get("/api/studies/1/workers").json()["workers"]
    assert (worker["device"], worker["peak_bytes"]) == (None, None)
