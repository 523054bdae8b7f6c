"""The normal form of a function's syntax tree: the same on every Python, whatever its layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def function_form(node: Function) -> str:
    """Return what a function does as one line of text.

    Comments, positions, docstrings, layout and the function's own name are left out. So are its
    defaults and decorators, because they are evaluated outside of it: other digests cover their
    values. Annotations appear only where a decorator could read them.

    >>> def form(text):
    ...     return function_form(ast.parse(text).body[0])
    >>> form("def f(x):\\n    return x+1") == form("def g(x): # one more\\n    return (x + 1)")
    True
    >>> form("def f(x):\\n    return x + 1") == form("def f(x):\\n    return x + 2")
    False
    """
    return _Writer().function(node)


def constant_form(value: Any) -> str:
    """Return a constant with its type; strings as code points, because ``repr`` follows Unicode."""
    if isinstance(value, str):
        return f"str:{value.encode('utf-8', 'surrogatepass').hex()}"
    if isinstance(value, tuple | frozenset):
        inside = [constant_form(each) for each in value]
        ordered = sorted(inside) if isinstance(value, frozenset) else inside
        return f"{type(value).__name__}:({', '.join(ordered)})"
    return f"{type(value).__name__}:{value!r}"


class _Writer:
    """A writer of nodes that knows whether it is in a class body, where annotations matter."""

    def __init__(self) -> None:
        self._in_class = False

    def function(self, node: Function) -> str:
        if isinstance(node, ast.Lambda):
            body = f"[Return(value={self._form(node.body)})]"
        else:
            body = self._statements(node.body)
        annotated = bool(getattr(node, "decorator_list", ()))
        arguments = self._arguments(node.args, annotated=annotated, defaults=False)
        kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{kind}({arguments}, {body})"

    def _form(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{', '.join(map(self._form, node))}]"
        if isinstance(node, ast.Constant):
            return constant_form(node.value)
        if isinstance(node, ast.JoinedStr):
            return f"JoinedStr({', '.join(self._pieces(node))})"
        if node is None:  # not the constant: the key of ``{**x}``, a default that is not given
            return "-"
        if not isinstance(node, ast.AST):
            return constant_form(node)
        was_in_class = self._in_class
        if isinstance(node, (ast.ClassDef, *Function.__args__)):
            self._in_class = isinstance(node, ast.ClassDef)
        fields = ", ".join(self._fields(node))
        self._in_class = was_in_class
        return f"{type(node).__name__}({fields})"

    def _fields(self, node: ast.AST) -> Iterator[str]:
        """Yield the fields of a node by name, without those that are empty or are layout."""
        decorated = bool(getattr(node, "decorator_list", ()))
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name in _LAYOUT or value is None or value == []:
                continue
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield f"{name}={self._statements(value)}"
            elif isinstance(value, ast.arguments):
                yield f"{name}={self._arguments(value, annotated=decorated, defaults=True)}"
            elif isinstance(node, ast.Delete):
                yield f"{name}={self._form(_flat(value))}"
            elif name == "format_spec" and not self._pieces(value):
                continue
            elif name != "returns" or decorated:
                yield f"{name}={self._form(value)}"

    def _statements(self, body: list[Any]) -> str:
        """Write statements without those that do nothing: docstrings, constants, ``pass``."""
        kept: list[Any] = []
        for each in body:
            if isinstance(each, ast.Pass):
                continue
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue
            if isinstance(each, ast.AnnAssign) and each.simple and not self._in_class:
                if each.value is not None:
                    kept.append(ast.Assign(targets=[each.target], value=each.value))
                continue
            kept.append(each)
        return self._form(kept)

    def _arguments(self, node: ast.arguments, *, annotated: bool, defaults: bool) -> str:
        def one(each: ast.arg) -> str:
            if not annotated or each.annotation is None:
                return each.arg
            return f"{each.arg}: {self._form(each.annotation)}"

        groups = (node.posonlyargs, node.args, node.kwonlyargs)
        out = [f"[{', '.join(map(one, group))}]" for group in groups]
        out += ["" if rest is None else one(rest) for rest in (node.vararg, node.kwarg)]
        if defaults:
            out += [self._form(node.defaults), self._form(list(node.kw_defaults))]
        return f"arguments({', '.join(out)})"

    def _pieces(self, node: Any) -> list[str]:
        """Return the pieces of an f-string; versions of Python split its text differently."""
        out: list[str] = []
        text = ""
        for each in node.values:
            if isinstance(each, ast.Constant):
                text += str(each.value)
                continue
            if text:
                out.append(constant_form(text))
            text = ""
            out.append(self._form(each))
        return [*out, constant_form(text)] if text else out


def _flat(targets: list[ast.expr]) -> list[ast.expr]:
    """Flatten targets: ``del (a, b)`` deletes what ``del a, b`` does."""
    out: list[ast.expr] = []
    for each in targets:
        out += _flat(each.elts) if isinstance(each, ast.Tuple | ast.List) else [each]
    return out


_LAYOUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
