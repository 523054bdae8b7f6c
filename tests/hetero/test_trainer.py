"""What a trainer does beyond summing gradients: reports, limits, resuming, leaving workers out."""

from __future__ import annotations

import copy
import logging
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.hetero.memberships import ThreadCluster
from thrifty.core import DivergedError, HeteroError, PeerLostError, TooFewWorkersError
from thrifty.hetero import (
    BatchScaling,
    FixedMembership,
    HeteroOptions,
    HeteroTrainer,
    MembersChanged,
    Place,
    Power,
    PowerMeter,
    SampleOrder,
    StepCurve,
    WholeBatchNorm,
    WorkerView,
    balance,
)
from thrifty.hetero.workers._membership import from_bytes, to_bytes
from thrifty.testing import VirtualClock

from .jobs import SAMPLES, Worker, data, distance, loss, model, plain, sgd


pytestmark = pytest.mark.slow


LINE = StepCurve(sample_s=1.0)


def by_sample(size, step):
    return float(size)


def trainer_of(net, optimizer=None, members=None, **options):
    """Return a trainer with its own clock, on which a sample takes a second."""
    clock = options.setdefault("clock", VirtualClock())
    criterion = options.pop("loss", loss)

    def timed(net, batch):
        clock.advance(len(batch[0]))
        return criterion(net, batch)

    names = HeteroOptions.__dataclass_fields__.keys() & options.keys()
    hetero = HeteroOptions(**{"curve": LINE, **{name: options.pop(name) for name in names}})
    return HeteroTrainer(
        net,
        optimizer or sgd(net),
        data(),
        members=members,
        options=hetero,
        loss=timed,
        **{"global_batch": 16, "seed": 5, **options},
    )


def together(*workers, epochs=2):
    """Train the given workers, named a, b, ..., and return them."""
    team = dict(zip("abcd", workers, strict=False))
    done = ThreadCluster().run({name: worker.job(epochs) for name, worker in team.items()})
    return [done[name] for name in team]


# --- limits


@pytest.mark.parametrize("batch", [0, -3])
def test_a_step_has_samples(batch):
    with pytest.raises(HeteroError, match=f"`global_batch` must be at least 1, got {batch}"):
        trainer_of(model(), global_batch=batch)


def test_there_has_to_be_something_to_train():
    net = model()
    optimizer = sgd(net)
    with pytest.raises(HeteroError, match="no parameter of the model needs a gradient"):
        trainer_of(net.requires_grad_(False), optimizer)


def test_a_model_has_parameters():
    with pytest.raises(HeteroError, match="the model has no parameters"):
        trainer_of(nn.Tanh(), sgd(model()))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_training(value):
    net, states = model(), []

    def diverging(net, batch):
        states.append(copy.deepcopy(net.state_dict()))
        return loss(net, batch) * (float(value) if len(states) == 3 else 1.0)

    trainer = trainer_of(net, loss=diverging)
    with pytest.raises(DivergedError, match=f"the loss of step 3 is {value}.*learning rate"):
        list(trainer.run(epochs=1))
    assert trainer.steps == 2
    # The model is as before that step.
    assert all(map(torch.equal, net.state_dict().values(), states[-1].values()))


def test_all_workers_see_one_diverge():
    def job(factor):
        net = model()

        def run(members):
            trainer = trainer_of(
                net, members=members, loss=lambda net, batch: loss(net, batch) * factor
            )
            with pytest.raises(DivergedError, match="the loss of step 1 is nan"):
                list(trainer.run(epochs=1))

        return run

    ThreadCluster().run({"a": job(1.0), "b": job(float("nan"))})


class Lonely(FixedMembership):
    """A membership of two workers where the other one is lost from the third sum on."""

    def __init__(self):
        super().__init__()
        self.sums = 0
        self.closed = 0

    def begin_all_reduce(self, tensor):
        self.sums += 1
        if self.sums > 2:
            raise PeerLostError("a worker is gone")
        return lambda: None

    def close(self):
        self.closed += 1


def test_a_fixed_group_ends_with_its_first_worker(caplog):
    trainer = trainer_of(model(), members=Lonely())
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TooFewWorkersError, match=r"cannot go on without it.*ElasticMembership"),
    ):
        list(trainer.run(epochs=1))
    assert trainer.steps == 1
    assert "step 2: a worker is gone" in caplog.text


