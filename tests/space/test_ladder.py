"""The space of a ladder: its trials, their horizons, and what it refuses."""

from __future__ import annotations

import pytest

import thrifty as th
from thrifty.core import ScheduleError, SpaceError, UsageError
from thrifty.space import EpochSize, Timeline, Trunk, common_prefix


pytestmark = pytest.mark.usefixtures("device")


def test_every_rate_shape_and_horizon_is_a_trial_that_ends_there():
    ladder = th.Ladder(horizons=[5, 8, 20], rates=[0.1, 0.2], shapes=["linear", "1-sqrt"])
    assert [
        (c["lr"].value, c["lr"].shape, ladder.horizon_of(c), c["lr"].cooldown)
        for c in ladder.grid()
    ] == [
        (rate, shape, end, length)
        for rate in (0.1, 0.2)
        for shape in ("linear", "1-sqrt")
        for end, length in ((5, 1.0), (8, 2.0), (20, 4.0))  # 6.4 is no whole epoch: 6
    ]
    assert ladder.trunk_epochs == 16


def test_a_cooldown_may_be_a_number_of_epochs():
    ladder = th.Ladder(horizons=[2, 6], rates=[0.1], cooldown=2, name="rate", width=4)
    assert [(c["rate"].cooldown, c["width"]) for c in ladder.grid()] == [(2.0, 4), (2.0, 4)]
    assert ladder.trunk_epochs == 4


def test_horizons_may_be_amounts_of_steps():
    given = th.Ladder(
        horizons=[th.steps(500), th.steps(1_000)],
        rates=[0.1],
        cooldown=th.steps(200),
        warmup=th.steps(50),
        averages="ema",
        width=4,
    )
    assert len(given.amounts()) == 4
    plain = th.Ladder(
        horizons=[5, 10], rates=[0.1], cooldown=2, warmup=0.5, averages="ema", width=4
    )
    found = given.in_epochs(EpochSize(steps=100))
    assert list(found.grid()) == list(plain.grid())
    assert not found.amounts()
    with pytest.raises(UsageError, match="Ladder: horizons"):
        given.in_epochs(EpochSize(steps=300))


def test_trunk_and_cooldowns_part_where_the_cooldown_starts():
    ladder = th.Ladder(horizons=[5, 10], rates=[0.1], warmup=2, averages=["ema", "swa"])
    lines = [Timeline(c, epochs=ladder.horizon_of(c)) for c in ladder.grid()]
    assert [c["lr"].average for c in ladder.grid() if isinstance(c["lr"], Trunk)] == ["ema", "swa"]
    assert [common_prefix(lines[1], line) for line in lines] == [4, 10, 5, 5]
    assert [line.epochs for line in lines] == [5, 10, 5, 5]


def test_branches_are_the_starts_of_cooldowns():
    branches = th.Ladder(horizons=[5, 10], rates=[0.1]).branches(max_epochs=10)
    held = [each for each in branches.intervals if hasattr(each.piece, "kind")]
    assert [(each.first, each.last) for each in held if each.piece.value] == [(4, 4), (8, 8)]


def test_a_plain_space_has_no_horizons():
    space = th.Space(lr=th.cooldowns(0.1, ends=[5, 10]))
    assert not space.has_horizons
    assert {space.horizon_of(config) for config in space.grid()} == {None}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"horizons": []}, SpaceError, "at least one horizon"),
        ({"horizons": [5, 5]}, SpaceError, "later than the one before"),
        ({"horizons": [2.5]}, SpaceError, "2.5 is no whole number"),
        ({"rates": []}, SpaceError, "at least one rate"),
        ({"rates": [0.1, "0.2"]}, SpaceError, "a rate must be above 0"),
        ({"cooldown": 0}, SpaceError, "a share of the horizon"),
        ({"cooldown": 1.5}, SpaceError, "a share of the horizon"),
        ({"cooldown": 6}, ScheduleError, "does not fit into the horizon of 5"),
        ({"warmup": 5}, ScheduleError, "do not fit"),
        ({"shapes": []}, SpaceError, "at least one shape"),
        ({"shapes": ["round"]}, SpaceError, "'round' is unknown"),
        ({"shapes": ["linear", "linear"]}, SpaceError, "name each once"),
        ({"averages": "mean"}, SpaceError, "'ema', 'swa'"),
        ({"lr": 0.1}, SpaceError, "follows the rates"),
    ],
)
def test_what_makes_no_ladder(options, kind, message):
    with pytest.raises(kind, match=message):
        th.Ladder(**{"horizons": [5, 10], "rates": [0.1], **options})


@pytest.mark.parametrize(
    ("extra", "message"),
    [({}, "last horizon of the ladder is 10"), ({"wd": th.Step(0.1, [7])}, "'wd'.*5")],
)
def test_schedules_fit_max_epochs_and_the_first_horizon(extra, message):
    ladder = th.Ladder(horizons=[5, 10], rates=[0.1], **extra)
    with pytest.raises(ScheduleError, match=message):
        ladder.check(max_epochs=9 if not extra else 10)
