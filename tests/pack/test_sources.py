"""Data sets stay loaded while trials use them; trials share them unless reading changes them."""

import contextlib
import gc
import io
import itertools
import math
import types
import weakref
from collections import OrderedDict
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from tests.devices import here
from thrifty.core import StateError
from thrifty.pack import ArrayData, DatasetPair, EpochPlan, FusedBackend, Member
from thrifty.pack.task._sources import NUM_RECENT, AliveSources
from thrifty.pack.trial._trial import TaskTrial
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space
from thrifty.study import Study
from thrifty.testing import LineTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


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


@pytest.mark.sample(1)
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
    backend = FusedBackend(task, device=here())
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


@pytest.mark.parametrize(
    ("value", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ((1, 2), (True, 2)), (None, "absent")]
)
def test_trials_whose_values_code_can_tell_apart_have_data_of_their_own(value, other):
    class Optional(Scaled):
        def data(self, hp):
            hp.get("columns", 3)
            return super().data(hp)

    backend = FusedBackend(Optional(), device=here())
    trials = [
        backend.prepare(
            Member(
                values={"lr": 0.1, "scale": 1.0} | ({} if v == "absent" else {"columns": v}),
                seed=0,
                epoch=0,
            )
        )
        for v in (value, other, value)
    ]
    assert trials[0].source is trials[2].source
    assert trials[0].source is not trials[1].source


class Named(Scaled):
    """Names a file after its hyper-parameters."""

    def data(self, hp):
        self.file = f"rows of {hp}.npy"
        return super().data(hp)


def test_data_that_depend_on_the_text_of_all_hyperparameters_are_not_shared():
    backend = FusedBackend(Named(), device=here())
    trials = [
        backend.prepare(Member(values={"lr": rate, "scale": 1.0}, seed=0, epoch=0))
        for rate in (0.1, 0.2, 0.1)
    ]
    assert trials[0].source is trials[2].source
    assert trials[0].source is not trials[1].source


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


# -- data that change while they are read ------------------------------------------------------

X = torch.linspace(-1, 1, 64)[:, None]
NUM_READ = [0]


class Rows(Dataset):
    """Rows of a line, and what reading one of them does besides."""

    num = 0

    def __init__(self, effect):
        self.effect, self.count, self.seen, self.cache = effect, 0, [], {}
        self.helper = types.SimpleNamespace(num=0)
        self.tensor, self.table = torch.zeros(2), dict.fromkeys(range(300), 0)
        self.others = [torch.tensor([math.nan]), torch.tensor(1j).conj(), torch.empty(0),
                       torch.ones(2, 3).T, torch.tensor(True), torch.ones(1).bfloat16(),
                       np.array([math.nan]), math.nan]  # fmt: skip
        self.installed = OrderedDict()
        self.file = io.StringIO("\n" * 1000)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.effect(self, index)
        return X[index], 2 * X[index]


def count(data, index):
    data.count += 1


def list_it(data, index):
    data.seen.append(index)


def add_an_attribute(data, index):
    data.last = index


def count_in_a_helper(data, index):
    data.helper.num += 1


def count_in_a_global(data, index):
    NUM_READ[0] += 1


def count_on_the_class(data, index):
    Rows.num += 1


def keep(data, index):
    data.cache[index] = X[index]


def nothing(data, index):
    pass


class Reading(LineTask):
    """A task whose data set has an effect, within another data set or as a function of batches."""

    def __init__(self, effect, wrap=lambda rows: rows):
        self.effect, self.wrap = effect, wrap

    def data(self, hp):
        return DatasetPair(train=self.wrap(Rows(self.effect)), valid=Rows(nothing))


def sources_of_two(task):
    trials = [TaskTrial(task, torch.device("cpu")) for _ in range(2)]
    for trial in trials:
        trial.begin(Member(values={"lr": 0.1}, seed=0))
    return [trial.source for trial in trials]


def write_through_numpy(data, index):
    data.tensor.numpy()[0] += 1


def count_in_a_large_dict(data, index):
    data.table[7] += 1


def read_on(data, index):
    data.file.readline()


EFFECTS = [
    count, list_it, add_an_attribute, count_in_a_helper, keep, write_through_numpy,
    count_in_a_large_dict, read_on,
]  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Subset(rows, range(40))])
@pytest.mark.parametrize("effect", EFFECTS)
def test_data_that_reading_changes_are_not_shared_and_the_change_is_named(effect, wrap, caplog):
    one, other = sources_of_two(Reading(effect, wrap))
    assert one is not other
    assert caplog.text.count("reading its data changes") == 1


