"""A plugin of pytest that saves coverage data at the end of a session.

pytest-xdist gives its workers ten seconds to exit and then kills them. Coverage.py saves at exit,
after everything else that has to be closed, so the data of a whole worker could be lost.
"""

from __future__ import annotations

import coverage
import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Save what this process has measured so far."""
    if (measuring := coverage.Coverage.current()) is not None:
        measuring.save()
