from __future__ import annotations

import pytest

from thrifty.core import StageDone, StageStarted
from thrifty.plan import SearchPlan
from thrifty.search import Proposal
from thrifty.store import StageRecord
from thrifty.study._goals import Goals
from thrifty.study._ledger import Ledger
from thrifty.testing import VirtualClock


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0])
def test_a_stage_takes_as_long_as_it_takes_whatever_the_date(jump_s):
    clock = VirtualClock(10_000.0)
    ledger = Ledger(
        SearchPlan(), goals=Goals.of("mse", "min", constraints=None), max_epochs=4, clock=clock
    )
    ledger.decide([Proposal(target=4, config={"lr": 0.1})])
    ledger.handle(StageStarted(node=0, start=0, stop=4, worker="w"))
    clock.advance(2.0)
    clock.jump(jump_s)
    clock.advance(3.0)
    ledger.handle(StageDone(node=0, start=0, stop=4, worker="w"))
    (stage,) = (record for record in ledger.outbox if isinstance(record, StageRecord))
    assert (stage.started_at, stage.seconds) == (10_000.0, 5.0)
