"""Errors of a PostgreSQL server that answers, but denies access."""

from __future__ import annotations

import re

from sqlalchemy.exc import DBAPIError

from thrifty.core import StoreError, StoreWriteError


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
