"""Workers that are jobs: the same records as here, whatever ends a job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from submitit.core.utils import UncompletedJobError

import thrifty as th
from thrifty.core import UsageError
from thrifty.run import _cluster, _slurm
from thrifty.run._cluster import WorkerEvictedError
from thrifty.run._slurm import Slurm, SlurmCluster
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow

CLUSTERS = ["local", "slurm"]


@pytest.fixture(scope="module")
def cluster(request):
    """Return a kind of cluster that is there; where Slurm is not, ``sinfo`` takes ten seconds."""
    if request.param == "slurm":
        found = shutil.which("sinfo")
        if found is None or subprocess.run([found], capture_output=True, timeout=60).returncode:
            pytest.skip("no Slurm runs here")
    return request.param


class Slow(LineTask):
    """A task whose epochs take a while, and say which other process trains them."""

    def __init__(self, folder, seconds):
        super().__init__()
        self.folder, self.seconds = folder, seconds
        self.driver = os.getpid()

    def identity(self):
        return {"task": "slow"}

    def metrics(self, model, batch):
        time.sleep(self.seconds)
        if os.getpid() != self.driver:
            (self.folder / str(os.getpid())).touch()
        return super().metrics(model, batch)


def make(folder, *, seconds=0.0, name="line"):
    pids = folder / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    rates = [0.02 * (1 + i) for i in range(3)]
    options = [*rates, *(th.Step(rate, [at]) for rate in rates for at in (2, 5))]
    return th.Study(
        Slow(pids, seconds),
        th.Space(lr=th.Choice(options)),
        algorithm=th.GridSearch(max_epochs=8),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
    )


def records(study):
    return [(t.number, t.config, t.state, t.curve) for t in study.trials]


def slurm(where, cluster, **options):
    return th.Slurm(**{
        "cluster": cluster,
        "time": 5,
        "folder": str(where / "jobs"),
        "host": "127.0.0.1" if cluster == "slurm" else None,
        "pack": "solo",
        **options,
    })


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return records(
        make(tmp_path_factory.mktemp("here")).run(progress=False, executor=th.Local(pack="solo"))
    )


# The start of a job takes three seconds of CPU. The tests below also compare all records.
@pytest.mark.thorough
@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
def test_the_records_are_those_of_local_workers(tmp_path, cluster, expected):
    study = make(tmp_path, seconds=0.02)
    study.run(progress=False, executor=slurm(tmp_path, cluster, workers=2))
    assert records(study) == expected
    assert study.savings.unique_epochs == 8 * 3 + 6 * 3 + 3 * 3


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
def test_jobs_that_are_told_to_end_hand_back_their_work(tmp_path, cluster, expected):
    """As at a time limit: no epoch is trained twice."""
    study = make(tmp_path, seconds=0.05)
    enders = Ender(tmp_path / "pids", signal.SIGUSR2, num=1)
    study.run(progress=False, executor=slurm(tmp_path, cluster, workers=1))
    assert enders.stop() == 1
    assert records(study) == expected
    assert study.savings.unique_epochs == 8 * 3 + 6 * 3 + 3 * 3
    assert len(list((tmp_path / "pids").iterdir())) == 2


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
def test_jobs_that_are_killed_lose_no_record(tmp_path, cluster, expected):
    study = make(tmp_path, seconds=0.05)
    enders = Ender(tmp_path / "pids", signal.SIGKILL, num=1)
    study.run(progress=False, executor=slurm(tmp_path, cluster, workers=2))
    assert enders.stop() == 1
    assert records(study) == expected


class Ender:
    """Sends a signal to each process that has trained an epoch, in a thread."""

    def __init__(self, pids, number, *, num):
        self._pids, self._number, self._num = pids, number, num
        self._ended = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while len(self._ended) < self._num and not self._is_over.wait(0.05):
            for path in self._pids.iterdir():
                if path.name not in self._ended and len(self._ended) < self._num:
                    self._ended.add(path.name)
                    with suppress(ProcessLookupError):
                        os.kill(int(path.name), self._number)

    def stop(self):
        self._is_over.set()
        self._thread.join()
        return len(self._ended)


def test_a_job_that_fails_at_its_start_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "serve", _fail)
    monkeypatch.setattr(_cluster, "MAX_STARTS", 1)
    study = make(tmp_path)
    with pytest.raises(th.WorkerLostError, match="has ended before it has reached"):
        study.run(progress=False, executor=slurm(tmp_path, "local"))


def test_a_job_that_is_told_to_end_while_it_begins_is_replaced(tmp_path, monkeypatch, expected):
    """At its first try it ends as submitit ends jobs that cannot go on."""
    (tmp_path / "tries").mkdir()
    monkeypatch.setattr(_slurm, "serve", _late)
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    study = make(tmp_path)
    study.run(progress=False, executor=slurm(tmp_path, "local"))
    assert records(study) == expected
    assert len(list((tmp_path / "tries").iterdir())) == 2


def _late(*arguments):
    tries = Path(os.environ["TRIES"])
    (tries / str(os.getpid())).touch()
    if len(list(tries.iterdir())) < 2:
        raise UncompletedJobError("Job not requeued because: timed-out")
    _slurm.serve(*arguments)


def _fail(*_):
    raise RuntimeError("no network")


def test_a_task_that_cannot_be_loaded_is_said(tmp_path):
    study = th.Study(
        Unloadable(),
        th.Space(lr=0.1),
        algorithm=th.GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="line",
    )
    with pytest.raises(UsageError, match="only here"):
        study.run(progress=False, executor=slurm(tmp_path, "local"))


class Unloadable(LineTask):
    def __reduce__(self):
        return _only_here, (os.getpid(),)


def _only_here(pid):
    if pid != os.getpid():
        raise RuntimeError("only here")
    return Unloadable()


def test_who_does_not_know_the_key_is_refused(tmp_path):
    cluster = SlurmCluster(slurm(tmp_path, "local"), b"")
    address = cluster._listener.address
    try:
        with pytest.raises(Exception, match="rejected"), Client(address, authkey=b"wrong"):
            pass
        with Client(address, authkey=cluster._key) as stranger:
            stranger.send("another job")
            with pytest.raises(EOFError):
                stranger.recv()
    finally:
        cluster.close()


def test_a_job_that_has_left_takes_no_calls(tmp_path):
    cluster = SlurmCluster(slurm(tmp_path, "local"), b"")
    job = cluster.start_worker()
    cluster.stop_worker(job)
    call = cluster.advance(job, [], orders=[], stop=False)
    assert cluster.wait([call], 0) == [call]
    with pytest.raises(WorkerEvictedError, match="stopped"):
        cluster.result(call)
    cluster.close()


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        (90, 90),
        ("90", 90),
        ("90:30", 91),
        ("4:00:00", 240),
        ("2-00:00:00", 2880),
        ("1-12", 36 * 60),
        ("1-12:30", 36 * 60 + 30),
    ],
)
def test_times_are_those_of_sbatch(time, minutes):
    assert Slurm(time=time).minutes == minutes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "soon"}, "4:00:00"),
        ({"time": 0}, "4:00:00"),
        ({"time": 2, "signal_s": 120}, "give it more time"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1"),
        ({"cpus_per_task": 0}, "cpus_per_task=0"),
        ({"signal_s": 0}, "signal_s=0"),
        ({"cluster": "cloud"}, "slurm"),
        ({"workers": 0}, "workers=0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        Slurm(**options)


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="no sbatch"):
        make(tmp_path).run(progress=False, executor=slurm(tmp_path, "slurm"))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="cannot write the files"):
        make(tmp_path).run(progress=False, executor=slurm(tmp_path, "local", folder="/proc/no"))


def test_a_host_without_an_address(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "_submitter", lambda config: None)
    with pytest.raises(UsageError, match="give another one"):
        SlurmCluster(slurm(tmp_path, "slurm", host="nowhere.invalid"), b"")


def test_what_sbatch_says_when_it_refuses_a_job(tmp_path, monkeypatch):
    for name in ("sbatch", "srun"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: gpu' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UsageError, match=r"does not take .*invalid partition: gpu.*; see sinfo"):
        make(tmp_path).run(progress=False, executor=slurm(tmp_path, "slurm", partition="gpu"))


def test_states_of_jobs_are_asked_for(tmp_path, monkeypatch):
    """A job that is cancelled while it waits in the queue has ended."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho JobId=7 JobState=CANCELLED Reason=None\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(_slurm, "_submitter", lambda config: Submitter())
    monkeypatch.setattr(_slurm, "ASK_S", 0.0)
    cluster = SlurmCluster(slurm(tmp_path, "slurm"), b"")
    job = cluster.start_worker()
    call = cluster.prepare(job, None)
    while not cluster.wait([call], 0.1):
        pass
    with pytest.raises(th.WorkerLostError, match="job 7 has ended"):
        cluster.result(call)
    cluster.close()


class Submitter:
    """A queue in which jobs wait for ever."""

    job_id = "7"
    stderr = result_pickle = Path("nothing")

    @property
    def paths(self):
        return self

    def batch(self):
        return threading.Lock()

    def submit(self, *_):
        return self

    def cancel(self, *, check):
        pass
