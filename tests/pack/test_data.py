"""Data sets read through a loader: batches keep their types, and each option has its own effect."""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from thrifty.core import TaskError
from thrifty.pack import ArrayData, DatasetPair, open_source
from thrifty.pack.task._data import steps_of, to_device
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space, Step
from thrifty.study import Study
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Rows(Dataset):
    def __init__(self, num, make=Pair):
        self.x = torch.linspace(-1, 1, num)[:, None]
        self.make = make

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.make(self.x[index], 2 * self.x[index])


def source(train=10, valid=10, make=Pair, **options):
    return open_source(
        DatasetPair(train=Rows(train, make), valid=Rows(valid, make), **options), device=CPU
    )


def train_batches(source, size=4):
    return list(source.train_batches(seed=0, epoch=0, batch_size=size))


# -- batches keep their types --------------------------------------------------------------


def test_named_tuples_stay_named_tuples():
    batch = train_batches(source())[0]
    assert isinstance(batch, Pair)
    assert torch.equal(batch.y, 2 * batch.x)
    (valid, num), *_ = source().valid_batches(batch_size=4)
    assert (type(valid), num) == (Pair, 4)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    about: dict = dataclasses.field(default_factory=dict)


def collate(rows):
    return Frozen(*(torch.stack(each) for each in zip(*rows, strict=True)), {"num": len(rows)})


def test_dataclasses_stay_dataclasses():
    batch = train_batches(source(collate_fn=collate))[0]
    assert isinstance(batch, Frozen)
    assert (len(batch.x), batch.about) == (4, {"num": 4})


def test_nested_containers_keep_their_types():
    x = torch.zeros(2)
    batch = {
        "list": [x, (x, [x])],
        "pair": Pair(x, x),
        "ordered": collections.OrderedDict(a=x, b=[x]),
        "default": collections.defaultdict(list, a=x),
        "text": "plain",
        "nothing": None,
    }
    moved = to_device(batch, torch.device("meta"))

    def shape(value):
        if isinstance(value, dict):
            return type(value), {k: shape(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [shape(v) for v in value]
        return type(value)

    assert shape(moved) == shape(batch)
    assert moved["ordered"]["b"][0].device.type == "meta"
    assert moved["default"].default_factory is list
    assert batch["list"][0].device.type == "cpu", "the batch itself is left alone"


def test_what_knows_how_to_move_moves_itself():
    sequence = pack_sequence([torch.zeros(3), torch.zeros(2)])
    moved = to_device([sequence], torch.device("meta"))[0]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


# -- options of the loader -----------------------------------------------------------------


def test_drop_last_is_for_training_only():
    some = source(drop_last=True)
    assert [len(batch.x) for batch in train_batches(some)] == [4, 4]
    assert steps_of(some, 4) == 2
    assert [num for _, num in some.valid_batches(batch_size=4)] == [4, 4, 2]
    assert steps_of(source(), 4) == len(train_batches(source())) == 3
    assert steps_of(source(drop_last=False), 4) == 3


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_with_fewer_rows_than_an_evaluation_batch_are_compared(drop_last, tmp_path):
    """Loaded data are compared with those of another load, by a batch of each."""

    class Few(LineTask):
        def data(self, hp):
            x = torch.linspace(-1, 1, 70)[:, None]
            rows = TensorDataset(x, 2 * x)
            return DatasetPair(train=rows, valid=rows, drop_last=drop_last)

    study = Study(
        Few(),
        Space(lr=Choice([0.1, Step(0.1, [2])])),
        algorithm=GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="few",
    )
    study.run(progress=False, executor=Local(threads=1))
    assert [trial.state for trial in study.trials] == ["done", "done"]


def test_a_batch_larger_than_the_data_leaves_nothing():
    assert steps_of(source(drop_last=True), 10) == 1
    with pytest.raises(TaskError, match=r"batch_size is 11, but there are 10 training samples"):
        steps_of(source(drop_last=True), 11)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"shuffle": True},
        {"shuffle": False},
        {"sampler": [0, 1]},
        {"batch_sampler": [[0]]},
        {"generator": torch.Generator()},
        {"dataset": None},
    ],
)
def test_options_that_are_not_the_users_are_refused(options):
    (name,) = options
    with pytest.raises(TaskError, match=rf"DatasetPair\({name}=.*thrifty sets {name} itself"):
        source(**options)