ONE = Rows(count)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Reading(count_in_a_global), "NUM_READ"),
        (Reading(count_on_the_class), "Rows.num"),
        (Reading(nothing, lambda _: ONE), "data.train.count"),
    ],
)
def test_a_change_of_what_all_data_share_is_refused_by_name(task, name):
    with pytest.raises(StateError, match=rf"changes '[\w.]*{name}', which is no part of what"):
        sources_of_two(task)


PACKS = pytest.mark.parametrize("pack", ["solo", "concatenated", "fused", "auto"])


class Own:
    """A source of a user, whose batches are its own tensors."""

    arrays, num_train = None, 8

    def __init__(self):
        self.x = torch.ones(8, 1, device=here())

    def source(self, device):
        return self

    def train_batches(self, *, seed, epoch, batch_size):
        for start in range(0, 8, batch_size):
            yield (self.x[start : start + batch_size],) * 2

    def valid_batches(self, *, batch_size):
        yield (self.x, self.x), 8


class Doubling(LineTask):
    """A task that changes its batches in place."""

    def __init__(self, data):
        self.given = data

    def data(self, hp):
        return self.given

    def loss(self, model, batch):
        return super().loss(model, (batch[0].mul_(2), batch[1]))

    def metrics(self, model, batch):
        return super().metrics(model, (batch[0].mul_(2), batch[1]))


class Drawing(Rows):
    """Rows with noise from an iterator, which cannot be compared with what it was."""

    def __init__(self):
        super().__init__(nothing)
        self.noise = iter(range(10**6))

    def __getitem__(self, index):
        return X[index] + next(self.noise), X[index]


def test_data_with_an_iterator_are_not_shared_unless_it_is_said_to_mean_nothing():
    one, other = sources_of_two(Reading(nothing, lambda _: Drawing()))
    assert one is not other

    class Meant(Reading):
        not_state = ("noise",)

    one, other = sources_of_two(Meant(nothing, lambda _: Drawing()))
    assert one is other


def test_one_iterator_for_all_data_is_refused():
    all_read = Drawing()
    with pytest.raises(StateError, match=r"'data\.train\.noise', which is no part of what"):
        sources_of_two(Reading(nothing, lambda _: all_read))


@PACKS
def test_batches_of_a_source_of_ones_own_may_be_changed(pack, tmp_path):
    data = Own()
    study = Study(
        Doubling(data),
        Space(lr=Choice([0.1, 0.05])),
        algorithm=GridSearch(max_epochs=2),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="s",
    )
    study.run(progress=False, executor=Local(pack=pack, threads=1))
    assert [trial.state for trial in study.trials] == ["done", "done"]
    assert torch.equal(data.x.cpu(), torch.ones(8, 1))


class Transform:
    """An object of the user without a comparison of its own."""

    scale = 1.0


class Blurring(LineTask):
    """A task whose data read an attribute that ``adapt`` sets in each trial's copy of the task."""

    strength = 0.0

    def __init__(self):
        self.strength = 0.0
        self.transform = Transform()

    def data(self, hp):
        rows = Rows(lambda data, index: self.strength + self.transform.scale)
        return DatasetPair(train=rows, valid=Rows(nothing))

    def adapt(self, model, hp):
        super().adapt(model, hp)
        self.strength = hp.strength


@pytest.mark.parametrize("pack", ["solo", "concatenated", "fused"])
def test_data_that_read_what_adapt_changes_are_refused(pack, tmp_path):
    study = Study(
        Blurring(),
        Space(lr=0.1, strength=Choice([0.0, 0.5])),
        algorithm=GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="s",
    )
    study.run(progress=False, executor=Local(pack=pack, threads=1))
    still, moved = study.trials
    assert still.state == "done"
    assert "read the task's attribute 'strength', which a trial has changed" in moved.error


def test_data_that_reading_does_not_change_are_shared(caplog):
    one, other = sources_of_two(Reading(nothing))
    assert one is other
    assert caplog.text == ""


def test_what_an_installed_class_caches_is_no_change(caplog):
    def look(data, index):
        data.installed.note = index

    one, other = sources_of_two(Reading(look))
    assert one is other
    assert caplog.text == ""


