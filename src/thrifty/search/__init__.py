"""Search algorithms: each decides, from the history alone, what to train and how far."""

from ._algorithm import Algorithm as Algorithm
from ._asha import ASHA as ASHA
from ._grid_search import GridSearch as GridSearch
from ._history import (
    Decision as Decision,
    History as History,
    Leaderboard as Leaderboard,
    Proposal as Proposal,
    Stop as Stop,
    Trial as Trial,
    TrialState as TrialState,
)
from ._hyperband import Bracket as Bracket, Hyperband as Hyperband
from ._median_stopping import MedianStopping as MedianStopping
from ._population import PopulationBasedTraining as PopulationBasedTraining
from ._random_search import RandomSearch as RandomSearch
from ._samplers import (
    GriddedSampler as GriddedSampler,
    GridSampler as GridSampler,
    RandomSampler as RandomSampler,
    Sampler as Sampler,
)
from ._successive_halving import SuccessiveHalving as SuccessiveHalving


__all__ = [
    "ASHA",
    "Algorithm",
    "Bracket",
    "Decision",
    "GridSampler",
    "GridSearch",
    "GriddedSampler",
    "History",
    "Hyperband",
    "Leaderboard",
    "MedianStopping",
    "PopulationBasedTraining",
    "Proposal",
    "RandomSampler",
    "RandomSearch",
    "Sampler",
    "Stop",
    "SuccessiveHalving",
    "Trial",
    "TrialState",
]
