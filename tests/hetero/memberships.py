"""Workers in threads, faults on demand, and conformance checks for memberships.

::

    @pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
    def test_mine(check):
        check(make_mine)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from thrifty.core import PeerLostError, TooFewWorkersError
from thrifty.hetero import Membership, PartialMembership, Wait, WorkerView


_LIMIT_S = 600.0
"""Seconds after which a wait counts as a deadlock.

A wait ends when a worker has answered or left, and a worker that dies leaves. On a busy machine
that may take a while.
"""


class WorkerKilled(BaseException):
    """An error that ends a worker's thread as a kill ends its process; do not catch it."""


class ThreadCluster:
    """A cluster of memberships in one process, which die on request.

    >>> cluster = ThreadCluster()
    >>> cluster.run({name: (lambda m: m.agree(step=0).names) for name in ("a", "b")})
    {'a': ('a', 'b'), 'b': ('a', 'b')}
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._live: list[str] = []
        self._current: tuple[str, ...] = ()
        self._generation = 0
        self._asking: dict[str, int] = {}
        self._broken = False
        self._parts: dict[str, Tensor] = {}
        self._result: Tensor | None = None
        self._served: set[str] = set()
        self._calls: dict[str, int] = {}
        self._doomed: dict[str, tuple[int, bool]] = {}
        self._partners: dict[str, tuple[str, ...]] = {}
        self._sent: dict[tuple[str, str], list[Tensor]] = {}
        self._waiting: set[str] = set()

    def member(self, name: str) -> ThreadMembership:
        """Add a worker that takes part from the next agreement on."""
        with self._changed:
            self._live.append(name)
            self._changed.notify_all()
        return ThreadMembership(self, name)

    def wait_for(self, name: str) -> None:
        """Wait until a worker asks to take part, so that the next agreement admits it."""
        with self._changed:
            self._wait(lambda: name in self._asking or name in self._current, name)

    def kill(self, name: str, *, after: int, delivers: bool = False) -> None:
        """Make a worker die later.

        Args:
            name: name of the worker.
            after: number of sums and broadcasts that it still completes.
            delivers: whether its part of the next sum still arrives. In that case, only the first
                of the other workers learns the result.
        """
        with self._changed:
            self._doomed[name] = (self._calls.get(name, 0) + after, delivers)

    def wait_for_standby(self, name: str) -> None:
        """Wait until a worker waits for a message."""
        with self._changed:
            self._wait(lambda: name in self._waiting, f"{name} to stand by")

    def lose(self, name: str) -> None:
        """Make a worker that waits for a message die."""
        with self._changed:
            self._doomed[name] = (-1, False)
            self._changed.notify_all()

    def run(self, jobs: dict[str, Callable[[Membership], Any]]) -> dict[str, Any]:
        """Run a job for each worker in its own thread.

        Returns:
            Results by name, without those of killed workers.
        """
        members = {name: self.member(name) for name in jobs}
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures: dict[str, Future[Any]] = {
                name: pool.submit(_until_killed, job, members[name]) for name, job in jobs.items()
            }
            done = {name: future.result() for name, future in futures.items()}
        return {name: result for name, result in done.items() if result is not WorkerKilled}

    # --- called by memberships

    def agree(self, name: str, step: int, *, broken: bool) -> WorkerView:
        """Run a worker's ``Membership.agree``."""
        with self._changed:
            if broken:
                self._break()
            self._asking[name] = step
            self._settle()
            self._changed.notify_all()
            self._wait(lambda: name not in self._asking, "an agreement")
            return self._view(name)

    def exchange(self, name: str, tensor: Tensor, source: int | None) -> None:
        """Run a worker's sum, or its broadcast if there is a source."""
        with self._changed:
            self._calls[name] = self._calls.get(name, 0) + 1
            if name in self._doomed and self._calls[name] > self._doomed[name][0]:
                self._die(name, tensor, source)
            if self._broken or name not in self._current:
                raise PeerLostError("a worker is gone")
            # The previous exchange must be over for all workers.
            self._wait(lambda: self._result is None or self._broken, "the exchange before")
            if self._broken:
                raise PeerLostError("a worker is gone")
            self._parts[name] = tensor
            self._combine(self._partners.get(name, self._current), source)
            self._wait(lambda: name in self._served or self._broken, "an exchange")
            if name not in self._served:
                raise PeerLostError("a worker is gone")
            assert self._result is not None
            tensor.copy_(self._result)
            self._served.discard(name)
            if not self._served:
                self._result = None
                self._parts = {}
                self._changed.notify_all()

    def narrow(self, name: str, ranks: Sequence[int]) -> None:
        """Let a worker's exchanges reach only these workers of the present generation."""
        with self._changed:
            if self._broken and len(ranks) > 1:
                raise PeerLostError("a worker is gone")
            self._partners[name] = tuple(self._current[rank] for rank in ranks)

    def send(self, name: str, tensor: Tensor, to: int) -> None:
        """Deliver a message to a worker that waits for it, or will."""
        with self._changed:
            if self._broken:
                raise PeerLostError("a worker is gone")
            self._sent.setdefault((name, self._current[to]), []).append(tensor.clone())
            self._changed.notify_all()

    def receive(self, name: str, tensor: Tensor, source: int) -> None:
        """Wait for a message."""
        with self._changed:
            key = (self._current[source], name)
            self._waiting.add(name)
            self._changed.notify_all()
            self._wait(
                lambda: self._broken or bool(self._sent.get(key)) or self._is_lost(name),
                "a message",
            )
            self._waiting.discard(name)
            if self._is_lost(name):
                self._doomed.pop(name)
                self._live.remove(name)
                self._break()
                self._settle()
                self._changed.notify_all()
                raise WorkerKilled
            if not self._sent.get(key):
                raise PeerLostError("a worker is gone")
            tensor.copy_(self._sent[key].pop(0))

    def leave(self, name: str) -> None:
        """Remove a worker that leaves in an orderly way."""
        with self._changed:
            if name in self._live:
                self._live.remove(name)
            if name in self._current:
                self._break()
            self._settle()
            self._changed.notify_all()

    # --- called with the lock held

    def _is_lost(self, name: str) -> bool:
        return self._doomed.get(name, (0, False))[0] < 0

    def _combine(self, partners: tuple[str, ...], source: int | None) -> None:
        if set(self._parts) != set(partners):
            return
        self._result = self._combined(partners, source)
        self._served = set(partners)
        self._changed.notify_all()

    def _combined(self, partners: tuple[str, ...], source: int | None) -> Tensor:
        parts = [self._parts[name] for name in partners]
        if source is not None:
            return parts[source].clone()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _die(self, name: str, tensor: Tensor, source: int | None) -> None:
        _, delivers = self._doomed.pop(name)
        self._live.remove(name)
        if delivers and not self._broken and self._result is None and name in self._current:
            self._parts[name] = tensor
            others = [other for other in self._current if other != name]
            self._wait(lambda: set(others) <= set(self._parts) or self._broken, "the others")
            if not self._broken and others:
                # The last worker to arrive has combined the parts; some may have their sum by now.
                self._served &= {others[0]}
                if not self._served:
                    self._result, self._parts = None, {}
        self._break()
        self._settle()
        self._changed.notify_all()
        raise WorkerKilled

    def _break(self) -> None:
        """Mark the connections of the present generation as broken."""
        self._broken = True
        self._changed.notify_all()

    def _settle(self) -> None:
        """Begin a new generation once every live worker of the present one requests it."""
        waiting_for = [name for name in self._current if name in self._live]
        if not self._asking or any(name not in self._asking for name in waiting_for):
            return
        if self._generation == 0 and set(self._asking) != set(self._live):
            return  # at the start, wait for all named workers
        names = tuple(sorted(self._asking))
        if names != self._current or self._broken:
            self._generation += 1
            self._current = names
            self._broken = False
            self._parts, self._result, self._served = {}, None, set()
            self._partners, self._sent = {}, {}
        self._steps = tuple(self._asking[name] for name in names)
        self._asking = {}
        self._changed.notify_all()

    def _view(self, name: str) -> WorkerView:
        return WorkerView(
            generation=self._generation,
            rank=self._current.index(name),
            names=self._current,
            steps=self._steps,
        )

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(ready, _LIMIT_S):
            raise TooFewWorkersError(f"{what} did not come within {_LIMIT_S:g} s")


