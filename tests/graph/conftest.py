from __future__ import annotations

import tests.strategies  # noqa: F401  for its profile of hypothesis: the same examples each time
