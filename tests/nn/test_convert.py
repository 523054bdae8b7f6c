import copy
import pickle

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


def test_a_layer_has_as_many_features_as_its_input_has_channels():
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


def test_equal_seeds_make_equal_masks():
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


# --- layers that do more than dropout


class Always(nn.Dropout):
    """A dropout that also drops in evaluation."""

    def forward(self, x):
        return nn.functional.dropout(x, self.p, training=True)


class Named(nn.Dropout):
    """A dropout that differs by its name alone."""


def with_layer(layer):
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 6), layer, nn.Linear(6, 2))


def hooked(how):
    layer = nn.Dropout()
    getattr(layer, how)(lambda *args: None)
    return layer


def patched():
    layer = nn.Dropout()
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Always(), "'3' is a Always with a forward of its own"),
        (hooked("register_forward_hook"), "'3' has hooks"),
        (hooked("register_forward_pre_hook"), "'3' has hooks"),
        (hooked("register_full_backward_hook"), "'3' has hooks"),
        (patched(), "'3' has hooks or a forward of its own"),
    ],
)
def test_what_would_be_lost_is_refused(layer, message):
    model = with_layer(layer)
    before = list(model)
    with pytest.raises(LayerError, match=message):
        gyro_(model, torch.ones(2, 4), **WHEN)
    assert list(model) == before
    gyro_(model, torch.ones(2, 4), where=lambda path, _: path == "1", **WHEN)
    assert model[3] is layer


def test_a_subclass_without_a_forward_of_its_own_is_a_dropout():
    model = with_layer(Named(0.2))
    gyro_(model, torch.ones(2, 4), **WHEN)
    assert type(model[3]) is GyroDropout


class ByList(nn.Module):
    """A model that calls its dropout through a plain list."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Dropout(), nn.Dropout()
        self.steps = [nn.Linear(4, 4), self.drop]

    def forward(self, x):
        x = self.first(x)
        for step in self.steps:
            x = step(x)
        return x


def test_a_layer_that_is_called_by_another_way_is_refused():
    model = ByList()
    first, drop = model.first, model.drop
    with pytest.raises(LayerError, match="'drop' by something else than the attribute"):
        gyro_(model, torch.ones(2, 4), **WHEN)
    assert (model.first, model.drop) == (first, drop)


def test_a_layer_that_is_never_reached_leaves_the_others_as_they_were():
    model = nn.Sequential(nn.Dropout(), Unused())
    with pytest.raises(LayerError, match=r"'1\.never'"):
        gyro_(model, torch.ones(2, 4), **WHEN)
    assert type(model[0]) is nn.Dropout


def test_a_shared_layer_may_be_replaced_in_one_place():
    drop = nn.Dropout()
    model = nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop)
    gyro_(model, torch.ones(2, 4), where=lambda path, _: path == "1", **WHEN)
    assert type(model[1]) is GyroDropout
    assert model[3] is drop


class Often(nn.Module):
    """A model that calls one dropout several times, for rows and for sequences."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout()

    def forward(self, x):
        x = self.drop(self.inner(x))
        return self.drop(self.inner(x[:, None]))[:, 0] + self.drop(x)


def test_a_layer_may_be_called_several_times():
    model = Often()
    gyro_(model, torch.ones(2, 4), **WHEN)
    out = model(torch.ones(4, 4))
    assert out.shape == (4, 4)
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(4, 4)), out)  # each sample has one mask, at every call


def test_dropout_in_place_stays_in_place():
    """A converted in-place dropout still works in place, since a model may rely on it."""

    class Relying(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=True)

        def forward(self, x):
            x = x * 1
            self.drop(x)
            return x

    model = Relying()
    gyro_(model, torch.ones(2, 64), **WHEN)
    x = torch.ones(4, 64, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, out.detach())


def test_nothing_else_of_the_model_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.drop(x + torch.rand(()))

    model = Counting().eval()
    stream = torch.get_rng_state()
    gyro_(model, torch.ones(2, 4), generator=torch.Generator().manual_seed(0), **WHEN)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), stream)
    assert not model.drop.training


# --- copies


def converted(seed=0, **options):
    model = mlp()
    generator = torch.Generator().manual_seed(seed)
    (schedule,) = gyro_(model, torch.ones(2, 4), generator=generator, **WHEN, **options)
    return model, schedule


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_model_that_loads_the_state_of_another_goes_on_as_that_one(group_size):
    (one, schedule), (two, other) = (converted(seed, group_size=group_size) for seed in (0, 1))
    for _ in range(7):
        schedule.step()
    x = torch.ones(8, 4)
    assert not torch.equal(one(x), two(x))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x), two(x))
    assert int(other.position) == 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_one_schedule_of_its_own(copied):
    model, schedule = converted()
    schedule.step()
    other = copied(model)
    assert other[1].schedule is other[2][1].schedule is not schedule
    x = torch.ones(8, 4)
    assert torch.equal(model(x), other(x))
    for _ in range(10):
        schedule.step()
    assert int(other[1].schedule.position) == 1
    assert not torch.equal(model(x), other(x))


def test_evaluation_is_that_of_the_model_before():
    model = mlp()
    x = torch.randn(5, 4)
    before = model.eval()(x)
    gyro_(model, x, **WHEN)
    assert torch.equal(model(x), before)
    assert not torch.equal(model.train()(x), before)
