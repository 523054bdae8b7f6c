"""What workers send, seen on the wire: gradients and control numbers, and nothing of private samples."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.hetero import ElasticMembership, HeteroOptions, HeteroTrainer, StepCurve


MARK = 1234.5678
"""Stands in every private sample, many times in a row."""

FEATURES = 4096
STEPS = 12


def job(address, name, sends):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 2))
    public = TensorDataset(torch.randn(64, FEATURES), torch.zeros(64, dtype=torch.long))
    mine = torch.randn(128, FEATURES)
    mine[:, :64] = MARK
    trainer = HeteroTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-6),
        public,
        private=TensorDataset(mine, torch.zeros(128, dtype=torch.long)),
        loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        global_batch=64,
        members=ElasticMembership(address, name=name, min_workers=2, timeout_s=20),
        options=HeteroOptions(curve=StepCurve(sample_s=1.0), admit_every=1000),
    )
    private = 0
    for steps, report in enumerate(trainer.run(epochs=3), 1):
        private += len(report.share.private)
        if steps == 2:
            sends["before"] = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        if steps == STEPS:
            sends["after"] = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            break
    trainer.close()
    return private, trainer.bytes_per_step


def both(address):
    sends = {}
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, address, name, sends) for name in ("a", "b")]
        (private, handed_in), _ = [each.result(60) for each in jobs]
    return private, handed_in, sends


def test_a_step_sends_gradients_and_control(lighthouse):
    private, handed_in, sends = both(lighthouse)
    assert private > 100
    sent = (sends["after"] - sends["before"]) / (STEPS - 2)
    # A ring of two sends each buffer once from each worker; packets and heartbeats come on top. The step's private samples would be 20 times as much.
    assert sent < 2 * handed_in * 1.5 + 20_000
    assert sent < 0.2 * private / STEPS * 2 * FEATURES * 4


def test_private_samples_are_never_on_the_wire(lighthouse):
    try:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    except (PermissionError, AttributeError) as error:
        pytest.skip(f"packets can only be read by root on Linux: {error}")
    pattern = torch.full((8,), MARK).numpy().tobytes()
    heard, packets, over = [], [], threading.Event()

    def listen():
        tap.settimeout(0.2)
        while not over.is_set():
            try:
                packet = tap.recv(1 << 17)
            except TimeoutError:
                continue
            packets.append(len(packet))
            if pattern in packet:
                heard.append(packet)

    with tap:
        tap.bind(("lo", 0))
        listener = threading.Thread(target=listen)
        listener.start()
        private, _, _ = both(lighthouse)
        assert private > 100
        assert len(packets) > STEPS
        assert not heard
        # The tap hears what is sent: the same bytes, for once on purpose.
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as out,
            server.accept()[0] as peer,
        ):
            out.sendall(pattern * 4)
            assert peer.recv(4096)
            for _ in range(100):
                if heard:
                    break
                over.wait(0.05)
        over.set()
        listener.join()
    assert heard
