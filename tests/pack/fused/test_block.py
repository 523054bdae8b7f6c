"""Which trials a block accepts."""

from __future__ import annotations

import pytest

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Dropping
from thrifty.pack import BlockOptions, FusedBackend


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


class Sized(Dropping):
    batch_size = "size"  # type: ignore[assignment]


def sized(*sizes):
    return [Trial(config={"lr": 0.05, "size": size}, seed=size) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "max_padding", "num_blocks"),
    [
        ((8, 10), 1.25, 1),
        ((10, 8), 1.25, 1),
        ((8, 10), 1.2, 2),
        ((10, 8), 1.2, 2),
        ((8, 9, 10), 1.2, 2),
        ((8, 8), 1.0, 1),
    ],
)
def test_a_block_takes_no_batches_beyond_its_padding(sizes, max_padding, num_blocks):
    backend = FusedBackend(Sized(), device=here(), block=BlockOptions(max_padding=max_padding))
    for slot, trial in enumerate(sized(*sizes)):
        backend.put(slot, trial.member)
    assert len(set(backend.blocks.home.values())) == num_blocks


def test_a_block_takes_no_more_than_its_size():
    backend = FusedBackend(Sized(), device=here(), block=BlockOptions(size=2))
    for slot, trial in enumerate(sized(8, 8, 8)):
        backend.put(slot, trial.member)
    assert len(set(backend.blocks.home.values())) == 2


@pytest.mark.parametrize("max_padding", [1.0, 2.5])
def test_trials_are_what_they_are_alone_however_they_are_padded(max_padding):
    trials = sized(8, 10, 20)
    backend = FusedBackend(Sized(), device=here(), block=BlockOptions(max_padding=max_padding))
    assert_same(together(backend, trials), alone(Sized(), trials), tolerance=1e-5)
