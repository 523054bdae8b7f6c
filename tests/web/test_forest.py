from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from thrifty.plan import SearchPlan, stage_forest as of_plan
from thrifty.space import MultiStep, Timeline
from thrifty.web.views._layouts import draw, stage_forest


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


EPOCHS = 9


@st.composite
def asked(draw_):
    """Draw trials as their milestones, the values between them, and their target epoch."""
    cuts = draw_(st.lists(st.integers(1, EPOCHS - 1), max_size=3, unique=True).map(sorted))
    values = draw_(st.lists(st.sampled_from([0.1, 0.2]), min_size=4, max_size=4))
    return tuple(cuts), tuple(values[: len(cuts) + 1]), draw_(st.integers(1, EPOCHS))


TRIALS = st.lists(asked(), min_size=1, max_size=14)


def rows(trials, *, values=None):
    """Return a plan with these trials, and the rows that a store would have of it."""
    plan = SearchPlan()
    ends = Counter()
    places = []
    for cuts, levels, target in trials:
        lr = MultiStep(levels, milestones=cuts) if cuts else levels[0]
        node = plan.insert(Timeline({"lr": lr}, epochs=EPOCHS))
        plan.note(node, target)
        ends[node, target] += 1
        places.append((node, target))
    tree = [
        SimpleNamespace(
            node=n.id, parent=None if n.parent is None else n.parent.id, start=n.start,
            last=n.farthest
        )
        for n in plan.nodes
    ]  # fmt: skip
    scores = values or [float(i) for i in range(len(trials))]
    ended = [
        SimpleNamespace(
            node=node, epoch=epoch, trials=1, failed=0, low=scores[i], high=scores[i], first=i
        )
        for i, (node, epoch) in enumerate(places)
    ]  # fmt: skip
    return plan, ends, tree, ended


@given(TRIALS)
def test_the_same_as_of_a_plan_in_memory(trials):
    plan, ends, tree, ended = rows(trials)
    mine = stage_forest(tree, ended, mode="max").stages
    theirs = of_plan(plan, ends=ends)

    def told(stages, count):
        above = {i: (s.node, s.stop) for i, s in enumerate(stages)}
        return {(s.node, s.start, s.stop, above.get(s.parent), count(s)) for s in stages}

    assert told(mine, lambda s: s.trials) == told(theirs, lambda s: s.num_trials)


@given(TRIALS, st.sampled_from(["min", "max"]))
def test_the_best_of_those_that_pass(trials, mode):
    _, _, tree, ended = rows(trials)
    forest = stage_forest(tree, ended, mode=mode)
    for place in range(len(forest.stages)):
        passing = forest.some_trials(place, limit=len(trials))
        assert len(passing) == forest.stages[place].trials
        best = min(passing) if mode == "min" else max(passing)
        assert forest.sign * forest.stages[place].score == best


@given(TRIALS, st.integers(1, 12))
def test_what_is_drawn_hangs_together_and_does_not_overlap(trials, limit):
    _, _, tree, ended = rows(trials)
    forest = stage_forest(tree, ended, mode="max")
    drawn = draw(forest, metric="m", limit=limit)
    shown = {stage.id: stage for stage in drawn.stages}
    assert len(shown) == min(limit, drawn.total)
    hidden = sum(more.stages for more in drawn.more)
    assert hidden == drawn.total - len(shown)
    for stage in drawn.stages:
        if stage.parent is not None:
            above = shown[stage.parent]
            assert above.stop == stage.start
            assert above.top <= stage.top < stage.bottom <= above.bottom
    boxes = [(b.start, b.stop, b.top, b.bottom) for b in (*drawn.stages, *drawn.more)]
    assert all(bottom <= drawn.rows for *_, bottom in boxes)
    for i, (start, stop, top, bottom) in enumerate(boxes):
        for other in boxes[:i]:
            apart = stop <= other[0] or other[1] <= start or bottom <= other[2] or other[3] <= top
            assert apart


@given(TRIALS)
def test_a_path_is_the_way_of_a_trial(trials):
    _, _, tree, ended = rows(trials)
    forest = stage_forest(tree, ended, mode="max")
    starts = {row.node: (row.parent, row.start) for row in tree}
    for end in ended:
        node = end.node
        while end.epoch <= starts[node][1]:
            node = starts[node][0]
        path = [forest.stages[place] for place in forest.path(node, end.epoch)]
        assert [s.start for s in path] == [0, *(s.stop for s in path[:-1])]
        assert path[-1].stop == end.epoch
        assert all(
            end.first in forest.some_trials(p, limit=99) for p in forest.path(node, end.epoch)
        )


def test_shared_epochs_are_counted_once():
    _, _, tree, ended = rows([((), (0.1,), 9), ((3,), (0.1, 0.2), 9), ((3, 6), (0.1, 0.2, 0.1), 9)])
    drawn = draw(stage_forest(tree, ended, mode="max"), metric="m", limit=99)
    # 27 epochs reached; 9 + 6 + 3 trained.
    assert drawn.saved == 9


@pytest.mark.parametrize(
    ("last", "failed", "state"),
    [(9, 0, "done"), (4, 0, "running"), (0, 0, "pending"), (4, 1, "failed")],
)
def test_a_stage_has_the_state_of_its_trials(last, failed, state):
    _, _, tree, ended = rows([((), (0.1,), 9)])
    tree[0].last, ended[0].failed = last, failed
    assert draw(stage_forest(tree, ended, mode="max"), metric="m", limit=9).stages[0].state == state


def test_trials_that_have_not_begun_are_not_there():
    _, _, tree, ended = rows([((), (0.1,), 9)])
    ended[0].epoch = 0
    drawn = draw(stage_forest(tree, ended, mode="max"), metric="m", limit=9)
    assert (drawn.stages, drawn.rows, drawn.epochs) == ([], 0.0, 0)
