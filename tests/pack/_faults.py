"""Packs that compute something wrong."""

from __future__ import annotations

from thrifty.pack.fused._row_state import RowState


def wrong_from(monkeypatch, first):
    """Make all updates of blocks wrong from the ``first`` on; return how many there were."""
    right = RowState.updater
    number = [0]

    def updater(self, options):
        update = right(self, options)

        def wrong():
            update()
            number[0] += 1
            if number[0] > first:
                self._parameters.mul_(1.01)

        return wrong

    monkeypatch.setattr(RowState, "updater", updater)
    return number
