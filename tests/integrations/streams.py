"""Streams of events for loggers."""

from __future__ import annotations

from thrifty.space import Step
from thrifty.study import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded


CONFIG = {"lr": Step(0.1, [3]), "width": 64, "norm": True, "name": "a b", "none": None}


def began(*, resumed=False, study="digits", key="0123456789abcdef"):
    return StudyBegan(study=study, key=key, metrics=("mse",), modes=("min",), resumed=resumed)


def advanced(trial, first, values):
    """Return a report of ``mse`` after epochs ``first``, ..."""
    return TrialAdvanced(
        trial=trial,
        first_epoch=first,
        metrics=tuple({"mse": value, "a metric (%)": value + 1} for value in values),
        value=values[-1],
    )


def first_run():
    """Return a run in which each trial ends in another way.

    Trial 0 is done, 1 is stopped, 2 fails, and 3 waits when the run is stopped.
    """
    return [
        began(),
        *(TrialBegan(trial=trial, config=CONFIG) for trial in range(3)),
        advanced(0, 1, [0.5, 0.4]),
        advanced(1, 1, [0.9, 0.8]),
        TrialEnded(trial=1, state="stopped"),
        TrialEnded(trial=2, state="failed", message="it broke"),
        TrialBegan(trial=3, config=CONFIG, parent=(0, 2)),
        advanced(3, 1, [0.5, 0.4, 0.3, 0.2]),
        advanced(0, 3, [0.3]),
        TrialEnded(trial=0, state="done"),
        TrialEnded(trial=0, state="stopped"),  # nothing new: the trial had ended
        StudyEnded(state="stopped", best_trial=3, best_value=0.2),
    ]


def second_run():
    """Return a resumed run of trial 3, whose last two epochs come again after a crash."""
    return [
        began(resumed=True),
        TrialBegan(trial=3, config=CONFIG, parent=(0, 2), epoch=2),
        advanced(3, 3, [0.3, 0.2, 0.1]),
        TrialEnded(trial=3, state="done"),
        StudyEnded(state="done", best_trial=3, best_value=0.1),
    ]


def tell(logger, events):
    for event in events:
        logger.on_event(event)
