from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tests import strategies
from tests.plan._drive import Driver, ref
from thrifty.core import CheckpointLost, CheckpointRef, EpochDone, StageFailed
from thrifty.plan import (
    MAX_ATTEMPTS,
    MAX_EVICTIONS,
    MAX_LOSSES,
    SearchPlan,
    evictable_checkpoints,
    stage_forest,
    superseded,
)
from thrifty.space import (
    Choice,
    Constant,
    Cosine,
    Float,
    MultiStep,
    Space,
    Step,
    Timeline,
    Warmup,
    common_prefix,
)
from thrifty.space._timeline import starts_alike


pytestmark = pytest.mark.slow


EPOCHS = 12
LEVELS = st.sampled_from([1, 2, 3])
schedules = st.one_of(
    LEVELS.map(Constant),
    st.sampled_from([Cosine(1.0), Cosine(1.0, epochs=8.0)]),
    st.builds(
        lambda levels, cuts: MultiStep(levels, milestones=sorted(cuts)),
        st.lists(LEVELS, min_size=3, max_size=3),
        st.sets(st.integers(1, EPOCHS - 1), min_size=2, max_size=2),
    ),
)
requests = st.lists(st.tuples(schedules, st.integers(1, EPOCHS)), min_size=1, max_size=25)


def timeline(schedule, epochs: int = EPOCHS) -> Timeline:
    return Timeline({"lr": schedule}, epochs=epochs)


def symbols(schedule, epochs: int) -> list:
    """Return what the trial does in each epoch, computed the slow way."""
    line = timeline(schedule)
    return [next(r.key for r in line.runs if r.start <= e < r.stop) for e in range(epochs)]


def minimum(asked) -> int:
    """Count distinct prefixes, one by one."""
    return len({tuple(symbols(s, e)) for s, target in asked for e in range(1, target + 1)})


@given(requests, st.integers(1, 4), st.integers(0, 10))
@settings(max_examples=80, deadline=None)
def test_every_epoch_is_trained_once_and_every_request_answered(asked, workers, seed):
    plan = SearchPlan()
    for trial, (schedule, target) in enumerate(asked):
        plan.request(trial, plan.insert(timeline(schedule)), target)
    driver = Driver(plan, workers=workers, seed=seed)
    driver.run()
    assert set(driver.trained.values()) == {1}
    assert sum(driver.trained.values()) == minimum(asked) == plan.num_epochs_needed
    assert sorted(a.trial for a in driver.answers) == list(range(len(asked)))


@given(requests, st.integers(1, 3), st.integers(0, 10))
@settings(max_examples=80, deadline=None)
def test_requests_that_come_while_others_run_retrain_nothing_at_kept_cuts(asked, workers, seed):
    plan = SearchPlan(cuts=range(1, EPOCHS))
    driver = Driver(plan, workers=workers, seed=seed)
    answered = 0
    for trial, (schedule, target) in enumerate(asked):
        answered += plan.request(trial, plan.insert(timeline(schedule)), target) is not None
        if driver.fill():
            driver.step()
    driver.run()
    assert set(driver.trained.values()) == {1}
    assert len(driver.answers) + answered == len(asked)


@given(requests, st.permutations(range(6)))
@settings(max_examples=60, deadline=None)
def test_insertion_commutes(asked, order):
    asked = asked[:6]
    totals = set()
    for sequence in (range(len(asked)), [i for i in order if i < len(asked)]):
        plan = SearchPlan()
        for index in sequence:
            plan.request(index, plan.insert(timeline(asked[index][0])), asked[index][1])
        totals.add(plan.num_epochs_needed)
    assert totals == {minimum(asked)}


