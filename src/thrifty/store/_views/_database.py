"""Read-only access to a database that other processes write."""

from __future__ import annotations

from typing import Self

from sqlalchemy import Engine

from thrifty.core import UsageError
from thrifty.store._address import redact_url
from thrifty.store._engine import forbid_writing, open_engine

from ._plans import PlanViews
from ._studies import StudyViews
from ._trial_samples import TrialSamples
from ._trials import TrialViews


class Views:
    """Read-only views of a database that other processes write.

    ``studies`` are summaries of the studies, ``trials`` is the table of their trials, ``samples``
    are as many trials as a chart can show, and ``plans`` is what was trained.

    >>> from thrifty.store import Store
    >>> import tempfile
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/t.db"
    >>> with Store.open(url) as store:
    ...     plan = store.plans.open("what is trained", task="Digits").id
    ...     made = store.studies.create(
    ...         "first", plan=plan, spec={"metric": "loss", "mode": "min"}
    ...     )
    >>> with Views.open(url) as views:
    ...     [(study.name, study.metrics) for study in views.studies.list()]
    [('first', ('loss',))]
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.studies = StudyViews(engine)
        self.trials = TrialViews(engine)
        self.samples = TrialSamples(engine)
        self.plans = PlanViews(engine)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a database on read-only connections, after a migration if it needs one.

        Raises:
            UsageError: ``url`` is not a database address, or names a database in memory.
            StudyNotFoundError: There is no such file.
            StoreVersionError: A newer thrifty wrote the database.
            StoreUnreachableError: The database server does not answer.
            MissingExtraError: PostgreSQL's driver is not installed.
        """
        engine = open_engine(url, create=False)
        sqlite = engine.dialect.name == "sqlite"
        if sqlite and engine.url.database in (None, "", ":memory:"):
            engine.dispose()
            raise UsageError(
                f"{redact_url(url)} is a database in memory, which only its own process sees; "
                "name a file"
            )
        engine.dispose()  # close the connection that may have migrated it, which can write
        forbid_writing(engine)
        return cls(engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