def test_a_trial_gets_data_that_nobody_has_read():
    (one, _) = sources_of_two(Reading(count))
    assert one.parts["data.train"].count == 0


def test_data_whose_change_is_said_to_mean_nothing_are_shared(caplog):
    class Cached(Reading):
        not_state = ("cache",)

    one, other = sources_of_two(Cached(keep))
    assert one is other
    assert caplog.text == ""


class Fading(Rows):
    """Rows whose inputs are zero after they were read for some epochs."""

    def __init__(self, num_epochs):
        super().__init__(count)
        self.num_epochs = num_epochs

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (self.count <= self.num_epochs * len(X)), y


def study_of(rates, *, num_epochs, folder):
    class Task(LineTask):
        def data(self, hp):
            return DatasetPair(train=Fading(num_epochs), valid=Rows(nothing))

    return Study(
        Task(),
        Space(lr=Choice(rates)),
        algorithm=GridSearch(max_epochs=3),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/{len(rates)}.db",
        name="s",
    )


@pytest.mark.sample(2)
@PACKS
def test_a_counter_that_takes_effect_in_the_next_epoch_is_refused_by_name(pack, tmp_path):
    study = study_of([0.1, 0.05, 0.02], num_epochs=3, folder=tmp_path)
    with pytest.raises(StateError, match=r"Not in the checkpoint: 'data\.train\.count'"):
        study.run(progress=False, executor=Local(pack=pack, threads=1))


@pytest.mark.sample(1)
@PACKS
def test_a_counter_that_takes_effect_later_changes_no_other_trial(pack, tmp_path):
    """Three trials read often enough for the effect, one alone does not.

    If time allows, the check of states finds the effect; if not, each trial has its own counter.
    """
    alone, among = (
        study_of(rates, num_epochs=5, folder=tmp_path) for rates in ([0.02], [0.1, 0.05, 0.02])
    )
    for study in (alone, among):
        with contextlib.suppress(StateError):
            study.run(progress=False, executor=Local(pack=pack, threads=1))
    (wanted,) = alone.trials
    found = {trial.config["lr"]: trial for trial in among.trials}.get(0.02)
    if found is not None and found.state == "done":
        assert found.curve == pytest.approx(wanted.curve, rel=1e-5)


@pytest.mark.sample(1)
@PACKS
def test_a_counter_without_effect_changes_nothing(pack, tmp_path):
    def curve(rates):
        study = study_of(rates, num_epochs=10**6, folder=tmp_path)
        study.run(progress=False, executor=Local(pack=pack, threads=1))
        return {trial.config["lr"]: trial.curve for trial in study.trials}[0.02]

    assert curve([0.1, 0.05, 0.02]) == pytest.approx(curve([0.02]), rel=1e-5)


@cache
def kept_counts():
    return itertools.count()


def count_in_a_cached_result(data, index):
    next(kept_counts())


def test_data_that_change_what_a_cached_function_keeps_are_refused():
    kept_counts.cache_clear()
    task = Reading(count_in_a_cached_result)
    trials = [TaskTrial(task, torch.device("cpu")) for _ in range(2)]
    trials[0].begin(Member(values={"lr": 0.1}, seed=0))
    trials[0].epoch(EpochPlan(epoch=0, values={"lr": 0.1}))
    with pytest.raises(StateError, match=r"'kept_counts\(\.\.\.\)', which is no part of what"):
        trials[1].begin(Member(values={"lr": 0.1}, seed=0))


@lru_cache
def doubled(index):
    return X[index] * 2


def test_data_whose_rows_are_cached_are_shared():
    doubled.cache_clear()
    one, other = sources_of_two(Reading(lambda data, index: doubled(index)))
    assert one is other


def test_data_that_change_later_while_trials_share_them_are_refused():
    def late(data, index):
        data.count += index == 7 and len(data.seen) > 0

    task = Reading(late)
    trials = [TaskTrial(task, torch.device("cpu")) for _ in range(2)]
    for trial in trials:
        trial.begin(Member(values={"lr": 0.1}, seed=0))
    first, second = trials
    assert first.source is second.source
    first.source.parts["data.train"].seen.append(1)
    for trial in trials:
        with pytest.raises(StateError, match=r"have changed while .*'data\.train\.seen'"):
            trial.batches(EpochPlan(epoch=1, values={"lr": 0.1}))
