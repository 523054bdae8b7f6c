import pytest
import torch
from torch import nn

from thrifty.nn import BlockGyroDropout, GyroDropout, GyroSchedule
from thrifty.testing.nn import DROPOUT_CHECKS


pytestmark = pytest.mark.slow


WHEN = {"subnetworks": 6, "concurrent": 3, "total_steps": 4}
LAYERS = {
    "gyro": lambda units: GyroDropout(0.4, num_features=units, **WHEN),
    "legacy": lambda units: GyroDropout(0.4, num_features=units, **WHEN, schedule="legacy"),
    "one step": lambda units: GyroDropout(0.4, num_features=units, **WHEN | {"total_steps": 1}),
    "one subnetwork": lambda units: GyroDropout(
        0.4, num_features=units, subnetworks=1, concurrent=1, total_steps=4
    ),
    "cycles": lambda units: GyroDropout(
        0.4, num_features=units, schedule=GyroSchedule(**WHEN, cycles=2)
    ),
    "blocks": lambda units: BlockGyroDropout(0.5, num_features=units, group_size=2, **WHEN),
    "nothing dropped": lambda units: GyroDropout(0.0, num_features=units, **WHEN),
    "torch": lambda units: nn.Dropout(0.4),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("check", DROPOUT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_conformance(check, make):
    check(make)


class Constant(nn.Module):
    def forward(self, x):
        return x * 0.5


class Elementwise(nn.Module):
    """A dropout that draws from its own stream, which no state holds."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5) * 2


class Unregistered(nn.Module):
    """A dropout whose mask is not a buffer and fits only batches of rows."""

    def __init__(self, units):
        super().__init__()
        self.mask = (torch.rand(units) > 0.5) * 2.0

    def forward(self, x):
        return x * self.mask if self.training else x


@pytest.mark.parametrize(
    ("make", "failing"),
    [
        (lambda units: Constant(), "check_evaluation check_expectation"),
        (lambda units: Elementwise(), "check_gradients check_checkpointed"),
    ],
)
def test_checks_can_fail(make, failing):
    named = {check.__name__: check for check in DROPOUT_CHECKS}
    for name in failing.split():
        with pytest.raises((AssertionError, RuntimeError)):
            named[name](make)