class ThreadMembership:
    """One worker's side of a ``ThreadCluster``."""

    def __init__(self, cluster: ThreadCluster, name: str) -> None:
        self._cluster = cluster
        self.name = name

    def agree(self, *, step: int, broken: bool = False) -> WorkerView:
        """Agree with the live threads."""
        return self._cluster.agree(self.name, step, broken=broken)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the threads of this generation."""
        self._cluster.exchange(self.name, tensor, None)

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Return a function that computes the sum when it is called."""
        return lambda: self.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast to the threads of this generation."""
        self._cluster.exchange(self.name, tensor, source)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Exchange with these threads only."""
        self._cluster.narrow(self.name, ranks)

    def send(self, tensor: Tensor, *, to: int) -> None:
        """Send a message to one thread."""
        self._cluster.send(self.name, tensor, to)

    def receive(self, tensor: Tensor, *, source: int) -> None:
        """Wait for a message of one thread."""
        self._cluster.receive(self.name, tensor, source)

    def close(self) -> None:
        """Leave the cluster."""
        self._cluster.leave(self.name)


def _until_killed(job: Callable[[Membership], Any], member: Membership) -> Any:
    try:
        return job(member)
    except WorkerKilled:
        return WorkerKilled
    finally:
        member.close()


class MakeMember(Protocol):
    """A function from a unique name to a membership.

    The memberships made by one such function meet each other.
    """

    def __call__(self, name: str) -> Membership:
        """Make a membership."""
        ...


