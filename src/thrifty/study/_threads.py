"""The workers' CPU threads: results may depend on them, so the first run of a plan fixes them."""

from __future__ import annotations

from thrifty.core import UsageError, plain_logger
from thrifty.run import ExecutorConfig, Local
from thrifty.run._local import num_cores
from thrifty.store import Store


logger = plain_logger(__name__)


def with_threads_of(
    plan: int, executor: ExecutorConfig, *, store: Store, name: str
) -> ExecutorConfig:
    """Return the executor with the number of CPU threads that its plan is trained with.

    The first run fixes the number: the executor's setting, or its default.

    Raises:
        UsageError: The executor asks for another number than the fixed one.
    """
    default = executor.default_threads
    if default is None:
        return executor
    fixed = store.plans.fix_threads(plan, executor.threads or default)
    if executor.threads not in (None, fixed):
        kind = type(executor).__name__
        raise UsageError(
            f"{kind}(threads={executor.threads}): what study {name!r} shares was trained with "
            f"{fixed} CPU "
            f"threads for each worker, and results may depend on that in the last bits; leave "
            f"threads out, "
            f"give threads={fixed}, or use another seed or database to begin anew"
        )
    total = fixed * executor.num_workers
    if isinstance(executor, Local) and fixed > 1 and total > max(num_cores(), fixed):
        logger.warning(
            "study %r keeps the %d CPU threads for each worker that its first run had: %d "
            "workers use %d "
            "threads on %d cores; fewer workers may be as fast",
            name,
            fixed,
            executor.num_workers,
            total,
            num_cores(),
        )
    return executor.with_threads(fixed)