# --- equality with the plain loop


def twin(epochs, batch, *, rate=lambda step: 0.1, clip_norm=None):
    """Train the plain loop, with a learning rate for each step and clipped gradients."""
    net = model()
    optimizer = sgd(net)
    order = SampleOrder(SAMPLES, seed=5)
    step = 0
    for epoch in range(epochs):
        indices = list(order.shares(Place(epoch=epoch), (SAMPLES,), ("one",))[0].public)
        for begin in range(0, SAMPLES, batch):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            loss(net, data()[indices[begin : begin + batch]]).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            optimizer.step()
            step += 1
    return net


def test_the_gradient_of_the_global_batch_is_clipped():
    speeds = [StepCurve(sample_s=1.0), StepCurve(sample_s=3.0)]
    for worker in together(*[Worker(by_sample, curve=c, clip_norm=0.1) for c in speeds]):
        # Norms are summed in float32.
        assert distance(worker.net, twin(2, 16, clip_norm=0.1)) < 1e-6
        assert distance(worker.net, twin(2, 16)) > 1e-3


@pytest.mark.parametrize(
    ("growth", "rate"),
    [
        (BatchScaling(max_batch=30), lambda step: 0.1 * 30 / 10),
        (BatchScaling(max_batch=30, rule="none"), lambda step: 0.1),
        (BatchScaling(max_batch=30, rule="sqrt"), lambda step: 0.1 * 3**0.5),
        (BatchScaling(max_batch=30, warmup_steps=4), lambda step: 0.1 * (1 + 2 * min(1, step / 4))),
    ],
    ids=["linear", "none", "sqrt", "warm"],
)
def test_batch_and_rate_grow_together(growth, rate):
    curve = StepCurve(sample_s=1.0, fixed_s=5.0)
    workers = together(
        *[Worker(by_sample, curve=curve, growth=growth, global_batch=10) for _ in range(2)],
        epochs=3,
    )
    for worker in workers:
        assert [sum(report.sizes) for report in worker.reports] == [30] * 6
        assert worker.reports[0].events[0].batch == 30
        assert distance(worker.net, twin(3, 30, rate=rate)) < 1e-12


def test_the_caller_s_learning_rates_count_and_stay_his():
    """Learning rates that a scheduler sets between two reports are used and not overwritten."""
    net = model()
    optimizer = sgd(net)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    growth = BatchScaling(max_batch=30, efficiency=0.5)
    curve = StepCurve(sample_s=1.0, fixed_s=30.0)
    trainer = trainer_of(net, optimizer, global_batch=10, growth=growth, curve=curve)
    for _ in trainer.run(epochs=2):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert distance(net, twin(2, 30, rate=lambda step: 0.3 * 0.5**step)) < 1e-12


def test_energy_may_count_more_than_time():
    speeds, watts = (0.01, 0.02), (100.0, 5.0)
    workers = [
        Worker(
            by_sample,
            curve=StepCurve(sample_s=speed),
            objective="energy",
            power=Power(idle_w=0.0, busy_w=power),
        )
        for speed, power in zip(speeds, watts, strict=True)
    ]
    one, _ = together(*workers, epochs=1)
    assert one.reports[0].sizes == (0, 16)
    assert distance(one.net, plain(1)[0]) < 1e-12


@pytest.mark.parametrize("kind", ["global", "local"])
def test_layers_are_replaced_only_where_statistics_are_global(kind):
    net = model(norm=True)
    trainer = trainer_of(net, batch_norm=kind)
    assert isinstance(net[1], WholeBatchNorm) == (kind == "global")
    assert len(list(trainer.run(epochs=1))) == 4


class Activated(nn.BatchNorm1d):
    """Batch normalisation and an activation in one layer, as in timm."""

    def forward(self, x):
        return torch.relu(super().forward(x))


