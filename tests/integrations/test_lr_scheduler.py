"""``thrifty.LRScheduler`` against torch's own schedulers and the study's timeline."""

import io
import logging

import pytest
import torch
from torch.optim import lr_scheduler as theirs

import thrifty as th
from thrifty.space import Timeline


def make_optimizer(*, lr=0.1, **options):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, **options)


def follow(schedulers, num_steps, *, option="lr"):
    """Return the option's value at each step while all schedulers are stepped together."""
    optimizer, out = schedulers[0].optimizer, []
    for _ in range(num_steps):
        out.append(optimizer.param_groups[0][option])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return out


def one_cycle(optimizer):
    return theirs.OneCycleLR(
        optimizer,
        max_lr=0.1,
        total_steps=12,
        pct_start=4 / 12,
        base_momentum=0.85,
        max_momentum=0.95,
    )


# OneCycleLR reaches its peak and its end one step before thrifty's, which ends after the last step:
# 11 epochs for 12 steps.
TORCH = [
    (th.Linear(0.1), 10, lambda o: theirs.LinearLR(o, 1.0, end_factor=0.0, total_iters=10)),
    (th.Cosine(0.1), 10, lambda o: theirs.CosineAnnealingLR(o, 10)),
    (th.OneCycle(0.1, warmup=3 / 11, final_div=25e4), 11, one_cycle),
    (th.Step(0.1, [3, 7]), 10, lambda o: theirs.MultiStepLR(o, [3, 7])),
    (th.Step(0.1, every=4, gamma=0.3), 10, lambda o: theirs.StepLR(o, 4, gamma=0.3)),
    (th.Exponential(0.1, gamma=0.9), 10, lambda o: theirs.ExponentialLR(o, 0.9)),
]


@pytest.mark.parametrize(("schedule", "epochs", "make"), TORCH, ids=lambda value: repr(value)[:24])
def test_equals_torch_step_for_step(schedule, epochs, make):
    ours = th.LRScheduler(schedule, make_optimizer(momentum=0.9), epochs=epochs)
    expected = follow([make(make_optimizer(momentum=0.9))], epochs + 1)
    assert follow([ours], epochs + 1) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("schedule", "epochs", "make"), TORCH, ids=lambda value: repr(value)[:24])
def test_equals_torch_after_a_break(schedule, epochs, make):
    expected = follow([make(make_optimizer(momentum=0.9))], epochs + 1)
    first = th.LRScheduler(schedule, make_optimizer(momentum=0.9), epochs=epochs)
    head = follow([first], 5)
    file = io.BytesIO()
    torch.save({"opt": first.optimizer.state_dict(), "sched": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = th.LRScheduler(schedule, make_optimizer(momentum=0.9), epochs=epochs)
    second.optimizer.load_state_dict(saved["opt"])
    second.load_state_dict(saved["sched"])
    assert second.get_last_lr() == first.get_last_lr()
    whole = head + follow([second], epochs + 1 - 5)
    assert whole == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_second_scheduler_follows_the_momentum_of_one_cycle():
    expected = follow([one_cycle(make_optimizer(momentum=0.9))], 12, option="momentum")
    optimizer = make_optimizer(momentum=0.9)
    # Momentum falls to 0.85 while the rate rises, and rises again while the rate falls.
    momentum = th.Cosine(0.95, floor=0.85, epochs=3).then(th.Cosine(0.85, floor=0.95), at=3)
    both = [
        th.LRScheduler(th.OneCycle(0.1, warmup=3 / 11), optimizer, epochs=11),
        th.LRScheduler(momentum, optimizer, epochs=11, name="momentum"),
    ]
    assert follow(both, 12, option="momentum") == pytest.approx(expected, rel=1e-12)
    assert both[1].get_last_lr() == [optimizer.param_groups[0]["momentum"]]
    assert both[0].get_last_lr() == [optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    "schedule",
    [
        th.REX(0.1, sample="epoch"),
        th.REX(0.1, sample=0.05),
        th.Cosine(0.1, sample=(0.5, 0.75)),
        th.Warmup(2, th.WSD(0.1, cooldown=2.5)),
        th.MultiStep([1, 0.5], milestones=[2.5]),
        th.Constant(0.1).then(th.Linear(0.1), at=3),
    ],
    ids=repr,
)
def test_equals_the_timeline_of_a_study(schedule):
    timeline = Timeline({"lr": schedule}, epochs=7)
    expected = []
    for epoch in range(7):
        values = timeline.values("lr", epoch, num_steps=4)
        expected += values if isinstance(values, list) else [values] * 4
    ours = th.LRScheduler(schedule, make_optimizer(), epochs=7, steps_per_epoch=4)
    assert follow([ours], 28) == expected


def test_rex_is_the_papers():
    ours = th.LRScheduler(th.REX(1.0), make_optimizer(), epochs=5)
    assert follow([ours], 6) == pytest.approx([1, 8 / 9, 3 / 4, 4 / 7, 1 / 3, 0], abs=1e-12)
    hundred = follow([th.LRScheduler(th.REX(1.0), make_optimizer(), epochs=100)], 100)
    moments = [hundred[50], hundred[75], hundred[90]]
    assert moments == pytest.approx([2 / 3, 2 / 5, 2 / 11], rel=1e-12)


def test_afterwards_the_last_value_stays_and_is_warned_of_once(caplog):
    ours = th.LRScheduler(th.Linear(1.0, floor=0.2), make_optimizer(), epochs=2)
    with caplog.at_level(logging.WARNING):
        assert follow([ours], 5) == pytest.approx([1.0, 0.6, 0.2, 0.2, 0.2])
    (record,) = caplog.records
    assert "the 2 steps of Linear(1.0, floor=0.2) are over" in record.getMessage()


def groups(*rates):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates], lr=1.0
    )


