"""Search algorithms: each decides, from the history alone, what to train and for how long."""

from ._algorithm import Algorithm as Algorithm
from ._asha import ASHA as ASHA
from ._async_sub_sampling import AsyncSubSampling as AsyncSubSampling
from ._baselines import (
    GridSearch as GridSearch,
    MedianStopping as MedianStopping,
    RandomSearch as RandomSearch,
)
from ._boss import BOSS as BOSS
from ._history import (
    Decision as Decision,
    History as History,
    Leaderboard as Leaderboard,
    Proposal as Proposal,
    Stop as Stop,
    Trial as Trial,
    TrialState as TrialState,
)
from ._hyperband import (
    BOHB as BOHB,
    Bracket as Bracket,
    Hyperband as Hyperband,
    SuccessiveHalving as SuccessiveHalving,
)
from ._population import PopulationBasedTraining as PopulationBasedTraining
from ._samplers import (
    CMAESSampler as CMAESSampler,
    GPSampler as GPSampler,
    GriddedSampler as GriddedSampler,
    GridSampler as GridSampler,
    KDESampler as KDESampler,
    NSGAIISampler as NSGAIISampler,
    RandomForestSampler as RandomForestSampler,
    RandomSampler as RandomSampler,
    Sampler as Sampler,
    TPESampler as TPESampler,
)
from ._sub_sampling import SubSampling as SubSampling


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
