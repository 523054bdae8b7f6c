from __future__ import annotations

import pytest

from thrifty.core import UsageError
from thrifty.run import Local
from thrifty.testing import EXECUTOR_CHECKS


pytestmark = pytest.mark.slow


EXECUTORS = {"inline": Local(workers=1, threads=1), "processes": Local(workers=2, threads=1)}


@pytest.mark.sample(12)
@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", EXECUTORS)
def test_conformance(name, check):
    check(EXECUTORS[name])


@pytest.mark.parametrize("option", ["workers", "threads"])
def test_needs_workers_and_threads(option):
    with pytest.raises(UsageError, match=f"{option}=0"):
        Local(**{option: 0})
