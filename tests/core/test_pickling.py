"""Code that another process cannot import is sent to it, functions under a cache included."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import textwrap

import pytest

from thrifty.core._child import pickled


@functools.cache
def importable(x):
    return x + 1


def test_a_cached_function_of_a_module_is_sent_by_name():
    assert pickle.loads(pickled(importable)) is importable


def test_a_cached_function_that_cannot_be_imported_is_sent_with_an_empty_cache():
    @functools.lru_cache(maxsize=7)
    def squared(x):
        return x * x

    squared(3)
    sent = pickle.loads(pickled(squared))
    assert sent(3) == 9
    assert sent.cache_parameters()["maxsize"] == 7
    assert sent.cache_info().misses == 1


def test_a_recursive_one_goes_on_with_its_own_cache():
    @functools.cache
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    sent = pickle.loads(pickled(fibonacci))
    assert sent(30) == 832040
    assert sent.cache_info().currsize == 31


def test_a_method_under_a_cache_and_one_of_a_class():
    class Table:
        @functools.lru_cache  # noqa: B019
        def row(self, n):
            return [n] * n

    kind = pickle.loads(pickled(Table))
    assert kind().row(2) == [2, 2]


def test_a_cached_function_keeps_its_attributes():
    @functools.lru_cache
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 3
    sent = pickle.loads(pickled(scaled))
    assert sent(2) == 6
    assert sent.__wrapped__.__qualname__ == scaled.__qualname__


def test_a_cached_property_is_sent_without_its_lock():
    class Table:
        calls = 0

        @functools.cached_property
        def rows(self):
            """Rows."""
            self.calls += 1
            return [1, 2]

    kind = pickle.loads(pickled(Table))
    table = kind()
    assert (table.rows, table.rows, table.calls) == ([1, 2], [1, 2], 1)
    assert kind.rows.__doc__ == "Rows."


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_with_a_cached_function(workers, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import functools, torch, thrifty as th

            @functools.lru_cache
            def table(n):
                return torch.linspace(0.5, 1, n)

            @th.trainable
            def train(trial):
                lr = trial.suggest_categorical("lr", [0.1, 0.2])
                w = torch.nn.Parameter(torch.ones(4))
                for _ in trial.epochs({{"w": w}}):
                    (w * table(4)).sum().backward()
                    w.data -= lr * w.grad
                    w.grad = None
                    yield {{"x": float(w.sum())}}

            if __name__ == "__main__":
                study = th.Study(train, name="s", algorithm=th.GridSearch(max_epochs=2),
                                 metric="x", mode="min", storage="sqlite:///s.db")
                study.run(progress=False, executor=th.Local(workers={workers}, threads=1))
                print([round(t.curve[-1], 4) for t in study.trials])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().splitlines()[-1] == "[3.4, 2.8]", done.stderr
