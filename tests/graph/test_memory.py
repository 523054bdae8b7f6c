from __future__ import annotations

import gc
import pickle
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from thrifty.graph._batch import ALIGNMENT, Memory


pytestmark = pytest.mark.slow


def place_of(tensor):
    return tensor.untyped_storage().data_ptr()


def views(lent):
    """Return every kind of object that keeps the memory of a tensor in use."""
    return {
        "itself": lent,
        "row": lent[1],
        "transposed": lent.t(),
        "detached": lent.detach(),
        "numpy": lent.numpy(),
        "row of numpy": lent.numpy()[1],
        "bits": lent.view(torch.int32),
        "storage": lent.untyped_storage(),
        "dlpack": torch.from_dlpack(lent),
        "batch": {"x": [lent[:1]]},
        "graph": (lent * torch.ones(3, requires_grad=True)).sum(),
    }


@pytest.mark.parametrize("how", views(torch.ones(2, 3)))
def test_memory_is_not_used_again_as_long_as_anything_holds_it(how):
    memory = Memory()
    lent = memory.array((2, 3), torch.float32).fill_(7)
    place = place_of(lent)
    held = views(lent)[how]
    del lent
    assert place_of(memory.array((2, 3), torch.float32)) != place
    del held
    assert place_of(memory.array((2, 3), torch.float32)) == place


def test_memory_in_a_cycle_comes_back_when_garbage_is_collected():
    memory = Memory()
    cycle = [memory.array((2, 3), torch.float32)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert memory.num_free == 1


def test_memory_comes_back_from_another_thread():
    memory = Memory()
    lent = [memory.array((4,), torch.float32)]
    thread = Thread(target=lent.clear)
    thread.start()
    thread.join()
    assert memory.num_free == 1


def test_an_array_outlives_its_pool():
    memory = Memory()
    lent = memory.array((1000,), torch.int64).fill_(3)
    del memory
    gc.collect()
    assert lent.tolist() == [3] * 1000


def test_no_more_buffers_are_kept_than_asked_for():
    memory = Memory(keep=2)
    lent = [memory.array((4,), torch.float32) for _ in range(5)]
    lent.clear()
    assert memory.num_free == 2


def test_sizes_that_nobody_asks_for_any_more_are_given_up():
    memory = Memory(keep=2)
    old = [memory.array((10,), torch.float32) for _ in range(2)]
    old.clear()
    for _ in range(2):
        large = [memory.array((1000,), torch.float32) for _ in range(2)]
        places = {place_of(array) for array in large}
        large.clear()
    again = [memory.array((1000,), torch.float32) for _ in range(2)]
    assert {place_of(array) for array in again} == places


def test_a_little_more_or_less_meets_in_one_size():
    memory = Memory()
    place = place_of(memory.array((10_000, 100), torch.float32))
    assert place_of(memory.array((10_100, 100), torch.float32)) == place
    assert memory.num_free == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3,), (7, 5), (2, 3, 4)])
def test_arrays_are_as_asked_for(shape, dtype):
    array = Memory().array(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.is_contiguous()
    assert array.data_ptr() % ALIGNMENT == 0


def test_the_storage_has_no_more_than_the_array():
    # Copying the whole storage, as a transfer does, then copies no unneeded bytes.
    assert Memory().array((5, 3), torch.float32).untyped_storage().nbytes() == 60


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.integers(0, 9)), max_size=40))
def test_no_array_is_ever_changed_by_another(steps):
    memory = Memory(keep=3)
    held = {}
    for number, (give_back, size, slot) in enumerate(steps):
        if give_back:
            held.pop(slot, None)
        else:
            held[slot] = (number, memory.array((size,), torch.int32).fill_(number))
        assert all(bool((array == value).all()) for value, array in held.values())
        assert memory.num_free <= 3


def test_threads_may_borrow_at_once():
    memory = Memory(keep=3)
    wrong = []

    def borrow(number):
        rng = np.random.default_rng(number)
        for _ in range(200):
            held = [
                memory.array((int(n),), torch.int64).fill_(number) for n in rng.integers(1, 40, 3)
            ]
            wrong.extend(a for a in held if not bool((a == number).all()))

    threads = [Thread(target=borrow, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_free_is_not_pickled():
    memory = Memory(keep=5)
    memory.array((10_000,), torch.float32)
    sent = pickle.dumps(memory)
    assert len(sent) < 1000
    assert pickle.loads(sent).num_free == 0
