from __future__ import annotations

import gc
import os
import re
import shutil
import signal
from pathlib import Path


# What a script starts in the background ignores Ctrl-C, and so would every process of the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before NumPy and torch are imported. Threads of OpenMP and OpenBLAS spin while they wait for
# each other: on busy cores, a test with two of them takes four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray starts its workers with a niceness of 15: beside other work, they hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")

# Databases sync each commit. On a disk, the tests of the store spend a fifth of their time on that,
# so files are in memory where there is room.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, settings

from thrifty.pack.identity._settings import all_precisions, set_matmul_precision
from thrifty.perf import PackCurve

from .depth import IS_THOROUGH, drawn, draws
from .devices import chosen, on, takes_device


# Modules are imported faster without it; ``pytest_collection_finish`` starts it again.
gc.disable()

# The time of an example says more about the machine than about the code.
settings.register_profile(
    "busy", deadline=None, max_examples=draws(30, 100), suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("few", settings.get_profile("busy"), max_examples=20)
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="run the tests that train on a device, on this one only, and no others"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that take ``device`` on each device."""
    if takes_device(metafunc.definition):
        metafunc.parametrize("device", chosen(metafunc.config), indirect=True, scope="module")


@pytest.fixture(scope="module")
def device(request):
    with on(request.param) as found:
        yield found


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what ``make quick`` leaves out: importing takes a third of its time."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    is_slow = re.search(r"^pytestmark = .*\bslow\b", collection_path.read_text(), re.MULTILINE)
    return True if is_slow else None


_LOOK_AT_ALL_OBJECTS = frozenset({
    "_object_graphs.py", "test_lightning.py", "test_model_copies.py", "test_object_graphs.py",
})  # fmt: skip
"""Their tests go through all objects of the process: at its end, that takes seconds for each."""

_LONGEST = frozenset({"test_browser.py"})
"""Files of two minutes, by themselves: if one of them begins last, a core waits for it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of tests marked ``sample``, and tests marked ``thorough``.

    ``make thorough`` and a command line that names a test run them all. With ``--device``, only
    tests that take a device are left.
    """
    # Slow files begin early, so that the last ones to end are short.
    items.sort(
        key=lambda item: (
            item.path.name not in _LOOK_AT_ALL_OBJECTS,
            item.path.name not in _LONGEST,
            item.get_closest_marker("slow") is None,
        )
    )  # fmt: skip
    if config.getoption("device") is not None:
        config.hook.pytest_deselected(items=[item for item in items if not takes_device(item)])
        items[:] = [item for item in items if takes_device(item)]
    if IS_THOROUGH or any("::" in arg for arg in config.args):
        return
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for group in groups.values():
        if group[0].get_closest_marker("thorough"):
            left_out.update(group)
        elif mark := group[0].get_closest_marker("sample"):
            left_out.update(set(group) - set(drawn(group, mark.args[0])))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Freeze what is imported, to save the garbage collector 0.3 s at each collection."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch._dynamo  # noqa: F401, PLC0415 (a first optimizer imports it in any case)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Freeze what earlier files have left, some of which thaw all objects to look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(settings_of_torch, monkeypatch):
    """Remove THRIFTY_ variables, so that no test depends on the caller's shell.

    What is patched is given back before settings of torch are, since it comes after them here.
    """
    for name in list(os.environ):
        if name.startswith("THRIFTY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def known_gains(monkeypatch):
    """Packs in this process are measured in no time, and found to be as good as they can be.

    What is measured on a busy machine is another thing each time.
    """
    curves = [
        PackCurve(backend="solo", step_s={1: 1.0}),
        PackCurve(backend="fused", step_s={1: 1.0, 8: 1.0}),
    ]
    monkeypatch.setattr(
        "thrifty.pack.backends._fusion_policy.calibrate", lambda *args, **options: curves
    )


@pytest.fixture(autouse=True)
def settings_of_torch():
    """Run torch with one thread, because bits may depend on it; give back what a test has set.

    What one test left would change the results of others, whichever come after it in a process.
    """
    threads = torch.get_num_threads()
    before = _settings_of_torch()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if _settings_of_torch() == before:
        return
    deterministic, warn_only, cudnn, precisions, dtype = before
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    # PyTorch refuses to read by the older interface what only the newer one has set.
    torch.backends.cudnn.allow_tf32 = dict(precisions).get("cudnn.conv") == "tf32"
    torch.set_float32_matmul_precision("highest")
    set_matmul_precision(precisions)
    torch.set_default_dtype(dtype)


def _settings_of_torch():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        all_precisions(),
        torch.get_default_dtype(),
    )
