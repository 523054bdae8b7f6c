"""Streams: the same batches for every trial, alone or packed, stopped or branched, or an error."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.study.helpers import SOLO, StopAfter, make_study
from thrifty.core import StateError, TaskError
from thrifty.pack import EpochPlan, FusedBackend, Member, inspect_task, open_source
from thrifty.pack.task._step_options import epoch_batches, epoch_length
from thrifty.pack.trial._probes import probe
from thrifty.pack.trial._trial import TaskTrial
from thrifty.search import GridSearch
from thrifty.space import Choice, Space, Step


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]

CPU = torch.device("cpu")
SIZE = 4


def drawn(*key, num=SIZE):
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    x = torch.randn(num, 3, generator=generator)
    return x, x.sum(1, keepdim=True)


def endless(seed, epoch):
    for step in itertools.count():
        yield drawn(seed, epoch, step)


def held_out():
    yield drawn("valid", 0)
    yield drawn("valid", 1, num=2)


class Numbers(IterableDataset):
    """Samples 0, 1, ... in passes of ``num``, with a position that can be saved."""

    def __init__(self, num=10):
        self.num, self.at = num, 0

    def __iter__(self):
        while self.at < self.num:
            self.at += 1
            x = torch.tensor([self.at / 10, 1.0, -self.at / 20])
            yield x, x.sum(0, keepdim=True)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Loader:
    """Batches with a state, as ``StatefulDataLoader`` has; the order depends on the pass."""

    def __init__(self, num=5):
        self.num, self.number, self.at = num, 0, 0

    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        while self.at < self.num:
            self.at += 1
            yield drawn("loader", self.number, self.at)
        self.at = 0

    def __len__(self):
        return self.num

    def state_dict(self):
        return {"at": self.at, "number": self.number, "held": torch.ones(1)}

    def load_state_dict(self, state):
        self.at, self.number = state["at"], state["number"]


class Streaming(th.Task):
    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = SIZE
    steps_per_epoch = 3
    train = staticmethod(endless)
    valid = staticmethod(held_out)
    options: ClassVar[dict[str, object]] = {}

    def data(self, hp):
        return th.StreamData(train=self.train, valid=self.valid, **self.options)

    def model(self, hp):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


class OwnStream(Streaming):
    """The stream is made in each call of ``data``."""

    kind = Numbers

    def data(self, hp):
        return th.StreamData(train=self.kind(), valid=self.valid, **self.options)


def task_of(base=Streaming, **attributes):
    return type("Own", (base,), attributes)()


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "train.bin"
    (np.arange(500) % 97).astype(np.uint16).tofile(path)
    return th.TokenFile(path, block_size=3)


class Floats(Streaming):
    """A model over tokens."""

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x / 97), y[:, -1:] / 97)


def numbers():
    return task_of(OwnStream)


def loader():
    return task_of(OwnStream, kind=Loader)


def function():
    return task_of()


def ahead():
    return task_of(options={"prefetch": 2})


def from_file(tokens):
    return task_of(Floats, tokens=tokens, train=tokens, valid=tokens)


KINDS = [function, ahead, numbers, loader]
each_kind = pytest.mark.parametrize("make", KINDS)


def x_of(batches):
    return [batch[0].tolist() for batch in batches]


# -- exact: alone, packed, stopped, branched --------------------------------------------------


def pieces(task, *, epochs=4, cut=2):
    """Train at a stretch, and in two trials of which the second resumes."""
    (whole,) = alone(task, [Trial(config={"lr": 0.1}, epochs=epochs)])
    assert whole.error is None
    (first,) = alone(task, [Trial(config={"lr": 0.1}, epochs=cut)])
    rest = Trial(config={"lr": 0.1}, start=cut, epochs=epochs, state=first.state)
    return whole, first, rest


@each_kind
def test_a_trial_that_resumes_reads_what_it_would_have_read(make):
    whole, first, rest = pieces(make())
    (found,) = alone(make(), [rest])
    assert first.metrics + found.metrics == whole.metrics


def test_a_trial_on_a_token_file_resumes(tokens):
    whole, first, rest = pieces(from_file(tokens))
    (found,) = alone(from_file(tokens), [rest])
    assert first.metrics + found.metrics == whole.metrics


@each_kind
def test_packed_trials_equal_solo_ones(make):
    trials = [
        Trial(config={"lr": 0.1}),
        Trial(config={"lr": 0.03}, epochs=2),
        Trial(config={"lr": 0.1}, seed=4),
    ]
    backend = FusedBackend(make(), device=here())
    found = together(backend, trials)
    assert [result.error for result in found] == [None] * 3
    assert_same(found, alone(make(), trials), tolerance=1e-5)


def test_packed_trials_on_a_token_file_equal_solo_ones(tokens):
    trials = [
        Trial(config={"lr": 0.1}),
        Trial(config={"lr": 0.03}),
        Trial(config={"lr": 0.1}, seed=4),
    ]
    task = from_file(tokens)
    assert_same(
        together(FusedBackend(task, device=here()), trials), alone(task, trials), tolerance=1e-5
    )


@pytest.mark.sample(2)
@each_kind
def test_a_study_is_killed_resumed_and_branches(make, tmp_path):
    space = Space(lr=Choice([0.1, Step(0.1, [2]), Step(0.1, [2.5])]))
    study = make_study(tmp_path, task=make(), space=space, algorithm=GridSearch(max_epochs=4))
    study.run(progress=False, executor=SOLO, observers=[StopAfter(3)])
    study.run(progress=False, executor=SOLO)
    assert study.savings.unique_epochs == 8
    for trial in study.trials:
        (wanted,) = alone(make(), [Trial(config=trial.config, epochs=4, run_epochs=4)])
        assert trial.curve == tuple(each["mse"] for each in wanted.metrics)


def test_trials_do_not_advance_each_others_streams():
    shared = Loader()
    task = task_of(train=shared)
    trials = [Trial(config={"lr": 0.1}), Trial(config={"lr": 0.02}, epochs=2)]
    assert_same(
        together(th.pack.ConcatenatedBackend(task, device=here()), trials), alone(loader(), trials)
    )
    assert (shared.at, shared.number) == (0, 0)  # the stream itself is never read


def test_validation_does_not_advance_training():
    both = Loader()
    (found,) = alone(task_of(train=both, valid=both), [Trial(config={"lr": 0.1}, epochs=4)])
    (wanted,) = alone(loader(), [Trial(config={"lr": 0.1}, epochs=4)])
    curves = [[each["train_loss"] for each in one.metrics] for one in (found, wanted)]
    assert curves[0] == curves[1]


def test_an_epoch_that_is_begun_again_has_the_same_batches():
    trial = TaskTrial(loader(), CPU)
    trial.begin(Member(values={"lr": 0.1}, seed=0))
    stream = trial._stream
    first = x_of(stream.epoch(0, batch_size=SIZE, num=3))
    some = stream.epoch(1, batch_size=SIZE, num=3)
    next(some)
    second = x_of(stream.epoch(1, batch_size=SIZE, num=3))
    again = x_of(stream.epoch(1, batch_size=SIZE, num=3))
    assert second == again != first
    with pytest.raises(StateError, match="is at epoch 1, but the trial trains epoch 5"):
        stream.epoch(5, batch_size=SIZE, num=3)


def test_passes_go_on_across_epochs():
    source = open_source(th.StreamData(train=Loader(), valid=held_out), device=CPU)
    stream = source.trial_stream()
    found = [x_of(stream.epoch(epoch, batch_size=SIZE, num=3)) for epoch in range(4)]
    one_pass = [x_of([drawn("loader", n, at) for at in range(1, 6)]) for n in range(3)]
    assert list(chain(*found)) == list(chain(*one_pass))[:12]


# -- what a stream may be -----------------------------------------------------------------------


def batches_of(data, *, epoch=0, num_steps=3, seed=0):
    source = open_source(data, device=CPU)
    if source.is_stateful:
        stream = source.trial_stream()
        return list(stream.epoch(epoch, batch_size=SIZE, num=num_steps))
    return list(epoch_batches(source, seed=seed, epoch=epoch, batch_size=SIZE, num_steps=num_steps))


def test_samples_are_collated_and_the_last_batch_of_a_pass_is_smaller():
    sizes = [len(x) for x, _ in batches_of(th.StreamData(train=Numbers(), valid=held_out))]
    assert sizes == [4, 4, 2]


def test_a_function_may_know_the_size_of_a_batch():
    def train(seed, epoch, batch_size):
        return itertools.repeat(torch.zeros(batch_size))

    data = th.StreamData(train=train, valid=held_out)
    assert [len(batch) for batch in batches_of(data)] == [SIZE] * 3


def test_data_sets_with_items_are_shuffled_as_ever():
    rows = [(torch.tensor([float(n)]), n) for n in range(20)]
    streams = batches_of(th.StreamData(train=rows, valid=rows), epoch=2)
    usual = batches_of(th.StreamData(train=rows, valid=held_out), epoch=2)
    source = open_source(th.DatasetPair(train=rows, valid=rows), device=CPU)
    wanted = epoch_batches(source, seed=0, epoch=2, batch_size=SIZE, num_steps=3)
    assert x_of(streams) == x_of(usual) == x_of(wanted)


def test_a_length_stands_in_for_steps_per_epoch():
    def listed(seed, epoch):
        return [drawn(seed, epoch, step) for step in range(7)]

    for train, length in ((Loader(), 5), (listed, 7), ([(torch.zeros(1), 0)] * 9, 3)):
        source = open_source(th.StreamData(train=train, valid=held_out), device=CPU)
        assert epoch_length(source, seed=0, batch_size=SIZE, num_steps=None) == length


@pytest.mark.parametrize("train", [staticmethod(endless), Numbers()])
def test_a_stream_without_a_length_needs_one(train):
    task = task_of(train=train, steps_per_epoch=None)
    with pytest.raises(TaskError, match="says no length, so an epoch has no end; set steps_per_"):
        inspect_task(task, {"lr": 0.1}, seed=0)


def test_validation_of_every_kind(tokens):
    rows = [(torch.tensor([float(n)]), n) for n in range(6)]
    kinds = {
        held_out: [4, 2],
        (lambda seed, epoch: [torch.zeros(3)]): [3],
        Loader(2): [4, 4],
        Numbers(6): [4, 2],
    }
    for valid, sizes in (*kinds.items(), (rows, [4, 2]), (DataLoader(rows, batch_size=5), [5, 1])):
        source = open_source(th.StreamData(train=endless, valid=valid), device=CPU)
        for _ in range(2):
            assert [num for _, num in source.valid_batches(batch_size=SIZE)] == sizes


# -- streams that cannot be trusted ----------------------------------------------------------


def refused(task, error, match):
    for use in (
        lambda: inspect_task(task, {"lr": 0.1}, seed=0),
        lambda: TaskTrial(task, CPU).begin(Member(values={"lr": 0.1}, seed=0)),
    ):
        with pytest.raises(error, match=match):
            use()


class Stateless(IterableDataset):
    def __iter__(self):
        yield from range(10)


@pytest.mark.parametrize(
    ("train", "match"),
    [
        (Stateless(), r"Stateless objects cannot be resumed, because they have no state_dict"),
        (iter([1]), "can be read only once, so a trial could not be resumed"),
        (DataLoader([1, 2]), r"Return thrifty\.DatasetPair"),
        (3, "int objects cannot be resumed"),
        (lambda seed: [seed], "it takes 1 arguments; it is called with seed and epoch"),
    ],
)
def test_a_training_stream_that_cannot_resume(train, match):
    with pytest.raises(TaskError, match=match):
        th.StreamData(train=train, valid=held_out)


@pytest.mark.parametrize(
    ("valid", "match"),
    [
        (iter([1]), "cannot be read after each epoch"),
        (None, "NoneType objects cannot be read"),
        (lambda seed: [seed], "it takes 1 arguments; it takes none, or seed and epoch"),
    ],
)
def test_a_validation_stream_that_cannot_be_read_again(valid, match):
    with pytest.raises(TaskError, match=match):
        th.StreamData(train=endless, valid=valid)


@pytest.mark.parametrize("prefetch", [-1, 1.5, True])
def test_a_prefetch_that_is_no_number(prefetch):
    with pytest.raises(TaskError, match="it must be a whole number, 0 or more"):
        th.StreamData(train=endless, valid=held_out, prefetch=prefetch)


def test_a_loader_prefetches_itself():
    with pytest.raises(TaskError, match="a Loader reads its batches itself; leave prefetch out"):
        th.StreamData(train=Loader(), valid=held_out, prefetch=2)


def test_a_function_that_keeps_a_hidden_count():
    count = itertools.count()

    def train(seed, epoch):
        while True:
            yield drawn(next(count))

    refused(task_of(train=staticmethod(train)), StateError, "gives other batches when it is called")


GENERATOR = np.random.default_rng(0)


def test_a_function_that_draws_from_a_generator_of_the_module():
    def train(seed, epoch):
        while True:
            yield torch.tensor(GENERATOR.random((SIZE, 3)))

    refused(
        task_of(train=staticmethod(train)), StateError, "reading the data of Own changes .GENERATOR"
    )


def test_a_function_may_draw_from_the_global_stream_which_is_seeded_for_each_batch():
    def train(seed, epoch):
        while True:
            x = torch.randn(SIZE, 3)
            yield x, x.sum(1, keepdim=True)

    task = task_of(train=staticmethod(train))
    whole, first, rest = pieces(task)
    (found,) = alone(task, [rest])
    assert first.metrics + found.metrics == whole.metrics
    trials = [Trial(config={"lr": 0.1}), Trial(config={"lr": 0.1}, seed=1)]
    assert_same(
        together(FusedBackend(task, device=here()), trials), alone(task, trials), tolerance=1e-5
    )
    ahead = task_of(train=staticmethod(train), options={"prefetch": 2})
    (drawing,) = alone(ahead, [Trial(config={"lr": 0.1})])
    assert "draws from a global random stream" in str(drawing.error)


def test_a_function_that_ignores_the_epoch_is_said(caplog):
    def train(seed, epoch):
        return itertools.repeat(drawn(seed))

    with caplog.at_level(logging.WARNING):
        inspect_task(task_of(train=staticmethod(train)), {"lr": 0.1}, seed=0)
    assert "epochs 1 and 2 begin with the same batches" in caplog.text


def test_a_stream_that_ends_within_an_epoch():
    def train(seed, epoch):
        return [drawn(seed, epoch, step) for step in range(2)]

    for options in ({}, {"prefetch": 2}):
        task = task_of(train=staticmethod(train), options=options)
        (found,) = alone(task, [Trial(config={"lr": 0.1})])
        assert "ended after 2 batches of epoch 1, and an epoch has 3 steps" in str(found.error)
        packed = together(
            FusedBackend(task, device=here()), [Trial(config={"lr": lr}) for lr in (0.1, 0.2)]
        )
        assert all("ended after 2 batches" in str(each.error) for each in packed)


def test_a_stream_with_no_batches():
    refused(task_of(train=staticmethod(lambda seed, epoch: [])), TaskError, "ended after 0 batches")
    refused(
        task_of(OwnStream, kind=staticmethod(lambda: Loader(0))),
        TaskError,
        "a pass over the stream has no",
    )
    with pytest.raises(TaskError, match=r"validation stream .* has no batches"):
        list(
            open_source(th.StreamData(train=endless, valid=list), device=CPU).valid_batches(
                batch_size=2
            )
        )


def test_a_function_that_returns_no_iterable():
    task = task_of(train=staticmethod(lambda seed, epoch: torch.zeros(3)))
    refused(task, TaskError, "it returned Tensor; return an iterable of batches")


class Forgetful(Loader):
    """Its state leaves out where it is."""

    def load_state_dict(self, state):
        self.at = 0


class Opaque(Loader):
    def state_dict(self):
        return {"at": object()}


class Uncopied(Loader):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (Forgetful, StateError, "goes on differently when it is restored from its state_dict"),
        (Opaque, TaskError, "stored without pickle"),
        (Uncopied, TaskError, "the Uncopied cannot be copied"),
    ],
)
def test_a_state_that_is_not_all(kind, error, match):
    refused(task_of(OwnStream, kind=kind), error, match)


def test_copies_that_share_what_they_count():
    counts = itertools.count()

    class Shared(Loader):
        def __iter__(self):
            for _ in range(self.num):
                self.at += 1
                yield drawn(next(counts))
            self.at = 0

    refused(task_of(OwnStream, kind=Shared), StateError, "begins differently each time")


def test_validation_that_changes_is_found():
    count = itertools.count()

    def valid():
        yield drawn("fixed")
        yield drawn(next(count))

    (found,) = alone(task_of(valid=staticmethod(valid)), [Trial(config={"lr": 0.1})])
    assert "gave other batches than before (batch 2 differs)" in str(found.error)


def test_validation_that_gets_shorter_is_found():
    sizes = iter([3, 2])

    def valid():
        return [torch.zeros(2)] * next(sizes)

    source = open_source(th.StreamData(train=endless, valid=valid), device=CPU)
    list(source.valid_batches(batch_size=1))
    with pytest.raises(StateError, match="3 batches were 2"):
        list(source.valid_batches(batch_size=1))


def test_validation_without_rows():
    source = open_source(th.StreamData(train=endless, valid=lambda: [3]), device=CPU)
    with pytest.raises(TaskError, match="gives batches of type int, which have no rows"):
        list(source.valid_batches(batch_size=1))


def test_a_checkpoint_of_data_that_were_no_stream():
    (first,) = alone(function(), [Trial(config={"lr": 0.1}, epochs=1)])
    trial = TaskTrial(loader(), CPU)
    with pytest.raises(StateError, match="holds no position of its stream"):
        trial.begin(Member(values={"lr": 0.1}, seed=0, epoch=1, state=first.state))


# -- threads ----------------------------------------------------------------------------------


def prefetching():
    return [t for t in threading.enumerate() if t.name.startswith("thrifty-batches")]


def test_no_thread_is_left_when_an_epoch_is_dropped():
    source = open_source(th.StreamData(train=endless, valid=held_out, prefetch=2), device=CPU)
    batches = epoch_batches(source, seed=0, epoch=0, batch_size=SIZE, num_steps=100)
    next(batches), next(batches)
    (thread,) = prefetching()
    del batches
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_batches_are_prepared_in_advance_and_errors_come_in_their_turn():
    made = []

    def train(seed, epoch):
        for step in range(100):
            if step == 4:
                raise RuntimeError("no more")
            made.append(step)
            yield torch.tensor([step])

    source = open_source(th.StreamData(train=train, valid=held_out, prefetch=3), device=CPU)
    batches = epoch_batches(source, seed=0, epoch=0, batch_size=1, num_steps=100)
    assert [int(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)
    assert made == [0, 1, 2, 3]


# -- workers of loaders -----------------------------------------------------------------------


class Queue:
    """A queue to a worker; as those of ``multiprocessing``, it is closed by a weak reference."""

    def __init__(self, log):
        weakref.finalize(self, log.append, "closed")


class Batches:
    """The iterator of a loader with a worker, as torch's: it tells the worker to end."""

    def __init__(self, log):
        self.log, self.queue = log, Queue(log)

    def __iter__(self):
        return self

    def __next__(self):
        return drawn("batches")

    def __del__(self):
        self.log.append("told")


