"""The number of workers changes no bit: CPU threads are those of a plan's first run."""

import logging
from typing import ClassVar

import pytest
import torch

from tests.study.helpers import StopAfter, make_study
from thrifty.core import UsageError
from thrifty.pack import SGD, ArrayData, Task
from thrifty.run import ExecutorConfig, Local, Ray
from thrifty.search import RandomSearch
from thrifty.space import Float, Space
from thrifty.store import Store


pytestmark = pytest.mark.slow


SPACE = Space(lr=Float(0.01, 0.1))


class Wide(Task):
    """Task large enough that two threads add up in another order than one does."""

    optimizer = SGD(lr="lr")
    batch_size = 512

    def data(self, hp):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
        return ArrayData(train=(x, x[:, :10]), valid=(x, x[:, :10]))

    def model(self, hp):
        return torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


def wide(folder):
    return make_study(
        folder, task=Wide(), space=SPACE, algorithm=RandomSearch(max_epochs=4, num_trials=4)
    )


def curves(folder, *executors):
    """Return the curves of a study that is stopped and resumed by the next executor."""
    for executor in executors[:-1]:
        wide(folder).run(progress=False, executor=executor, observers=[StopAfter(5)])
    study = wide(folder).run(progress=False, executor=executors[-1])
    return [t.curve for t in study.trials]


@pytest.mark.sample(1)
@pytest.mark.parametrize("pack", ["solo", "concatenated"])
def test_two_workers_give_the_bits_of_one(tmp_path, pack):
    one, two = (Local(workers=n, pack=pack) for n in (1, 2))
    first = Local(workers=1, threads=2, pack=pack)
    expected = curves(tmp_path / "one", first, one)
    assert curves(tmp_path / "two", first, two) == expected
    if curves(tmp_path / "other", Local(workers=1, threads=1, pack=pack)) == expected:
        pytest.skip("on this machine threads change no bit")


def threads_of(folder):
    with Store.open(f"sqlite:///{folder}/t.db", create=False) as store:
        return store.plans.threads(1)


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr("thrifty.run._local.num_cores", lambda: 8)
    monkeypatch.setattr("thrifty.study._housekeeping.num_cores", lambda: 8)


class Seen(Local):
    """Executor that records the threads of its workers."""

    threads_seen: ClassVar[list[int]] = []

    def open(self, task, **options):
        self.threads_seen.append(self.threads)
        return super().open(task, **options)


@pytest.mark.usefixtures("cores")
def test_the_first_run_fixes_an_equal_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(Seen, "threads_seen", [])
    make_study(tmp_path).run(progress=False, executor=Seen(workers=2), observers=[StopAfter(3)])
    make_study(tmp_path).run(progress=False, executor=Seen(workers=1))
    make_study(tmp_path, name="other").run(progress=False, executor=Seen(threads=4))
    assert threads_of(tmp_path) == 4
    assert Seen.threads_seen == [4, 4, 4]


def test_another_number_of_threads_is_refused_before_training(tmp_path):
    make_study(tmp_path).run(progress=False, executor=Local(threads=1), observers=[StopAfter(3)])
    message = r"Local\(threads=2\).*trained with 1 CPU threads.*leave threads out, give threads=1"
    study = make_study(tmp_path)
    with pytest.raises(UsageError, match=message):
        study.run(progress=False, executor=Local(threads=2))
    with Store.open(study.storage.url) as store:
        assert store.studies.summary("s").state == "stopped"


def test_another_seed_begins_anew(tmp_path):
    make_study(tmp_path).run(progress=False, executor=Local(threads=1))
    other = make_study(tmp_path, name="other", seed=1)
    assert other.run(progress=False, executor=Local(threads=2)).trials


@pytest.mark.usefixtures("cores")
def test_more_threads_than_cores_are_said(tmp_path, caplog):
    make_study(tmp_path).run(progress=False, executor=Local(threads=6), observers=[StopAfter(3)])
    with caplog.at_level(logging.WARNING):
        make_study(tmp_path).run(progress=False, executor=Local(workers=2, devices=("cpu",)))
    assert "2 workers use 12 threads on 8 cores" in caplog.text


def test_a_model_that_is_trained_again_is_trained_with_the_same_threads(tmp_path, monkeypatch):
    study = wide(tmp_path).run(progress=False, executor=Local(threads=2, pack="solo"))
    kept = study.trials[0].load_model().state_dict()
    for path in tmp_path.glob("t-checkpoints/*/*"):
        path.unlink()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        again = study.trials[0].load_model().state_dict()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_executors_say_what_their_workers_use():
    assert Ray(num_cpus=3).default_threads == 3
    assert Ray(num_cpus=0.5).with_threads(2).threads == 2

    class Other(ExecutorConfig):
        def open(self, task, **options):
            raise AssertionError

    other = Other()
    assert other.default_threads is None
    assert other.with_threads(3) is other
