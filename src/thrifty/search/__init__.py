"""Search algorithms: each decides, from the history alone, what to train and for how long."""

from ._algorithm import (
    Algorithm,
    Enqueued,
    GridSearch,
    MedianStopping,
    RandomSearch,
    next_decisions,
)
from ._auto_algorithm import Auto
from ._checked_algorithms import CheckedASHA, CheckedBOSS
from ._freeze_thaw import FreezeThaw
from ._halving import ASHA, BOHB, Bracket, Hyperband, StoppingASHA, SuccessiveHalving
from ._history import Decision, History, Leaderboard, Proposal, Stop, Trial, TrialState
from ._population import PopulationBasedTraining
from ._sub_sampling import BOSS, FixedWidthSubSampling, SubSampling, WideBOSS
from .samplers import (
    CMAESSampler,
    GPSampler,
    GridSampler,
    KDESampler,
    NSGAIISampler,
    QuantizedSampler,
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
    "Auto",
    "Bracket",
    "CMAESSampler",
    "CheckedASHA",
    "CheckedBOSS",
    "Decision",
    "Enqueued",
    "FixedWidthSubSampling",
    "FreezeThaw",
    "GPSampler",
    "GridSampler",
    "GridSearch",
    "History",
    "Hyperband",
    "KDESampler",
    "Leaderboard",
    "MedianStopping",
    "NSGAIISampler",
    "PopulationBasedTraining",
    "Proposal",
    "QuantizedSampler",
    "RandomForestSampler",
    "RandomSampler",
    "RandomSearch",
    "Sampler",
    "Stop",
    "StoppingASHA",
    "SubSampling",
    "SuccessiveHalving",
    "TPESampler",
    "Trial",
    "TrialState",
    "WideBOSS",
    "next_decisions",
]
