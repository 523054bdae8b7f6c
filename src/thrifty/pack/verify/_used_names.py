"""Which variables results depend on, and which are only counted, noted or shown.

The user's functions are read as statements through which values flow. A value is used if it reaches
something that matters: what a function returns to the library, what is yielded, a call with
effects, a test that decides about one of these. What reaches only a log line is not used.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any


SHOWING = frozenset({
    "print", "log", "debug", "info", "warning", "warn", "error", "exception", "critical", "write",
    "writerow", "writerows", "writelines", "dump", "save", "savefig", "flush", "add_scalar",
    "add_scalars", "add_histogram", "add_image", "add_text", "add_figure", "log_metric",
    "log_metrics", "log_dict", "log_param", "log_params", "set_postfix", "set_postfix_str",
    "set_description", "set_description_str", "set_user_attr", "log_artifact", "display",
})  # fmt: skip
"""Names of functions and methods that only show or record what they get."""
FILLING = frozenset({
    "append", "appendleft", "add", "update", "extend", "insert", "setdefault", "clear", "popleft",
})  # fmt: skip
"""Names of methods that put what they get into their object."""
ENTRIES = frozenset({
    "loss", "metrics", "train", "evaluate", "forward", "step", "adapt", "closure", "loss_weight",
    "training_step", "validation_step", "test_step", "configure_optimizers", "compute_loss",
    "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "__len__",
})  # fmt: skip
"""Names of methods whose results the library takes."""

Node = tuple[str, ...]
"""An attribute, a variable, a local variable, the result of a function, or its parameters."""
Nodes = frozenset[Node]
SINK: Node = ("sink",)
_NONE: Nodes = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedNames:
    """The names that results depend on.

    Attributes:
        attributes: Names of attributes of any object.
        variables: Names of global variables, and of variables of an enclosing function.
    """

    attributes: frozenset[str]
    variables: frozenset[str]


def used_names(functions: Iterable[FunctionType], *, recorded: Collection[str] = ()) -> UsedNames:
    """Return the names of the variables and attributes that results depend on.

    Of a function whose source cannot be read, all names count as used.

    Args:
        functions: The user's functions and methods that run in training and evaluation.
        recorded: Names of functions that look as if they only showed what they get, such as
            ``log``, and whose values are results.
    """
    codes = tuple({function.__code__: None for function in functions})
    return _used_in(codes, SHOWING.difference(recorded))


@functools.lru_cache(maxsize=8)  # trials of one task are compared again and again
def _used_in(known: tuple[CodeType, ...], showing: frozenset[str]) -> UsedNames:
    flow = _Flow(showing=showing)
    nodes = _sources_of(known)
    flow.known = {_name(code, node) for code, node in nodes.items()}
    for code, node in nodes.items():
        _Function(flow, name=_name(code, node), node=node).run()
    used = flow.used()
    unread = [name for code in known if code not in nodes for name in _names_in(code)]
    return UsedNames(
        attributes=frozenset([*(n[1] for n in used if n[0] == "attribute"), *unread]),
        variables=frozenset([*(n[1] for n in used if n[0] == "variable"), *unread]),
    )


@dataclass(slots=True)
class _Flow:
    """From which nodes each node gets its value, over all functions."""

    showing: frozenset[str] = SHOWING
    """The names of functions that only show what they get."""
    sources: dict[Node, set[Node]] = field(default_factory=lambda: defaultdict(set))
    known: set[str] = field(default_factory=set)
    """The names of the user's functions."""
    read: set[str] = field(default_factory=set)
    """The names that are called, or read as attributes."""
    stores: list[tuple[str, Nodes]] = field(default_factory=list)
    """What is stored in attributes of objects other than ``self``."""
    bound: dict[str, set[Node]] = field(default_factory=lambda: defaultdict(set))
    """The attributes and variables that each function assigns."""
    effects: set[str] = field(default_factory=set)
    """The functions that do something which matters."""
    calls: list[tuple[str, str, Nodes]] = field(default_factory=list)
    """Who calls which function, and the nodes that decide whether it does."""
    exits: list[tuple[str, Nodes]] = field(default_factory=list)
    """Functions that may end early, and the nodes that decide about it."""

    def add(self, node: Node, sources: Iterable[Node]) -> None:
        self.sources[node].update(sources)

    def used(self) -> set[Node]:
        """Return the nodes from which a value reaches the sink."""
        self._decide()
        found, queue = {SINK}, [SINK]
        while queue:
            new = self.sources[queue.pop()] - found
            found |= new
            queue += new
        return found

    def _decide(self) -> None:
        """Add the flows that are only known once all functions are read."""
        for name in (self.known & ENTRIES) | (self.known - self.read):
            self.add(SINK, [("result", name)])
        for name, value in self.stores:
            if name not in self.read:  # code of a library reads it
                self.add(SINK, value)
        while new := {by for by, name, _ in self.calls if name in self.effects} - self.effects:
            self.effects |= new
        for name, decided in (*self.exits, *((name, nodes) for _, name, nodes in self.calls)):
            for node in self.bound[name]:
                self.add(node, decided)
            if name in self.effects:
                self.add(SINK, decided)


