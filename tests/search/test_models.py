"""Common properties of samplers with a model of their own."""

from dataclasses import replace

import numpy as np
import pytest

from tests.search._sampling import SCHEDULES, filled, mean_epochs_shared, sample
from thrifty.search import History, KDESampler, RandomForestSampler, Trial
from thrifty.search.samplers._base_sampler import Picker


MODELS = [
    KDESampler(random_share=0.0),
    RandomForestSampler(random_share=0.0, num_trees=20, num_candidates=200),
]
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)


@pytest.fixture
def behind(monkeypatch):
    """Record how far the acquisition of each chosen candidate was below the best new one's."""
    found = []

    def pick(self, acquisition, config_of):
        best = max(a for i, a in enumerate(acquisition) if not self.is_known(config_of(i)))
        picked = take(self, acquisition, config_of)
        found.append(best - acquisition[picked[0]])
        return picked

    take = Picker.pick
    monkeypatch.setattr(Picker, "pick", pick)
    return found


@each_model
def test_learns_from_earlier_studies(model):
    prior = [
        Trial(
            number=t.number, config=t.config, target=9, reached=9, scores=t.scores, state="stopped"
        )
        for t in filled(score=lambda config: config["x"])
    ]
    drawn = sample(model, History(prior=prior), num=10)
    assert np.mean([config["x"] for config in drawn]) > 0.8


@each_model
def test_without_a_share_the_best_candidate_is_taken(model, behind):
    history = filled(SCHEDULES, num=12)
    sample(model, history, SCHEDULES, num=8)
    assert behind == [0.0] * 8
    sample(replace(model, share=0.8), history, SCHEDULES, num=8)
    assert max(behind) > 0, "with one, others are taken"


@each_model
def test_share_saves_training(model):
    history = filled(SCHEDULES, num=12)
    nothing, much = (
        mean_epochs_shared(replace(model, share=share), history, SCHEDULES) for share in (0.0, 0.8)
    )
    assert much > nothing + 0.5
