"""Worker processes that die, hang, or are left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.study.helpers import make_study
from tests.study.processes import started
from thrifty.core import EpochDone, StageFailed, UsageError
from thrifty.hetero import HeteroTask
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Local
from thrifty.run._local import ProcessExecutor
from thrifty.run._worker import WorkerSpec
from thrifty.search import GridSearch
from thrifty.space import Choice, MultiStep, Space, Timeline
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


LIMIT_S = 60.0
EPOCHS = 4


class LeavesTracks(FaultyTask):
    """Task that writes a file with its own process and a forked one before it hangs or dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def identity(self) -> Mapping[str, str]:
        return {**super().identity(), "attributes": ""}

    def loss(self, model: Any, batch: Any) -> Any:
        if model.training and self._fault == "fork and die":
            forked = os.fork()
            if not forked:
                signal.pause()
            self.leave("forked", forked)
            os.kill(os.getpid(), signal.SIGKILL)
        if model.training and self._fault == "hang":
            self.leave("hangs", os.getpid())
        return super().loss(model, batch)

    def leave(self, name: str, pid: int) -> None:
        (self.folder / f"{name}.new").write_text(str(pid))
        (self.folder / f"{name}.new").rename(self.folder / name)


class Clock:
    """A clock that stands still unless a process hangs; then it advances with each reading."""

    def __init__(self, folder: Path) -> None:
        self._hangs = folder / "hangs"
        self._now = 0.0

    def __call__(self) -> float:
        if self._hangs.exists() and psutil.pid_exists(int(self._hangs.read_text())):
            self._now += LIMIT_S / 2
        return self._now


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Local):
    """``Local`` with a time limit on another clock."""

    folder: Path

    def open(self, task, *, checkpoints, folder, **_):
        specs = [spec(checkpoints, pack=self.pack)]
        return ProcessExecutor(task, specs, epoch_timeout_s=LIMIT_S, clock=Clock(self.folder))


def spec(checkpoints, *, pack="solo"):
    return WorkerSpec(
        name="cpu-0",
        device="cpu",
        threads=1,
        checkpoints=str(checkpoints),
        folder="plan",
        pack=pack,
        curves={},
    )


def assignment(number: int = 0, **config: Any) -> Assignment:
    timeline = Timeline({"lr": 0.1, **config}, epochs=EPOCHS)
    stages = (Stage(node=number, start=0, stop=EPOCHS),)
    return Assignment(
        number=number, chain=Chain(stages=stages, timeline=timeline, resume=None), seed=0
    )


def from_epoch(fault: str, epoch: int = 2) -> MultiStep:
    return MultiStep(["", fault], milestones=[epoch])


def rest(executor, num=1):
    """Return all events until the last of ``num`` assignments ends."""
    events = []
    while num:
        for report in executor.poll(1.0):
            num -= report.event is None
            events.append(report.event)
    return [event for event in events if event is not None]


def failures(events):
    return [event for event in events if isinstance(event, StageFailed)]


@pytest.fixture
def executor(tmp_path):
    opened = ProcessExecutor(
        LeavesTracks(tmp_path),
        [spec(tmp_path / "checkpoints")],
        epoch_timeout_s=LIMIT_S,
        clock=Clock(tmp_path),
    )
    yield opened
    opened.close()


def test_a_killed_worker_is_noticed_though_a_fork_keeps_its_socket(executor, tmp_path):
    executor.submit(assignment(fault=from_epoch("fork and die")))
    (failed,) = failures(rest(executor))
    assert (failed.kind, failed.message) == (
        "lost",
        "WorkerLostError: worker cpu-0 ended unexpectedly (killed by signal 9)",
    )
    os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


def test_an_epoch_that_hangs_is_ended(executor):
    executor.submit(assignment(fault=from_epoch("hang")))
    events = rest(executor)
    (failed,) = failures(events)
    assert (failed.kind, failed.epoch) == ("timeout", 2)
    assert "no epoch has ended in 60 s" in failed.message
    assert "raise epoch_timeout" in failed.message
    executor.submit(assignment(1))
    assert len([e for e in rest(executor) if isinstance(e, EpochDone)]) == EPOCHS


