"""Workers stand by while the others train faster without them, and the result stays the same."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

from tests.hetero.memberships import ThreadCluster
from thrifty.core import DivergedError, HeteroError
from thrifty.hetero import (
    BatchScaling,
    HeteroOptions,
    HeteroTrainer,
    Power,
    StandbyChange,
    StepCurve,
)
from thrifty.hetero.training._learner import settings_digest
from thrifty.hetero.workers._membership import from_bytes, to_bytes
from thrifty.perf import standby

from .jobs import Costly, Worker, data, distance, loss, model, plain, sgd
from .test_trainer import trainer_of, twin, with_dropout


pytestmark = pytest.mark.slow


FAST, SLOW = StepCurve(sample_s=1.0), StepCurve(sample_s=15.0)
"""With these curves, 16 samples take 16 s on the first worker alone and 15 s on both."""


def costly(job, clock, seconds=10.0):
    """Return the job on a membership whose sums take some seconds."""

    def run(members):
        return job(Costly(members, clock, seconds))

    return run


def fast(size, step):
    return 1.0 * size


def slow(size, step):
    return 15.0 * size


def team(*, seconds=(fast, slow), epochs=5, on_step=None, cluster=None, **options):
    """Train workers a, b, ... whose sums take 10 s, and return them."""
    curves = options.pop("curves", (FAST, SLOW))
    nets = options.pop("nets", [None] * len(seconds))
    workers = {
        name: Worker(each, curve=curve, net=net, **options)
        for name, each, curve, net in zip("abc", seconds, curves, nets, strict=False)
    }
    jobs = {
        name: costly(worker.job(epochs, on_step), worker.clock) for name, worker in workers.items()
    }
    (cluster or ThreadCluster()).run(jobs)
    return list(workers.values())


def changes(worker):
    return [
        event
        for report in worker.reports
        for event in report.events
        if isinstance(event, StandbyChange)
    ]


def states_equal(*workers):
    first, *others = [to_bytes(worker.trainer.state()) for worker in workers]
    return all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("norm", [False, True])
def test_a_worker_that_costs_more_than_it_saves_stands_by(norm, caplog):
    with caplog.at_level(logging.INFO, logger="thrifty.hetero"):
        one, two = team(nets=[model(norm), model(norm)])
    (change,) = changes(one)
    assert change.reason.startswith("a alone trains ")
    assert change.reason.endswith("times as fast as with b; b stands by")
    assert (change.training, change.standing_by) == (("a",), ("b",))
    assert change.step_s[0] > change.step_s[1] == 16.0
    # Both report the steps until the change; then only one of them trains.
    assert [r.step for r in one.reports] == list(range(1, 21))
    assert [r.step for r in two.reports] == list(range(1, change.step + 1))
    assert changes(two) == [change]
    for report in one.reports:
        assert report.names == (("a", "b") if report.step <= change.step else ("a",))
        assert report.rank == 0
        assert sum(report.sizes) == len(report.share) or report.step <= change.step
    assert states_equal(one, two)
    for worker in (one, two):
        assert distance(worker.net, plain(5, net=model(norm))[0]) < 1e-12
    assert caplog.text.count(f"step {change.step}: {change.reason}") == 1


def test_the_trained_batch_is_whole_while_a_worker_stands_by():
    one, _ = team()
    assert {sum(report.sizes) for report in one.reports} == {16, 12}


@pytest.mark.parametrize(
    "options",
    [
        {"stand_by": False},
        {"objective": "energy", "power": Power(idle_w=1.0, busy_w=2.0)},
        {"growth": BatchScaling(max_batch=16)},
    ],
)
def test_no_worker_stands_by_where_it_does_not_apply(options):
    one, two = team(**options)
    assert changes(one) == []
    assert len(one.reports) == len(two.reports)


def test_unless_asked_for_a_trainer_only_says_what_standing_by_would_save(caplog):
    with caplog.at_level(logging.INFO, logger="thrifty.hetero"):
        one, two = team(stand_by=None)
    assert changes(one) == []
    assert len(one.reports) == len(two.reports) == 20
    hint = "with HeteroOptions(stand_by=True), a alone trains "
    assert caplog.text.count(hint) == 1


def test_a_worker_with_private_samples_never_stands_by():
    one = Worker(fast, curve=FAST)
    two = Worker(slow, curve=SLOW, private=data())
    ThreadCluster().run({"a": costly(one.job(3), one.clock), "b": costly(two.job(3), two.clock)})
    assert changes(one) == []
    assert len(one.reports) == len(two.reports)


def test_workers_come_back_when_those_that_train_slow_down():
    """From the 20th step on the first worker is ten times as slow."""

    def tiring(size, step):
        return size * (10.0 if step >= 20 else 1.0)

    one, two = team(seconds=(tiring, slow), epochs=15)
    first, second, *_ = changes(one)
    assert second.step > 20
    assert "with b training should be" in second.reason
    assert (second.training, second.standing_by) == (("a", "b"), ())
    assert [r.step for r in two.reports][first.step] == second.step + 1
    assert states_equal(one, two)
    for worker in (one, two):
        assert distance(worker.net, plain(15)[0]) < 1e-12
    # Reports of both workers are equal where both train.
    told = {report.step: report for report in two.reports}
    for report in one.reports:
        if report.step in told:
            assert report.loss == told[report.step].loss
            assert report.sizes == told[report.step].sizes


def test_a_trial_notices_that_a_worker_has_become_faster(monkeypatch):
    monkeypatch.setattr(standby, "_TRIAL_SHARE", 0.1)  # the test shall not take long
    reports = []

    def recovering(size, step):
        return size * (1.0 if len(reports) > 60 else 15.0)

    one, two = team(seconds=(fast, recovering), epochs=80, on_step=lambda _: reports.append(1))
    first, second, *_ = changes(one)
    assert first.standing_by == ("b",)
    assert second.reason.startswith("b called back, to measure")
    assert two.reports[-1].step > second.step
    assert two.reports[-1].sizes[1] >= 6
    for worker in (one, two):
        assert distance(worker.net, plain(80)[0]) < 1e-10


def test_two_of_three_workers_train_in_a_group_of_their_own():
    curves = (FAST, FAST, StepCurve(sample_s=60.0))
    seconds = (fast, fast, lambda size, step: 60.0 * size)
    workers = {
        name: Worker(each, curve=curve, global_batch=40)
        for name, each, curve in zip("abc", seconds, curves, strict=True)
    }
    ThreadCluster().run({name: costly(w.job(30), w.clock, 12.0) for name, w in workers.items()})
    one, two, three = workers.values()
    (change,) = changes(one)
    assert change.training == ("a", "b")
    assert change.reason.startswith("a, b train ")
    assert len(one.reports) == len(two.reports) > len(three.reports)
    assert [report.rank for report in two.reports] == [1] * len(two.reports)
    assert states_equal(one, two, three)
    for worker in workers.values():
        assert distance(worker.net, plain(30, batch=40)[0]) < 1e-12


def test_draws_are_those_of_the_worker_that_trains_alone():
    nets = [with_dropout(), with_dropout()]
    seen = []

    def on_step(report):
        if report.rank == 0 and not seen and any(map(_is_change, report.events)):
            seen.append(to_bytes(team_trainer[0].state()))

    def _is_change(event):
        return isinstance(event, StandbyChange)

    team_trainer = []
    workers = {
        name: Worker(each, curve=curve, net=net)
        for name, each, curve, net in zip("ab", (fast, slow), (FAST, SLOW), nets, strict=True)
    }

    def first(members):
        worker = workers["a"]
        worker.trainer = worker._make(Costly(members, worker.clock, 10.0))
        team_trainer.append(worker.trainer)
        for report in worker.trainer.run(epochs=5):
            worker.reports.append(report)
            on_step(report)

    ThreadCluster().run({"a": first, "b": costly(workers["b"].job(5), workers["b"].clock)})
    alone = trainer_of(with_dropout())
    alone.load_state(from_bytes(seen[0]))
    list(alone.run(epochs=5))
    expected = alone.state()["model"]
    for net in nets:
        assert all(torch.equal(net.state_dict()[name], each) for name, each in expected.items())


def test_a_schedule_in_the_loop_holds_although_one_worker_missed_steps():
    """The first worker's schedule counts all steps, and the second one's only its own."""

    def tiring(size, step):
        return size * (10.0 if step >= 20 else 1.0)

    def job(worker):
        def run(members):
            worker.trainer = worker._make(Costly(members, worker.clock, 10.0))
            optimizer = worker.trainer._learner.optimizer
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
            for report in worker.trainer.run(epochs=15):
                worker.reports.append(report)
                schedule.step()

        return run

    one, two = Worker(tiring, curve=FAST), Worker(slow, curve=SLOW)
    ThreadCluster().run({"a": job(one), "b": job(two)})
    assert len(changes(one)) >= 2
    expected = twin(15, 16, rate=lambda step: 0.1 * 0.97**step)
    for worker in (one, two):
        assert distance(worker.net, expected) < 1e-12


@pytest.mark.parametrize("as_tensor", [False, True])
def test_settings_are_plain_values_that_can_be_sent(as_tensor):
    """Learning rates may be tensors; settings that are not numbers are not sent."""

    def adam(lr):
        net = model()
        rate = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr
        trainer = trainer_of(net, torch.optim.Adam(net.parameters(), lr=rate))
        trainer._learner.optimizer.param_groups[0]["name"] = object()
        return trainer._learner

    one, other = adam(0.125), adam(0.5)
    assert settings_digest(one.settings()) != settings_digest(other.settings())
    other.load_settings(from_bytes(to_bytes(one.settings())))
    assert settings_digest(one.settings()) == settings_digest(other.settings())
    group = other.optimizer.param_groups[0]
    assert (float(group["lr"]), group["betas"]) == (0.125, (0.9, 0.999))
    assert isinstance(group["lr"], torch.Tensor) == as_tensor


def test_parameters_may_be_frozen_while_a_worker_stands_by():
    def freezing(net):
        def on_step(report):
            net[0].weight.requires_grad_(report.step < 12)

        return on_step

    nets = [model(), model()]
    workers = [
        Worker(each, curve=curve, net=net)
        for each, curve, net in zip((fast, slow), (FAST, SLOW), nets, strict=True)
    ]
    ThreadCluster().run({
        name: costly(worker.job(6, freezing(worker.net)), worker.clock)
        for name, worker in zip("ab", workers, strict=True)
    })  # fmt: skip
    assert workers[1].reports[-1].step < 12
    net = model()
    optimizer = sgd(net)
    _train_frozen(net, optimizer, epochs=6, since=12)
    assert not nets[1][0].weight.requires_grad
    for each in nets:
        assert distance(each, net) < 1e-12


def _train_frozen(net, optimizer, *, epochs, since):
    trainer = HeteroTrainer(net, optimizer, data(), loss=loss, global_batch=16, seed=5)
    for report in trainer.run(epochs=epochs):
        net[0].weight.requires_grad_(report.step < since)


def test_a_layer_that_only_those_that_train_replace_is_an_error():
    def widening(net):
        def on_step(report):
            if report.step == 12:
                net[0] = nn.Linear(6, 9).double()
                net[2] = nn.Linear(9, 3).double()

        return on_step

    workers = {"a": Worker(fast, curve=FAST), "b": Worker(slow, curve=SLOW)}
    said = {}

    def job(name):
        worker = workers[name]

        def run(members):
            with pytest.raises(HeteroError) as error:
                costly(worker.job(6, widening(worker.net)), worker.clock)(members)
            said[name] = str(error.value)

        return run

    ThreadCluster().run({name: job(name) for name in workers})
    assert said["a"] == said["b"]
    assert "the model has changed on worker a but not on b, which stood by" in said["a"]
    assert "HeteroOptions(stand_by=False)" in said["a"]


# --- ends


def stopping(worker, step, epochs=9):
    """Train until some step, leave the loop, and train on."""

    def run(members):
        worker.trainer = worker._make(Costly(members, worker.clock, 10.0))
        for report in worker.trainer.run(epochs=epochs):
            worker.reports.append(report)
            if report.step == step:
                break
        worker.middle = to_bytes(worker.trainer.state())
        for report in worker.trainer.run(epochs=epochs):
            worker.reports.append(report)

    return run


@pytest.mark.parametrize("at", [6, 8, 9, 10, 14, 20])
def test_leaving_the_loop_ends_that_of_workers_that_stand_by(at):
    """Also right before, at and after the step at which a worker begins to stand by."""
    one, two = Worker(fast, curve=FAST), Worker(slow, curve=SLOW)
    ThreadCluster().run({"a": stopping(one, at), "b": stopping(two, at)})
    assert torch.equal(one.middle, two.middle)
    assert [report.step for report in one.reports] == list(range(1, 37))
    assert len(two.reports) < 20
    for worker in (one, two):
        assert distance(worker.net, plain(9)[0]) < 1e-12


def test_runs_of_one_epoch_are_one_run():
    def by_epoch(worker):
        def run(members):
            worker.trainer = worker._make(Costly(members, worker.clock, 10.0))
            for epoch in range(6):
                worker.reports += worker.trainer.run(epochs=epoch + 1)
                worker.states.append(to_bytes(worker.trainer.state()))
            worker.trainer.close()

        worker.states = []
        return run

    one, two = Worker(fast, curve=FAST), Worker(slow, curve=SLOW)
    ThreadCluster().run({"a": by_epoch(one), "b": by_epoch(two)})
    assert all(map(torch.equal, one.states, two.states))
    assert len(one.reports) == 24
    # The first step of each run is trained by all workers.
    assert {9, 13, 17, 21} <= {report.step for report in two.reports} < set(range(1, 25))
    for worker in (one, two):
        assert distance(worker.net, plain(6)[0]) < 1e-12


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        ("nan", DivergedError, "the loss of step 15 is nan"),
        ("raise", HeteroError, "ValueError: the data are broken"),
    ],
)
def test_workers_that_stand_by_end_with_those_that_train(failure, kind, text):
    reports = []

    def criterion(net, batch):
        if len(reports) == 14:
            if failure == "raise":
                raise ValueError("the data are broken")
            return loss(net, batch) * float("nan")
        return loss(net, batch)

    said = {}

    def job(name, curve, seconds):
        def run(members):
            worker = Worker(seconds, curve=curve, verify=False)
            worker._loss = lambda net, batch: (
                worker.clock.advance(seconds(len(batch[0]), 0)),
                criterion(net, batch),
            )[1]
            trainer = HeteroTrainer(
                worker.net, sgd(worker.net), data(), loss=worker._loss, global_batch=16, seed=5,
                members=Costly(members, worker.clock, 10.0), clock=worker.clock,
                options=_options(curve),
            )  # fmt: skip
            try:
                for report in trainer.run(epochs=9):
                    if name == "a":
                        reports.append(report)
            except Exception as error:  # noqa: BLE001 -- any error ends the job
                said[name] = error
            trainer.close()

        return run

    ThreadCluster().run({"a": job("a", FAST, fast), "b": job("b", SLOW, slow)})
    assert isinstance(said["b"], kind)
    assert "training has failed while this worker stood by" in str(said["b"])
    assert text in str(said["b"])
    assert text.removeprefix("ValueError: ") in str(said["a"])


def _options(curve):
    return HeteroOptions(curve=curve, verify=False, stand_by=True)


# --- losses


def test_a_worker_that_dies_while_standing_by_is_noticed_at_the_end(caplog):
    cluster = ThreadCluster()
    gone = threading.Event()

    def on_step(report):
        if report.step == 14 and not gone.is_set():
            gone.set()
            cluster.wait_for_standby("b")
            cluster.lose("b")

    one, two = team(cluster=cluster, epochs=9, on_step=on_step)
    assert len(one.reports) == 36
    assert len(two.reports) < 14
    assert distance(one.net, plain(9)[0]) < 1e-12
    assert "a worker is gone" in caplog.text


@pytest.mark.parametrize("dies", ["a", "b"])
@pytest.mark.parametrize("after", range(3))
def test_a_worker_that_dies_while_all_of_them_come_together_again_is_noticed(after, dies, caplog):
    """``after``: messages that it still completes of the three that bring them together."""
    cluster = ThreadCluster()
    doomed = threading.Event()

    def on_step(report):
        if report.step == 36 and not doomed.is_set():
            doomed.set()
            cluster.wait_for_standby("b")
            cluster.kill(dies, after=after)

    one, two = team(cluster=cluster, epochs=9, on_step=on_step)
    left = two if dies == "a" else one
    assert left.reports[-1].step == 36
    assert distance(left.net, plain(9)[0]) < 1e-12
    assert "a worker is gone" in caplog.text


@pytest.mark.parametrize("after", range(12, 24))
def test_a_worker_that_dies_while_another_one_stands_by_is_replaced_by_it(after):
    """Two of three workers train when one of them dies; the third one goes on with the other."""
    cluster = ThreadCluster()
    cluster.kill("b", after=after)
    curves = (FAST, FAST, StepCurve(sample_s=60.0))
    seconds = (fast, fast, lambda size, step: 60.0 * size)
    workers = {
        name: Worker(each, curve=curve, global_batch=40)
        for name, each, curve in zip("abc", seconds, curves, strict=True)
    }
    done = cluster.run({name: costly(w.job(20), w.clock, 12.0) for name, w in workers.items()})
    assert set(done) == {"a", "c"}
    assert workers["a"].reports[-1].step == 40
    assert states_equal(workers["a"], workers["c"])
    for name in done:
        assert distance(workers[name].net, plain(20, batch=40)[0]) < 1e-12


def test_who_stands_by_goes_on_if_all_others_die():
    """The steps that they trained alone are lost with them, and trained again."""
    cluster = ThreadCluster()

    one, two = Worker(fast, curve=FAST), Worker(slow, curve=SLOW)
    held = []

    def dies(members):
        trainer = one._make(Costly(members, one.clock, 10.0))
        held.append(trainer.run(epochs=6))  # a process that dies does not leave its loop
        for report in held[0]:
            one.reports.append(report)
            if report.step == 15:
                cluster.wait_for_standby("b")
                return

    cluster.run({"a": dies, "b": costly(two.job(6), two.clock)})
    steps = [report.step for report in two.reports]
    assert steps == list(range(1, 25))
    assert two.reports[-1].names == ("b",)
    assert distance(two.net, plain(6)[0]) < 1e-12
