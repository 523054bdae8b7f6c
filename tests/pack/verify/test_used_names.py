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
    return used_names([__import__(module).f]).attributes


UNUSED = [
    "self.n += 1",
    "self.n = self.n + x",
    "self.n: int = self.n + 1",
    "self.n = min(self.n, x)",
    "self.n = 0 if x < self.n else self.n + 1",
    "self.n.append(x)",
    "self.n[x] = 1",
    "self.n[x] += 1",
    "self.n",
    "y = self.n",
    "self.m = self.n",
    "print(self.n)",
    "print(f'{self.n:.2f}')",
    "elapsed = time.time() - self.n\nprint(elapsed)",
    "text = f'{self.n}'\nlogger.info(text)",
    "self.writer.add_scalar('loss', x, self.n)",
    "json.dump(self.n, file)",
    "self.rows.append({'n': self.n})",
    "if self.n % 100 == 0:\n    print(x)",
    "if self.n % 100 == 0:\n    rate = self.m / 100\n    print(rate)\n    self.m = 0",
    "n = 16\nreturn x + n",
    "self.n, y = self.n + 1, 2\nreturn y",
    "self.m, self.n = self.m + 1, self.n > 4\nreturn self.m",
    "while self.n:\n    print(x)",
    "del self.n",
    "pass",
]


@pytest.mark.parametrize("text", UNUSED)
def test_a_value_that_is_only_updated_or_shown_is_not_used(text, tmp_path, monkeypatch):
    assert "n" not in uses_of(text, tmp_path, monkeypatch)


USED = [
    "if self.n >= 4:\n    return\nx.backward()",
    "if self.n >= 4:\n    raise ValueError",
    "return x * self.n",
    "y = self.n\nreturn y",
    "self.m = self.n\nreturn self.m",
    "self.m += self.n\nreturn self.m",
    "self.m[self.n] = 1\nreturn self.m",
    "self.model.set_rate(self.n)",
    "for group in self.groups:\n    group['lr'] = self.n",
    "self.model.scale = self.n",
    "while self.n:\n    x.step()",
    "for _ in range(self.n):\n    x.step()",
    "return len(self.n)",
    "return {'n': self.n}",
    "self.n.step()",
    "self.parts[self.n](x).backward()",
    "(x if self.n else 2 * x).backward()",
    "if self.n > 3:\n    print(x)\nelse:\n    return x",
    "if self.n > 4 and self.drop():\n    x.step()",
    "self.m, self.off = self.m + 1, self.n > 4\nif self.off:\n    x.step()",
    "y = []\ny.append(self.n)\nreturn y",
    "return vars(self)['n']",
    "return self.__dict__['n']",
    "return getattr(self, 'n')",
    "def inner():\n    return self.n\nreturn inner()",
    "return (lambda: self.n)()",
    "return [y for y in x if y > self.n]",
    "yield self.n",
    "assert self.n < 5",
    "with torch.autocast('cpu', enabled=self.n > 3) as y:\n    return y",
    "# a comment at column 0\nreturn self.n",
]


@pytest.mark.parametrize("text", USED)
def test_a_value_that_reaches_a_result_is_used(text, tmp_path, monkeypatch):
    assert "n" in uses_of(text, tmp_path, monkeypatch)


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def mean(self):
        return self.sum / self.count


class Shows:
    def train(self, batches):
        for batch in batches:
            self.meter.update(batch)
            self.num_steps += 1
            self.log()
        print(self.meter.mean)  # noqa: T201

    def log(self):
        if self.num_steps % 10:
            return
        print(self.num_steps)  # noqa: T201


class Returns(Shows):
    def evaluate(self):
        return {"mean": self.meter.mean}


class Stops(Shows):
    def train(self, batches):
        for batch in batches:
            self.num_steps += 1
            self.check()
            if self.is_done:
                break
            batch.backward()

    def check(self):
        if self.num_steps > 40:
            self.is_done = True


def functions_of(*kinds):
    members = [member for kind in kinds for member in vars(kind).values()]
    plain = [each.fget if isinstance(each, property) else each for each in members]
    return [each for each in plain if callable(each) and hasattr(each, "__code__")]


def test_values_flow_through_methods_and_properties():
    shown = used_names(functions_of(Meter, Shows)).attributes
    assert not {"sum", "count", "num_steps"} & shown
    returned = used_names(functions_of(Meter, Shows, Returns)).attributes
    assert {"sum", "count"} <= returned
    assert "num_steps" not in returned
    assert {"num_steps", "is_done"} <= used_names(functions_of(Stops)).attributes


LIMIT = 3


def counts_a_global():
    global LIMIT
    LIMIT += 1
    print(LIMIT)  # noqa: T201


def goes_by_a_global(x):
    return x if LIMIT > 4 else 2 * x


def test_variables_are_told_from_attributes():
    assert "LIMIT" not in used_names([counts_a_global]).variables
    found = used_names([counts_a_global, goes_by_a_global])
    assert "LIMIT" in found.variables
    assert "LIMIT" not in found.attributes


def test_all_names_of_a_function_without_source_are_used():
    names: dict = {}
    exec("def f(self):\n    return getattr(self, 'm') + self.n", names)
    assert {"n", "m"} <= used_names([names["f"]]).attributes