def test_a_worker_that_starts_or_has_nothing_to_do_does_not_hang(tmp_path):
    now = [0.0]
    opened = ProcessExecutor(
        LineTask(), [spec(tmp_path)], epoch_timeout_s=LIMIT_S, clock=lambda: now[0]
    )
    try:
        for number in range(2):
            opened.submit(assignment(number))
            if not number:
                now[0] += 2 * LIMIT_S  # as long as importing torch takes on a busy machine
            assert not failures(rest(opened))
            now[0] += 2 * LIMIT_S
    finally:
        opened.close()


def study_of(folder, *faults, **options):
    space = Space(lr=Choice([0.1]), fault=Choice(["", *map(from_epoch, faults)]))
    return make_study(
        folder,
        task=LeavesTracks(folder),
        space=space,
        algorithm=GridSearch(max_epochs=EPOCHS),
        **options,
    )


@pytest.mark.parametrize("pack", ["solo", "concatenated", "fused"])
def test_who_hangs_is_found_out_and_the_others_are_trained(tmp_path, pack):
    study = study_of(tmp_path, "hang")
    study.run(progress=False, executor=Timed(folder=tmp_path, pack=pack, pack_size=2))
    good, hung = study.trials
    assert (good.state, good.epochs) == ("done", EPOCHS)
    assert hung.state == "failed"
    assert "no epoch has ended" in hung.error


def test_one_worker_with_a_time_limit_is_a_process(tmp_path):
    opened = Local(epoch_timeout=60.0).open(LineTask(), checkpoints=str(tmp_path), folder="p")
    assert isinstance(opened, ProcessExecutor)


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_time_limit_is_a_number_of_seconds(limit):
    with pytest.raises(UsageError, match=r"epoch_timeout=.*finite number of seconds"):
        Local(epoch_timeout=limit)


def run_hanging(folder):
    study_of(folder, "hang").run(progress=False, executor=Local(workers=2, threads=1, pack="solo"))


def test_workers_end_when_their_driver_is_killed(tmp_path):
    """Workers end when their driver is killed in the middle of an epoch that never ends."""
    driver = started(run_hanging, tmp_path)
    while not (tmp_path / "hangs").exists():
        assert driver.is_alive()
        psutil.Process(driver.pid).cpu_percent(interval=0.05)
    workers = psutil.Process(driver.pid).children(recursive=True)
    assert int((tmp_path / "hangs").read_text()) in [worker.pid for worker in workers]
    driver.kill()
    driver.join()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_a_task_that_cannot_be_loaded_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "gone_task.py").write_text(
        "import thrifty.testing\nclass Gone(thrifty.testing.LineTask):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import gone_task  # type: ignore[import-not-found]  # noqa: PLC0415

    opened = ProcessExecutor(gone_task.Gone(), [spec(tmp_path)])
    (tmp_path / "gone_task.py").write_text("import sys\nsys.exit('not today')\n")
    sys.modules.pop("gone_task")
    try:
        opened.submit(assignment())
        with pytest.raises(UsageError, match=r"cannot be loaded by a worker(.|\n)*not today"):
            rest(opened)
    finally:
        opened.close()


class Dying(FaultyTask):
    """Task in which one of the two processes of a trial dies, once."""

    def loss(self, model, batch):
        import torch.distributed as dist  # noqa: PLC0415

        if model.training and dist.get_rank() == 1 and self._burn():
            os.kill(os.getpid(), signal.SIGKILL)
        return LineTask.loss(self, model, batch)


def test_a_job_that_loses_a_worker_is_tried_again(tmp_path, caplog):
    fuse = tmp_path / "fuse"
    fuse.touch()
    task = HeteroTask(Dying(fuse=str(fuse)), workers=2)
    study = make_study(
        tmp_path, task=task, space=Space(lr=Choice([0.1])), algorithm=GridSearch(max_epochs=2)
    )
    study.run(progress=False)
    assert [trial.state for trial in study.trials] == ["done"]
    assert "worker 1 of 2 of this trial ended without a word (killed by signal 9)" in caplog.text