@given(requests, st.data())
@settings(max_examples=60, deadline=None)
def test_released_work_is_not_trained(asked, data):
    plan = SearchPlan()
    nodes = [plan.insert(timeline(s)) for s, _ in asked]
    for trial, (_, target) in enumerate(asked):
        plan.request(trial, nodes[trial], target)
    dropped = data.draw(st.sets(st.integers(0, len(asked) - 1)))
    for trial in dropped:
        plan.release(trial, nodes[trial], asked[trial][1])
    driver = Driver(plan)
    driver.run()
    kept = [a for i, a in enumerate(asked) if i not in dropped]
    assert sum(driver.trained.values()) == minimum(kept)


def test_the_same_timeline_is_the_same_node():
    plan = SearchPlan()
    assert plan.insert(timeline(Constant(1.0))) == plan.insert(timeline(Step(1.0)))


def test_an_answer_that_exists_is_given_at_once():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 5)
    Driver(plan).run()
    answer = plan.request("b", node, 3)
    assert answer is not None
    assert answer.metrics == {"m": 3.0}


def test_extending_a_trial_goes_on_from_its_checkpoint():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 3)
    Driver(plan).run()
    plan.request("a", node, 9)
    chain = plan.next_chain()
    assert chain is not None
    assert chain.resume == ref(node, 3)
    assert chain.num_epochs == 6


def test_a_worker_gets_the_longest_path_as_one_chain():
    plan = SearchPlan()
    for trial, schedule in enumerate([Step(1.0, [4]), Step(1.0, [4, 8]), Constant(1.0)]):
        plan.request(trial, plan.insert(timeline(schedule)), 12 - trial)
    chain = plan.next_chain()
    assert chain is not None
    assert [(s.start, s.stop) for s in chain.stages] == [(0, 4), (4, 8), (8, 12)]


def test_cost_decides_which_path_is_longest():
    plan = SearchPlan(cost=lambda config: {1: 1.0, 2: 5.0}[config["lr"].value])
    slow = plan.insert(timeline(Constant(2)))
    plan.request("short and slow", slow, 4)
    plan.request("long and quick", plan.insert(timeline(Constant(1))), 12)
    chain = plan.next_chain()
    assert chain is not None
    assert chain.stages[0].node == slow


def test_a_lost_checkpoint_is_trained_again():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    for trial, epoch in (("a", 3), ("b", 6)):
        plan.request(trial, node, epoch)
    driver = Driver(plan)
    driver.run()
    plan.request("b", node, 9)
    chain = plan.next_chain()
    assert chain is not None
    assert chain.resume is not None
    plan.abandon(chain)
    plan.record(CheckpointLost(checkpoint=chain.resume, reason="flipped bits", worker="w"))
    again = plan.next_chain()
    assert again is not None
    assert again.resume == ref(node, 3)
    assert again.num_epochs == 6


def test_a_lost_checkpoint_at_a_branch_is_trained_again_for_all_children():
    plan = SearchPlan()
    plan.request(0, plan.insert(timeline(Constant(1))), 4)
    Driver(plan).run()
    lines = [MultiStep([1, level], milestones=[4]) for level in (2, 3)]
    for trial, schedule in enumerate(lines):
        plan.request(trial + 1, plan.insert(timeline(schedule)), 12)
    plan.drop(ref(0, 4))
    driver = Driver(plan)
    driver.run()
    assert sum(driver.trained.values()) == 4 + 2 * 8
    assert len(driver.answers) == 2


def failed(
    node: int, epoch: int, *, kind: str = "error", reached: int | None = None
) -> StageFailed:
    return StageFailed(
        node=node,
        start=0,
        stop=12,
        epoch=epoch,
        kind=kind,
        message="boom",
        worker="w",
        reached=reached,
    )


