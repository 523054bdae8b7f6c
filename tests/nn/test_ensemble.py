from functools import partial

import pytest
import torch
from torch import nn

from thrifty.core import LayerError
from thrifty.nn import GyroDropout, GyroMLP, GyroSchedule, SubnetworkEnsemble, subnetwork


def mlp(p=0.5, subnetworks=6):
    schedule = GyroSchedule(subnetworks=subnetworks, concurrent=2, total_steps=10)
    return GyroMLP(3, [8, 8], 2, p=p, group_size=2, schedule=schedule)


@pytest.mark.parametrize("training", [True, False])
def test_one_subnetwork_is_the_model_with_its_masks(training):
    model = mlp().train(training)
    x = torch.randn(5, 3)
    with subnetwork(model, 4):
        out = model(x)
    h = x
    for linear, drop in ((model[0], model[2]), (model[3], model[5])):
        mask = torch.zeros(4).index_fill(0, drop.kept[4], 2.0).repeat_interleave(2)
        h = linear(h).relu() * mask
    torch.testing.assert_close(out, model[6](h))
    assert model[2].subnetwork is None


def test_an_ensemble_is_the_mean_of_its_subnetworks():
    model, x = mlp(), torch.randn(5, 3)
    for transform in (None, partial(torch.softmax, dim=-1)):
        ensemble = SubnetworkEnsemble(model, num=3, transform=transform).eval()
        outs = []
        for number in ensemble.chosen.tolist():
            with subnetwork(model, number):
                outs.append(model(x) if transform is None else transform(model(x)))
        torch.testing.assert_close(ensemble(x), torch.stack(outs).mean(0))


def test_nothing_dropped_is_the_model():
    model, x = mlp(p=0.0).eval(), torch.randn(5, 3)
    torch.testing.assert_close(SubnetworkEnsemble(model, num=6).eval()(x), model(x))


def test_chosen_without_replacement():
    assert sorted(SubnetworkEnsemble(mlp(), num=6).chosen.tolist()) == list(range(6))


def test_an_error_leaves_the_model_as_it_was():
    model = mlp()
    with pytest.raises(RuntimeError), subnetwork(model, 0):
        model(torch.ones(5, 4))
    assert model[2].subnetwork is None


def two_schedules():
    options = {"num_features": 3, "subnetworks": 4, "concurrent": 2, "total_steps": 9}
    return nn.Sequential(GyroDropout(**options), GyroDropout(**options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SubnetworkEnsemble(nn.Linear(2, 2), num=1), "Linear has no gyro dropout"),
        (lambda: SubnetworkEnsemble(two_schedules(), num=1), "several schedules"),
        (lambda: SubnetworkEnsemble(mlp(), num=7), "num=7, and the model has 6 subnetworks"),
        (lambda: SubnetworkEnsemble(mlp(), num=0), "num=0"),
        (lambda: subnetwork(mlp(), 6).__enter__(), "subnetwork 6 does not exist: there are 6"),
        (lambda: subnetwork(mlp(), -1).__enter__(), "subnetwork -1 does not exist"),
    ],
)
def test_an_invalid_ensemble_says_what_is_wrong(make, message):
    with pytest.raises(LayerError, match=message):
        make()
