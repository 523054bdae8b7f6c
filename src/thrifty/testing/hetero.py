"""Workers in threads, faults on demand, and what every membership has to do.

::

    @pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
    def test_mine(check):
        check(make_mine)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from thrifty.core import PeerLostError, TooFewWorkersError
from thrifty.hetero import Membership, View, Wait


_LIMIT_S = 600.0
"""Seconds after which a wait is taken for a deadlock.

Waits end when a worker has answered or left; a worker that dies leaves. On a busy machine that may
take a while.
"""


class WorkerKilled(BaseException):
    """Ends a worker's thread as a kill would end its process: nobody catches it."""


class ThreadCluster:
    """Memberships that live in one process, and die when told.

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

    def member(self, name: str) -> ThreadMembership:
        """A worker that will take part from the next agreement on."""
        with self._changed:
            self._live.append(name)
            self._changed.notify_all()
        return ThreadMembership(self, name)

    def wait_for(self, name: str) -> None:
        """Wait until a worker asks to take part, so that the next agreement admits it."""
        with self._changed:
            self._wait(lambda: name in self._asking or name in self._current, name)

    def kill(self, name: str, *, after: int, delivers: bool = False) -> None:
        """Dooms a worker.

        Args:
            name: of it.
            after: sums and broadcasts that it still completes.
            delivers: its part of the next sum still arrives, but only the first of the others learns the result.
        """
        with self._changed:
            self._doomed[name] = (self._calls.get(name, 0) + after, delivers)

    def run(self, jobs: dict[str, Callable[[Membership], Any]]) -> dict[str, Any]:
        """Run a job for each worker in its own thread.

        Returns:
            Results by name, without those of killed workers.
        """
        members = {name: self.member(name) for name in jobs}
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures: dict[str, Future[Any]] = {
                name: pool.submit(_until_killed, job, members[name])
                for name, job in jobs.items()
            }
            done = {name: future.result() for name, future in futures.items()}
        return {name: result for name, result in done.items() if result is not WorkerKilled}

    # --- what memberships call

    def agree(self, name: str, step: int, *, broken: bool) -> View:
        """A worker's ``Membership.agree``."""
        with self._changed:
            if broken:
                self._break()
            self._asking[name] = step
            self._settle()
            self._changed.notify_all()
            self._wait(lambda: name not in self._asking, "an agreement")
            return self._view(name)

    def exchange(self, name: str, tensor: Tensor, source: int | None) -> None:
        """A worker's sum, or broadcast where there is a source."""
        with self._changed:
            self._calls[name] = self._calls.get(name, 0) + 1
            if name in self._doomed and self._calls[name] > self._doomed[name][0]:
                self._die(name, tensor, source)
            if self._broken or name not in self._current:
                raise PeerLostError("a worker is gone")
            # The exchange before has to be over for everybody.
            self._wait(lambda: self._result is None or self._broken, "the exchange before")
            if self._broken:
                raise PeerLostError("a worker is gone")
            self._parts[name] = tensor
            self._combine(source)
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

    def leave(self, name: str) -> None:
        """A worker goes in peace."""
        with self._changed:
            if name in self._live:
                self._live.remove(name)
            if name in self._current:
                self._break()
            self._settle()
            self._changed.notify_all()

    # --- under the lock

    def _combine(self, source: int | None) -> None:
        if set(self._parts) != set(self._current):
            return
        self._result = self._combined(source)
        self._served = set(self._current)
        self._changed.notify_all()

    def _combined(self, source: int | None) -> Tensor:
        parts = [self._parts[name] for name in self._current]
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
                # Who came last has combined the parts; some may have their sum by now.
                self._served &= {others[0]}
                if not self._served:
                    self._result, self._parts = None, {}
        self._break()
        self._settle()
        self._changed.notify_all()
        raise WorkerKilled

    def _break(self) -> None:
        """The present generation's connections are of no use any more."""
        self._broken = True
        self._changed.notify_all()

    def _settle(self) -> None:
        """Begins a new generation once every live worker of the present one asks for it."""
        waiting_for = [name for name in self._current if name in self._live]
        if not self._asking or any(name not in self._asking for name in waiting_for):
            return
        if self._generation == 0 and set(self._asking) != set(self._live):
            return  # at the start all that were named are waited for
        names = tuple(sorted(self._asking))
        if names != self._current or self._broken:
            self._generation += 1
            self._current = names
            self._broken = False
            self._parts, self._result, self._served = {}, None, set()
        self._steps = tuple(self._asking[name] for name in names)
        self._asking = {}
        self._changed.notify_all()

    def _view(self, name: str) -> View:
        return View(
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

    def agree(self, *, step: int, broken: bool = False) -> View:
        """With the live threads."""
        return self._cluster.agree(self.name, step, broken=broken)

    def all_reduce(self, tensor: Tensor) -> None:
        """Over the threads of this generation."""
        self._cluster.exchange(self.name, tensor, None)

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Sums once it is waited for."""
        return lambda: self.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """To the threads of this generation."""
        self._cluster.exchange(self.name, tensor, source)

    def close(self) -> None:
        """Leaves."""
        self._cluster.leave(self.name)


def _until_killed(job: Callable[[Membership], Any], member: Membership) -> Any:
    try:
        return job(member)
    except WorkerKilled:
        return WorkerKilled
    finally:
        member.close()


class MakeMember(Protocol):
    """From a unique name to a membership that meets the others made by the same maker."""

    def __call__(self, name: str) -> Membership:
        """Makes one."""
        ...


Job = Callable[[Membership], Any]


def check_sums(make: MakeMember) -> None:
    """Sums and broadcasts reach everybody; ranks follow one order."""

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
    """Several sums may be on their way at a time."""

    def job(member: Membership) -> Any:
        view = member.agree(step=0)
        mine = [torch.full((size,), float(view.rank + 1)) for size in (3, 1, 100_000)]
        for wait in [member.begin_all_reduce(each) for each in mine]:
            wait()
        return [each.unique().tolist() for each in mine]

    results = _together(dict.fromkeys(("a", "b"), job), make)
    assert list(results.values()) == [[[3.0]] * 3] * 2


def check_same_generation(make: MakeMember) -> None:
    """Who agrees again with the same workers keeps the generation, and learns their steps."""

    def job(member: Membership) -> Any:
        first = member.agree(step=0)
        again = member.agree(step=3)
        return first.generation == again.generation, again.steps, again.furthest

    results = _together(dict.fromkeys(("a", "b"), job), make)
    assert set(results.values()) == {(True, (3, 3), 0)}


def check_lost_peer(make: MakeMember) -> None:
    """Who is left gets an error instead of a sum, agrees anew, and goes on."""

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
    """Who comes later is let in at an agreement, and everybody sees who is behind."""
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
        early.add_done_callback(lambda _: there.set())  # an error is no reason to wait
        there.wait()
        late = pool.submit(_closing, second, lambda: make("late"))
        late.add_done_callback(lambda _: gone.set())
        assert early.result() == late.result() == (("early", "late"), "early", 2.0)


def check_close(make: MakeMember) -> None:
    """A worker may leave twice."""

    def job(member: Membership) -> Any:
        member.agree(step=0)
        member.close()
        member.close()

    _together({"a": job}, make)


def _together(jobs: dict[str, Job], make: MakeMember) -> dict[str, Any]:
    members = {name: make(name) for name in jobs}
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = {
            name: pool.submit(_closing, job, lambda name=name: members[name])
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
"""For memberships that come and go; each takes a maker of members."""
