"""What workers send on the wire: gradients and control numbers, but no private samples."""

from __future__ import annotations

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.hetero import ElasticMembership, HeteroOptions, HeteroTrainer, StepCurve


pytestmark = pytest.mark.slow


MARK = 1234.5678
"""Value that every private sample contains, many times in a row."""

FEATURES = 4096
STEPS = 12


PACKET_OUTGOING = 4
"""Packet type of sent packets; the loopback interface shows each packet twice."""


class Tap:
    """A context manager that records packets sent on the loopback interface.

    Attributes:
        packets: All recorded packets.
    """

    def __init__(self):
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        except (PermissionError, AttributeError) as error:
            pytest.skip(f"packets can only be read by root on Linux: {error}")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**25)
        self.packets = []
        self._heard = threading.Condition()
        self._over = False

    def __enter__(self):
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._over = True
        self._thread.join()
        self._socket.close()

    def has(self, pattern):
        with self._heard:
            return any(pattern in packet for packet in self.packets)

    def wait_for(self, pattern, *, send):
        """Send the pattern until it is recorded."""
        with self._heard:
            while not self._heard.wait_for(lambda: self.has(pattern), 1.0):
                send(pattern * 4)

    def num_bytes(self, ports):
        """Return the number of bytes of packets from or to some ports."""
        with self._heard:
            return sum(len(each) for each in self.packets if ports & set(ports_of(each)))

    def _listen(self):
        while not self._over:
            try:
                packet, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if address[2] == PACKET_OUTGOING:
                with self._heard:
                    self.packets.append(packet)
                    self._heard.notify_all()


def ports_of(packet):
    """Return both ports of a TCP packet; for other packets, the result is meaningless."""
    begin = 54 if packet[12:14] == b"\x86\xdd" else 14 + 4 * (packet[14] & 15)
    return struct.unpack_from("!HH", packet.ljust(begin + 4, b"\0"), begin)


def own_ports():
    """Return ports of connections within this process, which runs both workers."""
    found = [each.laddr.port for each in psutil.Process().net_connections("tcp") if each.raddr]
    return set(found)


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
        members=ElasticMembership(address, name=name, min_workers=2, timeout_s=300),
        options=HeteroOptions(curve=StepCurve(sample_s=1.0), admit_every=1000),
    )
    private = 0
    for steps, report in enumerate(trainer.run(epochs=3), 1):
        private += len(report.share.private)
        if steps == STEPS:
            sends["ports"] = own_ports()
            break
    trainer.close()
    return private, trainer.bytes_per_step


def both(address):
    sends = {}
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, address, name, sends) for name in ("a", "b")]
        (private, handed_in), _ = [each.result() for each in jobs]
    return private, handed_in, sends


def test_a_step_sends_gradients_and_control(lighthouse):
    with Tap() as tap:
        private, handed_in, sends = both(lighthouse)
        sent = tap.num_bytes(sends["ports"]) / STEPS
    assert private > 100
    # A ring of two sends each buffer once from each worker; packet headers, heartbeats and the
    # state at the start come on top. The step's private samples would be 20 times as much.
    assert handed_in < sent < 2 * handed_in * 1.5 + 20_000
    assert sent < 0.2 * private / STEPS * 2 * FEATURES * 4


def test_private_samples_are_never_on_the_wire(lighthouse):
    pattern = torch.full((8,), MARK).numpy().tobytes()
    with Tap() as tap:
        private, _, _ = both(lighthouse)
        assert private > 100
        assert len(tap.packets) > STEPS
        assert not tap.has(pattern)
        # The tap does record private bytes, as sending them on purpose shows.
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as out,
            server.accept()[0],
        ):
            tap.wait_for(pattern, send=out.sendall)
