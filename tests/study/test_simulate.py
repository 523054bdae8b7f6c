"""Simulated studies: real decisions, virtual time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thrifty.core import EpochDone, UsageError
from thrifty.plan import SearchPlan
from thrifty.run import Faults
from thrifty.search import (
    ASHA,
    BOSS,
    CheckedBOSS,
    FreezeThaw,
    GridSampler,
    GridSearch,
    History,
    Hyperband,
    MedianStopping,
    PopulationBasedTraining,
    Proposal,
    RandomSearch,
    Stop,
    SubSampling,
    SuccessiveHalving,
    WideBOSS,
)
from thrifty.space import Choice, Constant, Float, MultiStep, Space, Step, Timeline, Warmup
from thrifty.store import Store
from thrifty.study._forecast import forecast
from thrifty.study._goals import Goals
from thrifty.study.simulation._simulate import (
    JointAlgorithm,
    JointHistory,
    MadeUpCurve,
    SimulatedStudy,
    simulate,
)
from thrifty.study.simulation._simulation_report import DecisionTimes, Simulation, least_s
from thrifty.study.simulation._synthetic_results import MadeUpRun


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


SPACE = Space(
    lr=Choice([
        Constant(0.1),
        Step(0.1, [3]),
        Step(0.1, [6]),
        Step(0.1, [3, 6]),
        Warmup(2, Constant(0.1)),
        Warmup(2, Step(0.1, [6])),
    ]),
    batch=Choice([32, MultiStep([32, 64], milestones=[5])]),
)
WHOLE_RUNGS = [
    GridSearch(max_epochs=9),
    RandomSearch(max_epochs=9, num_trials=10),
    SuccessiveHalving(max_epochs=9, num_trials=12, sampler=GridSampler()),
    Hyperband(max_epochs=9),
]
ALGORITHMS = [*WHOLE_RUNGS, ASHA(max_epochs=9, num_trials=15)]
TROUBLE = Faults(
    mean_between_failures_s=300.0,
    repair_s=20.0,
    mean_between_preemptions_s=500.0,
    notice_s=15.0,
    replace_s=30.0,
    stragglers=0.3,
)


def one(algorithm=None, space=SPACE, **options):
    given = {"workers": 4, "epoch_s": 10.0}
    algorithm = GridSearch(max_epochs=9) if algorithm is None else algorithm
    return simulate(algorithm, space, **{**given, **options})


# -- how long ---------------------------------------------------------------------------------


def test_a_stage_tree_takes_what_can_be_counted_on_fingers():
    space = Space(lr=Choice([Constant(0.1), Step(0.1, [4])]))
    found = one(space=space, workers=2, start_s=1.0)
    # 1 + 40 s up to the branch; the branch waits for it, loads, and trains 5 epochs beside the
    # trunk.
    assert found.end_to_end_s == 1 + 40 + 1 + 50
    assert found.busy_s == (1 + 90) + (1 + 50)
    assert found.bound_s == 90
    assert (found.trial_epochs, found.unique_epochs) == (18, 14)
    assert found.merge_rate == 18 / 14
    assert found.utilisation == pytest.approx(142 / 184)
    assert found.efficiency == pytest.approx(90 / 92)


def test_without_sharing_each_trial_trains_all_of_its_epochs():
    space = Space(lr=Choice([Constant(0.1), Step(0.1, [4])]))
    found = one(space=space, workers=1, start_s=1.0, share=False)
    assert found.end_to_end_s == found.busy_s == 2 * (1 + 90)
    assert found.unique_epochs == found.trial_epochs == 18


def test_a_promoted_trial_goes_on_from_its_own_checkpoint():
    algorithm = SuccessiveHalving(max_epochs=9, num_trials=3)
    found = one(algorithm, workers=1, share=False, start_s=1.0)
    assert found.unique_epochs == 3 * 1 + 1 * (2 + 6)
    assert found.busy_s == 110 + 3 + 2


@pytest.mark.parametrize("share", [True, False])
def test_one_worker_is_never_idle(share):
    found = one(workers=1, share=share)
    assert found.end_to_end_s == found.busy_s == found.bound_s == 10 * found.unique_epochs


def test_epochs_that_depend_on_the_batch_size():
    space = Space(batch=Choice([32, MultiStep([32, 64], milestones=[5])]))
    found = one(space=space, workers=1, epoch_s=lambda values: 320 / values["batch"])
    assert found.busy_s == 9 * 10 + 4 * 5


def test_values_are_seen_as_the_user_wrote_them_where_nothing_is_shared():
    seen, metrics_of = set(), []

    def epoch_s(values):
        seen.update(values)
        return 1.0

    def outcome(timeline, epoch, seed):
        metrics_of.append(set(timeline.config))
        return {"score": 0.5}

    one(epoch_s=epoch_s, outcome=outcome, share=False)
    assert seen == set(SPACE.names)
    assert all(names == seen for names in metrics_of)


# -- the answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [a for a in WHOLE_RUNGS if not isinstance(a, RandomSearch)])
def test_as_many_epochs_as_the_forecast_says(algorithm):
    goals = Goals.of("score", "max")
    wanted = forecast(algorithm, SPACE, goals=goals, seed=3)
    found = one(algorithm, seed=3)
    low, high = wanted.unique_range
    assert found.num_trials == wanted.num_trials
    assert found.trial_epochs == wanted.trial_epochs
    if wanted.exact:
        assert low == found.unique_epochs == high


TWINS = [
    *ALGORITHMS,
    MedianStopping(max_epochs=9, num_trials=20),
    BOSS(max_epochs=9),
    WideBOSS(max_epochs=9),
    CheckedBOSS(max_epochs=9),
    SubSampling(max_epochs=9, num_trials=12),
    FreezeThaw(max_epochs=9, num_trials=12),
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", TWINS, ids=lambda a: type(a).__name__)
def test_a_forecast_decides_what_a_simulation_on_one_worker_decides(algorithm, seed):
    run = MadeUpRun(algorithm, SPACE, seed=seed)
    run.play(History(max_epochs=9))
    found = one(algorithm, workers=1, seed=seed)
    assert len(run.history) == found.num_trials
    assert run.trial_epochs == found.trial_epochs
    assert run.plan.num_epochs_needed == found.unique_epochs
    assert max(trial.scores[-1] for trial in run.history) == found.best_value


@given(st.sampled_from(WHOLE_RUNGS), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_neither_sharing_nor_workers_change_the_answer(algorithm, workers, seed):
    shared = one(algorithm, workers=workers, seed=seed)
    alone = one(algorithm, workers=1, seed=seed, share=False)
    assert shared.best_value == alone.best_value
    assert shared.num_trials == alone.num_trials
    assert shared.trial_epochs == alone.trial_epochs == alone.unique_epochs
    assert shared.unique_epochs <= alone.unique_epochs


@given(st.sampled_from(WHOLE_RUNGS), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_faults_change_the_time_and_not_the_answer(algorithm, workers, seed):
    quiet = one(algorithm, workers=workers, seed=seed)
    # Stages of a few epochs are not lost three times in a row.
    faulty = one(algorithm, workers=workers, seed=seed, faults=TROUBLE)
    if not faulty.num_failed:
        assert faulty.best_value == quiet.best_value
        assert faulty.unique_epochs == quiet.unique_epochs


@pytest.mark.sample(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("share", [True, False])
def test_the_same_arguments_give_the_same_simulation(algorithm, share):
    first, again = (one(algorithm, faults=TROUBLE, share=share, seed=1) for _ in range(2))
    assert first == again
    assert first.end_to_end_s != one(algorithm, faults=TROUBLE, share=share, seed=2).end_to_end_s


def test_members_of_a_population_go_on_from_their_donors():
    algorithm = PopulationBasedTraining(max_epochs=8, population=6, interval=2, explore=("lr",))
    space = Space(lr=Float(0.01, 0.1))
    shared, alone = (one(algorithm, space, share=share) for share in (True, False))
    assert alone.unique_epochs == shared.unique_epochs == 6 * 8
    assert alone.trial_epochs > alone.unique_epochs
    assert alone.best_value == shared.best_value


def test_the_metric_and_its_direction():
    found = {mode: one(metric="loss", mode=mode).best_value for mode in ("max", "min")}
    assert 0 < found["min"] < found["max"] < 1


def test_a_metric_that_is_not_there():
    with pytest.raises(UsageError, match="score"):
        one(outcome=lambda timeline, epoch, seed: {"loss": 1.0})


# -- faults --------------------------------------------------------------------------------------


def test_what_is_lost_is_trained_again():
    found = one(faults=Faults(mean_between_failures_s=200.0, repair_s=5.0), seed=4)
    assert found.failures > 0
    assert found.epochs_redone > 0
    assert found.busy_s > 10 * found.unique_epochs
    assert found.end_to_end_s > one(seed=4).end_to_end_s


@pytest.mark.parametrize("seed", range(4))
def test_branches_that_are_asked_for_later_begin_at_a_kept_state(seed):
    algorithm = ASHA(max_epochs=9, num_trials=30, min_epochs=7)
    found = one(algorithm, workers=2, seed=seed)
    assert (found.epochs_redone, found.num_failed) == (0, 0)


def test_notice_saves_work():
    rate = {"mean_between_preemptions_s": 150.0, "replace_s": 5.0}
    without, with_notice = (
        one(faults=Faults(**rate, notice_s=notice_s), seed=4) for notice_s in (0.0, 10.0)
    )
    assert without.preemptions > 0
    assert without.epochs_redone > 0
    assert with_notice.preemptions > 0
    assert with_notice.epochs_redone == 0
    assert with_notice.num_failed == 0


def test_a_stage_that_is_lost_again_and_again_is_given_up():
    found = one(
        GridSearch(max_epochs=9),
        Space(width=Choice([1, 2])),
        workers=2,
        faults=Faults(mean_between_failures_s=1.0, repair_s=1.0),
    )
    assert found.num_failed == found.num_trials == 2
    assert found.best_value is None
    assert found.trial_epochs == 0


def test_stragglers_are_in_the_bound():
    found = one(workers=1, faults=Faults(stragglers=1.0, slowdown=3.0))
    assert found.bound_s == found.end_to_end_s == 3 * one(workers=1).end_to_end_s


def test_states_that_are_passed_go_without_a_word(caplog):
    """Simulated states have no files, so deleting them causes no warning."""
    simulate(MedianStopping(max_epochs=9, num_trials=30), SPACE, workers=2, epoch_s=1.0)
    simulate(ASHA(max_epochs=9, num_trials=30), SPACE, workers=2, epoch_s=1.0)
    assert not caplog.records


def test_made_up_failures_are_not_logged(caplog):
    assert one(faults=TROUBLE, seed=4).failures
    assert not caplog.records


# -- several studies -----------------------------------------------------------------------------


def test_equal_studies_train_nothing_twice():
    grid = GridSearch(max_epochs=9)
    single, double = one(grid), one([grid, grid])
    assert double.num_trials == 2 * single.num_trials
    assert double.trial_epochs == 2 * single.trial_epochs
    assert double.unique_epochs == single.unique_epochs
    assert one([grid, grid], share=False).unique_epochs == double.trial_epochs


def test_each_study_does_what_it_would_alone():
    algorithms = [Hyperband(max_epochs=9), GridSearch(max_epochs=9)]
    halving = SuccessiveHalving(max_epochs=9, num_trials=6)
    together = one([*algorithms, halving])
    alone = [one(algorithm) for algorithm in algorithms]
    # The third one draws with a seed of its own.
    assert together.num_trials == sum(found.num_trials for found in alone) + 6
    assert together.unique_epochs <= sum(found.unique_epochs for found in alone) + 6 * 9
    assert together.best_value >= max(found.best_value for found in alone)


def test_a_list_of_one_is_one():
    for algorithm in ALGORITHMS:
        assert one([algorithm], [SPACE], faults=TROUBLE) == one(algorithm, faults=TROUBLE)


def test_studies_of_different_spaces():
    spaces = [Space(width=Choice([1, 2])), Space(depth=Choice([1, 2, 3]))]
    found = one(GridSearch(max_epochs=4), spaces[0])
    found = one([GridSearch(max_epochs=4)] * 2, spaces)
    assert (found.num_trials, found.unique_epochs) == (5, 20)


def test_populations_beside_each_other():
    algorithm = PopulationBasedTraining(max_epochs=6, population=4, interval=2, explore=("lr",))
    space = Space(lr=Float(0.01, 0.1))
    shared, alone = (one([algorithm] * 2, space, share=share) for share in (True, False))
    assert shared.unique_epochs == alone.unique_epochs == 2 * 4 * 6


def test_a_joint_history_keeps_one_for_each_study():
    history = JointHistory(2, max_epochs=9)
    twins = [History(max_epochs=9) for _ in range(2)]
    new = Proposal(target=1, config={"lr": 0.1}, group="a")
    script = [(0, new), (1, new), (1, replace(new, group="b")), (0, replace(new, group="b"))]
    for study, decision in script:
        history.record_decision(history.joint(study, decision))
        twins[study].record_decision(decision)
    for number, (study, own, score) in enumerate([(0, 0, 0.1), (1, 0, 0.2), (1, 1, -math.inf)]):
        history.record_scores(number, [score])
        twins[study].record_scores(own, [score])
    history.record_failure(3)
    twins[0].record_failure(1)
    later = [(0, Stop(trial=0)), (1, Proposal(target=3, trial=0, group="a"))]
    branch = Proposal(target=3, config={"lr": 0.2}, group="c", parent=(0, 1))
    for study, decision in [*later, (1, branch)]:
        history.record_decision(history.joint(study, decision))
        twins[study].record_decision(decision)
    for part, twin in zip(history.parts, twins, strict=True):
        assert list(part) == list(twin)
        for group in "ab":
            assert part.leaderboard(1, group=group)[:] == twin.leaderboard(1, group=group)[:]
        assert part.num_decisions == twin.num_decisions
    assert history[4].parent == (1, 1)
    assert history.num_running == sum(twin.num_running for twin in twins) == 2


def test_free_workers_are_shared_out():
    asked = []

    class Asked(RandomSearch):
        def ask(self, history, space, *, num, rng):
            asked.append(num)
            return ()

    studies = [
        SimulatedStudy(algorithm=Asked(max_epochs=9, num_trials=1), space=SPACE, seed=0)
        for _ in range(2)
    ]
    rng = np.random.default_rng(0)
    assert JointAlgorithm(studies).ask(JointHistory(2, max_epochs=9), SPACE, num=5, rng=rng) == []
    assert asked == [3, 3]


def test_studies_that_do_not_fit_together():
    with pytest.raises(UsageError, match="same max_epochs; these have 9, 4"):
        one([GridSearch(max_epochs=9), GridSearch(max_epochs=4)])
    with pytest.raises(UsageError, match="2 algorithms and 1 spaces"):
        one([GridSearch(max_epochs=9)] * 2, [SPACE])
    with pytest.raises(UsageError, match="0 algorithms"):
        one([])


# -- the records ---------------------------------------------------------------------------------


def test_all_is_recorded_as_in_a_real_run(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    found = one(Hyperband(max_epochs=9), storage=url)
    with Store.open(url, create=False) as store:
        info = store.studies.get("simulated")
        assert info.state == "done"
        assert len(store.studies.load(info.id).trials) == found.num_trials
        assert len(store.plans.load(info.plan).epochs) == found.unique_epochs
    with pytest.raises(UsageError, match="simulated"):
        one(storage=url)


def test_checkpoints_are_added_up():
    found = one(space=Space(width=Choice([1, 2, 3])), checkpoint_bytes=100)
    assert found.kept_bytes == 300


# -- the bound -----------------------------------------------------------------------------------


@given(
    st.sampled_from(ALGORITHMS),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, TROUBLE]),
    st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_nothing_is_quicker_than_the_bound(algorithm, workers, share, faults, seed):
    found = one(algorithm, workers=workers, share=share, faults=faults, seed=seed)
    assert found.bound_s <= found.end_to_end_s * (1 + 1e-9)
    assert found.busy_s <= found.workers * found.end_to_end_s * (1 + 1e-9)
    assert found.bound_s >= 10.0 * found.unique_epochs / workers * (1 - 1e-9)


@st.composite
def small_plans(draw):
    """Draw a few timelines over few epochs, all trained."""
    plan = SearchPlan()
    for _ in range(draw(st.integers(1, 3))):
        epochs = draw(st.integers(1, 3))
        values = draw(st.lists(st.integers(0, 1), min_size=epochs, max_size=epochs))
        config = {
            "x": values[0] if epochs == 1 else MultiStep(values, milestones=list(range(1, epochs)))
        }
        node = plan.insert(Timeline(config, epochs=epochs))
        for epoch in range(1, epochs + 1):
            owner = plan.owner(node, epoch)
            done = EpochDone(node=owner.id, epoch=epoch, metrics={}, seconds=0.0, worker="")
            plan.record(done)
    return plan


def best_possible(plan, workers):
    """Return the shortest schedule of unit epochs, by trying all of them."""
    before = {}
    for node in plan.nodes:
        for epoch in node.metrics:
            parent = None if epoch == 1 else (plan.owner(node.id, epoch - 1).id, epoch - 1)
            before[node.id, epoch] = parent
    states, steps = {frozenset()}, 0
    while frozenset(before) not in states:
        steps += 1
        states = {
            done | frozenset(chosen)
            for done in states
            for ready in [
                [t for t, p in before.items() if t not in done and (p is None or p in done)]
            ]
            for chosen in itertools.combinations(ready, min(workers, len(ready)))
        }
    return steps


@given(small_plans(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_one(plan, workers):
    best = best_possible(plan, workers)
    bound = least_s(plan, seconds_of=lambda timeline, epoch: 1.0, slowdowns=[1.0] * workers)
    assert bound <= best + 1e-9
    work = sum(len(node.metrics) for node in plan.nodes)
    longest = max(epoch for node in plan.nodes for epoch in node.metrics)
    assert bound >= max(work / workers, longest)
    if workers == 1:
        assert bound == best


def test_a_trunk_and_a_tail_count():
    plan = SearchPlan()
    trunk = plan.insert(Timeline({"x": 0}, epochs=10))
    branches = [
        plan.insert(Timeline({"x": MultiStep([0, i], milestones=[5])}, epochs=10))
        for i in range(1, 5)
    ]
    for node in [trunk, *branches]:
        for epoch in range(1, 11):
            owner = plan.owner(node, epoch).id
            plan.record(EpochDone(node=owner, epoch=epoch, metrics={}, seconds=0.0, worker=""))
    # 5 epochs before anything can run in parallel, then 25 on two workers.
    slow = {"seconds_of": lambda timeline, epoch: 2.0, "slowdowns": [1.0, 1.0]}
    assert least_s(plan, **slow) == 2 * (5 + 12.5)
    # Two workers that are three times as slow.
    assert least_s(plan, **{**slow, "slowdowns": [3.0, 3.0]}) == 6 * (5 + 12.5)


def test_nothing_trained_takes_no_time():
    assert least_s(SearchPlan(), seconds_of=lambda t, e: 1.0, slowdowns=[1.0]) == 0.0


# -- curves and words ----------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9), st.integers(0, 9))
def test_curves_agree_as_long_as_timelines_do(one_lr, other_lr, epoch, seed):
    options = SPACE["lr"].options
    curve = MadeUpCurve(metric="m", mode="max")
    timelines = [Timeline({"lr": options[i]}, epochs=9) for i in (one_lr, other_lr)]
    same = all(
        [t.values("lr", e, num_steps=4) for e in range(epoch)]
        == [timelines[0].values("lr", e, num_steps=4) for e in range(epoch)]
        for t in timelines
    )
    values = [curve(t, epoch, seed)["m"] for t in timelines]
    assert (values[0] == values[1]) == same
    assert curve(timelines[0], epoch, seed)["m"] > (
        curve(timelines[0], epoch - 1, seed)["m"] if epoch > 1 else 0.0
    )


def test_it_says_what_it_took():
    text = str(one(faults=TROUBLE, seed=4, workers=2))
    for word in (
        "2 workers",
        "end to end",
        "worker-hours",
        "merge rate",
        "failures",
        "lower bound",
        "p99",
    ):
        assert word in text
    assert "trained again" in text
    plain = str(one(share=False))
    assert "each trial by itself" in plain
    assert "faults" not in plain


def test_an_empty_simulation_has_no_shares():
    nothing = Simulation(
        workers=1,
        shared=True,
        end_to_end_s=0.0,
        busy_s=0.0,
        bound_s=0.0,
        num_trials=0,
        num_failed=0,
        trial_epochs=0,
        unique_epochs=0,
        epochs_redone=0,
        failures=0,
        preemptions=0,
        kept_bytes=0,
        best_value=None,
        decision_s=DecisionTimes.of([]),
        driver_s=0.0,
    )
    assert (nothing.utilisation, nothing.efficiency, nothing.merge_rate) == (0.0, 1.0, 0.0)
    assert "0.0 s" in str(nothing)


def test_decisions_are_timed():
    found = one()
    assert found.decision_s.num >= found.num_trials
    assert 0 <= found.decision_s.median <= found.decision_s.p99 <= found.decision_s.max
    assert found.decision_s.max <= found.driver_s
