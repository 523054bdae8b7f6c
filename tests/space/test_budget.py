"""Schedules for a budget: the right one is chosen, and only cooldowns are trained twice."""

import pytest

import thrifty as th
from tests.plan._drive import Driver
from thrifty.core import EpochDone
from thrifty.plan import SearchPlan
from thrifty.space import Timeline, common_prefix, last_value
from thrifty.testing import LineTask


ENDS = (20, 50, 100)
COOLDOWNS = (4, 10, 20)


def test_a_known_budget_ends_at_zero():
    assert th.schedule_for(0.1) == th.REX(0.1)
    assert th.schedule_for(0.1, shape="linear", epochs=9) == th.Linear(0.1, epochs=9)
    warm = th.schedule_for(0.1, warmup=2, epochs=10)
    assert warm == th.Warmup(2, th.REX(0.1, epochs=8))
    assert last_value(warm, epochs=10) == 0.0


def test_one_that_may_grow_is_shared_until_it_cools_down():
    short = th.schedule_for(0.1, extendable=True, epochs=50, warmup=3, cooldown=0.3)
    assert short == th.WSD(0.1, cooldown=15.0, warmup=3, epochs=50)
    longer = th.schedule_for(0.1, extendable=True, epochs=80, warmup=3, cooldown=0.3)
    a, b = (Timeline({"lr": s}, epochs=80) for s in (short, longer))
    assert common_prefix(a, b) == 35


def test_a_cooldown_begins_on_a_whole_epoch():
    (odd,) = th.cooldowns(1.0, ends=[7]).options
    assert (odd.cooldown, odd.epochs) == (2.0, 7)
    (tiny,) = th.cooldowns(1.0, ends=[1]).options
    assert tiny.cooldown == 1.0


def test_peaks_may_be_domains():
    space = th.Space(lr=th.schedule_for(th.Float(0.01, 0.1), warmup=1))
    space.check(max_epochs=5)
    many = th.Space(lr=th.cooldowns(th.Float(0.01, 0.1), ends=[4, 5]))
    many.check(max_epochs=5)


def test_cooldowns_share_warm_up_and_stable_phase():
    lines = [
        Timeline({"lr": schedule}, epochs=100)
        for schedule in th.cooldowns(0.1, ends=ENDS, warmup=5).options
    ]
    assert common_prefix(lines[0], lines[1]) == 16
    assert common_prefix(lines[0], lines[2]) == 16
    assert common_prefix(lines[1], lines[2]) == 40


def test_only_cooldowns_are_extra():
    plan = SearchPlan()
    for number, (schedule, end) in enumerate(
        zip(th.cooldowns(0.1, ends=ENDS).options, ENDS, strict=True)
    ):
        node = plan.insert(Timeline({"lr": schedule}, epochs=100))
        plan.request(number, node, end)
    driver = Driver(plan)
    driver.run()
    assert driver.trained.total() == 80 + sum(COOLDOWNS)
    assert set(driver.trained.values()) == {1}


def test_in_one_study_the_shorter_ones_idle_until_the_end():
    study = th.Study(
        LineTask(),
        th.Space(lr=th.cooldowns(0.1, ends=ENDS)),
        algorithm=th.GridSearch(max_epochs=100),
        metric="mse",
        mode="min",
        storage="sqlite://",
        name="one",
    )
    idle = sum(100 - end for end in ENDS)
    assert study.plan().unique_epochs == 80 + sum(COOLDOWNS) + idle


def test_a_study_for_each_end_trains_only_its_cooldown_again(tmp_path):
    trained = []
    for schedule, end in zip(th.cooldowns(0.1, ends=ENDS).options, ENDS, strict=True):
        study = th.Study(
            LineTask(),
            th.Space(lr=schedule),
            algorithm=th.GridSearch(max_epochs=end),
            metric="mse",
            mode="min",
            storage=f"sqlite:///{tmp_path}/thrifty.db",
            name=f"until {end}",
        )
        epochs = Epochs()
        study.run(progress=False, executor=th.Local(pack="solo", threads=1), observers=[epochs])
        trained.append(epochs.num)
    assert trained == [20, 50 - 16, 100 - 40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "d0.9"}, 'it is "rex" or "linear"'),
        ({"warmup": -1}, "at least 0 and fewer than the run has"),
        ({"warmup": 5, "epochs": 5}, "at least 0 and fewer than the run has"),
        ({"extendable": True}, "needs epochs: where the run ends for now"),
        ({"extendable": True, "epochs": 9, "cooldown": 0.0}, "a share of the run"),
        ({"extendable": True, "epochs": 10, "cooldown": 0.5, "warmup": 6}, "do not fit"),
    ],
)
def test_what_cannot_work(options, message):
    with pytest.raises(th.ScheduleError, match=message):
        th.schedule_for(0.1, **options)


@pytest.mark.parametrize("ends", [[], [5, 5], [9, 3]])
def test_ends_must_rise(ends):
    with pytest.raises(th.ScheduleError, match="each later than the one before"):
        th.cooldowns(0.1, ends=ends)


def test_where_a_schedule_arrives():
    assert last_value(th.OneCycle(1.0, final_div=100.0), epochs=4) == pytest.approx(0.01)
    assert last_value(th.MultiStep([(0.9, 0.99), (0.8, 0.9)], milestones=[2]), epochs=3) == (
        0.8,
        0.9,
    )
    assert last_value(th.REX(1.0, sample="epoch"), epochs=2) == pytest.approx(2 / 3)


class Epochs:
    """Observer that counts trained epochs and ignores other events."""

    def __init__(self):
        self.num = 0

    def on_event(self, event):
        self.num += isinstance(event, EpochDone)