def test_a_failure_fails_what_lies_beyond_it_and_nothing_else():
    plan = SearchPlan()
    trunk = plan.insert(timeline(Constant(1)))
    early = plan.insert(timeline(MultiStep([1, 2], milestones=[3])))
    late = plan.insert(timeline(MultiStep([1, 3], milestones=[9])))
    for trial, node in (("trunk", trunk), ("early", early), ("late", late)):
        plan.request(trial, node, 12)
    chain = plan.next_chain()
    assert chain is not None
    plan.abandon(chain)
    answers = plan.record(failed(trunk, 5))
    assert sorted(str(a.trial) for a in answers) == ["late", "trunk"]
    assert all(a.failure == ("error", "boom", "") for a in answers)
    driver = Driver(plan)
    driver.run()
    assert [a.trial for a in driver.answers] == ["early"]
    again = plan.request("another", late, 12)
    assert again is not None
    assert again.failure is not None


@pytest.mark.parametrize(("kind", "tries"), [("lost", MAX_ATTEMPTS), ("evicted", MAX_EVICTIONS)])
def test_a_lost_worker_is_tried_again_but_not_forever(kind, tries):
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 12)
    for attempt in range(tries):
        chain = plan.next_chain()
        assert chain is not None
        plan.abandon(chain)
        answers = plan.record(failed(node, 0, kind=kind))
        assert bool(answers) == (attempt == tries - 1)
    assert plan.next_chain() is None


def test_a_stage_that_comes_to_other_epochs_is_tried_more_often_but_not_forever():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 12)
    reached = [4, 2, 4, 2, *range(5, 5 + MAX_LOSSES - 4)]
    assert len(reached) == MAX_LOSSES
    for attempt, epoch in enumerate(reached, start=1):
        chain = plan.next_chain()
        assert chain is not None
        plan.abandon(chain)
        answers = plan.record(failed(node, 0, kind="lost", reached=epoch))
        assert bool(answers) == (attempt == MAX_LOSSES)
    assert plan.next_chain() is None


def test_losses_at_the_same_epoch_add_up_over_losses_elsewhere():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 12)
    for epoch in (3, 5, 3, 7):
        assert not plan.record(failed(node, 0, kind="lost", reached=epoch))
    assert plan.record(failed(node, 0, kind="lost", reached=3))


def test_evictions_are_no_mark_against_a_stage_whose_worker_is_lost_later():
    plan = SearchPlan()
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 12)
    kinds = ["evicted"] * (2 * MAX_ATTEMPTS) + ["lost"] * (MAX_ATTEMPTS - 1)
    for kind in kinds:
        assert not plan.record(failed(node, 0, kind=kind))
    assert plan.next_chain() is not None


def test_curve_runs_along_the_path():
    plan = SearchPlan()
    node = plan.insert(timeline(Step(1.0, [4])))
    plan.request("other", plan.insert(timeline(Constant(1.0))), 12)
    plan.request("a", node, 6)
    Driver(plan).run()
    assert [m["m"] for m in plan.curve(node, 6)] == [1, 2, 3, 4, 5, 6]


def test_garbage_spares_what_a_live_trial_stands_on():
    plan = SearchPlan(cuts=[2, 4, 6])
    node = plan.insert(timeline(Constant(1)))
    plan.request("a", node, 6)
    Driver(plan).run()
    dropped = evictable_checkpoints(plan, live=[(node, 4)], budget_bytes=1)
    assert [r.epoch for r in dropped] == [2, 6]
    assert evictable_checkpoints(plan, live=[], budget_bytes=10) == []


@given(requests)
@settings(max_examples=40, deadline=None)
def test_the_forest_covers_each_needed_epoch_once(asked):
    plan = SearchPlan()
    ends: dict[tuple[int, int], int] = {}
    for trial, (schedule, target) in enumerate(asked):
        node = plan.insert(timeline(schedule))
        plan.request(trial, node, target)
        ends[node, target] = ends.get((node, target), 0) + 1
    stages = stage_forest(plan, ends=ends)
    assert sum(s.stop - s.start for s in stages) == plan.num_epochs_needed
    assert sum((s.stop - s.start) * s.num_trials for s in stages) == sum(t for _, t in asked)


