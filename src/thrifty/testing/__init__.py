"""For tests, of thrifty and of what is built on it: tiny tasks, fakes, conformance suites."""

from ._tasks import LineTask as LineTask


__all__ = ["LineTask"]
