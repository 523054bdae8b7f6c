"""Thrifty's schedules in any PyTorch loop, without a study."""

from ._lr_scheduler import LRScheduler as LRScheduler


__all__ = ["LRScheduler"]