def borrowed(node: int, epoch: int) -> CheckpointRef:
    """Return a checkpoint that another plan has trained."""
    return CheckpointRef(
        node=node, epoch=epoch, path="other", num_bytes=9, digest="", train_loss=0.5
    )


def epoch_done(node: int, epoch: int) -> EpochDone:
    return EpochDone(node=node, epoch=epoch, metrics={"m": 1.0}, seconds=0.0, worker="w")


def test_an_epoch_whose_state_another_plan_has_kept_is_not_trained():
    plan = SearchPlan()
    node = plan.insert(Timeline({"lr": Constant(0.1)}, epochs=6))
    plan.restore(borrowed(node, 2))
    plan.restore(borrowed(node, 6))
    plan.request(0, node, 4)
    chain = plan.next_chain()
    assert chain.resume is None
    assert [(s.start, s.stop, s.kept) for s in chain.stages] == [(0, 4, (borrowed(node, 2),))]
    assert chain.stages[0].kept_at(2) == borrowed(node, 2)
    assert chain.stages[0].kept_at(3) is None


def test_training_goes_on_from_such_a_state_once_its_epoch_is_evaluated():
    plan = SearchPlan()
    node = plan.insert(Timeline({"lr": Constant(0.1)}, epochs=6))
    plan.restore(borrowed(node, 2))
    plan.request(0, node, 2)
    chain = plan.next_chain()
    plan.record(epoch_done(node, 1))
    assert not plan.nodes[node].checkpoints
    answers = plan.record(epoch_done(node, 2))
    plan.abandon(chain)
    assert [answer.epoch for answer in answers] == [2]
    plan.request(0, node, 6)
    assert plan.next_chain().resume == borrowed(node, 2)


def test_a_state_of_another_plan_that_is_gone_is_trained():
    plan = SearchPlan()
    node = plan.insert(Timeline({"lr": Constant(0.1)}, epochs=6))
    plan.restore(borrowed(node, 2))
    plan.record(CheckpointLost(checkpoint=borrowed(node, 2), reason="gone", worker="w"))
    plan.request(0, node, 2)
    assert plan.next_chain().stages[0].kept == ()


def test_files_of_another_plan_are_not_dropped_and_do_not_count():
    plan = SearchPlan()
    node = plan.insert(Timeline({"lr": Constant(0.1)}, epochs=6))
    for epoch in (1, 2):
        plan.record(epoch_done(node, epoch))
        plan.restore(borrowed(node, epoch))
    assert evictable_checkpoints(plan, live=[], budget_bytes=1) == []


# -- states that were only passed ----------------------------------------------------------


def passed(plan, node=0, *, stands=()):
    return [ref.epoch for ref in superseded(plan, node, stands=lambda n, e: (n, e) in stands)]


def kept_to(epoch, **options):
    """Return a plan of one node with all checkpoints after epochs 1, 2, ..."""
    plan = SearchPlan(**options)
    plan.insert(Timeline({"lr": 0.1}, epochs=9))
    for e in range(1, epoch + 1):
        plan.restore(CheckpointRef(node=0, epoch=e, path="", num_bytes=1, digest=""))
    return plan


def test_a_later_state_takes_the_place_of_earlier_ones():
    assert passed(kept_to(4)) == [1, 2, 3]
    assert passed(kept_to(0)) == passed(kept_to(1)) == []


def test_states_where_trials_stand_and_where_the_space_may_branch_are_kept():
    assert passed(kept_to(5, cuts=[2]), stands={(0, 3)}) == [1, 4]


def test_states_where_the_space_may_branch_in_an_interval_are_kept_up_to_the_milestone():
    space = Space(lr=Step(0.1, [Float(2, 7)]))
    plan = SearchPlan(intervals=space.branches(max_epochs=9).intervals)
    node = plan.insert(Timeline({"lr": Step(0.1, [4.5])}, epochs=9))
    plan.request("trial", node, 9)
    stages = plan.next_chain().stages
    assert [stage.stop for stage in stages] == [2, 3, 4, 9]
    for stage in stages:
        plan.restore(ref(node, stage.stop))
    assert passed(plan, node) == []


