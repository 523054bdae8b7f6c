"""Search algorithms: each decides, from the history alone, what to train and how far."""

from ._algorithm import Algorithm as Algorithm
from ._history import (
    Decision as Decision,
    History as History,
    Proposal as Proposal,
    Stop as Stop,
    Trial as Trial,
    TrialState as TrialState,
)


__all__ = ["Algorithm", "Decision", "History", "Proposal", "Stop", "Trial", "TrialState"]
