"""What pages show: aggregated, read-only looks at a database, a statement each where that is possible.

Nothing here grows with the number of trials in Python unless it must: the database counts, sorts and thins out.
"""

from ._database import Views as Views
from ._plans import Paths as Paths
from ._studies import StudyView as StudyView
from ._trial_filter import TrialFilter as TrialFilter
from ._trial_order import COLUMNS as COLUMNS, Order as Order, sortable as sortable