Job = Callable[[Membership], Any]


def check_sums(make: MakeMember) -> None:
    """Check that sums and broadcasts reach all workers, and that ranks follow one order."""

    def job(member: Membership) -> Any:
        view = member.agree(step=0)
        mine = torch.tensor([float(view.rank + 1), 1.0])
        member.all_reduce(mine)
        sent = torch.full((3,), float(view.rank))
        member.broadcast(sent, source=1)
        return view.names, view.rank, mine.tolist(), sent.tolist()

    results = _together(dict.fromkeys(("a", "b", "c"), job), make)
    assert {names for names, *_ in results.values()} == {("a", "b", "c")}
    assert sorted(rank for _, rank, *_ in results.values()) == [0, 1, 2]
    assert all(total == [6.0, 3.0] for *_, total, _ in results.values())
    assert all(sent == [1.0, 1.0, 1.0] for *_, sent in results.values())


def check_sums_begun(make: MakeMember) -> None:
    """Check that several sums may be in progress at a time."""

    def job(member: Membership) -> Any:
        view = member.agree(step=0)
        mine = [torch.full((size,), float(view.rank + 1)) for size in (3, 1, 100_000)]
        for wait in [member.begin_all_reduce(each) for each in mine]:
            wait()
        return [each.unique().tolist() for each in mine]

    results = _together(dict.fromkeys(("a", "b"), job), make)
    assert list(results.values()) == [[[3.0]] * 3] * 2


def check_same_generation(make: MakeMember) -> None:
    """Check that workers that agree again keep the generation and learn each other's steps."""

    def job(member: Membership) -> Any:
        first = member.agree(step=0)
        again = member.agree(step=3)
        return first.generation == again.generation, again.steps, again.furthest

    results = _together(dict.fromkeys(("a", "b"), job), make)
    assert set(results.values()) == {(True, (3, 3), 0)}


def check_lost_peer(make: MakeMember) -> None:
    """Check that workers that lose a peer get an error instead of a sum, agree again and go on."""

    def stays(member: Membership) -> Any:
        first = member.agree(step=0)
        member.all_reduce(torch.ones(1))
        try:
            for _ in range(3):
                member.begin_all_reduce(torch.ones(1))()
        except PeerLostError:
            pass
        else:
            raise AssertionError("a sum with a worker that is gone did not fail")
        view = member.agree(step=1, broken=True)
        mine = torch.ones(1)
        member.all_reduce(mine)
        return view.generation > first.generation, view.names, mine.item()

    def goes(member: Membership) -> Any:
        member.agree(step=0)
        member.all_reduce(torch.ones(1))
        member.close()

    results = _together({"a": stays, "b": goes, "c": stays}, make)
    assert results["a"] == results["c"] == (True, ("a", "c"), 2.0)


