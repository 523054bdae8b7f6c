"""Aggregated, read-only queries for the web pages, one statement each where possible.

The database counts, sorts and samples, so that work in Python does not grow with the number of
trials unless it must.
"""

from ._study_queries import Paths as Paths, StudyView as StudyView, Views as Views
from ._trial_queries import (
    COLUMNS as COLUMNS,
    Order as Order,
    TrialFilter as TrialFilter,
    sortable as sortable,
)
