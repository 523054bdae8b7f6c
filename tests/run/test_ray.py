"""The Ray executor, on a cluster of this machine that is started once for this file."""

from __future__ import annotations

import pytest
import ray

from tests.depth import IS_THOROUGH
from tests.run.ray_driver import ALGORITHM, everything
from tests.study.helpers import make_study
from thrifty.core import StageFailed, UsageError
from thrifty.run import Local, Ray
from thrifty.search import GridSearch
from thrifty.space import Choice, MultiStep, Space
from thrifty.study import Storage
from thrifty.testing import EXECUTOR_CHECKS, FaultyTask, LineTask
from thrifty.testing._executors import check_packs_make_room, check_several_at_once


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


ONE = Ray(workers=1, threads=1, pack="solo")
TWO = Ray(workers=2, threads=1, pack="solo")
LOCAL = Local(workers=2, threads=1, pack="solo")
HERE = Local(workers=1, threads=1, pack="solo")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        address="local",
        num_cpus=2,
        resources={"cups": 3},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def still_there():
    """Assert that a user's own connection stays open."""
    yield
    assert ray.is_initialized()


# What this checks depends on how workers are started and called. So do values and the loss of a
# worker, which tests below are about; the other checks test what workers do, which local processes
# do alike. The start of a worker takes three seconds of CPU.
ABOUT_RAY = (check_several_at_once,)


@pytest.mark.parametrize(
    "check", EXECUTOR_CHECKS if IS_THOROUGH else ABOUT_RAY, ids=lambda check: check.__name__
)
def test_conformance(check):
    several = check in (check_several_at_once, check_packs_make_room)
    check(TWO if several else ONE)


def run(folder, *, executor, algorithm=ALGORITHM, observers=(), **options):
    study = make_study(folder, algorithm=algorithm, **options)
    study.run(progress=False, executor=executor, observers=observers)
    return study


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the records that the same study leaves behind on local workers."""
    return run(tmp_path_factory.mktemp("local"), executor=LOCAL)


def test_the_same_records_as_on_local_workers(tmp_path, undisturbed):
    study = run(tmp_path, executor=TWO)
    assert everything(study) == everything(undisturbed)
    assert [(t.value, t.curve) for t in study.trials] == [
        (t.value, t.curve) for t in undisturbed.trials
    ]
    assert study.savings.unique_epochs == undisturbed.savings.unique_epochs


class Failures:
    """Observer that records failures with their reasons."""

    def __init__(self):
        self.kinds = []

    def on_event(self, event):
        if isinstance(event, StageFailed):
            self.kinds.append(event.kind)


def test_a_worker_that_is_killed_loses_nothing(tmp_path):
    fuse = tmp_path / "fuse"
    options = {
        "algorithm": GridSearch(max_epochs=6),
        "task": FaultyTask(fuse=str(fuse)),
        "space": Space(lr=Choice([0.1, 0.05, 0.02]), fault=MultiStep(["", "die"], milestones=[4])),
    }
    harmless = run(tmp_path, executor=HERE, name="harmless", **options)
    fuse.touch()
    failures = Failures()
    (tmp_path / "other").mkdir()
    study = run(tmp_path / "other", executor=TWO, observers=[failures], **options)
    assert failures.kinds == ["lost"]
    assert not fuse.exists()
    assert everything(study) == everything(harmless)


@pytest.mark.thorough
def test_packs_with_states_in_a_relative_folder(tmp_path, monkeypatch, undisturbed):
    monkeypatch.chdir(tmp_path)
    study = run(
        tmp_path,
        executor=Ray(workers=1, threads=1, pack="concatenated", pack_size=4),
        storage=Storage(url=f"sqlite:///{tmp_path}/t.db", checkpoints="here"),
    )
    assert everything(study) == everything(undisturbed)
    assert list((tmp_path / "here").rglob("*.safetensors"))


class Elsewhere(LineTask):
    """A task whose code is missing where the workers are."""

    def __reduce__(self):
        return __import__, ("no_such_module_anywhere",)


def test_a_task_that_workers_cannot_load(tmp_path):
    study = make_study(tmp_path, task=Elsewhere(), algorithm=ALGORITHM)
    with pytest.raises(UsageError, match=r"(?s)working_dir.*no_such_module_anywhere"):
        study.run(progress=False, executor=ONE)


def test_as_many_workers_as_there_is_room_for():
    assert Ray().num_workers == 2
    assert Ray(num_cpus=0.5).num_workers == 4
    assert Ray(num_cpus=0, resources={"cups": 1.5}).num_workers == 2
    assert Ray(num_gpus=1).num_workers == 1
    assert Ray(workers=7).num_workers == 7


@pytest.mark.parametrize(("num_gpus", "warned"), [(0, False), (1, True)])
def test_workers_that_no_machine_is_large_enough_for(tmp_path, caplog, num_gpus, warned):
    Ray(num_gpus=num_gpus).open(LineTask(), checkpoints=str(tmp_path), folder="plan").close()
    assert ("no machine of this Ray cluster can run a worker" in caplog.text) == warned