def test_batch_normalisation_with_a_forward_of_its_own_is_kept_or_refused():
    net = model()
    net.insert(1, Activated(8).double())
    with pytest.raises(HeteroError, match=r"layer '1' \(Activated\)"):
        trainer_of(net)
    plain = copy.deepcopy(net)
    trainer = trainer_of(net, batch_norm="local", curve=None)
    first = next(trainer.run(epochs=1))
    share = [data()[i] for i in first.share.public]
    batch = [torch.stack(each) for each in zip(*share, strict=True)]
    assert first.loss == pytest.approx(float(loss(plain, batch).detach()))


def test_batch_normalisation_without_a_counter_trains():
    net = model()
    net.insert(1, nn.BatchNorm1d(8).double())
    net[1].num_batches_tracked = None
    assert len(list(trainer_of(net, curve=None).run(epochs=1))) == 4


def test_workers_measure_themselves_unless_told():
    def seconds(speed):
        return lambda size, step: 0.25 + speed * size

    one, two = together(
        Worker(seconds(1 / 64), curve=None), Worker(seconds(3 / 64), curve=None), epochs=1
    )
    assert [curve.fixed_s for curve in one.trainer.curves] == pytest.approx([0.25] * 2)
    assert [curve.sample_s * 64 for curve in one.trainer.curves] == pytest.approx([1.0, 3.0])
    assert one.reports[0].sizes == two.reports[0].sizes == (12, 4)
    assert distance(one.net, plain(1)[0]) < 1e-12


# --- dropout


def with_dropout():
    net = model()
    net.insert(2, nn.Dropout(0.5))
    return net


def test_draws_follow_the_seed_alone():
    def trained(seed):
        net = with_dropout()
        torch.manual_seed(seed + 100)  # the caller's stream has no effect
        stream = torch.get_rng_state()
        done = list(trainer_of(net, seed=seed).run(epochs=2))
        assert torch.equal(torch.get_rng_state(), stream)
        return [report.loss for report in done], net

    (losses, one), (again, two), (other, _) = trained(1), trained(1), trained(2)
    assert losses == again
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert losses != other


def test_each_step_has_draws_of_its_own():
    masks = []

    def watching(net, batch):
        x = torch.ones(4, 8, dtype=torch.double)
        masks.append(tuple(net[2](x).flatten().tolist()))
        return loss(net, batch)

    list(trainer_of(with_dropout(), loss=watching).run(epochs=2))
    assert len(set(masks)) == len(masks) == 8


def test_layers_that_count_steps_count_those_of_the_optimizer():
    """Layers count optimizer steps, not their own passes.

    A worker that is left out counts too, and trial passes do not count.
    """

    class Counting(nn.Sequential):
        step_counters = ("position",)

        def __init__(self):
            super().__init__(model())
            self.register_buffer("position", torch.tensor(0))

    curve = StepCurve(sample_s=1.0, fixed_s=50.0)
    workers = together(
        Worker(by_sample, net=Counting()),
        Worker(lambda size, step: 50.0 + size, net=Counting(), curve=curve),
    )
    assert {report.sizes[1] for report in workers[0].reports} == {0}
    assert [int(worker.net.position) for worker in workers] == [8, 8]


# --- resuming from a state


@pytest.mark.parametrize("steps", [1, 3, 4, 6])
@pytest.mark.parametrize("norm", [False, True])
def test_resuming_in_the_middle_is_training_on(steps, norm):
    """Resuming is bitwise exact; the fourth step is the last one of an epoch."""

    def whole(net, trainer):
        return net, [report.loss for report in trainer.run(epochs=3)]

    def begin(net, trainer):
        done = (to_bytes(trainer.state()) for r in trainer.run(epochs=3) if r.step == steps)
        return next(done)

    def resume(net, trainer):
        trainer.load_state(from_bytes(state))
        return net, [(report.step, report.loss) for report in trainer.run(epochs=3)]

    def both(job):
        """Run ``job`` on two workers; models are made here since threads share a random stream."""

        def of(net):
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            return lambda members: job(net, trainer_of(net, optimizer, members))

        return ThreadCluster().run({name: of(model(norm)) for name in ("a", "b")})

    expected, losses = both(whole)["a"]
    state, other = both(begin).values()
    assert torch.equal(state, other)
    for net, reported in both(resume).values():
        assert reported == list(enumerate(losses, 1))[steps:]
        assert all(map(torch.equal, net.state_dict().values(), expected.state_dict().values()))


