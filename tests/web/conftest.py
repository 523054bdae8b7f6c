from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from bench.dashboard.rows import fill
from tests.study.helpers import SOLO, WIDE, make_study
from thrifty.search import SuccessiveHalving
from thrifty.space import Choice, Space, Step
from thrifty.store import (
    EpochRecord,
    NodeRecord,
    Store,
    StudyInfo,
    TrialAsked,
    TrialFailed,
    TrialReported,
)
from thrifty.study import Storage
from thrifty.web import create_app, serve


BIG = 100_000
SCRIPT = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a database with one trained study, and one with hostile texts."""
    folder = tmp_path_factory.mktemp("trained")
    make_study(folder, name="line", space=WIDE).run(progress=False, executor=SOLO)
    with Store.open(f"sqlite:///{folder}/t.db") as store:
        harm(store)
    return folder / "t.db"


def harm(store: Store) -> StudyInfo:
    """Create a study in which every text is markup."""
    plan = store.plans.open("harm", task=SCRIPT).id
    spec = {
        "metric": SCRIPT, "mode": "max", "max_epochs": 4, "space": {SCRIPT: SCRIPT},
        "algorithm": SCRIPT,
    }  # fmt: skip
    study = store.studies.create(SCRIPT, plan=plan, spec=spec)
    asked = {"study": study.id, "trial": 0}
    config = {SCRIPT: SCRIPT, "lr": Step(0.1, [2])}
    place = {"plan": plan, "node": 0}
    said = {SCRIPT: {SCRIPT: SCRIPT}, "text": SCRIPT, "\x1b[31m": "red\x1b[31m"}
    store.record([
        NodeRecord(**place, parent=None, start=0, config=config, epochs=4),
        EpochRecord(
            **place, epoch=1, metrics={SCRIPT: 0.5}, seconds=1.0, worker=SCRIPT, attributes=said
        ),
        TrialAsked(**asked, target=4, config=config, group=0, parent=None, node=0),
        TrialReported(**asked, epoch=1, value=0.5),
        TrialFailed(**asked, epoch=0, kind="error", message=SCRIPT, traceback=SCRIPT),
    ])
    return study


@pytest.fixture
def database(trained, tmp_path):
    """Return a copy of the database that a test may write to."""
    shutil.copy(trained, tmp_path / "t.db")
    return tmp_path / "t.db"


@pytest.fixture
def client(database):
    with opened(database) as made:
        yield made


@contextmanager
def opened(path, **options):
    app = create_app(f"sqlite:///{path}", patience_s=0.0, **options)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="session")
def big(tmp_path_factory):
    """Return a database of 100,000 trials."""
    path = tmp_path_factory.mktemp("big") / "big.db"
    fill(path, num_trials=BIG)
    return path


@contextmanager
def serving(path, **options):
    """Run a dashboard that listens on a port of its own; yield its address."""
    server = serve(f"sqlite:///{path}", port=0, **options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join()


def halving(folder, **options):
    """Return a study that writes for a while."""
    space = Space(
        lr=Choice([Step(rate, [2]) for rate in (0.1, 0.05, 0.02)]), width=Choice([0, 2, 4])
    )
    return make_study(
        folder,
        space=space,
        algorithm=SuccessiveHalving(max_epochs=8, num_trials=9, min_epochs=2),
        storage=Storage(url=f"sqlite:///{folder}/t.db"),
        **options,
    )
