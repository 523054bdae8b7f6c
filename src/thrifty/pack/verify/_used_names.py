"""What code does with a variable: whether it decides by it, or only counts and shows it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from types import FunctionType


SHOWING = frozenset({
    "print", "log", "debug", "info", "warning", "error", "write", "add_scalar", "add_scalars",
    "log_metric", "log_metrics", "set_postfix", "set_description", "perf_counter", "time",
})  # fmt: skip
"""Names of functions and methods that only show or record what they get."""
FILLING = frozenset({
    "append", "appendleft", "add", "update", "extend", "insert", "setdefault", "clear", "popleft",
})  # fmt: skip
"""Names of methods that change a container; what they return is not used in a statement."""


def used_names(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Return the names of variables and attributes that functions use.

    A name is not used where a statement only updates it (``self.n += 1``, ``self.best = min(
    self.best, x)``, ``self.notes.append(x)``) or shows it (``print(self.n)``). A function whose
    source is not available uses no names.

    >>> import thrifty.pack.verify._used_names as this  # doctests have no source
    >>> sorted(this.used_names([this.used_names]) & {"found", "functions", "SHOWING"})
    ['found', 'functions']

    Args:
        functions: Functions of the user's own.
    """
    found = _Uses()
    for function in functions:
        try:
            found.visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
    return frozenset(found.names)


class _Uses(ast.NodeVisitor):
    """A collector of the names that are read for anything but their own update."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._updated: frozenset[str] = frozenset()

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node.id, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node.attr, node.ctx)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        # what is called is no value that differs between two trials; what it belongs to may be
        called = node.func.value if isinstance(node.func, ast.Attribute) else None
        cached = node.func if isinstance(node.func, ast.Name) else None
        for each in (called, cached, *node.args, *node.keywords):
            if each is not None:
                self.visit(each)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = frozenset(name for each in node.targets for name in _targets(each))
        self._visit_update(node.value, targets)
        self._visit_indices(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._visit_update(node.value, frozenset(_targets(node.target)))
        self._visit_indices([node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit_update(node.value, frozenset(_targets(node.target)))
        self._visit_indices([node.target])

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if not isinstance(call, ast.Call) or _is_shown(node):
            if not isinstance(call, ast.Call):
                self.visit(call)
            return
        if isinstance(call.func, ast.Attribute) and call.func.attr in FILLING:
            for each in (*call.args, *call.keywords):
                self.visit(each)
            return
        self.visit(call)

    def visit_If(self, node: ast.If) -> None:
        if all(map(_is_shown, (*node.body, *node.orelse))):
            return  # it decides only whether something is shown
        self.generic_visit(node)

    def _note(self, name: str, context: ast.expr_context) -> None:
        if isinstance(context, ast.Load) and name not in self._updated:
            self.names.add(name)

    def _visit_update(self, value: ast.expr, targets: frozenset[str]) -> None:
        before, self._updated = self._updated, self._updated | targets
        self.visit(value)
        self._updated = before

    def _visit_indices(self, targets: Iterable[ast.expr]) -> None:
        for each in targets:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Subscript):
                    self.visit(inner.slice)


def _targets(node: ast.expr) -> Iterable[str]:
    """Return the names that an assignment changes: ``self.a[k] = v`` changes ``a``."""
    if isinstance(node, ast.Tuple | ast.List):
        return [name for each in node.elts for name in _targets(each)]
    if isinstance(node, ast.Subscript | ast.Starred):
        return _targets(node.value)
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def _is_shown(node: ast.stmt) -> bool:
    """Return whether a statement only shows something."""
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in SHOWING