class _Function:
    """The flow of values in one function.

    Args:
        flow: What is found is added here.
        name: Name of the function.
        node: Its syntax tree.
        outer: The function around it.
    """

    def __init__(
        self,
        flow: _Flow,
        *,
        name: str,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        outer: _Function | None = None,
    ) -> None:
        self._flow, self._name, self._node, self._outer = flow, name, node, outer
        self._key = str(id(node))
        self._given: Nodes = _NONE
        """The nodes that decide whether the present expression is computed."""
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        self._parameters = [each.arg for each in every]
        body = node.body if isinstance(node.body, list) else [node.body]
        inside = [each for statement in body for each in ast.walk(statement)]
        shared = {
            n for each in inside if isinstance(each, ast.Global | ast.Nonlocal) for n in each.names
        }
        stored = {e.id for e in inside if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Store)}
        self._locals = ({*self._parameters} | stored) - shared
        self._made = {
            target.id
            for each in inside
            if isinstance(each, ast.Assign) and _is_new_container(each.value)
            for target in each.targets
            if isinstance(target, ast.Name)
        }

    def run(self) -> None:
        for name in self._parameters:
            self._flow.add(self._variable(name), [("parameters", self._name)])
        if isinstance(self._node, ast.Lambda):
            self._flow.add(("result", self._name), self._reads(self._node.body))
        else:
            self._run(self._node.body, _NONE)

    # -- statements --------------------------------------------------------------------------

    def _run(self, body: Iterable[ast.stmt], given: Nodes) -> None:
        """Read statements; ``given`` are the nodes that decide whether they are run."""
        for each in body:
            visit = getattr(self, f"_{type(each).__name__.lower()}", None)
            if visit is not None:
                self._given = given
                visit(each, given)

    def _assign(self, node: ast.Assign, given: Nodes) -> None:
        for target in node.targets:
            self._bind_value(target, node.value, given)

    def _annassign(self, node: ast.AnnAssign, given: Nodes) -> None:
        if node.value is not None:
            self._bind_value(node.target, node.value, given)

    def _augassign(self, node: ast.AugAssign, given: Nodes) -> None:
        self._bind(node.target, self._reads(node.value) | given)

    def _expr(self, node: ast.Expr, given: Nodes) -> None:
        value = node.value
        if isinstance(value, ast.Await):
            value = value.value
        if isinstance(value, ast.Call):
            self._call_for_effect(value, given)
        elif isinstance(value, ast.Yield | ast.YieldFrom):
            self._matters(self._reads(value) | given)

    def _return(self, node: ast.Return, given: Nodes) -> None:
        value = _NONE if node.value is None else self._reads(node.value)
        self._flow.add(("result", self._name), value | given)
        self._flow.exits.append((self._name, given))

    def _raise(self, node: ast.Raise, given: Nodes) -> None:
        self._matters(given)

    def _assert(self, node: ast.Assert, given: Nodes) -> None:
        self._matters(self._reads(node.test) | given)

    def _break(self, node: ast.Break | ast.Continue, given: Nodes) -> None:
        self._flow.exits.append((self._name, given))

    _continue = _break

    def _if(self, node: ast.If | ast.While, given: Nodes) -> None:
        test = self._reads(node.test) | given
        self._run((*node.body, *node.orelse), test)

    _while = _if

    def _for(self, node: ast.For | ast.AsyncFor, given: Nodes) -> None:
        rows = self._reads(node.iter) | given
        self._bind(node.target, rows)
        self._run((*node.body, *node.orelse), rows)

    _asyncfor = _for

    def _with(self, node: ast.With | ast.AsyncWith, given: Nodes) -> None:
        for item in node.items:
            value = self._reads(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value | given)
        self._run(node.body, given)

    _asyncwith = _with

    def _try(self, node: ast.Try, given: Nodes) -> None:
        handlers = (statement for each in node.handlers for statement in each.body)
        self._run((*node.body, *handlers, *node.orelse, *node.finalbody), given)

    _trystar = _try

    def _match(self, node: ast.Match, given: Nodes) -> None:
        subject = self._reads(node.subject) | given
        for case in node.cases:
            self._run(case.body, subject)

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, given: Nodes) -> None:
        self._flow.known.add(node.name)
        _Function(self._flow, name=node.name, node=node, outer=self).run()

    _asyncfunctiondef = _functiondef

    # -- where values go ---------------------------------------------------------------------

    def _matters(self, nodes: Nodes) -> None:
        self._flow.add(SINK, nodes)
        self._flow.effects.add(self._name)

    def _bind_value(self, target: ast.expr, value: ast.expr, given: Nodes) -> None:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            is_plain = not any(map(_is_starred, (*target.elts, *value.elts)))
            if is_plain and len(target.elts) == len(value.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._bind_value(one, other, given)
                return
        self._bind(target, self._reads(value) | given)

    def _bind(self, target: ast.expr, value: Nodes) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind(each, value)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value)
        elif isinstance(target, ast.Attribute):
            self._assigns(("attribute", target.attr), value)
            if not self._is_self(target.value):
                self._flow.stores.append((target.attr, value))
        elif isinstance(target, ast.Subscript):
            self._bind_element(target, value | self._reads(target.slice))
        elif isinstance(target, ast.Name):
            self._assigns(self._variable(target.id), value)

    def _bind_element(self, target: ast.Subscript, value: Nodes) -> None:
        root: ast.expr = target
        while isinstance(root, ast.Subscript):
            named = _named_element(root)
            if named is not None:
                self._assigns(("attribute", named), value)
                return
            root = root.value
        if isinstance(root, ast.Name) and root.id in self._locals and root.id not in self._made:
            self._matters(value)  # another name for something that is kept elsewhere
        else:
            self._bind(root, value)

    def _assigns(self, node: Node, value: Nodes) -> None:
        self._flow.add(node, value)
        self._flow.bound[self._name].add(node)

    def _call_for_effect(self, call: ast.Call, given: Nodes) -> None:
        name, function = _called(call), call.func
        if self._is_showing(call):
            return
        value = self._arguments(call) | given
        if name in self._flow.known:
            self._flow.read.add(name)
            self._flow.add(("parameters", name), value)
            self._flow.calls.append((self._name, name, given))
        if name in FILLING and isinstance(function, ast.Attribute):
            self._fill(function.value, value)
        elif name not in self._flow.known:
            self._matters(value | self._receiver(function))

    def _fill(self, container: ast.expr, value: Nodes) -> None:
        """Read that a method puts values into its object."""
        if isinstance(container, ast.Call):
            name = _called(container)
            self._flow.add(("result", name), value)
            self._flow.add(("variable", name), value)
        elif isinstance(container, ast.Name) and container.id not in self._made | self._mine():
            self._matters(value)
        else:
            self._bind(container, value)

    def _mine(self) -> set[str]:
        """Return the names that are no aliases of something that is kept elsewhere."""
        return {"self", *(name for name in self._made)}

    # -- where values come from --------------------------------------------------------------

    def _reads(self, node: ast.AST) -> Nodes:
        """Return the nodes from which an expression gets its value."""
        if isinstance(node, ast.Name):
            return frozenset([self._variable(node.id)])
        if isinstance(node, ast.Attribute):
            self._flow.read.add(node.attr)
            own = {("attribute", node.attr), ("result", node.attr)}
            return self._reads(node.value) | own
        if isinstance(node, ast.Call):
            return self._reads_call(node)
        if isinstance(node, ast.NamedExpr):
            value = self._reads(node.value)
            self._bind(node.target, value)
            return value
        if isinstance(node, ast.Lambda):
            return self._reads(node.body)
        if isinstance(node, ast.BoolOp):
            return self._reads_in_turn(node.values)
        if isinstance(node, ast.IfExp):
            return self._reads_in_turn([node.test, node.body, node.orelse])
        if isinstance(node, ast.comprehension):
            rows = self._reads(node.iter)
            self._bind(node.target, rows)
            return rows.union(*map(self._reads, node.ifs))
        named = _named_element(node) if isinstance(node, ast.Subscript) else None
        if named is not None:
            self._flow.read.add(named)
            return frozenset([("attribute", named)])
        return _NONE.union(*map(self._reads, ast.iter_child_nodes(node)))

    def _reads_in_turn(self, parts: Iterable[ast.expr]) -> Nodes:
        """Read expressions of which each decides whether the next is computed."""
        before, found = self._given, _NONE
        for part in parts:
            found |= self._reads(part)
            self._given = before | found
        self._given = before
        return found

    def _reads_call(self, call: ast.Call) -> Nodes:
        name = _called(call)
        if self._is_showing(call):
            return _NONE
        value = self._arguments(call)
        if name in ("getattr", "hasattr") and len(call.args) > 1:
            text = call.args[1]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                self._flow.read.add(text.value)
                value |= {("attribute", text.value)}
        if name in self._flow.known:
            self._flow.read.add(name)
            self._flow.add(("parameters", name), value)
            self._flow.calls.append((self._name, name, self._given))
            return self._receiver(call.func) | {("result", name)}
        if name in FILLING and isinstance(call.func, ast.Attribute):
            self._fill(call.func.value, value)
        for module in ("forward", "__call__"):  # the object that is called may be a module
            self._flow.add(("parameters", module), value)
        results: set[Node] = {("result", "forward"), ("result", "__call__")}
        if isinstance(call.func, ast.Name):
            results.add(self._variable(call.func.id))
        return value | self._receiver(call.func) | results

    def _is_showing(self, call: ast.Call) -> bool:
        """Return whether a call only shows what it gets; what it calls for that is noted."""
        name = _called(call)
        if name not in self._flow.showing or name in self._flow.known:
            return False
        self._arguments(call)
        return True

    def _arguments(self, call: ast.Call) -> Nodes:
        every = (*call.args, *(each.value for each in call.keywords))
        return _NONE.union(*map(self._reads, every))

    def _receiver(self, function: ast.expr) -> Nodes:
        """Return the nodes of the object whose method is called, or of what is called."""
        if isinstance(function, ast.Name):
            return _NONE
        return self._reads(function.value if isinstance(function, ast.Attribute) else function)

    def _variable(self, name: str) -> Node:
        scope: _Function | None = self
        while scope is not None:
            if name in scope._locals:
                return ("local", scope._key, name)
            scope = scope._outer
        return ("variable", name)

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and [node.id] == self._parameters[:1]


