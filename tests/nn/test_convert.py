import pytest
import torch
from torch import nn

from thrifty.core import LayerError
from thrifty.nn import BlockGyroDropout, GyroDropout, gyro_


WHEN = {"subnetworks": 8, "concurrent": 4, "total_steps": 20}


def mlp():
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3)),
        nn.Linear(8, 2),
    )


def test_every_dropout_has_one_schedule():
    model = mlp()
    (schedule,) = gyro_(model, torch.ones(2, 4), **WHEN)
    one, two = model[1], model[2][1]
    assert type(one) is type(two) is GyroDropout
    assert (one.p, one.num_features, two.p, two.num_features) == (0.2, 6, 0.3, 8)
    assert one.schedule is two.schedule is schedule
    model(torch.ones(3, 4)).sum().backward()


def test_or_one_for_each_layer():
    model = mlp()
    schedules = gyro_(model, torch.ones(2, 4), shared=False, order="legacy", **WHEN)
    assert [model[1].schedule, model[2][1].schedule] == schedules
    assert not torch.equal(schedules[0].order, schedules[1].order)


def test_blocks_and_another_rate():
    model = mlp()
    gyro_(model, torch.ones(2, 4), p=0.5, group_size=2, **WHEN)
    assert type(model[1]) is BlockGyroDropout
    assert model[1].kept.shape == (8, round(0.5 * 3))


def test_channels():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Dropout2d(),
        nn.Conv2d(4, 6, 3),
        nn.Dropout(),
        nn.Flatten(),
        nn.Dropout(),
    )
    gyro_(model, torch.ones(1, 1, 6, 6), **WHEN)
    assert [model[i].num_features for i in (1, 3, 5)] == [4, 6, 24]
    model(torch.ones(5, 1, 6, 6))


def test_channels_of_a_sequence():
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Dropout1d())
    gyro_(model, torch.ones(2, 1, 9), **WHEN)
    out = model(torch.ones(4, 1, 9))
    assert ((out != 0).all(2) | (out == 0).all(2)).all()


def test_a_layer_in_two_places_stays_one():
    drop = nn.Dropout()
    model = nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop)
    gyro_(model, torch.ones(1, 4), **WHEN)
    assert model[1] is model[3]


def test_some_layers_only():
    model = mlp()
    gyro_(model, torch.ones(2, 4), where=lambda path, layer: path == "2.1", **WHEN)
    assert type(model[1]) is nn.Dropout
    assert type(model[2][1]) is GyroDropout


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4).eval())
    gyro_(model, torch.ones(8, 4), **WHEN)
    assert [layer.training for layer in model] == [True, True, False]
    assert not int(model[0].num_batches_tracked)
    assert not any(layer._forward_pre_hooks for layer in model)


def test_seeds():
    masks = []
    for _ in range(2):
        model = mlp()
        gyro_(model, torch.ones(1, 4), generator=torch.Generator().manual_seed(4), **WHEN)
        masks.append(model[1].masks)
    assert torch.equal(*masks)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.never = nn.Dropout()

    def forward(self, x):
        return x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(x).sum() + self.drop(x[:, :2]).sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4), "Linear has no dropout layer inside to replace"),
        (nn.Dropout(), "Dropout has no dropout layer inside"),
        (Unused(), "the inputs never reach the dropout layer 'never'"),
        (Twice(), "a dropout layer is used for 4 units and for 2"),
    ],
)
def test_what_cannot_be_turned(model, message):
    with pytest.raises(LayerError, match=message):
        gyro_(model, torch.ones(2, 4), **WHEN)