def test_plain_values_are_for_all_groups():
    optimizer = groups(0.1, 0.5)
    scheduler = th.LRScheduler(th.Linear(1.0), optimizer, epochs=2)
    follow([scheduler], 1)
    assert [g["lr"] for g in optimizer.param_groups] == scheduler.get_last_lr() == [0.5, 0.5]


def test_relative_values_are_factors_as_in_lambda_lr():
    rex = th.REX(1.0)
    ours, other = groups(0.1, 0.5), groups(0.1, 0.5)
    scheduler = th.LRScheduler(rex, ours, epochs=4, relative=True)
    factors = rex.values(0, 4, epochs=4)
    judge = theirs.LambdaLR(other, lambda step: factors[step])
    for _ in range(3):
        for optimizer, one in ((ours, scheduler), (other, judge)):
            optimizer.step()
            one.step()
        rates = [g["lr"] for g in ours.param_groups]
        assert rates == pytest.approx([g["lr"] for g in other.param_groups], rel=1e-12)


def test_groups_added_later_follow():
    optimizer = groups(0.1)
    scheduler = th.LRScheduler(th.Linear(1.0), optimizer, epochs=4, relative=True)
    follow([scheduler], 1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 2.0})
    follow([scheduler], 1)
    assert scheduler.get_last_lr() == pytest.approx([0.05, 1.0])
    assert [g["lr"] for g in optimizer.param_groups] == scheduler.get_last_lr()


@pytest.mark.parametrize("name", ["weight_decay", "betas[0]"])
def test_other_options_follow_and_the_rest_stays(name):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.3, betas=(0.9, 0.99))
    scheduler = th.LRScheduler(th.Linear(0.8), optimizer, epochs=4, name=name)
    follow([scheduler], 1)
    (group,) = optimizer.param_groups
    value = group["betas"][0] if name == "betas[0]" else group[name]
    assert value == pytest.approx(0.6)
    assert (group["lr"], group["betas"][1]) == (0.3, 0.99)


def test_tensors_stay_the_same_tensor():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=False)
    scheduler = th.LRScheduler(th.Linear(1.0), optimizer, epochs=4)
    follow([scheduler], 1)
    scheduler.load_state_dict(scheduler.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.75


def test_goes_on_by_hand():
    first = th.LRScheduler(th.REX(1.0), groups(0.1), epochs=8, relative=True)
    whole = follow([first], 8)
    half = th.LRScheduler(th.REX(1.0), groups(0.1), epochs=8, relative=True)
    follow([half], 4)
    fresh = groups(0.1)
    fresh.load_state_dict(half.optimizer.state_dict())
    second = th.LRScheduler(th.REX(1.0), fresh, epochs=8, relative=True, last_step=3)
    assert follow([second], 4) == whole[4:]


def test_within_sequential_lr():
    optimizer = make_optimizer()
    parts = [theirs.ConstantLR(optimizer, 0.5), th.LRScheduler(th.Linear(0.1), optimizer, epochs=4)]
    both = theirs.SequentialLR(optimizer, parts, milestones=[2])
    assert follow([both], 6)[2:] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_number_stays():
    assert follow([th.LRScheduler(0.25, make_optimizer(), epochs=3)], 3) == [0.25] * 3


def test_state_of_another_run_is_refused():
    optimizer = make_optimizer()
    saved = th.LRScheduler(th.REX(0.1), optimizer, epochs=5).state_dict()
    other = th.LRScheduler(th.Linear(0.1), optimizer, epochs=5)
    with pytest.raises(
        th.ScheduleError, match=r"schedule=REX\(0.1\), this scheduler schedule=Linear"
    ):
        other.load_state_dict(saved)
    longer = th.LRScheduler(th.REX(0.1), optimizer, epochs=6)
    with pytest.raises(th.ScheduleError, match="epochs=5, this scheduler epochs=6"):
        longer.load_state_dict(saved)
    with pytest.raises(th.ScheduleError, match="not the state of a thrifty"):
        other.load_state_dict(theirs.StepLR(optimizer, 1).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, r"epochs=0\): a whole number, at least 1"),
        ({"epochs": 3, "steps_per_epoch": 1.5}, "steps_per_epoch=1.5"),
        ({"epochs": 3, "name": "betas[x]"}, "one of several as in"),
        ({"epochs": 3, "name": "betas[0]"}, r"SGD has no option 'betas\[0\]'.* it has .*momentum"),
        ({"epochs": 3, "name": "lr[0]"}, r"no option 'lr\[0\]'"),
        ({"epochs": 3, "relative": True, "last_step": 4}, "has no 'initial_lr'"),
    ],
)
def test_what_cannot_work_is_said_at_once(options, message):
    with pytest.raises(th.ScheduleError, match=message):
        th.LRScheduler(th.REX(0.1), make_optimizer(), **options)


def test_a_schedule_must_fit_the_run():
    with pytest.raises(th.ScheduleError, match="needs at least 31 epochs"):
        th.LRScheduler(th.Step(0.1, [30]), make_optimizer(), epochs=10)
    with pytest.raises(th.ScheduleError, match="sample the space first"):
        th.LRScheduler(th.REX(th.Float(0.1, 1.0)), make_optimizer(), epochs=10)


def test_is_a_torch_scheduler_and_no_name_of_ours_shadows_torch():
    assert issubclass(th.LRScheduler, theirs.LRScheduler)
    assert th.LRScheduler is th.integrations.LRScheduler
    assert not hasattr(th, "torch")