def _called(call: ast.Call) -> str:
    """Return the name of what is called; "" if it has none."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _named_element(node: ast.Subscript) -> str | None:
    """Return the attribute that ``vars(x)["name"]`` or ``x.__dict__["name"]`` stands for."""
    table, key = node.value, node.slice
    is_table = (isinstance(table, ast.Call) and _called(table) == "vars") or (
        isinstance(table, ast.Attribute) and table.attr == "__dict__"
    )
    if is_table and isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    return None


def _is_new_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _called(value) in ("dict", "list", "set", "defaultdict", "Counter", "deque")
    kinds = (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, kinds)


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


# -- sources -------------------------------------------------------------------------------


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _name(code: CodeType, node: Function) -> str:
    return getattr(node, "name", code.co_name)


def _sources_of(codes: Iterable[CodeType]) -> dict[CodeType, Function]:
    """Return the syntax trees of the functions whose source can be read; read each file once."""
    by_file: dict[str, list[CodeType]] = defaultdict(list)
    for code in codes:
        by_file[code.co_filename].append(code)
    found: dict[CodeType, Function] = {}
    for filename, inside in by_file.items():
        functions = _functions_in(filename, "".join(linecache.getlines(filename)))
        nodes = ((code, _source_of(code, functions)) for code in inside)
        found |= {code: node for code, node in nodes if node is not None}
    return found


def _source_of(code: CodeType, found: Mapping[int, Sequence[Function]]) -> Function | None:
    """Return the syntax tree of a function among those of its file; None if it is not clear."""
    kind = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    here = [
        node
        for node in found.get(code.co_firstlineno, [])
        if isinstance(node, kind) and _name(code, node) == code.co_name
    ]
    return here[0] if len(here) == 1 else None


@functools.lru_cache(maxsize=64)
def _functions_in(filename: str, source: str) -> dict[int, list[Function]]:  # noqa: ARG001
    """Return the functions of a file by their first lines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[Function]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            lines = [node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]
            found[min(lines)].append(node)
    return found


def _names_in(code: Any) -> Iterator[str]:
    """Yield all names in the code of a function, and the texts that may be names."""
    if isinstance(code, CodeType):
        yield from (*code.co_names, *code.co_freevars)
        for each in code.co_consts:
            yield from _names_in(each)
    elif isinstance(code, str) and code.isidentifier():
        yield code
