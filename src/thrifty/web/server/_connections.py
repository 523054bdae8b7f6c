"""Connections with time limits, and a limit on their number.

A connection is closed if it sends no request, sends one too slowly, or does not read the response.
A few slow or hostile clients therefore cannot lock out the others."""

from __future__ import annotations

import asyncio
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


REQUEST_S = 10.0
"""Maximum seconds for a whole request, from its first byte or the start of its connection."""
ANSWER_S = 60.0
"""Maximum seconds for a response to be made and read."""
MOST = 512
"""Maximum number of connections. Beyond it, the longest-idle ones are closed."""


class Connection(H11Protocol):
    """A uvicorn connection with time limits."""

    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    _quiet_since = 0.0

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Register a new connection; beyond the maximum, close another one or reject it."""
        super().connection_made(transport)
        self._quiet_since = time.monotonic()
        if len(self.connections) > MOST and not self._find_room():
            transport.abort()
            return
        self._limit("request")

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the timer of a closed connection."""
        self._limit("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request, or several requests."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Set the next time limit after a response; part of the next request may have arrived."""
        super().on_response_complete()
        self._quiet_since = time.monotonic()
        self._watch()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Choose the time limit for the connection's current state."""
        if self.transport.is_closing():
            self._limit("")
        elif not self.is_quiet:
            self._limit("answer")
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # uvicorn's own limit for idle connections applies, unless this one has sent no request
            # yet.
            self._limit("request" if self.cycle is None else "")
        else:
            self._limit("request")

    def _limit(self, what: str) -> None:
        if what == self._limited:
            return
        self._limited = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what:
            after_s = REQUEST_S if what == "request" else ANSWER_S
            self._timer = self.loop.call_later(after_s, self.transport.abort)

    def _find_room(self) -> bool:
        """Close the connection that has been idle longest; return False if all others are busy."""
        quiet = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and each.is_quiet
        ]
        if not quiet:
            return False
        min(quiet, key=lambda each: each._quiet_since).transport.abort()
        return True
