"""Applying what people ask of a study while it runs."""

from __future__ import annotations

from collections.abc import Callable

from thrifty.store import Driver, StudyMoved
from thrifty.store._acts import Act
from thrifty.store._records import ActApplied

from ._ledger import Ledger


class Steering:
    """Applies acts in the process that runs a study, each once.

    Attributes:
        stopped_by: The user who requested that the run ends; empty without such a request.
        is_paused: Whether the run waits for a request to go on.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self.is_paused = False
        self._known: set[int] = set()
        """Acts that are applied already and whose records may not be written yet."""

    def or_asked(self, reason: Callable[[], str]) -> Callable[[], str]:
        """Return a function that says why to stop: a request, or ``reason``."""
        return lambda: f"{self.stopped_by} has stopped it" if self.stopped_by else reason()

    def begin(self, ledger: Ledger, driver: Driver) -> None:
        """Answer wishes that earlier runs end: they are not meant for this one."""
        acts, _ = driver.wishes(num_enqueued=ledger.history.num_ever_enqueued)
        for act in acts:
            if act.kind != "stop trial":
                self._note(act, "the run had ended", ledger)

    def apply(self, ledger: Ledger, driver: Driver) -> bool:
        """Apply what is queued; return whether there was anything."""
        acts, configs = driver.wishes(num_enqueued=ledger.history.num_ever_enqueued)
        fresh = [act for act in acts if act.id not in self._known]
        for act in fresh:
            self._note(act, self._apply(act, ledger), ledger)
        for config in configs:
            ledger.history.record_enqueued(config)
        return bool(fresh or configs)

    def _apply(self, act: Act, ledger: Ledger) -> str:
        if act.kind == "stop":
            self.stopped_by = act.who
            return ""
        if act.kind in ("pause", "resume"):
            self.is_paused = act.kind == "pause"
            state = "paused" if self.is_paused else "running"
            ledger.outbox.append(StudyMoved(study=ledger.study_id, state=state))
            return ""
        assert act.trial is not None
        return ledger.stop_trial(act.trial)

    def _note(self, act: Act, answer: str, ledger: Ledger) -> None:
        self._known.add(act.id)
        ledger.outbox.append(ActApplied(act=act.id, answer=answer))
