from __future__ import annotations

import heapq
from itertools import pairwise

from thrifty.web._responses import PollThrottle


def rounds(pages, *, for_s):
    """Return when each page asks, if it follows the server's delays; all start together."""
    clock = [0.0]
    pace = PollThrottle(least_s=2, spacing_s=0.1, now=lambda: clock[0])
    due = [(0.0, page) for page in range(pages)]
    asked = []
    while due[0][0] <= for_s:
        clock[0], page = heapq.heappop(due)
        asked.append((clock[0], page))
        heapq.heappush(due, (clock[0] + pace.again_s(), page))
    return asked


def test_one_page_comes_back_soon():
    assert [at for at, _ in rounds(1, for_s=10)] == [0, 2, 4, 6, 8, 10]


def test_many_pages_ask_no_more_often_together_and_all_have_their_turn():
    asked = rounds(200, for_s=100)
    later = [(at, page) for at, page in asked if at >= 2]
    assert len(later) <= 98 / 0.1 + 2
    turns = [[at for at, page in later if page == which] for which in range(200)]
    assert all(len(mine) >= 4 for mine in turns)
    assert max(b - a for mine in turns for a, b in pairwise(mine)) < 21


def test_those_who_have_left_keep_nobody_waiting_for_long():
    clock = [0.0]
    pace = PollThrottle(least_s=2, spacing_s=0.1, now=lambda: clock[0])
    for _ in range(200):
        pace.again_s()
    clock[0] = 22.0
    assert pace.again_s() == 2