class WithWorker(Loader):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __iter__(self):
        return Batches(self.log)

    def __deepcopy__(self, memo):
        return WithWorker(self.log)


@pytest.mark.parametrize("is_epoch_over", [False, True])
def test_a_worker_is_told_to_end_before_its_queue_is_closed(is_epoch_over):
    log = []
    source = open_source(th.StreamData(train=WithWorker(log), valid=held_out), device=CPU)
    stream = source.trial_stream()
    stream.batches = stream.epoch(0, batch_size=SIZE, num=3)
    stream.itself = stream  # a reference cycle
    for _ in range(4 if is_epoch_over else 1):
        next(stream.batches, None)
    del stream
    gc.collect()
    assert log == ["told", "closed"]  # in the other order, torch waits 5 s for each worker


def test_a_probe_leaves_its_trial_in_no_reference_cycle():
    task = OwnStream()
    trial = TaskTrial(task, CPU)
    trial.begin(Member(values={"lr": 0.1}, seed=0, epoch=0, state=None))
    dropped = weakref.ref(trial)
    gc.collect()
    gc.disable()
    try:
        probe(trial, EpochPlan(epoch=0, values={"lr": 0.1}), trains=False)
        del trial
        assert dropped() is None
    finally:
        gc.enable()


# -- token files --------------------------------------------------------------------------------


