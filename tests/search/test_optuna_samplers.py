from __future__ import annotations

import logging
import math
import sys

import numpy as np
import optuna
import pytest

from thrifty.core import AlgorithmError, MissingExtraError
from thrifty.search import (
    CMAESSampler,
    GPSampler,
    History,
    Hyperband,
    NSGAIISampler,
    Proposal,
    TPESampler,
    Trial,
)
from thrifty.search.samplers import _optuna
from thrifty.search.samplers._optuna_study import (
    OptunaStudy,
    _distribution,
    _param,
    _suggest,
    _violations,
)
from thrifty.space import Choice, Constant, Float, Int, Space, Step, Timeline, common_prefix
from thrifty.testing import check_algorithm


pytestmark = pytest.mark.slow


QUICK = [TPESampler(), CMAESSampler(), NSGAIISampler(population=6)]
SAMPLERS = [*QUICK, GPSampler()]
LINE = Space(x=Float(0.0, 1.0), y=Float(1e-4, 1.0, log=True))
NESTED = Space(
    lr=Choice([Constant(Float(0.01, 1.0)), Step(Choice([0.1, 0.2]), [Int(2, 6, step=2)])]),
    kind=Choice(["sgd", "adam"]),
    momentum=Float(0.0, 0.9, step=0.3).when(kind="sgd"),
    width=Int(8, 64, log=True),
    decay=0.1,
)


def hill(config):
    return -((config["x"] - 0.3) ** 2) - ((math.log10(config["y"]) + 2) / 4) ** 2


def rng(*seed):
    return np.random.default_rng(seed)


def tell(history, config, *, score=0.0, target=1, objectives=(), violation=0.0):
    number = history.record_decision(Proposal(target=target, config=config))
    if score is None:
        history.record_failure(number)
    else:
        history.record_scores(number, [score] * target, objectives=objectives, violation=violation)


def seen(space=LINE, *, num=20, score=hill, seed=0):
    history = History()
    for config in [space.sample(rng(seed, i)) for i in range(num)]:
        tell(history, config, score=score(config))
    return history


def found(sampler, *, num, seed, space=LINE, result=lambda c: {"score": hill(c)}):
    """Return the history of a search, one trial after the other."""
    history = History()
    for i in range(num):
        (config,) = sampler.sample(history, space, num=1, rng=rng(seed, i))
        tell(history, config, **result(config))
    return history


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_same_stream_same_answer(sampler):
    one, again, other = (
        sampler.sample(seen(), LINE, num=3, rng=rng(stream)) for stream in (1, 1, 2)
    )
    assert one == again
    assert one != other


class PlainStudy(OptunaStudy):
    """The slowest version: Optuna's checked functions tell its own storage of each trial."""

    def __init__(self, optuna, sampler, *, seen, coordinates, attrs):
        self._coordinates = coordinates
        self._study = optuna.create_study(
            sampler=sampler, directions=["maximize"] * seen.num_objectives
        )
        known = [values for _, values in seen.finished if values is not None]
        worst = tuple(map(min, zip(*known, strict=True))) or (0.0,) * seen.num_objectives
        violations = _violations(seen.finished)
        for (trial, values), violation in zip(seen.finished, violations, strict=True):
            limits = {"constraints": (violation,)} if any(violations) else {}
            self._add(trial.config, values=values or worst, system_attrs={**attrs, **limits})
        for config in seen.running:
            self.note(config)

    def suggest(self):
        trial = self._study.ask()
        config = self._coordinates.compose(lambda c: _suggest(trial, c))
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return config

    def note(self, config):
        self._add(config, state=optuna.trial.TrialState.RUNNING)

    def _add(self, config, **what):
        picked = self._coordinates.values(config)
        present = [c for c in self._coordinates.coordinates if c.name in picked]
        trial = optuna.trial.create_trial(
            params={c.name: _param(c, picked[c.name]) for c in present},
            distributions={c.name: _distribution(optuna, c) for c in present},
            **what,
        )
        self._study.add_trial(trial)