def check_newcomer(make: MakeMember) -> None:
    """Check that a late worker joins at an agreement, and that all see which worker is behind."""
    there, gone = threading.Event(), threading.Event()

    def first(member: Membership) -> Any:
        member.agree(step=0)
        there.set()
        step = 0
        while not gone.is_set():
            step += 1
            view = member.agree(step=step)
            if len(view.names) == 2:
                mine = torch.ones(1)
                member.all_reduce(mine)
                return view.names, view.names[view.furthest], mine.item()
        raise AssertionError("the newcomer was never let in")

    def second(member: Membership) -> Any:
        view = member.agree(step=0)
        mine = torch.ones(1)
        member.all_reduce(mine)
        return view.names, view.names[view.furthest], mine.item()

    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(_closing, first, lambda: make("early"))
        early.add_done_callback(lambda _: there.set())  # after an error, stop waiting
        there.wait()
        late = pool.submit(_closing, second, lambda: make("late"))
        late.add_done_callback(lambda _: gone.set())
        assert early.result() == late.result() == (("early", "late"), "early", 2.0)


def check_narrow(make: MakeMember) -> None:
    """Check that sums and broadcasts can leave workers out, which wait for messages meanwhile."""

    def trains(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        view = member.agree(step=0)
        member.narrow((0, 2))
        mine = torch.full((2,), float(view.rank + 1))
        member.all_reduce(mine)
        sent = torch.full((1,), float(view.rank))
        member.broadcast(sent, source=1)  # the second one of those that train
        if view.rank == 0:
            member.send(torch.tensor([7, 8]), to=1)
            member.send(torch.tensor([9]), to=1)
        member.narrow((0, 1, 2))
        everyone = torch.ones(1)
        member.all_reduce(everyone)
        return mine.tolist(), sent.item(), everyone.item()

    def stands_by(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        member.agree(step=0)
        member.narrow((0, 2))
        first, second = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        member.receive(first, source=0)
        member.receive(second, source=0)
        member.narrow((0, 1, 2))
        everyone = torch.ones(1)
        member.all_reduce(everyone)
        return first.tolist(), second.item(), everyone.item()

    results = _together({"a": trains, "b": stands_by, "c": trains}, make)
    assert results["a"] == results["c"] == ([4.0, 4.0], 2.0, 3.0)
    assert results["b"] == ([7, 8], 9, 3.0)


def check_narrow_to_one(make: MakeMember) -> None:
    """Check that a worker that trains alone exchanges nothing."""

    def trains(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        member.agree(step=0)
        member.narrow((0,))
        mine = torch.ones(1)
        member.begin_all_reduce(mine)()
        member.broadcast(mine, source=0)
        member.send(torch.tensor([1]), to=1)
        return mine.item()

    def stands_by(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        member.agree(step=0)
        member.narrow((0,))
        told = torch.zeros(1, dtype=torch.int64)
        member.receive(told, source=0)
        return told.item()

    assert _together({"a": trains, "b": stands_by}, make) == {"a": 1.0, "b": 1}


def check_lost_while_standing_by(make: MakeMember) -> None:
    """Check that a worker that stands by notices that the one that trains has gone."""

    def trains(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        member.agree(step=0)
        member.narrow((0,))
        member.close()

    def stands_by(member: Membership) -> Any:
        assert isinstance(member, PartialMembership)
        member.agree(step=0)
        try:
            member.narrow((0,))
            member.receive(torch.zeros(1, dtype=torch.int64), source=0)
        except PeerLostError:
            return "lost"
        raise AssertionError("the loss of the worker that trains was not noticed")

    assert _together({"a": trains, "b": stands_by}, make)["b"] == "lost"


def check_close(make: MakeMember) -> None:
    """Check that a worker may leave twice."""

    def job(member: Membership) -> Any:
        member.agree(step=0)
        member.close()
        member.close()

    _together({"a": job}, make)


def _together(jobs: dict[str, Job], make: MakeMember) -> dict[str, Any]:
    members = {name: make(name) for name in jobs}
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = {
            name: pool.submit(_closing, job, partial(members.__getitem__, name))
            for name, job in jobs.items()
        }
        return {name: future.result() for name, future in futures.items()}


def _closing(job: Job, make: Callable[[], Membership]) -> Any:
    member = make()
    try:
        return job(member)
    finally:
        member.close()


MEMBERSHIP_CHECKS: Sequence[Callable[[MakeMember], None]] = (
    check_sums,
    check_sums_begun,
    check_same_generation,
    check_lost_peer,
    check_newcomer,
    check_close,
)
"""Checks for memberships that come and go; each takes a maker of members."""

PARTIAL_CHECKS: Sequence[Callable[[MakeMember], None]] = (
    check_narrow,
    check_narrow_to_one,
    check_lost_while_standing_by,
)
"""Checks for memberships in which some workers can stand by."""