def test_an_option_that_a_loader_does_not_have_is_refused():
    with pytest.raises(TaskError, match=r"num_worker=...\): .* no such option; .*num_workers"):
        source(num_worker=2)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_drop_last_is_a_bool(value):
    with pytest.raises(TaskError, match="must be True or False"):
        source(drop_last=value)


class Line(LineTask):
    """A task with 20 training and 10 validation samples that counts its training steps."""

    batch_size = 8
    eval_batch_size = 4

    def data(self, hp):
        return DatasetPair(train=Rows(20), valid=Rows(10), drop_last=hp.drop_last)

    def metrics(self, model, batch):
        assert isinstance(batch, Pair)
        return {"mse": self.loss(model, batch), "x": batch.x.mean() + 0 * self.loss(model, batch)}


def study(algorithm, pack, **params):
    space = Space(lr=0.1, drop_last=Choice([True, False]), **params)
    made = Study(
        Line(), space, algorithm=algorithm, metric="mse", mode="min", storage="sqlite://", name="s"
    )
    made.run(progress=False, executor=Local(threads=1, pack=pack, pack_size=2))
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize("pack", ["solo", "concatenated", "fused"])
def test_named_tuples_and_dropped_batches_in_every_back_end(pack):
    dropped, whole = study(GridSearch(max_epochs=2), pack).trials
    assert (dropped.state, whole.state) == ("done", "done"), dropped.error
    assert dropped.curve != whole.curve
    alone = study(GridSearch(max_epochs=2), "solo").trials
    assert [t.value for t in (dropped, whole)] == pytest.approx([t.value for t in alone])


def test_batches_are_never_parts_of_the_data():
    """A forward pass that changes its input does not affect other trials and epochs."""
    rows = [torch.ones(2) for _ in range(4)]
    pair = DatasetPair(train=rows, valid=rows, collate_fn=lambda batch: batch[0])
    arrays = ArrayData(train=(torch.ones(2, 2),), valid=(torch.ones(2, 2),))
    for data in (pair, arrays):
        source = open_source(data, device=torch.device("cpu"))
        for _ in range(2):
            batches = [
                *source.train_batches(seed=0, epoch=0, batch_size=1),
                *(batch for batch, _ in source.valid_batches(batch_size=1)),
            ]
            tensors = [b if isinstance(b, torch.Tensor) else b[0] for b in batches]
            assert all(bool((t == 1).all()) for t in tensors)
            for tensor in tensors:
                tensor.zero_()


@pytest.mark.parametrize("rows", [["some", "texts"], [[1, 2], [3]]])
def test_arrays_that_are_no_numbers_of_one_shape_are_refused_with_what_to_do(rows):
    message = r"ArrayData\(train=.*takes arrays of numbers.*a DatasetPair with a collate_fn"
    with pytest.raises(TaskError, match=message):
        ArrayData(train=(rows,), valid=(torch.ones(2),))


@pytest.mark.parametrize(
    "dataset",
    [
        (torch.zeros(8, 2), torch.zeros(8, 2)),
        (torch.zeros(8, 2), torch.zeros(8)),
        [torch.zeros(8, 2), torch.zeros(8)],
        [torch.zeros(8, 1), torch.zeros(8, 1)],
        (np.zeros((8, 2)), np.zeros(8)),
    ],
    ids=["equal shapes", "tuple", "list", "list of equal shapes", "NumPy"],
)
@pytest.mark.parametrize("as_pair", [False, True])
def test_a_tuple_of_arrays_is_not_taken_for_samples(dataset, as_pair):
    data = DatasetPair(train=dataset, valid=dataset) if as_pair else (dataset, dataset)
    with pytest.raises(TaskError, match=r"of arrays .*return thrifty.ArrayData"):
        open_source(data, device=CPU)


def test_a_list_of_samples_is_a_dataset():
    source = open_source(([torch.zeros(2)] * 8, [torch.zeros(2)] * 4), device=CPU)
    assert (source.num_train, source.num_valid) == (8, 4)


def pad(samples):
    return torch.stack([sample.mean(0) for sample in samples])


