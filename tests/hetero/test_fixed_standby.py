"""Workers that stand by in real groups of processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.study.processes import started

from .gloo import abandon, net_of, stand_by
from .jobs import data, distance, plain


pytestmark = pytest.mark.slow


def ended(job, size, folder):
    """Run a job in some processes; return what those that ended have saved."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    try:
        processes += (started(job, rank, store.port, str(folder)) for rank in range(size))
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=True) if file.exists() else {} for file in files]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return ended(stand_by, 3, tmp_path_factory.mktemp("standby"))


@pytest.mark.parametrize(
    ("kind", "batch", "epochs", "names"), [("alone", 16, 6, ["0"]), ("pair", 40, 20, ["0", "1"])]
)
def test_processes_that_stand_by_end_with_the_result_of_one(three, kind, batch, epochs, names):
    net, _ = plain(epochs, net=net_of("plain"), dataset=data(torch.float32), batch=batch)
    first, _, last = (each[kind]["steps"] for each in three)
    assert names in [present for _, present in first]
    assert len(last) < len(first)
    for each in three:
        mine = net_of("plain")
        mine.load_state_dict(each[kind]["state"])
        assert distance(mine, net) < 1e-6
        assert each[kind]["place"] == epochs
        for name, value in each[kind]["state"].items():
            assert torch.equal(value, three[0][kind]["state"][name])


def test_a_killed_process_that_stood_by_ends_the_job(three):
    assert three[0]["error"].startswith("TooFewWorkersError: a worker was lost")
    assert three[1]["error"].startswith(
        "HeteroError: training has failed while this worker stood by: TooFewWorkersError"
    )
    assert "error" not in three[2]


def test_a_process_that_stands_by_notices_that_the_other_one_has_ended(tmp_path):
    _, waiting = ended(abandon, 2, tmp_path)
    assert waiting["error"].startswith("TooFewWorkersError: a worker was lost")
