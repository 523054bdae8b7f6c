"""A cache of recently used states in memory."""

from __future__ import annotations

from collections import OrderedDict

from thrifty.pack import State


class RecentStates:
    """The most recently used states, up to a number of bytes; at least one state is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._states: OrderedDict[tuple[int, int], State] = OrderedDict()

    def get(self, key: tuple[int, int]) -> State | None:
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def add(self, key: tuple[int, int], state: State) -> None:
        replaced = self._states.pop(key, None)
        self._held_bytes += _num_bytes(state) - (_num_bytes(replaced) if replaced else 0)
        self._states[key] = state
        while self._held_bytes > self._max_bytes and len(self._states) > 1:
            _, dropped = self._states.popitem(last=False)
            self._held_bytes -= _num_bytes(dropped)


def _num_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.tensors.values())
