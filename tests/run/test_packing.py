"""Several trials on one worker: nothing is lost, and each gets the result it gets alone."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from thrifty.core import (
    EpochDone,
    PackShrunk,
    Refused,
    StageDone,
    StageFailed,
    StageStarted,
    UsageError,
)
from thrifty.pack import AutoBackend
from thrifty.pack.fused._block import Block
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Local, state_from_arrays, train_alone
from thrifty.space import Linear, MultiStep, Timeline
from thrifty.store import CheckpointFolder
from thrifty.testing import EXECUTOR_CHECKS, FaultyTask, LineTask


pytestmark = pytest.mark.slow


POLL_S = 30.0
PACKS = ["fused", "concatenated", "auto", "solo"]
EPOCHS = 4
CONFIGS = [
    {"lr": 0.1, "width": 4, "dropout": 0.3},
    {"lr": Linear(0.1), "width": 4, "dropout": 0.3},
    {"lr": 0.05, "width": 4, "dropout": MultiStep([0.2, 0.0], milestones=[2])},
    {"lr": 0.05, "width": 3},
    {"lr": MultiStep([0.1, 0.01], milestones=[2])},
]


@pytest.mark.sample(14)
@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pack", ["fused", "concatenated"])
@pytest.mark.parametrize("workers", [1, 2])
def test_conformance(workers, pack, check):
    check(Local(workers=workers, threads=1, pack_size=3, pack=pack))


class Run:
    """Trainer of configurations on one executor, each an assignment of two stages."""

    def __init__(self, executor_config, folder, task, configs):
        root = str(folder / "checkpoints")
        self.checkpoints = CheckpointFolder(root)
        self.timelines = [Timeline(config, epochs=EPOCHS) for config in configs]
        self.events = defaultdict(list)
        self.ended = []
        executor = executor_config.open(task, checkpoints=root, folder="plan")
        try:
            self._train(executor)
        finally:
            executor.close()

    def _train(self, executor):
        for number, timeline in enumerate(self.timelines):
            stages = tuple(Stage(node=number, start=a, stop=b) for a, b in [(0, 2), (2, 4)])
            chain = Chain(stages=stages, timeline=timeline, resume=None)
            executor.submit(Assignment(number=number, chain=chain, seed=number))
        while len(self.ended) < len(self.timelines):
            # There may be no report for long: a failure is reported once the states before it are
            # written.
            for report in executor.poll(POLL_S):
                assert report.assignment not in self.ended, "something after the last word"
                if report.event is None:
                    self.ended.append(report.assignment)
                else:
                    self.events[report.assignment].append(report.event)

    def of(self, number, kind):
        return [e for e in self.events[number] if isinstance(e, kind)]

    def metrics(self, number):
        done = self.of(number, EpochDone)
        assert [e.epoch for e in done] == list(range(1, len(done) + 1))
        return [e.metrics for e in done]

    def every(self, kind):
        return [e for events in self.events.values() for e in events if isinstance(e, kind)]


def alone(task, config, seed):
    _, metrics = train_alone(task, Timeline(config, epochs=EPOCHS), seed=seed, epochs=EPOCHS)
    return metrics


def nearly(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def check(run, *, exact=False, numbers=None, task=None):
    for number in numbers or range(len(CONFIGS)):
        wanted = alone(task or LineTask(), run.timelines[number].config, number)
        found = run.metrics(number)
        assert found == wanted if exact else nearly(found, wanted) is None


@pytest.mark.sample(3)
@pytest.mark.parametrize(("workers", "pack"), [*[(1, pack) for pack in PACKS], (2, "fused")])
def test_several_assignments_at_once(tmp_path, workers, pack):
    config = Local(workers=workers, threads=1, pack=pack, pack_size=3)
    run = Run(config, tmp_path, LineTask(), CONFIGS)
    check(run, exact=pack in ("concatenated", "solo"))
    assert sorted(run.ended) == list(range(len(CONFIGS)))
    for number in range(len(CONFIGS)):
        order = [
            (type(e).__name__, getattr(e, "epoch", None) or e.stop)
            for e in run.events[number]
            if isinstance(e, StageStarted | EpochDone)
        ]
        assert order == [
            ("StageStarted", 2),
            ("EpochDone", 1),
            ("EpochDone", 2),
            ("StageStarted", 4),
            ("EpochDone", 3),
            ("EpochDone", 4),
        ]
        assert [(e.start, e.stop) for e in run.of(number, StageDone)] == [(0, 2), (2, 4)]
        for done in run.of(number, StageDone):
            assert state_from_arrays(*run.checkpoints.read(done.checkpoint)).tensors


def test_how_many_more_can_start(tmp_path):
    executor = Local(workers=1, threads=1).open(
        LineTask(), checkpoints=str(tmp_path), folder="plan"
    )
    timeline = Timeline({"lr": 0.1}, epochs=1)
    chain = Chain(stages=(Stage(node=0, start=0, stop=1),), timeline=timeline, resume=None)
    assert executor.num_free(pack_size=3) == 3
    executor.submit(Assignment(number=0, chain=chain, seed=0))
    assert executor.num_free(pack_size=3) == 2
    assert executor.num_free(pack_size=1) == 0
    executor.submit(Assignment(number=1, chain=chain, seed=0))
    assert executor.num_free(pack_size=1) == 0
    executor.close()


@pytest.mark.parametrize("value", [0, -1])
def test_a_pack_needs_a_trial(value):
    with pytest.raises(UsageError, match=f"pack_size={value}"):
        Local(pack_size=value)


def test_an_unknown_way_to_pack():
    with pytest.raises(UsageError, match="it is one of 'auto', 'fused'"):
        Local(pack="batched")


@pytest.mark.parametrize("pack", ["fused", "concatenated"])
@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_goes_wrong_is_the_affair_of_one_trial(tmp_path, pack, fault):
    faults = ["", MultiStep(["", fault], milestones=[2]), "", ""]
    configs = [{"lr": 0.05, "width": 4, "fault": each} for each in faults]
    run = Run(Local(workers=1, threads=1, pack=pack, pack_size=4), tmp_path, FaultyTask(), configs)
    (failed,) = run.every(StageFailed)
    assert (failed.node, failed.epoch) == (1, 2)
    assert failed.kind == ("diverged" if fault == "nan" else "error")
    check(run, numbers=(0, 2, 3), task=FaultyTask())
    assert len(run.metrics(1)) == 2


# -- memory --------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """Return a function that limits memory to a number of trials, however they are trained."""

    def limit(num, *, where):
        original = getattr(AutoBackend, where)

        def crowded(self, *args):
            if len(self._where) + (where == "put") > num:
                raise torch.OutOfMemoryError("CUDA out of memory.\nmore words")
            return original(self, *args)

        monkeypatch.setattr(AutoBackend, where, crowded)

    return limit


@pytest.mark.sample(3)
@pytest.mark.parametrize(("room", "where"), [(1, "step"), (4, "step"), (2, "put")])
@pytest.mark.parametrize("pack", ["fused", "concatenated"])
def test_out_of_memory_shrinks_the_pack(tmp_path, memory, pack, room, where):
    memory(room, where=where)
    local = Local(workers=1, threads=1, pack=pack, pack_size=5)
    run = Run(local, tmp_path, LineTask(), CONFIGS)
    sizes = [event.size for event in run.every(PackShrunk)]
    assert sizes == sorted(sizes, reverse=True)
    assert 1 <= sizes[-1] <= room
    assert {event.reason for event in run.every(PackShrunk)} == {"CUDA out of memory."}
    assert not run.every(StageFailed)
    check(run, exact=pack == "concatenated")


class FrozenBase(LineTask):
    """A trained layer on a frozen one, so large that checkpoints leave it out."""

    def model(self, hp):
        base = torch.nn.Linear(1, 20_000)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        return torch.nn.Sequential(
            base.requires_grad_(False), torch.nn.Tanh(), torch.nn.Linear(20_000, 1)
        )


RATES = [{"lr": 1e-5 * (k + 1)} for k in range(5)]


@pytest.mark.parametrize("room", [1, 2])
def test_out_of_memory_in_a_fused_step_over_a_frozen_base(tmp_path, monkeypatch, room):
    """The steps before it have changed rows, moments and streams of all trials in the block."""
    original, sizes = Block.advance, []

    def crowded(self):
        sizes.append(len(self.trials))
        ended = original(self)
        if len(self.trials) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return ended

    monkeypatch.setattr(Block, "advance", crowded)
    local = Local(workers=1, threads=1, pack="fused", pack_size=5)
    run = Run(local, tmp_path, FrozenBase(), RATES)
    assert max(sizes) > room, "it has run out of memory"
    assert sizes[-1] <= room
    assert not run.every(StageFailed)
    for number, config in enumerate(RATES):
        nearly(run.metrics(number), alone(FrozenBase(), config, number))
    assert len(list((tmp_path / "checkpoints").rglob("base-*"))) == 1


@pytest.mark.parametrize("where", ["dry run", "step"])
def test_what_fits_alone_only_is_trained_alone(tmp_path, monkeypatch, where):
    def crowded(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if where == "dry run":
        monkeypatch.setattr("thrifty.pack.backends._dry_runs.dry_run", crowded)
    else:
        monkeypatch.setattr(Block, "advance", crowded)
    run = Run(Local(workers=1, threads=1, pack="fused"), tmp_path, FrozenBase(), RATES[:2])
    assert not run.every(StageFailed)
    for number, config in enumerate(RATES[:2]):
        assert run.metrics(number) == alone(FrozenBase(), config, number)


def test_out_of_memory_in_the_middle(tmp_path, monkeypatch):
    """When memory runs out after all have trained for a while, no epoch is lost or reported twice.

    Running stages are given back.
    """
    original, calls = AutoBackend.step, []

    def crowded(self, plans):
        calls.append(len(self._where))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, plans)

    monkeypatch.setattr(AutoBackend, "step", crowded)
    local = Local(workers=1, threads=1, pack="concatenated", pack_size=5)
    run = Run(local, tmp_path, LineTask(), CONFIGS)
    assert [event.size for event in run.every(PackShrunk)] == [calls[2] // 2]
    assert max(calls[3:], default=0) <= calls[2] // 2
    assert run.every(StageFailed)
    for number in range(len(CONFIGS)):
        crowded_out = run.of(number, StageFailed)
        wanted = alone(LineTask(), CONFIGS[number], number)
        found = run.metrics(number)
        assert found == wanted[: len(found)]
        assert bool(crowded_out) == (len(found) < EPOCHS)
        assert all(event.kind == "crowded" for event in crowded_out)


def test_a_refusal_is_reported_from_a_step_that_runs_out_of_memory(tmp_path, monkeypatch):
    original, calls = AutoBackend.step, []

    def crowded(self, plans):
        calls.append(plans)
        if len(calls) == 1:
            self._on_refused("one", "it differs")
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if len(calls) == 2:
            assert self._fused.refused == {"one": "it differs"}, "the new back-end knows it"
        return original(self, plans)

    monkeypatch.setattr(AutoBackend, "step", crowded)
    run = Run(Local(workers=1, threads=1, pack="fused", pack_size=5), tmp_path, LineTask(), CONFIGS)
    assert [(event.key, event.reason) for event in run.every(Refused)] == [("one", "it differs")]


@pytest.mark.parametrize("where", ["step", "put"])
def test_a_single_trial_without_memory_fails(tmp_path, memory, where):
    memory(0, where=where)
    run = Run(Local(workers=1, threads=1), tmp_path, LineTask(), CONFIGS[:1])
    (failed,) = run.every(StageFailed)
    assert failed.kind == "error"
    assert "out of memory" in failed.message


# -- workers that die ----------------------------------------------------------------------


def test_a_death_marks_nobody_who_had_company(tmp_path):
    faults = ["", "die", ""]
    configs = [{"lr": 0.05, "fault": each} for each in faults]
    executor = Local(workers=2, threads=1, pack="concatenated", pack_size=3).open(
        FaultyTask(), checkpoints=str(tmp_path), folder="plan"
    )
    del executor._workers[1]  # all trials are in one process
    try:
        kinds = {}
        for number, config in enumerate(configs):
            stages = (Stage(node=number, start=0, stop=2),)
            chain = Chain(stages=stages, timeline=Timeline(config, epochs=2), resume=None)
            executor.submit(Assignment(number=number, chain=chain, seed=0))
        ended = 0
        while ended < 3:
            for report in executor.poll(POLL_S):
                ended += report.event is None
                if isinstance(report.event, StageFailed):
                    kinds[report.assignment] = report.event.kind
        assert kinds == dict.fromkeys(range(3), "crowded")
        # Trials run one at a time until it is known which one is at fault.
        free = []
        for number in (0, 2, 1):
            free.append(executor.num_free(pack_size=3))
            stages = (Stage(node=number, start=0, stop=2),)
            timeline = Timeline(configs[number], epochs=2)
            chain = Chain(stages=stages, timeline=timeline, resume=None)
            executor.submit(Assignment(number=10 + number, chain=chain, seed=0))
            ended = False
            while not ended:
                for report in executor.poll(POLL_S):
                    ended = ended or report.event is None
                    if isinstance(report.event, StageFailed):
                        kinds[report.assignment] = report.event.kind
        assert free == [1, 1, 1]
        assert executor.num_free(pack_size=3) == 3
        assert kinds == {0: "crowded", 1: "crowded", 2: "crowded", 11: "lost"}
    finally:
        executor.close()
