"""Under seeded schedules of faults nothing is lost, repeated or stuck, and the best is the same."""

from __future__ import annotations

import errno
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from psycopg import errors
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url

from bench.common.postgresql import PrivatePostgreSQL
from tests.depth import draws
from tests.servers import FlakyProxy, needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.helpers import make_study, records
from tests.study.processes import At, die, exit_code, started
from thrifty.core import StoreWriteError, SystemClock
from thrifty.run import Local
from thrifty.search import SuccessiveHalving
from thrifty.store import CheckpointFolder, Store
from thrifty.study import Storage


pytestmark = [needs_postgresql, pytest.mark.slow]

KINDS = ("worker", "driver", "database", "full disk", "slow disk", "network", "clock")
NUM_SCHEDULES = draws(7, 50)
ALGORITHM = SuccessiveHalving(max_epochs=6, num_trials=12, eta=2)
IN_PROCESS = Local(pack="concatenated", pack_size=3)
PROCESSES = Local(workers=2, threads=1, pack="solo")


@dataclass(frozen=True)
class Scene:
    """All that a process needs to run a disturbed study."""

    folder: Path
    url: str
    server: PrivatePostgreSQL
    kind: str
    seed: int

    def study(self, url=None):
        storage = Storage(url=url or self.url, checkpoints=str(self.folder / "checkpoints"))
        return make_study(self.folder, algorithm=ALGORITHM, storage=storage)


class JumpingClock(SystemClock):
    """The wall clock of a machine whose time is changed."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        return super().now() + self.offset


def disturbed(scene: Scene) -> None:
    """Run the study with the faults of its schedule."""
    rng = np.random.default_rng(scene.seed)
    at = int(rng.integers(1, 60))
    executor, url, study_clock, action = IN_PROCESS, None, None, die
    if scene.kind == "worker":
        executor, action = PROCESSES, kill_a_worker
    elif scene.kind == "database":
        action = restart(scene.server)
    elif scene.kind == "full disk":
        action = fill_checkpoints if rng.random() < 0.5 else fill_database
    elif scene.kind == "slow disk":
        at, action = 1, slow_down
    elif scene.kind == "network":
        proxy = FlakyProxy(scene.server.socket).__enter__()
        action, url = cut(proxy, rng), through(proxy, scene.url)
    elif scene.kind == "clock":
        study_clock = JumpingClock()
        jump_s = float(rng.choice([-86_400.0, -90.0, 90.0, 86_400.0]))
        action = lambda: setattr(study_clock, "offset", jump_s)  # noqa: E731
    study = scene.study(url)
    if study_clock is not None:
        study._clock = study_clock
    study.run(progress=False, observers=[At(at, action)], executor=executor)


def kill_a_worker() -> None:
    """Kill one of the workers that exist at that event."""
    for parent in psutil.Process().children():
        assert "thrifty.core._fork_server" in parent.cmdline()
        for worker in parent.children():
            worker.kill()
            return


def restart(server):  # noqa: F811
    def action() -> None:
        server.stop(mode="immediate")
        server.start()

    return action


def cut(proxy, rng):
    """Break the connection; it returns after the driver has failed to reconnect a few times."""
    refusals = int(rng.integers(1, 4))

    def action() -> None:
        proxy.cut()
        tried = 0

        @event.listens_for(Engine, "handle_error")
        def count(context) -> None:
            nonlocal tried
            tried += 1
            if tried == refusals:
                proxy.mend()

    return action


def through(proxy, url) -> str:
    address = make_url(url).difference_update_query(["host"])
    return address.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)


def fill_checkpoints() -> None:
    def write(*_: object, **__: object):
        raise StoreWriteError(str(OSError(errno.ENOSPC, "No space left on device")))

    CheckpointFolder.write = write  # type: ignore[method-assign]


def fill_database() -> None:
    @event.listens_for(Engine, "before_cursor_execute")
    def full(connection, cursor, statement, *rest) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            raise errors.DiskFull("could not extend file: No space left on device")


def slow_down() -> None:
    """Make each write take much longer than an epoch."""
    write = CheckpointFolder.write

    def slowly(*args: object, **kwargs: object):
        time.sleep(0.02)  # a simulated slow disk
        return write(*args, **kwargs)

    CheckpointFolder.write = slowly  # type: ignore[method-assign]

    @event.listens_for(Engine, "commit")
    def commit(connection) -> None:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("left-alone"), algorithm=ALGORITHM)
    study.run(progress=False, executor=IN_PROCESS)
    return records(study), reports(study), (study.best_trial.number, study.best_trial.value)


def reports(study):
    with Store.open(study.storage.url, create=False) as store:
        log = store.studies.load(store.studies.get(study.name).id).log
    return Counter((e.kind, e.trial, e.epoch) for e in log)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_nothing_is_lost_or_there_twice(
    tmp_path,
    server,  # noqa: F811
    postgresql,  # noqa: F811
    undisturbed,
    seed,
):
    scene = Scene(tmp_path, postgresql, server, KINDS[seed % len(KINDS)], seed)
    child = started(disturbed, scene)
    code = exit_code(child)
    study = scene.study()
    if scene.kind in ("driver", "full disk"):
        assert code != 0
        study.run(progress=False, executor=IN_PROCESS)
    else:
        assert code == 0
    everything, reported, best = undisturbed
    assert reports(study) == reported
    assert max(reported.values()) == 1
    assert records(study) == everything
    assert (study.best_trial.number, study.best_trial.value) == best
