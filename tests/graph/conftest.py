from __future__ import annotations

import tests.strategies  # noqa: F401  loads the hypothesis profile: fixed examples
