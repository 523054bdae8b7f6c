"""Random edits of a small project cause no false reuse and no needless retraining."""

from __future__ import annotations

import pytest

from bench.trust.mutations import by_source_only, run
from tests.depth import draws


pytestmark = pytest.mark.slow


def test_every_edit_is_seen_and_none_that_means_nothing():
    found = run(edits=draws(60, 200), seed=0)
    assert found["wrong"] == []
    assert (found["false_reuse"], found["needless"]) == (0, 0)
    assert min(found[f"{kind} edits"] for kind in ("training", "evaluation", "neutral")) > 10


def test_the_edits_would_find_an_identity_that_sees_too_little():
    found = run(edits=60, seed=0, identify=by_source_only)
    assert found["false_reuse"] > 5
