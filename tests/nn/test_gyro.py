import math

import pytest
import torch

from thrifty.core import LayerError
from thrifty.nn import BlockGyroDropout, GyroDropout, GyroSchedule


pytestmark = pytest.mark.slow


WHEN = {"subnetworks": 8, "concurrent": 4, "total_steps": 20}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (6, 2, 2), (6, 2, 2, 2)])
def test_each_part_of_a_batch_has_its_mask(batch, shape):
    layer = GyroDropout(0.25, num_features=6, **WHEN)
    x = torch.rand(batch, *shape) + 1
    out = layer(x)
    dim = 1 if len(shape) > 2 else len(shape)
    active = layer.schedule.active()
    for sample in range(batch):
        mask = layer.masks[active[sample * 4 // batch]].float() / 0.75
        view = [1] * len(shape)
        view[dim - 1] = 6
        torch.testing.assert_close(out[sample], x[sample] * mask.view(view))


def test_a_dimension_of_ones_own():
    layer = GyroDropout(0.5, num_features=6, dim=1, **WHEN)
    out = layer(torch.ones(4, 6, 3))
    assert torch.equal(out[..., 0], out[..., 2])
    assert GyroDropout(0.5, num_features=5, dim=-1, **WHEN)(torch.ones(4, 3, 2, 5)).shape[-1] == 5


def test_many_subnetworks_each_for_one_sample_are_dropout():
    """With sigma at infinity and tau equal to the batch, masks are independent and Bernoulli."""
    p, batch, units = 0.3, 64, 10
    layer = GyroDropout(
        p,
        num_features=units,
        subnetworks=64 * 400,
        concurrent=batch,
        total_steps=400,
        generator=seeded(),
    )
    kept = []
    for _ in range(400):
        kept.append(layer(torch.ones(batch, units)) > 0)
        layer.schedule.step()
    kept = torch.cat(kept).double()
    assert len(kept) == 64 * 400
    sigmas = 5 * math.sqrt(p * (1 - p) / len(kept))
    assert ((kept.mean(0) - (1 - p)).abs() < sigmas).all()
    # Both units and samples are independent of each other.
    correlations = torch.corrcoef(kept.T) - torch.eye(units)
    assert correlations.abs().max() < 5 / math.sqrt(len(kept))
    neighbours = torch.corrcoef(torch.stack([kept[:-1].flatten(), kept[1:].flatten()]))[0, 1]
    assert neighbours.abs() < 5 / math.sqrt(kept.numel())


def test_as_many_at_a_time_as_there_are_is_one_set_of_masks():
    layer = GyroDropout(0.5, num_features=16, subnetworks=4, concurrent=4, total_steps=10)
    wanted = sorted(layer.masks.double().mul(2).tolist())
    for _ in range(12):
        assert sorted(layer(torch.ones(4, 16).double()).tolist()) == wanted
        layer.schedule.step()


def test_one_at_a_time_is_one_mask_a_batch():
    layer = GyroDropout(0.5, num_features=16, subnetworks=4, concurrent=1, total_steps=10)
    assert len(layer(torch.ones(9, 16)).unique(dim=0)) == 1


def test_one_schedule_ties_layers():
    schedule = GyroSchedule(**WHEN)
    first = GyroDropout(0.5, num_features=5, schedule=schedule)
    second = BlockGyroDropout(0.5, num_features=6, group_size=2, schedule=schedule)
    assert first.schedule is second.schedule
    assert len(first.masks) == len(second.kept) == 8


def test_equal_generators_give_equal_layers():
    """Equal generators give equal layers, as on the ranks of data-parallel training."""
    one, two = (GyroDropout(0.5, num_features=9, generator=seeded(3), **WHEN) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one.buffers(), two.buffers(), strict=True))


def test_resumed_in_mid_period_goes_on_with_the_same_masks():
    def trained(layer, steps):
        outs = []
        for _ in range(steps):
            outs.append(layer(torch.ones(6, 9)))
            layer.schedule.step()
        return outs

    layer = GyroDropout(0.5, num_features=9, generator=seeded(0), **WHEN)
    trained(layer, 7)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    wanted = trained(layer, 30)
    resumed = GyroDropout(0.5, num_features=9, generator=seeded(1), **WHEN)
    resumed.load_state_dict(state)
    assert all(torch.equal(*pair) for pair in zip(trained(resumed, 30), wanted, strict=True))


@pytest.mark.parametrize(("p", "kept"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.6, 2), (0.7, 1)])
def test_blocks_keep_exactly_as_many(p, kept):
    layer = BlockGyroDropout(p, num_features=12, group_size=3, **WHEN)
    x = torch.rand(8, 12) + 1
    groups = (layer(x) / x).reshape(8, 4, 3)
    torch.testing.assert_close(groups, groups[:, :, :1].expand_as(groups))
    assert ((groups[..., 0] > 0).sum(1) == kept).all()
    torch.testing.assert_close(groups.mean((1, 2)), torch.ones(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GyroDropout(1.0, num_features=4, **WHEN), r"p=1.0; give a probability"),
        (lambda: GyroDropout(True, num_features=4, **WHEN), "p=True"),
        (lambda: GyroDropout("0.5", num_features=4, **WHEN), "p='0.5'"),
        (lambda: GyroDropout(num_features=0, **WHEN), "num_features=0"),
        (lambda: GyroDropout(num_features=4), "subnetworks, concurrent, total_steps missing"),
        (
            lambda: GyroDropout(num_features=4, concurrent=2, schedule=GyroSchedule(**WHEN)),
            "concurrent: the schedule given says that already",
        ),
        (lambda: GyroDropout(num_features=4, **WHEN, schedule="other"), "order='other'"),
        (
            lambda: BlockGyroDropout(num_features=10, group_size=4, **WHEN),
            "num_features=10 is no multiple of group_size=4",
        ),
        (lambda: BlockGyroDropout(num_features=4, group_size=0, **WHEN), "group_size=0"),
        (
            lambda: BlockGyroDropout(0.9, num_features=4, group_size=2, **WHEN),
            "p=0.9 keeps none of 2 groups",
        ),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(LayerError, match=message):
        make()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6,), r"x has shape \(6,\); give a batch"),
        ((2, 5), r"5 units in dimension 1, and the layer 6"),
        ((2, 6, 5), "dimension 2"),
        ((2, 5, 6, 6), "dimension 1"),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_bad_input(shape, message, mode):
    layer = GyroDropout(0.5, num_features=6, **WHEN).train(mode)
    with pytest.raises(LayerError, match=message):
        layer(torch.ones(shape))


@pytest.mark.parametrize("dim", [0, 2, -2, -3])
def test_a_dimension_that_is_not_there_or_counts_samples(dim):
    layer = GyroDropout(0.5, num_features=6, dim=dim, **WHEN)
    with pytest.raises(LayerError, match=rf"dim={dim}, and x has shape \(6, 6\)"):
        layer(torch.ones(6, 6))
