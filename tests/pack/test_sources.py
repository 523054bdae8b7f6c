"""Data sets stay loaded while a trial uses them, and a few recently used ones stay longer."""

import gc
import weakref

import pytest
import torch

from thrifty.pack import ArrayData, FusedBackend, Member
from thrifty.pack.task._sources import NUM_RECENT, AliveSources
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space
from thrifty.study import Study
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


MADE: list[weakref.ref] = []
"""Tensors of all data sets ever loaded."""


def num_alive():
    gc.collect()
    return sum(tensor() is not None for tensor in MADE)


class Scaled(LineTask):
    """A task whose data depend on a hyper-parameter with many values."""

    loads = 0

    def data(self, hp):
        type(self).loads += 1
        x = torch.linspace(-1, 1, 32)[:, None] * hp.scale
        data = ArrayData(train=(x, 2 * x), valid=(x, 2 * x))
        MADE.extend(map(weakref.ref, (*data.train, *data.valid)))
        return data


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(Scaled, "loads", 0)
    MADE.clear()
    gc.freeze()  # so that each collection looks at the objects of this test alone


@pytest.mark.parametrize("pack", ["solo", "concatenated", "fused"])
def test_data_of_trials_that_are_gone_are_freed(pack):
    most = 0

    class Watch:
        def on_event(self, event):
            nonlocal most
            most = max(most, num_alive())

    task, scales = Scaled(), [float(s) for s in range(1, 13)]
    study = Study(
        task,
        Space(lr=0.1, scale=Choice(scales)),
        algorithm=GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage="sqlite://",
        name="s",
    )
    study.run(
        progress=False, executor=Local(threads=1, pack=pack, pack_size=1), observers=[Watch()]
    )
    assert {t.state for t in study.trials} == {"done"}
    assert len(study.trials) == len(scales) <= task.loads
    each = 4  # tensors of one data set
    assert most <= (NUM_RECENT + 2) * each
    assert num_alive() <= NUM_RECENT * each


def begun(task, *scales):
    backend = FusedBackend(task)
    return [
        backend.prepare(Member(values={"lr": 0.1, "scale": s}, seed=0, epoch=0)) for s in scales
    ]


def test_trials_share_data_as_long_as_one_uses_them():
    task = Scaled()
    first, *_ = begun(task, 1.0, 2.0, 3.0, 4.0)
    (again,) = begun(task, 1.0)
    assert again.source is first.source
    assert again.source_number == first.source_number
    assert Scaled.loads == 4


def test_the_data_used_last_are_kept():
    task = Scaled()
    begun(task, 1.0, 2.0)
    begun(task, 1.0, 2.0)
    assert Scaled.loads == 2
    begun(task, 3.0)
    begun(task, 1.0)
    assert Scaled.loads == 4


def test_data_that_come_later_are_never_taken_for_those_that_are_gone():
    task, numbers = Scaled(), set()
    for scale in range(1, 20):
        (trial,) = begun(task, float(scale))
        numbers.add(trial.source_number)
        del trial
    assert len(numbers) == 19


class Slotted:
    """An object that cannot be weakly referenced."""

    __slots__ = ()


def test_a_source_without_weak_references_is_found_while_it_is_a_recent_one():
    known, sources = AliveSources(), [Slotted() for _ in range(NUM_RECENT + 1)]
    for number, source in enumerate(sources):
        known.add(number, source)
        assert known.number_of(source) >= 0
    assert [key for key, _ in known] == list(range(1, NUM_RECENT + 1))