def test_blocks_are_a_function_of_seed_and_step(tokens):
    data = th.StreamData(train=tokens, valid=tokens)
    three = [batches_of(data, epoch=epoch, num_steps=3) for epoch in range(4)]
    four = [batches_of(data, epoch=epoch, num_steps=4) for epoch in range(3)]
    assert x_of(chain(*three)) == x_of(chain(*four))
    x, y = tokens.batch(seed=0, step=5, batch_size=SIZE)
    assert torch.equal(three[1][2][0], x)
    assert torch.equal(y[:, :-1], x[:, 1:])
    assert x.dtype == torch.int64
    assert not torch.equal(x, tokens.batch(seed=1, step=5, batch_size=SIZE)[0])
    assert data.tokens_per_sample == data.source(CPU).tokens_per_sample == 3


def test_every_block_can_be_drawn(tmp_path):
    path = tmp_path / "few.bin"
    np.arange(5, dtype=np.uint8).tofile(path)
    file = th.TokenFile(path, block_size=3, dtype="uint8")
    starts = {int(file.batch(seed=0, step=s, batch_size=1)[0][0, 0]) for s in range(40)}
    assert starts == {0, 1}
    assert [x.tolist() for x, _ in file.valid_batches(8)] == [[[0, 1, 2]]]


