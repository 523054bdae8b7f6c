"""Connections that do not wait for ever: time limits, and room for new ones.

Whoever opens a connection and sends nothing, or a letter now and then, or does not read the answer, is
cut off. So a few slow or hostile readers cannot keep everybody else out.
"""

from __future__ import annotations

import asyncio
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


REQUEST_S = 10.0
"""How long a whole request may take to come, from its first byte or from the opening of its connection."""
ANSWER_S = 60.0
"""How long an answer may take to be made and read."""
MOST = 512
"""How many connections there may be. With more, those that have waited longest for a request are closed."""


class Connection(H11Protocol):
    """A connection of uvicorn's with time limits."""

    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    _quiet_since = 0.0

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Note a new connection; one too many has to find room."""
        super().connection_made(transport)
        self._quiet_since = time.monotonic()
        if len(self.connections) > MOST and not self._find_room():
            transport.abort()
            return
        self._limit("request")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._limit("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request, or several."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer is out; perhaps a part of the next request has come already."""
        super().on_response_complete()
        self._quiet_since = time.monotonic()
        self._watch()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Choose the time limit for what the connection is at."""
        if self.transport.is_closing():
            self._limit("")
        elif not self.is_quiet:
            self._limit("answer")
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # uvicorn's own limit for idle connections holds, unless this one has never asked
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
        """Close the connection that has been quiet longest; False: all others are at work."""
        quiet = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and each.is_quiet
        ]
        if not quiet:
            return False
        min(quiet, key=lambda each: each._quiet_since).transport.abort()
        return True
