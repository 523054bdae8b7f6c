"""Database addresses: reading them, and showing them without their passwords.

An address that nobody can parse may hold a password, too. So hiding does not rely on parsing: where it
is not clear how far a password goes, everything that may belong to it is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from thrifty.core import UsageError


HIDDEN = "***"

_SECRET = re.compile(
    r"pass(word|wd|phrase|wort)?$|pwd|secret|token|credential|(access|account|api)_?key",
    re.IGNORECASE,
)
"""Names of options whose values are not shown."""
_SHORTEST = 3
"""Shorter texts are not looked for in messages: they would be found everywhere."""


def read_address(url: str) -> URL:
    """Read a database address.

    Raises:
        UsageError: It is none, or its password has characters that must be written in another way.
    """
    try:
        address = make_url(url)
    except (ArgumentError, ValueError, AttributeError):
        # The cause is not chained: it may quote the address.
        raise UsageError(
            "that is not a database address; write sqlite:///thrifty.db or "
            f"postgresql+psycopg://host/name{_hint(url)}"
        ) from None
    stray = "%40" not in url and "@" in str(address.database or "")
    if "sqlite" not in address.drivername and ("@" in str(address.host or "") or stray):
        raise UsageError(
            f"the database address {redact_url(url)} has more than one @, so that nobody can tell where its "
            "password ends; write @ as %40 in it"
        )
    return address


def redact_url(url: object) -> str:
    """Return an address as it may be printed: without passwords.

    It works for addresses of databases and of file systems, also for those that cannot be parsed. A
    path without ``://`` is no address.

    >>> redact_url("postgresql+psycopg://me:secret@host/thrifty?sslmode=require&sslpassword=also")
    'postgresql+psycopg://me:***@host/thrifty?sslmode=require&sslpassword=***'
    >>> redact_url("sqlite:///thrifty.db")
    'sqlite:///thrifty.db'
    """
    text = str(url)
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "", text
        if "@" not in text:
            name, colon, hidden = text.partition(":")
            return f"{name}{colon}{HIDDEN if hidden else ''}"
    if rest.startswith("/"):
        # A path: nobody logs in to a file.
        place, question, query = rest.partition("?")
        return f"{scheme}{mark}{place}{question}{_without_secrets(query)}"
    return f"{scheme}{mark}{_without_password(rest)}"


def redact_root(root: str) -> str:
    """Return the place of checkpoints as it may be printed: a path as it is, an address without passwords."""
    return redact_url(root) if "://" in root else root


def redact(text: str, *, url: object) -> str:
    """Return a text, such as a driver's error, without what may be a password of an address."""
    for secret in sorted(set(_secrets(str(url))), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _without_password(rest: str) -> str:
    place, question, query = rest.partition("?")
    colon = place.find(":")
    if colon >= 0 and "@" in query:
        # The question mark may be a part of the password.
        return f"{rest[:colon]}:{HIDDEN}"
    at = place.rfind("@")
    if 0 <= colon < at:
        place = f"{place[:colon]}:{HIDDEN}{place[at:]}"
    else:
        place = _without_odd_ports(place)
    return f"{place}{question}{_without_secrets(query)}"


def _without_odd_ports(place: str) -> str:
    """Hide what stands where a port should: somebody may have left out the host."""
    user, at, hosts = place.rpartition("@")
    hosts, slash, path = hosts.partition("/")
    shown = []
    for host in hosts.split(","):
        # brackets are around an address with colons
        name, colon, port = host.rpartition(":")
        odd = colon and not port.isdecimal() and not port.endswith("]")
        shown.append(f"{name.split(':')[0]}:{HIDDEN}" if odd else host)
    return f"{user}{at}{','.join(shown)}{slash}{path}"


def _without_secrets(query: str) -> str:
    """Hide the values of secret options, and all that follows: it may belong to the value."""
    shown: list[str] = []
    for pair in query.split("&") if query else ():
        name, equals, value = pair.partition("=")
        if not equals or _SECRET.search(unquote(name)):
            shown.append(f"{name}={HIDDEN}" if equals else HIDDEN)
            break
        shown.append(f"{name}={redact_url(value) if '://' in value else value}")
    return "&".join(shown)


def _secrets(url: str) -> Iterator[str]:
    """What may be a password in an address, as it is written and as it is meant."""
    rest = url.partition("://")[2] or url
    place, _, query = rest.partition("?")
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if _SECRET.search(unquote(name)):
            yield from _both(value)
            yield from _both(query.partition(f"{name}=")[2])
    colon = rest.find(":")
    if rest.startswith("/") or colon < 0:
        return
    for at in (place.rfind("@"), rest.rfind("@")):
        if colon < at:
            hidden = rest[colon + 1 : at]
            yield from _both(hidden)
            for part in re.split(r"[@:/?]", hidden):
                yield from _both(part)


def _both(text: str) -> Iterator[str]:
    yield from (each for each in (text, unquote(text)) if len(each) >= _SHORTEST)


def _hint(url: object) -> str:
    if isinstance(url, str) and ("@" in url or re.search(r":[^/0-9]", url)):
        return "; write the characters @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
    return ""
