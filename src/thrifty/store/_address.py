"""Database addresses: parsing them, and redacting their passwords for messages.

An address that cannot be parsed may contain a password, too. So redaction does not rely on parsing:
where the end of a password is unclear, it hides everything that may belong to the password.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from thrifty.core import UsageError


HIDDEN = "***"

_SECRET = re.compile(
    r"pass(word|wd|phrase|wort)?$|pwd|secret|token|credential|(access|account|api)_?key",
    re.IGNORECASE,
)
"""Pattern of the names of options whose values are hidden."""
_SHORTEST = 3
"""Length of the shortest text that is hidden in messages; shorter ones would match everywhere."""


def read_address(url: str) -> URL:
    """Parse a database address.

    Raises:
        UsageError: It is not a database address, or its password contains characters that must be
            percent-encoded.
    """
    try:
        address = make_url(url)
    except (ArgumentError, ValueError, AttributeError):
        # Do not chain the cause: it may quote the address.
        raise UsageError(_unreadable(url)) from None
    stray = "%40" not in url and "@" in str(address.database or "")
    if "sqlite" not in address.drivername and ("@" in str(address.host or "") or stray):
        raise UsageError(
            f"the database address {redact_url(url)} has more than one @, so it is unclear "
            "where its password ends; write each @ of the password as %40"
        )
    return address


def redact_url(url: object) -> str:
    """Return an address with its passwords hidden, for messages.

    This works for addresses of databases and file systems, including those that cannot be parsed.
    A path without ``://`` is not an address.

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
        # This is a file path, which has no user or password before its options.
        place, question, query = rest.partition("?")
        return f"{scheme}{mark}{place}{question}{_without_secrets(query)}"
    return f"{scheme}{mark}{_without_password(rest)}"


def shell_command(*words: str, url: str, name: str | None = None) -> str:
    """Return a thrifty command on a database as one types it in a shell, passwords hidden.

    Args:
        words: The command and its options.
        url: The database.
        name: The study that is the command's argument, if it takes one.

    >>> shell_command("delete", name="my study", url="sqlite:///t.db")
    "thrifty delete 'my study' --storage sqlite:///t.db"
    >>> shell_command("delete", name="-x", url="sqlite:///t.db")
    'thrifty delete --storage sqlite:///t.db -- -x'
    """
    parts = ["thrifty", *words, "--storage", redact_url(url)]
    if name is not None and name.startswith("-"):
        parts += ["--", name]  # without the two dashes, the name would be read as an option
    elif name is not None:
        parts.insert(-2, name)
    return shlex.join(parts)


def redact_root(root: str) -> str:
    """Return the checkpoint location for messages: a path unchanged, an address redacted."""
    return redact_url(root) if "://" in root else root


def redact(text: str, *, url: object) -> str:
    """Return a text, such as a driver's error, with all possible passwords of ``url`` hidden."""
    for secret in sorted(set(_secrets(str(url))), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _without_password(rest: str) -> str:
    place, question, query = rest.partition("?")
    colon = place.find(":")
    if colon >= 0 and "@" in query:
        # The question mark may be part of the password.
        return f"{rest[:colon]}:{HIDDEN}"
    at = place.rfind("@")
    if 0 <= colon < at:
        place = f"{place[:colon]}:{HIDDEN}{place[at:]}"
    else:
        place = _without_odd_ports(place)
    return f"{place}{question}{_without_secrets(query)}"


def _without_odd_ports(place: str) -> str:
    """Hide non-numeric ports: they may be passwords in an address without a host."""
    user, at, hosts = place.rpartition("@")
    hosts, slash, path = hosts.partition("/")
    shown = []
    for host in hosts.split(","):
        # An IPv6 address contains colons and is in brackets.
        name, colon, port = host.rpartition(":")
        odd = colon and not port.isdecimal() and not port.endswith("]")
        shown.append(f"{name.split(':')[0]}:{HIDDEN}" if odd else host)
    return f"{user}{at}{','.join(shown)}{slash}{path}"


def _without_secrets(query: str) -> str:
    """Hide the value of the first secret option and everything after it, which may belong to it."""
    shown: list[str] = []
    for pair in query.split("&") if query else ():
        name, equals, value = pair.partition("=")
        if not equals or _SECRET.search(unquote(name)):
            shown.append(f"{name}={HIDDEN}" if equals else HIDDEN)
            break
        shown.append(f"{name}={redact_url(value) if '://' in value else value}")
    return "&".join(shown)


def _secrets(url: str) -> Iterator[str]:
    """Yield possible passwords of an address, both percent-encoded and decoded."""
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


_FILE = re.compile(r"[^:@?*=]+")
"""Pattern of an address that is a path: it has no place for a password."""


def _unreadable(url: object) -> str:
    """Return why an address cannot be parsed, and what to write; quote it if it has no secrets."""
    if isinstance(url, Path) or (isinstance(url, str) and _FILE.fullmatch(url)):
        path = str(url)
        return f"{path!r} is not a database address; did you mean sqlite:///{path}?"
    return (
        "that is not a database address; write sqlite:///thrifty.db or "
        f"postgresql+psycopg://host/name{_hint(url)}"
    )


def _hint(url: object) -> str:
    if isinstance(url, str) and ("@" in url or re.search(r":[^/0-9]", url)):
        return "; write the characters @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
    return ""