def test_who_has_trained_all_epochs_trains_no_more():
    trainer = trainer_of(model())
    assert len(list(trainer.run(epochs=2))) == 8
    assert list(trainer.run(epochs=2)) == []
    assert [report.epoch for report in trainer.run(epochs=3)] == [2] * 4


def test_a_finished_state_stays_finished():
    one, two = trainer_of(model()), trainer_of(model())
    states = [one.state() for _ in one.run(epochs=1)]
    two.load_state(states[-1])
    assert list(two.run(epochs=1)) == []
    assert [(r.epoch, r.step) for r in two.run(epochs=2)] == [(1, n) for n in (5, 6, 7, 8)]


# --- workers that are left out


def test_a_worker_that_makes_steps_slower_is_left_out_until_it_is_fast_again(caplog):
    """With the slow worker a step would take at least 31 s; without it 16 s."""
    slow = range(8, 40)
    workers = [Worker(by_sample), Worker(lambda size, step: size + (30.0 if step in slow else 0.0))]
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        one, two = together(*workers, epochs=30)
    sizes = [report.sizes for report in one.reports if sum(report.sizes) == 16]
    assert sizes[0] == (8, 8)
    assert (16, 0) in sizes
    assert sizes[-1] == (8, 8)
    changes = [event for r in one.reports for event in r.events if hasattr(event, "reason")]
    # Its share shrinks as its slowness shows; then five probes, one every ten steps, bring it back.
    assert [change.reason for change in changes] == ["slower"] * 3 + ["faster"]
    assert {change.workers for change in changes} == {(1,)}
    assert (changes[2].after, changes[3].after) == ((16, 0), (8, 8))
    # Only one worker logs the warnings, once each.
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert said == [
        "worker b is left out: with it a step would take longer",
        "worker b is no longer left out: with it a step takes less time",
    ]
    for worker in (one, two):
        assert distance(worker.net, plain(30)[0]) < 1e-12


def test_who_would_slow_the_others_from_the_start_is_left_out_and_said(caplog):
    curve = StepCurve(sample_s=1.0, fixed_s=50.0)
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        one, _ = together(
            Worker(by_sample), Worker(lambda size, step: 50.0 + size, curve=curve), epochs=1
        )
    assert {report.sizes[1] for report in one.reports} == {0}
    assert caplog.text.count("worker b is left out: with it a step would take longer") == 1


def test_who_stays_left_out_is_not_said_again(caplog):
    """Worker c is left out from the start, and b slows down later, which changes the split."""
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        one, *_ = together(
            Worker(by_sample),
            Worker(lambda size, step: size * (3.0 if step >= 8 else 1.0)),
            Worker(lambda size, step: 50.0 + size, curve=StepCurve(sample_s=1.0, fixed_s=50.0)),
            epochs=5,
        )
    assert [one.reports[0].sizes, one.reports[-2].sizes] == [(8, 8, 0), (12, 4, 0)]
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["worker c is left out"]