LONG = [torch.full((1 + number % 3, 2), float(number)) for number in range(12)]


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        (LONG, LONG),
        (tuple(LONG), tuple(LONG)),
        (LONG, LONG[:1]),
        ([array.numpy() for array in LONG], LONG[:3]),
    ],
    ids=["list", "tuple", "one for validation", "NumPy"],
)
def test_arrays_of_several_lengths_are_samples_for_a_collate_fn(train, valid):
    train_len, valid_len = len(train), len(valid)

    def collate(samples):
        return pad([torch.as_tensor(sample) for sample in samples])

    source = open_source(DatasetPair(train=train, valid=valid, collate_fn=collate), device=CPU)
    assert (source.num_train, source.num_valid) == (train_len, valid_len)
    assert sum(map(len, train_batches(source))) == train_len


def test_a_few_validation_samples_are_samples_as_those_for_training_are():
    samples = [torch.zeros(2)] * 10
    assert open_source((samples, samples[:2]), device=CPU).num_valid == 2
    with pytest.raises(TaskError, match=r"list of arrays \(valid, shapes \(7,\), \(7,\)\)"):
        open_source((samples, [torch.zeros(7)] * 2), device=CPU)
    with pytest.raises(TaskError, match=r"list of arrays \(valid"):
        open_source((Rows(8), samples[:2]), device=CPU)


def test_arrays_of_several_shapes_need_a_collate_fn():
    with pytest.raises(TaskError, match=r"collate_fn for samples of several shapes"):
        open_source((LONG, LONG), device=CPU)


Split = collections.namedtuple("Split", "valid train")


def test_the_sets_of_a_named_tuple_are_found_by_name():
    source = open_source(Split(train=Rows(8), valid=Rows(3)), device=CPU)
    assert (source.num_train, source.num_valid) == (8, 3)
    with pytest.raises(TaskError, match=r"Pair\(x, y\), .* name them train and valid"):
        open_source(Pair(Rows(8), Rows(3)), device=CPU)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows(8))


class SizedStream(Stream):
    def __len__(self):
        return 8


class Unsized(Dataset):
    def __getitem__(self, index):
        return torch.zeros(1)


X = torch.zeros(32, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, X), "pair of Tensor and Tensor"),
        ((X.numpy(), X.numpy()), "pair of ndarray and ndarray"),
        ((X, X, X, X), "tuple of 4"),
        (([X, X, X, X], [X, X, X, X]), r"list of arrays \(train"),
        (([X[:, 0]] * 9, [X[:20, 0]] * 9), r"list of arrays \(train, shapes \(32,\)"),
        (({"x": X, "y": X}, {"x": X, "y": X}), r"dict \(train\), whose keys"),
        ({"train": X, "valid": X}, "returned dict; return"),
        (("train.csv", "valid.csv"), r"str \(train\), which is text"),
        ((Stream(), Stream()), r"Stream \(train\), which has no __len__"),
        ((SizedStream(), Rows(8)), "SizedStream, an IterableDataset"),
        ((Unsized(), Unsized()), r"Unsized \(train\), which has no __len__"),
        ((Rows(8), Unsized()), r"Unsized \(valid\), which has no __len__"),
        ((Rows(8), {X}), r"set \(valid\), which has no __getitem__"),
    ],
)
def test_what_is_no_pair_of_datasets_is_refused_before_training(data, message):
    class Wrong(LineTask):
        def data(self, hp):
            return data

    wrong = Study(
        Wrong(),
        Space(lr=Choice([0.1, 0.2])),
        algorithm=GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage="sqlite://",
        name="wrong",
    )
    with pytest.raises(TaskError, match=message) as caught:
        wrong.run(progress=False)
    assert "return thrifty." in str(caught.value)


def test_a_stream_with_a_length_is_a_validation_set():
    source = open_source((Rows(8), SizedStream()), device=CPU)
    assert [num for _, num in source.valid_batches(batch_size=5)] == [5, 3]


def test_a_loader_is_not_taken_for_a_dataset():
    loader = DataLoader(Rows(8), batch_size=2)
    with pytest.raises(TaskError, match=r"returned a DataLoader .*DatasetPair"):
        open_source((loader, loader), device=CPU)
