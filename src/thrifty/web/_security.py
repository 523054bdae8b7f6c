"""Access control and security headers of the dashboard."""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


POLICY = "; ".join((
    "default-src 'self'",
    "img-src 'self' data:",
    "object-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
))
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecurityMiddleware:
    """Middleware that checks the Host header and the token, and sets the headers of every response.

    ``only_here`` rejects every Host except this machine's own names. Thus a foreign page whose name
    was rebound to the loopback address (DNS rebinding) can read nothing. With a ``token``, a first
    request to ``/?token=...`` sets a cookie, and programs send the token as a bearer token.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, only_here: bool) -> None:
        self._app = app
        self._token = token
        self._only_here = only_here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        if self._only_here and not is_here(_host(headers.get("host", ""))):
            await _refuse(with_headers, 400, detail="this dashboard answers to localhost only")
        elif self._token is None or self._known(scope, headers):
            await self._app(scope, receive, with_headers)
        elif self._introduced(scope):
            await _let_in(with_headers, _cookie_name(scope), self._token)
        else:
            said = (
                "the token is missing or wrong; open the address that "
                "`thrifty dashboard` printed"
            )
            await _refuse(
                with_headers, 401, detail=said, headers=[(b"www-authenticate", b"Bearer")]
            )

    def _known(self, scope: Scope, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._same(given.strip()):
            return True
        # Parse by hand: another program's invalid cookie on this host must not hide ours.
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(n == _cookie_name(scope) and self._same(value) for n, _, value in pairs)

    def _introduced(self, scope: Scope) -> bool:
        if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8)
        return any(self._same(given) for given in query.get("token", ()))

    def _same(self, given: str) -> bool:
        assert self._token is not None
        # Compare bytes, because compare_digest accepts only ASCII in strings.
        return secrets.compare_digest(given.encode(), self._token.encode())


def is_here(host: str) -> bool:
    """Return whether a name or an address is this machine's loopback.

    >>> [is_here(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "evil.example")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """Return a Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _cookie_name(scope: Scope) -> str:
    # Cookies do not distinguish ports, and several dashboards may run on this host.
    server = scope.get("server") or ("", 0)
    return f"thrifty_{server[1]}"


async def _let_in(send: Send, name: str, token: str) -> None:
    cookie = f"{name}={token}; HttpOnly; SameSite=Strict; Path=/"
    await _answer(
        send,
        303,
        body=b"",
        headers=[(b"location", b"./"), (b"set-cookie", cookie.encode("latin-1"))],
    )


async def _refuse(
    send: Send, status: int, *, detail: str, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps({"detail": detail}).encode()
    kind = (b"content-type", b"application/json")
    await _answer(send, status, body=body, headers=[kind, *headers])


async def _answer(
    send: Send, status: int, *, body: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    length = (b"content-length", str(len(body)).encode())
    caching = (b"cache-control", b"no-store")
    await send({
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, length, caching],
    })
    await send({"type": "http.response.body", "body": body})