def test_probes_leave_nothing_behind():
    """Probes restore buffers that a pass changes in the model of a worker that is left out."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x):
            self.passes += 1
            return self.net(x)

    curve = StepCurve(sample_s=1.0, fixed_s=50.0)
    probed = []

    def seconds(size, step):
        probed.append(step)
        return 50.0

    one, two = together(
        Worker(by_sample, net=Counting()), Worker(seconds, net=Counting(), curve=curve), epochs=6
    )
    assert probed == [0, 10, 20]
    assert [r.busy_s[1] for r in two.reports if r.busy_s[1]] == [50.0] * 3
    # Only the passes of the training worker count, not the probes.
    assert one.net.passes == two.net.passes == 24
    assert distance(two.net.net, plain(6)[0]) < 1e-12


# --- reports


def test_reports_say_what_was_done():
    speeds = [1.0, 3.0]
    workers = together(*[
        Worker(lambda size, step, s=s: 0.5 + s * size, curve=StepCurve(sample_s=s)) for s in speeds
    ])
    _, losses = plain(2)
    for rank, worker in enumerate(workers):
        reports = worker.reports
        assert [report.step for report in reports] == list(range(1, 9))
        assert [report.epoch for report in reports] == [0] * 4 + [1] * 4
        assert [report.loss for report in reports] == pytest.approx(losses)
        assert [sum(report.sizes) for report in reports] == [16, 16, 16, 12] * 2
        assert reports[0].sizes == (12, 4)
        for report in reports:
            assert (report.rank, report.names) == (rank, ("a", "b"))
            busy = [0.5 + s * size for s, size in zip(speeds, report.sizes, strict=True)]
            assert report.busy_s == pytest.approx(tuple(busy))
            assert report.step_s == pytest.approx(busy[rank])  # each worker has its own clock
            assert report.joules is None
            assert len(report.share) == report.sizes[rank]
        (event,) = reports[0].events
        assert event == MembersChanged(
            step=0,
            generation=event.generation,
            names=("a", "b"),
            joined=("a", "b"),
            lost=(),
            split=(12, 4),
            batch=16,
        )
        assert not any(report.events for report in reports[1:])
    # Together, the workers' shares make up the epoch.
    for begin in (0, 4):
        shares = [r.share for worker in workers for r in worker.reports[begin : begin + 4]]
        indices = [index for share in shares for index in share.public]
        assert sorted(indices) == list(range(SAMPLES))


def test_the_optimizer_s_time_is_told_with_the_step_that_follows():
    class Slow(torch.optim.SGD):
        def step(self):
            clock.advance(0.25)
            return super().step()

    clock = VirtualClock()
    net = model()
    trainer = trainer_of(net, Slow(net.parameters(), lr=0.1), clock=clock)
    reports = list(trainer.run(epochs=1))
    assert [report.busy_s for report in reports] == [(16.0,), (16.25,), (16.25,), (12.25,)]
    assert [report.step_s for report in reports] == [16.25, 16.25, 16.25, 12.25]


def test_what_is_done_between_steps_does_not_count():
    clock = VirtualClock()
    meter = PowerMeter(Power(idle_w=1.0, busy_w=2.0))
    trainer = trainer_of(model(), clock=clock, meter=meter, global_batch=20)
    for report in trainer.run(epochs=1):
        assert report.busy_s == (20.0,)
        assert report.step_s == 20.0
        assert report.joules == 40.0
        clock.advance(1000.0)


def test_events_of_loss_and_arrival_name_the_workers():
    cluster = ThreadCluster()
    cluster.kill("b", after=8)
    team = {name: Worker(by_sample) for name in ("a", "b", "c")}
    done = cluster.run({name: worker.job(4) for name, worker in team.items()})
    events = [event for report in done["a"].reports for event in report.events]
    changed = [event for event in events if isinstance(event, MembersChanged)]
    assert [(e.names, e.joined, e.lost) for e in changed] == [
        (("a", "b", "c"), ("a", "b", "c"), ()),
        (("a", "c"), (), ("b",)),
    ]
    assert changed[1].generation > changed[0].generation
    # Three exchanges of the meeting, five steps.
    assert changed[1].step == 5
    assert changed[1].split == (8, 8)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_and_a_few_numbers_are_sent_at_each_step(workers):
    team = together(
        *[
            Worker(by_sample, net=model(dtype=torch.float32), dataset=data(torch.float32))
            for _ in range(workers)
        ],
        epochs=1,
    )
    parameters = [p.numel() for p in team[0].net.parameters()]
    for worker in team:
        # Control numbers: which parameters have a gradient; seconds, news and settings of each
        # worker; joules, meters, loss, weight, seconds of checks, buffers, seconds of the step.
        told = len(parameters) + 3 * workers + 7
        assert worker.trainer.bytes_per_step == 4 * (sum(parameters) + told)


def test_joules_of_all_workers_are_summed():
    power = [Power(idle_w=1.0, busy_w=3.0), Power(idle_w=2.0, busy_w=10.0)]
    workers = together(*[Worker(by_sample, meter=PowerMeter(each)) for each in power], epochs=2)
    reports = [worker.reports for worker in workers]
    for step in range(8):
        # How long a worker waits is known from the step before.
        joules = sum(
            each.joules(
                busy_s=mine[step].busy_s[rank],
                whole_s=max(mine[step].busy_s[rank], mine[step - 1].step_s if step else 0.0),
            )
            for rank, (each, mine) in enumerate(zip(power, reports, strict=True))
        )
        for mine in reports:
            assert mine[step].joules == pytest.approx(joules)
    assert reports[0][0].joules == pytest.approx(8 * 3 + 8 * 10)
    assert reports[0][3].joules == pytest.approx(6 * 3 + 2 * 1 + 6 * 10 + 2 * 2)


def test_split_and_curves_are_known_from_the_first_step_on():
    trainer = trainer_of(model())
    assert (trainer.split, trainer.curves) == ((), ())
    next(trainer.run(epochs=1))
    assert (trainer.split, trainer.curves) == ((16,), (LINE,))


# --- balance


def test_balance_closes_what_it_opened():
    for steps in (None, 1):
        members, net = Lonely(), model()
        members.begin_all_reduce = lambda tensor: lambda: None
        reports = balance(
            net,
            sgd(net),
            data(),
            epochs=1,
            loss=loss,
            global_batch=16,
            members=members,
            options=HeteroOptions(curve=LINE),
        )
        if steps is None:
            assert len(list(reports)) == 4
        else:
            next(reports)
            reports.close()
        assert members.closed == 1


def test_a_trainer_alone_needs_no_group():
    """A trainer alone needs no group, clock or curve."""
    net = model()
    trainer = HeteroTrainer(net, sgd(net), data(), loss=loss, global_batch=16, seed=5)
    assert {report.names for report in trainer.run(epochs=2)} == {("0",)}
    assert distance(net, plain(2)[0]) < 1e-12
    trainer.close()
    trainer.close()


def test_a_view_knows_who_is_furthest():
    view = WorkerView(generation=1, rank=0, names=("a", "b", "c"), steps=(3, 7, 7))
    assert view.furthest == 1


def test_a_parameter_without_a_part_in_the_loss_stays():
    """A parameter outside the loss has no gradient; with zeros, weight decay would shrink it."""

    def with_spare():
        net = model()
        net.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
        return net

    def decayed(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)

    one, two = together(
        *[Worker(by_sample, net=with_spare(), optimizer=decayed) for _ in range(2)], epochs=2
    )
    net, _ = plain(2, net=with_spare(), optimizer=decayed)
    assert torch.equal(one.net.spare, torch.ones(3, dtype=torch.float64))
    assert distance(one.net, net) < 1e-12
    assert distance(two.net, net) < 1e-12


class Pair(NamedTuple):
    """A named tuple, which ``default_collate`` also uses for the batch."""

    x: torch.Tensor
    y: torch.Tensor


def test_batches_may_have_named_fields():
    x, y = data().tensors
    samples = [Pair(*each) for each in zip(x, y, strict=True)]
    worker = Worker(by_sample, dataset=samples)
    ThreadCluster().run({"a": worker.job(1)})
    net, _ = plain(1)
    assert distance(worker.net, net) < 1e-12


def test_there_have_to_be_samples():
    with pytest.raises(HeteroError, match="no samples"):
        HeteroTrainer(model(), sgd(model()), [], loss=loss, global_batch=4)


def test_a_newcomer_measures_itself_before_the_others_wait_for_it():
    """A newcomer measures itself first, so as not to delay others or hit their time limit."""
    calls = []

    class Noting:
        def __init__(self, members):
            self.members = members

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.members, name)

    def seconds(size, step):
        calls.append("pass")
        return float(size)

    worker = Worker(seconds, curve=None)
    job = worker.job(1)
    ThreadCluster().run({"a": lambda members: job(Noting(members))})
    met = calls.index("agree")
    assert calls[:met].count("pass") > 3
    assert "pass" not in calls[met : calls.index("all_reduce", met)]


def test_the_last_short_step_can_be_left_out():
    whole = list(trainer_of(model(), global_batch=SAMPLES // 3 + 1, drop_last=True).run(epochs=2))
    assert [report.sizes for report in whole] == [(SAMPLES // 3 + 1,)] * 4
    assert [report.epoch for report in whole] == [0, 0, 1, 1]
    with pytest.raises(HeteroError, match="are not one step of"):
        trainer_of(model(), global_batch=SAMPLES + 1, drop_last=True)
