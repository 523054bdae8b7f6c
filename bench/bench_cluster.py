"""From one machine to a team: several drivers on one plan, and simulated clusters.

::

    python -m bench.bench_cluster [--quick] [--repeats 3] [--only drivers|claims|scale|cost|faults]

- ``drivers``: two studies by two processes on one plan of a private PostgreSQL.
- ``claims``: 32 processes that claim stages of one plan.
- ``scale``: the loop with 1,000 workers and 100,000 trials, with real decisions and records and a
  virtual clock.
- ``cost``: GPU-hours and hours by the number of workers, beside one worker for each trial.
- ``faults``: failures, stragglers and preemptions.

All of it is seeded; only the time of a decision is measured in real time. Measured epochs are read
from ``$THRIFTY_DATA``; see ``bench.cluster.workloads``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench.cluster.claims import claims
from bench.cluster.drivers import drivers
from bench.cluster.simulated import cost, faults, scale
from bench.common.harness import Part, finish, parser, run_parts


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "drivers": drivers,
    "claims": claims,
    "scale": scale,
    "cost": cost,
    "faults": faults,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=list(PARTS))
    args = options.parse_args()
    figures, goals = run_parts(PARTS, args, only=args.only)
    finish("cluster", figures, goals)


if __name__ == "__main__":
    main()
