"""Hypothesis strategies for the whole suite.

Numbers are few and round on purpose: two schedules drawn independently coincide often, for a while.
But no two of their straight lines coincide without being drawn from the same numbers.
"""

from __future__ import annotations

from hypothesis import settings, strategies as st

from thrifty.space import (
    REX,
    WSD,
    Choice,
    Constant,
    Cosine,
    CosineRestarts,
    Cyclic,
    Exponential,
    Float,
    Int,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Space,
    Step,
    Trunk,
    Warmup,
)


# Use the same examples each time: a test fails because of a change, not because of a draw.
settings.register_profile("thrifty", deadline=None, derandomize=True, database=None)
settings.load_profile("thrifty")

EPOCHS = 12
"""Length of the run that every drawn schedule fits."""

levels = st.sampled_from([0.1, 0.7, 1.3])
floors = st.sampled_from([0.0, 0.03])
lengths = st.sampled_from([None, 2, 3.5, 4, 6])
periods = st.sampled_from([1.5, 2, 4])
rates = st.sampled_from(["step", "step", "epoch", 0.25, (0.5, 0.75)])
shapes = st.sampled_from(["cosine", "linear"])
milestones = st.lists(st.sampled_from([1, 2, 2.5, 4, 5]), min_size=1, max_size=3, unique=True).map(
    lambda times: tuple(sorted(times))
)


@st.composite
def multi_steps(draw):
    times = draw(milestones)
    values = draw(st.lists(levels, min_size=len(times) + 1, max_size=len(times) + 1))
    return MultiStep(tuple(values), milestones=times)


LEAVES = {
    "Constant": st.builds(Constant, levels),
    "Cosine": st.builds(Cosine, levels, floor=floors, epochs=lengths, sample=rates),
    "CosineRestarts": st.builds(
        CosineRestarts,
        levels,
        period=periods,
        growth=st.sampled_from([1.0, 2.0]),
        floor=floors,
        sample=rates,
    ),
    "Cyclic": st.builds(Cyclic, floors, levels, period=periods, sample=rates),
    "Exponential": st.builds(Exponential, levels, gamma=st.sampled_from([0.5, 1.0]), sample=rates),
    "Linear": st.builds(Linear, levels, floor=floors, epochs=lengths, sample=rates),
    "MultiStep": multi_steps(),
    "OneCycle": st.builds(
        OneCycle,
        levels,
        warmup=st.sampled_from([0.25, 0.5]),
        div=st.just(10.0),
        final_div=st.just(100.0),
        shape=shapes,
        epochs=lengths,
        sample=rates,
    ),
    "Polynomial": st.builds(
        Polynomial,
        levels,
        power=st.sampled_from([1.0, 2.0]),
        floor=floors,
        epochs=lengths,
        sample=rates,
    ),
    "REX": st.builds(
        REX, levels, d=st.sampled_from([0.0, 0.5]), floor=floors, epochs=lengths, sample=rates
    ),
    "Step": st.builds(Step, levels, milestones, gamma=st.sampled_from([0.1, 0.5, 1.0])),
    "Step every": st.builds(Step, levels, every=periods, gamma=st.sampled_from([0.5, 1.0])),
    "WSD": st.builds(
        WSD,
        levels,
        cooldown=st.sampled_from([1, 2.5]),
        warmup=st.sampled_from([0, 1, 2.5]),
        floor=floors,
        shape=st.sampled_from(["linear", "cosine", "1-sqrt", "square"]),
        epochs=st.sampled_from([None, 5, 6]),
        sample=rates,
    ),
    "WSD exp": st.builds(
        WSD,
        st.sampled_from([0.5, 1.0]),
        cooldown=st.just(2.5),
        floor=st.just(0.1),
        shape=st.just("exp"),
    ),
    "Trunk": st.builds(
        Trunk,
        levels,
        epochs=st.sampled_from([2, 3.5, 6]),
        warmup=st.sampled_from([0, 1]),
        average=st.just("swa"),
    ),
}
"""Every kind that is not made of others; none needs more than 6 epochs."""

leaves = st.one_of(*LEAVES.values())


@st.composite
def _schedules(draw):
    """Draw a schedule that fits ``EPOCHS``: a leaf, perhaps warmed up or followed by another."""
    one = draw(leaves)
    if draw(st.booleans()) and draw(st.booleans()):
        start, rate = draw(st.sampled_from([0.0, 0.5])), draw(rates)
        one = Warmup(draw(st.sampled_from([1, 2, 2.5])), one, start=start, sample=rate)
    for at in draw(st.sampled_from([(), (), (9,), (9, 10)])):
        one = one.then(draw(st.one_of(levels, st.builds(Linear, levels))), at=at)
    return one


schedules = _schedules()

seeds = st.integers(0, 2**32 - 1)
plain_floats = st.builds(
    lambda low, width, log: Float(low, low + width, log=log),
    st.floats(1e-6, 1e3),
    st.floats(0.0, 1e3),
    st.booleans(),
)
stepped_floats = st.builds(
    lambda low, width, step: Float(low, low + width, step=step),
    st.floats(-10, 10),
    st.floats(0, 10),
    st.floats(0.05, 3),
)
plain_ints = st.builds(
    lambda low, width, log: Int(low, low + width, log=log),
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.booleans(),
)
stepped_ints = st.builds(
    lambda low, width, step: Int(low, low + width, step=step),
    st.integers(-100, 100),
    st.integers(0, 100),
    st.integers(1, 20),
)
floats = st.one_of(plain_floats, stepped_floats)
ints = st.one_of(plain_ints, stepped_ints)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), levels, st.sampled_from(["sgd", "adam"])
)
options = st.one_of(plain_values, leaves)
choices = st.lists(options, min_size=1, max_size=4, unique_by=repr).map(Choice)
domains = st.one_of(floats, ints, choices)


@st.composite
def _spaces(draw):
    """Draw a space with a condition: ``momentum`` exists if and only if ``kind`` is ``"sgd"``."""
    few = st.one_of(domains, plain_values, schedules)
    names = st.sampled_from(["lr", "width", "decay"])
    return Space(
        momentum=draw(domains).when(kind="sgd"),
        kind=Choice(draw(st.permutations(["sgd", "adam", 3]))),
        **draw(st.dictionaries(names, few, max_size=2)),
    )


spaces = _spaces()
configs = st.dictionaries(
    st.sampled_from(["lr", "width", "decay"]),
    st.one_of(plain_values, schedules, st.lists(plain_values, max_size=3).map(tuple)),
    min_size=1,
)