SCHEDULES = st.one_of(
    st.sampled_from([0.1, 0.2]),
    st.builds(
        Step,
        st.sampled_from([0.1, 0.2]),
        st.lists(st.sampled_from([2, 3, 3.5, 4.5, 6]), min_size=1, max_size=3, unique=True).map(
            sorted
        ),
        gamma=st.sampled_from([0.5, 1.0]),
    ),
    st.builds(Warmup, st.sampled_from([2, 2.5, 3]), st.builds(Cosine, st.just(0.1))),
)


@given(
    lr=st.lists(SCHEDULES, min_size=2, max_size=5, unique=True),
    wd=st.lists(SCHEDULES, min_size=1, max_size=3, unique=True),
)
def test_wherever_two_trials_of_a_space_part_both_keep_their_states(lr, wd):
    space = Space(lr=Choice(lr), wd=Choice(wd))
    found = space.branches(max_epochs=9)
    plan = SearchPlan(cuts=found.epochs, intervals=found.intervals)
    lines = [Timeline({"lr": a, "wd": b}, epochs=9) for a in lr for b in wd]
    for one in lines:
        for other in lines:
            if 0 < (epoch := common_prefix(one, other)) < 9:
                node = plan.nodes[plan.insert(one)]
                assert plan.may_branch(plan.owner(node.id, epoch), epoch)


def test_no_state_is_kept_where_nobody_follows_the_piece_that_ends():
    space = Space(lr=Choice([Step(0.1, [drop]) for drop in (2, 4, 6)]))
    plan = SearchPlan(intervals=space.branches(max_epochs=9).intervals)
    node = plan.insert(Timeline({"lr": Step(0.1, [4])}, epochs=9))
    plan.request("trial", node, 9)
    assert [stage.stop for stage in plan.next_chain().stages] == [2, 4, 9]


def test_states_that_a_node_branches_off_are_kept():
    plan = kept_to(4)
    plan.insert(Timeline({"lr": MultiStep([0.1, 0.2], milestones=[2])}, epochs=9))
    assert passed(plan) == [1, 3]


def test_states_that_pending_work_starts_from_are_kept():
    plan = kept_to(6)
    plan.drop(plan.nodes[0].checkpoints[4])
    child = plan.insert(Timeline({"lr": MultiStep([0.1, 0.2], milestones=[4])}, epochs=9))
    plan.request("trial", child, 9)
    assert passed(plan) == [1, 2, 5]
    chain = plan.next_chain()
    assert (chain.resume.epoch, chain.stages[0].stop) == (3, 4)
    assert passed(plan) == [1, 2, 5], "it is under way"


@given(st.lists(strategies.schedules, min_size=1, max_size=12))
@settings(deadline=None)
def test_a_longer_timeline_passes_the_nodes_of_the_shorter_one(drawn):
    """A study that becomes longer finds all that its trials have trained, and nothing else."""
    plan, before, after = SearchPlan(), strategies.EPOCHS, 2 * strategies.EPOCHS
    short = [plan.insert(Timeline({"lr": each}, epochs=before)) for each in drawn]
    for schedule, node in zip(drawn, short, strict=True):
        config = {"lr": schedule}
        longer = plan.insert(Timeline(config, epochs=after))
        mine = [plan.owner(node, epoch).id for epoch in range(1, before + 1)]
        found = [plan.owner(longer, epoch).id for epoch in range(1, before + 1)]
        assert (found == mine) == starts_alike(config, before=before, after=after)
        one, two = (Timeline(config, epochs=epochs) for epochs in (before, after))
        if starts_alike(config, before=before, after=after):
            for epoch in range(before):
                steps = (each.values("lr", epoch, num_steps=3) for each in (one, two))
                assert next(steps) == next(steps)
