"""Which variables code goes by, and which it only counts, notes or shows."""

from __future__ import annotations

import pytest

from thrifty.pack.verify import used_names


def uses_of(text, tmp_path, monkeypatch):
    """Return the names that a function with this body uses."""
    module = f"uses_{abs(hash(text))}"
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    (tmp_path / f"{module}.py").write_text(f"def f(self, x):\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return used_names([__import__(module).f])


@pytest.mark.parametrize(
    "text",
    [
        "self.n += 1",
        "self.n = self.n + x",
        "self.n: int = self.n + 1",
        "self.n = min(self.n, x)",
        "self.n = 0 if x < self.n else self.n + 1",
        "self.n.append(x)",
        "self.n[x] = 1",
        "self.n[x] += 1",
        "print(self.n)",
        "print(f'{self.n:.2f}')",
        "self.writer.add_scalar('loss', x, self.n)",
        "if self.n % 100 == 0:\n    print(x)",
        "self.n, y = self.n + 1, 2",
        "del self.n",
        "pass",
    ],
)
def test_a_value_that_is_only_updated_or_shown_is_not_used(text, tmp_path, monkeypatch):
    assert "n" not in uses_of(text, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "text",
    [
        "if self.n >= 4:\n    return",
        "return x * self.n",
        "y = self.n",
        "self.m = self.n",
        "self.m += self.n",
        "self.m[self.n] = 1",
        "self.model.set_rate(self.n)",
        "while self.n:\n    break",
        "return len(self.n)",
        "return {'n': self.n}",
        "self.n.step()",
        "if self.n > 3:\n    print(x)\nelse:\n    return",
        "self.n",
    ],
)
def test_a_value_that_code_goes_by_is_used(text, tmp_path, monkeypatch):
    assert "n" in uses_of(text, tmp_path, monkeypatch)


def test_a_function_without_source_uses_nothing():
    names: dict = {}
    exec("def f(self):\n    return self.n", names)
    assert used_names([names["f"]]) == frozenset()
