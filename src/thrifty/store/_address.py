"""Database addresses: parsing them, redacting their passwords, and what servers refuse them.

An address that cannot be parsed may contain a password, too. So redaction does not rely on parsing:
where the end of a password is unclear, it hides everything that may belong to the password.

A PostgreSQL server that answers, but denies access, gets an error that says what to do
(``refusal``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from thrifty.core import StoreError, StoreWriteError, UsageError


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
        if path.endswith(".py"):
            return (
                f"{path!r} is a Python file, not a database address; give the storage of its "
                "study, such as sqlite:///thrifty.db"
            )
        return f"{path!r} is not a database address; did you mean sqlite:///{path}?"
    return (
        "that is not a database address; write sqlite:///thrifty.db or "
        f"postgresql+psycopg://host/name{_hint(url)}"
    )


def _hint(url: object) -> str:
    if isinstance(url, str) and ("@" in url or re.search(r":[^/0-9]", url)):
        return "; write the characters @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
    return ""


_NO_RIGHT = "42501"

_LOGIN_TEXTS = {
    "28P01": r"password authentication failed|no password supplied",
    "28000": r"pg_hba\.conf|authentication failed|not permitted to log in"
    r"|role \"[^\n]*\" does not exist",
    "3D000": r"database \"[^\n]*\" does not exist",
    _NO_RIGHT: r"permission denied for database",
}
"""Texts of a server that refuses a connection, by SQLSTATE; the first that fits counts.

While psycopg connects, it reports only the text. A server that writes another language is not
understood, which is why the advice about a silent server also mentions the password.
"""

_ADDRESS = "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"

_ADVICE = {
    "28P01": "the password is missing or wrong; give the right one in PGPASSWORD, in ~/.pgpass or "
    f"in the address, {_ADDRESS}",
    "28000": f"the server refuses this user; check the user in the address, {_ADDRESS}, and ask "
    "the administrator of the server whether the role exists and whether pg_hba.conf admits it "
    "from this machine",
    "3D000": "the server has no database of this name; correct the name in the address, or create "
    "the database: createdb -h HOST DATABASE",
}


def refusal(error: DBAPIError, *, said: str, where: str, role: str | None) -> StoreError | None:
    """Return the error that users see if PostgreSQL denies access; None for other errors.

    Args:
        error: The database's error.
        said: The database's message, without secrets.
        where: The address of the database, without secrets.
        role: The user of the address, if it names one.
    """
    state = getattr(error.orig, "sqlstate", "")  # SQLite's errors have none
    if state is None:
        state = _login_state(said)
    said = " ".join(said.split())
    if state in _ADVICE:
        return StoreError(f"cannot log in to {where}: {said}; {_ADVICE[state]}")
    if state != _NO_RIGHT:
        return None
    verb = (error.statement or "connect").split(maxsplit=1)[0].upper()
    kind = StoreError if verb in ("SELECT", "CONNECT") else StoreWriteError
    return kind(f"{where} denies a right: {said}; {_grants(verb, role or 'ROLE')}")


def _login_state(said: str) -> str:
    """Return the SQLSTATE of a refused connection, or "" if its text is not known."""
    fitting = (state for state, text in _LOGIN_TEXTS.items() if re.search(text, said))
    return next(fitting, "")


def _grants(verb: str, role: str) -> str:
    """Say who can give a role the right that a statement needs, and how."""
    role = '"{}"'.format(role.replace('"', '""'))
    if verb == "CONNECT":
        return f"let the owner of the database run: GRANT CONNECT ON DATABASE NAME TO {role}"
    tables = f"ON ALL TABLES IN SCHEMA public TO {role}"
    if verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        return (
            f"let the owner of the tables run: GRANT SELECT {tables} if this role only reads, or "
            f"GRANT SELECT, INSERT, UPDATE, DELETE {tables}; GRANT USAGE ON ALL SEQUENCES IN "
            f"SCHEMA public TO {role} if it also trains or steers"
        )
    return (
        "thrifty's tables are missing or of an older version, and this role may not make or change "
        "them; let their owner open the database once, for example with 'thrifty status', or, for "
        f"a new database, let its owner run: GRANT CREATE ON SCHEMA public TO {role}"
    )
