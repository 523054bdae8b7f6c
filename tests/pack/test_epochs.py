"""Epochs of a number of steps: the same batches as plain passes one after the other, everywhere."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
import torch

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Dropping, Toy
from tests.study.helpers import SOLO, StopAfter, make_study
from thrifty.core import GraphError, TaskError
from thrifty.pack import FusedBackend, Member, check_usual_step, inspect_task, open_source
from thrifty.pack.task._data import steps_of, train_batches
from thrifty.pack.task._step_options import epoch_batches, parts_of_epoch
from thrifty.pack.trial._trial import TaskTrial
from thrifty.search import GridSearch
from thrifty.space import Choice, Space, Step


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


CPU = torch.device("cpu")
SIZE = 8


def rows(num):
    x = torch.arange(num, dtype=torch.float32)[:, None]
    return x, 2 * x


class Listed:
    """A source of a user, which says ``num_train`` samples and has ``num``."""

    arrays = None

    def __init__(self, num=20, num_train=20):
        self.num, self.num_train = num, num_train

    def source(self, device):
        return self

    def train_batches(self, *, seed, epoch, batch_size):
        order = np.random.default_rng([seed, epoch]).permutation(self.num)
        for start in range(0, self.num, batch_size):
            yield torch.tensor(order[start : start + batch_size])

    def valid_batches(self, *, batch_size):
        yield torch.arange(3), 3


def pair(**options):
    x, y = rows(20)
    return th.DatasetPair(train=list(zip(x, y, strict=True)), valid=[(x[0], y[0])], **options)


def graph():
    pytest.importorskip("numba")
    from thrifty.graph import Graph, GraphData  # noqa: PLC0415 (an extra)

    nodes = np.arange(24, dtype=np.int32)
    ring = Graph(np.arange(25), np.roll(nodes, 1), x=np.eye(24, dtype=np.float32), y=np.arange(24))
    return GraphData(ring, train=nodes[:20], valid=nodes[20:], fanouts=[1])


DATA = {
    "arrays": lambda: th.ArrayData(train=rows(20), valid=rows(4)),
    "data sets": pair,
    "drop_last": lambda: pair(drop_last=True),
    "own source": Listed,
    "graph": graph,
}


def plain(value):
    """Return a batch as lists."""
    value = (value.x, value.y) if hasattr(value, "blocks") else value
    each = value if isinstance(value, list | tuple) else (value,)
    return [tensor.tolist() for tensor in each]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("name", DATA)
def test_epochs_are_pieces_of_passes_one_after_the_other(name, num_steps):
    source = open_source(DATA[name](), device=CPU)
    passes = chain.from_iterable(
        train_batches(source, seed=5, epoch=number, batch_size=SIZE) for number in range(20)
    )
    for epoch in range(4):
        wanted = list(map(plain, islice(passes, num_steps)))
        found = epoch_batches(source, seed=5, epoch=epoch, batch_size=SIZE, num_steps=num_steps)
        assert list(map(plain, found)) == wanted


def test_parts_say_where_passes_end():
    parts = parts_of_epoch(0, num_steps=6, steps_per_pass=3)
    assert [(p.number, p.start, p.stop, p.is_end) for p in parts] == [
        (0, 0, 3, True),
        (1, 0, 3, True),
    ]
    assert not parts_of_epoch(0, num_steps=2, steps_per_pass=3)[0].is_end


def test_loader_processes_draw_anew_in_each_part_of_a_pass():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(())

    source = open_source(th.DatasetPair(train=Noisy(), valid=Noisy(), num_workers=1), device=CPU)

    def draws(epoch):
        batches = epoch_batches(source, seed=0, epoch=epoch, batch_size=2, num_steps=2)
        return torch.cat(list(batches)).tolist()

    first, second = draws(0), draws(1)
    assert first != second  # both are parts of the first pass
    assert (first, second) == (draws(0), draws(1))


@pytest.mark.parametrize(("num", "has"), [(12, "fewer"), (28, "more")])
def test_a_source_that_has_other_batches_than_it_says(num, has):
    source = open_source(Listed(num=num), device=CPU)
    assert steps_of(source, SIZE) == 3
    with pytest.raises(TaskError, match=f"a pass over the data has {has} than the 3 batches"):
        list(epoch_batches(source, seed=0, epoch=0, batch_size=SIZE, num_steps=5))


def test_a_loader_begins_within_an_epoch():
    data = graph()
    loader = data.loader(seed=1, batch_size=8, device=CPU)
    wanted = [batch.y.tolist() for batch in loader.epoch(2)]
    assert [batch.y.tolist() for batch in loader.epoch(2, start=1, stop=3)] == wanted[1:]
    with pytest.raises(GraphError, match="an epoch has 3 batches, so there are none from 2 to 4"):
        loader.epoch(2, start=2, stop=4)


# -- trials --------------------------------------------------------------------------------


def counted(base=Toy, steps=5, **attributes):
    return type("Counted", (base,), {"steps_per_epoch": steps, **attributes})()


def test_an_epoch_as_long_as_a_pass_changes_nothing():
    trials = [Trial(config={"lr": 0.1}), Trial(config={"lr": 0.02}, seed=1)]
    assert_same(alone(counted(steps=3), trials), alone(Toy(), trials))


@pytest.mark.parametrize("base", [Toy, Dropping])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_packed_trials_equal_solo_ones(base, steps):
    # 20 rows in batches of 8: a pass has 3 steps, and its last batch is smaller
    task = counted(base, steps)
    lr = th.Cosine(0.1)
    trials = [
        Trial(config={"lr": lr}),
        Trial(config={"lr": 0.05}),
        Trial(config={"lr": lr}, seed=3),
    ]
    backend = FusedBackend(task, device=here())
    found = together(backend, trials, at_once=2)
    assert backend.dry_runs.structures
    assert_same(found, alone(task, trials), tolerance=2e-5)


def test_a_stopped_trial_goes_on_within_a_pass():
    task = counted(Dropping)
    (whole,) = alone(task, [Trial(config={"lr": 0.1}, epochs=4)])
    (first,) = alone(task, [Trial(config={"lr": 0.1}, epochs=2)])
    (rest,) = alone(task, [Trial(config={"lr": 0.1}, start=2, epochs=4, state=first.state)])
    assert first.metrics + rest.metrics == whole.metrics
    assert_same([rest], [type(rest)(metrics=whole.metrics[2:], state=whole.state)])


def test_a_study_stops_goes_on_and_branches_within_a_pass(tmp_path):
    space = Space(lr=Choice([0.1, Step(0.1, [2]), Step(0.1, [2.5])]))
    study = make_study(tmp_path, task=counted(), space=space, algorithm=GridSearch(max_epochs=4))
    study.run(progress=False, executor=SOLO, observers=[StopAfter(3)])
    assert study.savings.unique_epochs < 8
    study.run(progress=False, executor=SOLO)
    assert study.savings.unique_epochs == 8  # not 12: the first two are shared
    for trial in study.trials:
        (wanted,) = alone(counted(), [Trial(config=trial.config, epochs=4, run_epochs=4)])
        assert trial.curve == tuple(each["mse"] for each in wanted.metrics)


def test_a_batch_size_with_a_schedule_is_refused_before_training():
    task = counted(batch_size="rows", optimizer=th.SGD(lr=th.times("lr", "rows")))
    values = {"lr": 0.1, "rows": 8}
    assert inspect_task(task, values, seed=0).metrics == {"mse"}
    with pytest.raises(
        TaskError, match=r"'rows' has a schedule, but Counted\.batch_size follows it"
    ):
        inspect_task(task, values, seed=0, moving={"rows"})
    with pytest.raises(TaskError, match="give 'rows' a fixed value, or leave steps_per_epoch out"):
        TaskTrial(task, CPU).begin(Member(values=values, seed=0, moving=frozenset({"rows"})))


def test_a_batch_size_that_an_algorithm_changes_is_refused():
    task = counted(batch_size="rows")
    (found,) = together(
        FusedBackend(task, device=here()),
        [Trial(config={"lr": 0.1, "rows": th.MultiStep([8, 4], milestones=[1])})],
    )
    assert "batch_size follows it" in str(found.error)


@pytest.mark.parametrize("steps", [0, 2.5, "many", True, -1])
def test_a_number_of_steps_that_is_none(steps):
    with pytest.raises(TaskError, match=r"steps_per_epoch is .*; it must be a whole number"):
        TaskTrial(counted(steps=steps), CPU)


def test_what_does_not_count_steps_says_so():
    with pytest.raises(TaskError, match=r"it counts epochs in steps \(steps_per_epoch\)"):
        check_usual_step(counted(), where="HeteroTask")
    check_usual_step(counted(), where="thrifty rent", counts_steps=True)


def test_the_length_of_an_epoch_is_part_of_the_identity():
    assert counted(steps=4).identity() != counted(steps=5).identity()