def full(space, num, *, objectives=False):
    """Return a history with earlier trials, failures, violations, short trials and running ones."""
    history = History(prior=tuple(seen(space, num=5, score=lambda c: len(repr(c)), seed=3)))
    for i in range(num):
        config = space.sample(rng(5, i))
        score = None if i % 7 == 6 else math.sin(i)
        tell(
            history,
            config,
            score=score,
            target=1 + i % 2,
            objectives=(math.sin(i), math.cos(i)) if objectives else (),
            violation=float(i % 5 == 4),
        )
    for i in range(2):
        history.record_decision(Proposal(target=1, config=space.sample(rng(6, i))))
    return history


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("sampler", "make"),
    [
        (sampler, make)
        for sampler in [
            TPESampler(),
            TPESampler(share=2),
            TPESampler(multivariate=False),
            TPESampler(group=False),
            NSGAIISampler(population=6, share=1),
        ]
        for make in [
            lambda: seen(num=30),
            lambda: full(LINE, 40),
            lambda: full(NESTED, 40),
            lambda: full(NESTED, 40, objectives=True),
        ]
    ]
    + [(GPSampler(), lambda: full(LINE, 20))],
)
def test_as_if_told_by_optuna_itself(monkeypatch, sampler, make):
    space = NESTED if "width" in make()[0].config else LINE
    history = make()
    for stream in range(3):
        quick = sampler.sample(history, space, num=3, rng=rng(stream))
        assert quick == sampler.sample(make(), space, num=3, rng=rng(stream))
        with monkeypatch.context() as patch:
            patch.setattr(_optuna, "OptunaStudy", PlainStudy)
            assert quick == sampler.sample(make(), space, num=3, rng=rng(stream))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_batch_spreads(sampler):
    batch = sampler.sample(seen(), LINE, num=8, rng=rng(0))
    assert len({tuple(config.items()) for config in batch}) == 8


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_it_is_random_at_first(sampler):
    few = seen(num=sampler.num_startup - 1)
    batch = sampler.sample(few, LINE, num=40, rng=rng(7))
    assert batch == sampler.sample(History(), LINE, num=40, rng=rng(7))
    assert np.std([config["x"] for config in batch]) > 0.2


@pytest.mark.parametrize("sampler", QUICK, ids=repr)
def test_it_learns(sampler):
    def late(history):
        return np.mean([hill(trial.config) for trial in list(history)[20:]])

    random = np.mean([hill(LINE.sample(rng(seed))) for seed in range(200)])
    learned = np.mean([late(found(sampler, num=40, seed=seed)) for seed in range(3)])
    assert learned > 0.65 * random


def test_the_gaussian_process_finds_the_top():
    (config,) = GPSampler().sample(seen(num=25), LINE, num=1, rng=rng(0))
    assert hill(config) > -0.005


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_nested_and_conditional_spaces(sampler):
    history = seen(NESTED, num=15, score=lambda config: config["width"] / 64)
    history.record_decision(Proposal(target=1, config=NESTED.sample(rng(99))))
    for config in sampler.sample(history, NESTED, num=6, rng=rng(0)):
        assert ("momentum" in config) == (config["kind"] == "sgd")
        assert config.get("momentum", 0.3) in NESTED["momentum"].levels(4)
        assert isinstance(config["lr"], Constant | Step)
        assert 8 <= config["width"] <= 64
        assert config["decay"] == 0.1


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_what_fails_is_kept_away_from(sampler):
    history = History()
    for i in range(30):
        config = LINE.sample(rng(i))
        tell(history, config, score=None if config["x"] > 0.4 else -config["x"])
    batch = sampler.sample(history, LINE, num=4, rng=rng(0))
    assert np.mean([config["x"] for config in batch]) < 0.4


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_everything_may_fail(sampler):
    history = History()
    for i in range(12):
        tell(history, LINE.sample(rng(i)), score=None)
    assert len(sampler.sample(history, LINE, num=2, rng=rng(0))) == 2


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_sampler_keeps_away_from_violations(sampler):
    history = History()
    for i in range(40):
        config = LINE.sample(rng(i))
        tell(history, config, score=config["x"], violation=max(config["x"] - 0.4, 0.0))
    batch = sampler.sample(history, LINE, num=4, rng=rng(0))
    assert np.median([config["x"] for config in batch]) < 0.5


