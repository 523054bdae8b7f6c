"""Ray with several simulated machines and GPUs.

Which worker gets which GPU, and what is at fault if a worker vanishes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cloudpickle
import pytest
import ray
from ray.cluster_utils import Cluster

from thrifty.core import WorkerLostError
from thrifty.run import Ray
from thrifty.run._cluster import WorkerEvictedError
from thrifty.run._ray import RayCluster
from thrifty.run._worker import WorkerSpec


pytestmark = pytest.mark.slow


MEMORY = 80 * 2**20


class AtLoading:
    """A task that calls a function where it is loaded."""

    def __init__(self, function, *args):
        self.what = function, args

    def __reduce__(self):
        return self.what


@pytest.fixture(scope="module")
def machines():
    """Start a cluster: the first machine has two GPUs, and others come and go."""
    head = {"num_cpus": 1, "num_gpus": 2, "resources": {"first": 1}, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(
        address=cluster.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def preparing(config, *what):
    """Start workers that load a task; return them and their calls."""
    cluster = RayCluster(ray, config, cloudpickle.dumps(AtLoading(*what)))
    spec = WorkerSpec(name="w", device="cpu", threads=1, checkpoints="", folder="", curves={})
    workers = [cluster.start_worker() for _ in range(config.workers)]
    return cluster, workers, [cluster.prepare(worker, spec) for worker in workers]


def show_gpus(path):
    with Path(path).open("a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_gpus", "workers", "seen"), [(0.5, 4, ["0", "0", "1", "1"]), (2, 1, ["0,1"])]
)
@pytest.mark.usefixtures("machines")
def test_each_worker_sees_its_own_gpus(tmp_path, num_gpus, workers, seen):
    config = Ray(num_cpus=0, num_gpus=num_gpus)
    assert config.num_workers == workers
    path = tmp_path / "seen"
    config = Ray(num_cpus=0, num_gpus=num_gpus, workers=workers)
    cluster, hired, calls = preparing(config, show_gpus, str(path))
    assert [cluster.result(call) for call in calls] == [""] * workers
    assert sorted(path.read_text().split()) == seen
    for worker in hired:
        cluster.stop_worker(worker)
    cluster.close()


def wait_forever(fifo):
    Path(fifo).write_text("loading")
    signal.pause()


@pytest.mark.sample(1)
@pytest.mark.parametrize("graceful", [True, False])
def test_a_worker_whose_machine_goes_was_evicted(machines, tmp_path, graceful):
    machine = machines.add_node(resources={"spot": 1}, object_store_memory=MEMORY)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    config = Ray(num_cpus=0, resources={"spot": 1}, workers=1)
    cluster, _, (call,) = preparing(config, wait_forever, str(fifo))
    assert fifo.read_text() == "loading"
    machines.remove_node(machine, allow_graceful=graceful)
    with pytest.raises(WorkerEvictedError):
        cluster.result(call)
    cluster.close()


@pytest.mark.usefixtures("machines")
def die():
    os._exit(3)


@pytest.mark.thorough
def test_a_worker_that_dies_on_a_machine_that_lives_was_not_evicted():
    config = Ray(num_cpus=0, resources={"first": 1}, workers=1)
    cluster, _, (call,) = preparing(config, die)
    with pytest.raises(WorkerLostError) as caught:
        cluster.result(call)
    assert not isinstance(caught.value, WorkerEvictedError)
    cluster.close()