def test_validation_reads_blocks_in_order(tokens):
    x = torch.cat([x for x, _ in tokens.valid_batches(7)])
    assert x.reshape(-1).tolist() == [n % 97 for n in range(166 * 3)]
    few = th.TokenFile(tokens.path, block_size=3, num_valid=4)
    (some,) = few.valid_batches(10)
    assert [int(row[0]) for row in some[0]] == [n * 166 // 4 * 3 % 97 for n in range(4)]


@pytest.mark.parametrize(
    ("num_bytes", "options", "match"),
    [
        (7, {}, "its 7 bytes are no whole number of tokens of 2 bytes"),
        (6, {}, "it has 3 tokens, and a sample needs 4"),
        (80, {"num_valid": 14}, "it has 13 blocks of 3 tokens; give at most 13"),
        (80, {"dtype": "float32"}, "tokens are integers"),
        (80, {"dtype": "no type"}, "tokens are integers"),
        (80, {"block_size": 0}, "block_size must be a whole number, 1 or more"),
        (None, {}, "there is no such file"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, num_bytes, options, match):
    path = tmp_path / "bad.bin"
    if num_bytes is not None:
        path.write_bytes(bytes(num_bytes))
    with pytest.raises(TaskError, match=match):
        th.TokenFile(path, **{"block_size": 3, **options})


def test_a_file_that_changes_is_another_task(tokens, tmp_path):
    before = from_file(tokens).identity()
    same = th.TokenFile(tokens.path, block_size=3)
    assert from_file(same).identity() == before
    assert from_file(th.TokenFile(tokens.path, block_size=4)).identity() != before
    (first,) = alone(from_file(tokens), [Trial(config={"lr": 0.1}, epochs=1)])
    np.arange(500, dtype=np.uint16).tofile(tokens.path)
    with pytest.raises(TaskError, match="has changed since the task was made"):
        from_file(tokens).identity()
    changed = from_file(th.TokenFile(tokens.path, block_size=3))
    assert changed.identity() != before
    with pytest.raises(StateError, match="a token file of Own has changed since the checkpoint"):
        TaskTrial(changed, CPU).begin(
            Member(values={"lr": 0.1}, seed=0, epoch=1, state=first.state)
        )


def test_a_file_that_the_identity_does_not_see(tmp_path):
    path = tmp_path / "own.bin"
    np.arange(50, dtype=np.uint16).tofile(path)

    class Hidden(Floats):
        def data(self, hp):
            file = th.TokenFile(path, block_size=3)
            return th.StreamData(train=file, valid=file)

    with pytest.raises(TaskError, match="make it an attribute of the task, on the class or in"):
        inspect_task(Hidden(), {"lr": 0.1}, seed=0)
    assert inspect_task(task_of(Hidden, version="1"), {"lr": 0.1}, seed=0).metrics


def test_large_files_are_digested_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.pack.task._data_contents.WHOLE_BYTES", 10)
    monkeypatch.setattr("thrifty.pack.task._data_contents.CHUNK_BYTES", 8)
    digests = set()
    for place in (None, 0, -1):
        path = tmp_path / f"{place}.bin"
        tokens = np.zeros(5000, dtype=np.uint16)
        if place is not None:
            tokens[place] = 1
        tokens.tofile(path)
        digests.add(th.TokenFile(path, block_size=3).digest)
    assert len(digests) == 3