@pytest.mark.parametrize(
    "sampler", [TPESampler(), GPSampler(), NSGAIISampler(population=6)], ids=repr
)
def test_two_objectives(sampler):
    """With two objectives, the sampler finds the front, where y is 0.01 for any x."""
    history = History()
    for i in range(30):
        config = LINE.sample(rng(i))
        loss = abs(math.log10(config["y"]) + 2)
        tell(
            history,
            config,
            score=config["x"] - loss,
            objectives=(config["x"] - loss, -config["x"] - loss),
        )
    tell(history, LINE.sample(rng(99)), score=None)
    batch = sampler.sample(history, LINE, num=3, rng=rng(0))
    assert np.median([abs(math.log10(config["y"]) + 2) for config in batch]) < 0.75


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_earlier_studies_are_learned_from(sampler):
    prior = tuple(seen(num=20, score=lambda config: -config["x"]))
    foreign = Trial(number=0, config={"z": 1}, target=1, reached=1, scores=(9.0,), state="stopped")
    batch = sampler.sample(History(prior=(*prior, foreign)), LINE, num=4, rng=rng(0))
    assert np.mean([config["x"] for config in batch]) < 0.4


@pytest.mark.parametrize("sampler", QUICK, ids=repr)
def test_nothing_is_tried_twice_while_there_is_more(sampler):
    space = Space(a=Int(0, 4), b=Choice(["a", "b", "c"]))
    history = found(sampler, num=10, seed=0, space=space, result=lambda c: {"score": c["a"]})
    assert len({tuple(trial.config.items()) for trial in history}) == 10
    assert len(sampler.sample(history, space, num=9, rng=rng(0))) == 9


@pytest.mark.parametrize("kind", [TPESampler, CMAESSampler, NSGAIISampler])
def test_what_shares_is_preferred(kind):
    space = Space(lr=Step(Choice([0.1, 0.2, 0.3, 0.4]), [Int(2, 8)], gamma=Float(0.1, 0.5)))
    history = History()
    for milestone in range(2, 9):
        for value in (0.1, 0.2):
            tell(history, {"lr": Step(value, [milestone], gamma=0.3)}, target=9)
    timelines = [Timeline(trial.config, epochs=9) for trial in history]

    def shared(share):
        batch = [
            config
            for seed in range(10)
            for config in kind(share=share).sample(history, space, num=1, rng=rng(seed))
        ]
        return np.mean([
            max(common_prefix(Timeline(config, epochs=9), t) for t in timelines) for config in batch
        ])

    assert shared(share=6) > shared(share=0) + 0.5


def test_choices_alone_give_the_evolution_nothing_to_move():
    space = Space(kind=Choice(["a", "b"]), fixed=Int(3, 3))
    history = seen(space, num=12, score=lambda config: 1.0)
    (config,) = CMAESSampler().sample(history, space, num=1, rng=rng(0))
    assert config["kind"] in {"a", "b"}


def test_only_trials_that_got_far_are_learned_from():
    """Only trials that got far are learned from.

    Early scores here are the opposite of the final ones.
    """
    history = History()
    for i in range(40):
        config = LINE.sample(rng(i))
        if i % 2:
            tell(history, config, score=10 + config["x"], target=1)
        else:
            tell(history, config, score=-config["x"], target=9)
    batch = TPESampler().sample(history, LINE, num=8, rng=rng(0))
    assert np.mean([config["x"] for config in batch]) < 0.4


@pytest.mark.parametrize("package", ["optuna", "scipy", "cmaes"])
def test_missing_packages_are_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    sampler = {"optuna": TPESampler(), "scipy": GPSampler(), "cmaes": CMAESSampler()}[package]
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*\.\[search\]"):
        sampler.sample(seen(), LINE, num=1, rng=rng(0))


def test_optuna_is_not_loaded_before_it_is_needed():
    assert not hasattr(_optuna, "optuna")
    assert not hasattr(_optuna, "cmaes")


def test_optuna_says_nothing_and_is_left_as_it_was(capfd):
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        TPESampler().sample(seen(), LINE, num=2, rng=rng(0))
        assert optuna.logging.get_verbosity() == logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TPESampler(num_startup=0), "num_startup must be"),
        (lambda: TPESampler(share=-1), "share must be the number"),
        (lambda: GPSampler(share=0.5), "share must be the number"),
        (lambda: TPESampler(num_candidates=0), "num_candidates must be"),
        (lambda: NSGAIISampler(population=0), "population must be"),
        (lambda: CMAESSampler(population=0), "population must be"),
        (lambda: CMAESSampler(population=1), "nothing to select from"),
        (lambda: CMAESSampler(sigma=0.0), "sigma must be"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(AlgorithmError, match=message):
        make()


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampler", [TPESampler(), CMAESSampler(share=2)], ids=repr)
def test_with_hyperband(sampler):
    check_algorithm(Hyperband(max_epochs=9, sampler=sampler))
