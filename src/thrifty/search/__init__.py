"""Search algorithms: each decides, from the history alone, what to train and for how long."""

from ._algorithm import Algorithm
from ._baselines import GridSearch, MedianStopping, RandomSearch
from ._history import Decision, History, Leaderboard, Proposal, Stop, Trial, TrialState
from ._population import PopulationBasedTraining
from .bandits._async_sub_sampling import AsyncSubSampling
from .bandits._sub_sampling import BOSS, SubSampling
from .halving._asha import ASHA
from .halving._hyperband import BOHB, Bracket, Hyperband, SuccessiveHalving
from .samplers import (
    CMAESSampler,
    GPSampler,
    GriddedSampler,
    GridSampler,
    KDESampler,
    NSGAIISampler,
    RandomForestSampler,
    RandomSampler,
    Sampler,
    TPESampler,
)


__all__ = [
    "ASHA",
    "BOHB",
    "BOSS",
    "Algorithm",
    "AsyncSubSampling",
    "Bracket",
    "CMAESSampler",
    "Decision",
    "GPSampler",
    "GridSampler",
    "GridSearch",
    "GriddedSampler",
    "History",
    "Hyperband",
    "KDESampler",
    "Leaderboard",
    "MedianStopping",
    "NSGAIISampler",
    "PopulationBasedTraining",
    "Proposal",
    "RandomForestSampler",
    "RandomSampler",
    "RandomSearch",
    "Sampler",
    "Stop",
    "SubSampling",
    "SuccessiveHalving",
    "TPESampler",
    "Trial",
    "TrialState",
]
