"""All cases and tasks; importing a module adds its own to the two tables."""

from bench.trust.case import CORPUS as CORPUS
from bench.trust.moving import MOVING as MOVING

from . import (
    changing as changing,
    late_effects as late_effects,
    models as models,
    reduced_precision as reduced_precision,
    settings as settings,
    steps as steps,
    streams as streams,
    tasks as tasks,
)
