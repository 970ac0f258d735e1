"""What the source of the modules around a layer says of it: that its weight is read there, that its tokens are flat.

T5 asks ``self.wo.weight.dtype``, Mamba multiplies with ``self.dt_proj.weight``, a CGT's T with ``self.mix.weight``,
RWKV goes through ``self.blocks`` and divides each ``block.attention.output.weight``: in their place no operator can
stand. OPT's ``fc1`` and every expert see all tokens in one row: there no context of (batch, tokens) fits. Which layers
these are is read off the source, not off a list of models.
"""

import ast
import functools
import inspect
import operator
import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

#: methods that run when a model is made, not when it computes
_SETUP = ("__init__", "_init", "init", "reset", "_reset", "tie", "_tie", "load", "_load", "prune", "extra_repr")
_ANY = "*"  # in a path: whichever element of a list of modules
#: code that is no model's own
_LIBRARIES = (
    "torch.",
    "peft.",
    "transformers.modeling_utils.",
    "transformers.modeling_layers.",
    "transformers.generation.",
)


def reader_of_weight(model: nn.Module, name: str) -> str | None:
    """``"Class.method"`` that reads ``.weight`` of the layer called ``name`` from around it, or None."""
    parts = name.split(".")
    module: Any = model
    for depth, part in enumerate(parts):
        kind: Any = type(module)
        path = ".".join(_ANY if part.isdigit() else part for part in parts[depth:])
        for read in _reads(kind).get(path, ()):
            if all(_known_value(test, module) is not outcome for test, outcome in read.never):
                return read.reader
        module = getattr(module, part)
    return None


def flattener_of_tokens(layer: nn.Module, name: str) -> str | None:
    """Name of the class in a decoder layer whose forward hands its module ``name`` all tokens in one row, or None."""
    module: Any = layer
    for part in name.split("."):
        kind: Any = type(module)
        if part in _after_flattening(kind):
            return str(kind.__name__)
        module = getattr(module, part)
    return None


@functools.cache
def _after_flattening(cls: Any) -> set[str]:
    """Names of children that a forward uses below ``x.reshape(-1, width)`` or ``x.view(-1, width)`` of its input."""
    for tree in _sources(cls):
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                inputs = {argument.arg for argument in method.args.args}
                calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
                lines = [call.lineno for call in calls if _is_flat(call, inputs)]
                if not lines:
                    return set()
                used = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
                return {path for node in used if (path := _below_self(node)) and node.lineno > min(lines)}
    return set()


def _is_flat(node: ast.Call, inputs: set[str]) -> bool:
    if not (isinstance(node.func, ast.Attribute) and len(node.args) == 2):
        return False
    whose, first = node.func.value, node.args[0]
    to_one_row = isinstance(first, ast.UnaryOp) and ast.unparse(first) == "-1"
    return node.func.attr in ("reshape", "view") and to_one_row and isinstance(whose, ast.Name) and whose.id in inputs


def _sources(cls: Any) -> Iterator[ast.Module]:
    """The parsed source of a class and of those that it inherits from, without libraries."""
    for base in cls.__mro__:
        if base is object or f"{base.__module__}.".startswith(_LIBRARIES):
            continue
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made at run time, or without its source
            continue


class _Read(NamedTuple):
    """One place that reads a weight; it is never reached where a test of ``never`` has the outcome beside it."""

    reader: str
    never: tuple[tuple[ast.expr, bool], ...]


@functools.cache
def _reads(cls: Any) -> dict[str, list[_Read]]:
    """Dotted paths below ``self`` whose ``.weight`` the methods of ``cls`` read, with the places that do.

    Elements of lists that a method goes through stand as ``*``.
    """
    found: dict[str, list[_Read]] = {}
    for tree in _sources(cls):
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and not method.name.startswith(_SETUP):
                for path, never in _weights_read(method, _elements(method), ()):
                    found.setdefault(path, []).append(_Read(f"{cls.__name__}.{method.name}", never))
    return found


def _elements(method: ast.FunctionDef) -> dict[str, str]:
    """Loop variable -> ``a.*``, of ``for x in self.a`` and ``for i, x in enumerate(self.a)``."""
    found: dict[str, str] = {}
    for loop in ast.walk(method):
        if not isinstance(loop, ast.For):
            continue
        target, source = loop.target, loop.iter
        if isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate" and isinstance(target, ast.Tuple):
            target, source = target.elts[-1], source.args[0]
        path = _below_self(source)
        if path and isinstance(target, ast.Name):
            found[target.id] = f"{path}.{_ANY}"
    return found


def _weights_read(node: ast.AST, elements: dict[str, str], never: tuple) -> Iterator[tuple[str, tuple]]:
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        path = _below_self(node.value, elements)
        if path is not None:
            yield path, never
    if isinstance(node, ast.If):
        yield from _weights_read(node.test, elements, never)
        for branch, outcome in ((node.body, False), (node.orelse, True)):
            for statement in branch:
                yield from _weights_read(statement, elements, (*never, (node.test, outcome)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _weights_read(child, elements, never)


def _below_self(node: ast.expr, elements: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """``a.b`` of ``self.a.b``, ``a.*.b`` of ``x.b`` where ``x`` is an element of ``self.a``; None for all else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in elements:
        parts.append(elements[node.id])
    elif not (isinstance(node, ast.Name) and node.id == "self"):
        return None
    return ".".join(reversed(parts)) or None


def _known_value(test: ast.expr, module: Any) -> bool | None:
    """Outcome of a test on settings of ``module``, such as ``self.pretraining_tp > 1``; None where it may vary."""
    if isinstance(test, ast.BoolOp):
        values = [_known_value(value, module) for value in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _known_value(test.operand, module)
        return None if value is None else not value
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        compare = _COMPARISONS.get(type(test.ops[0]))
        left, right = _setting(test.left, module), _setting(test.comparators[0], module)
        return compare(left, right) if compare and left is not None and right is not None else None
    value = _setting(test, module)
    return value if isinstance(value, bool) else None


_COMPARISONS = {ast.Gt: operator.gt, ast.Lt: operator.lt, ast.Eq: operator.eq, ast.NotEq: operator.ne}


def _setting(node: ast.expr, module: Any) -> Any:
    """A constant, or a number or boolean that ``module`` holds; None for everything else, and for its mode."""
    if isinstance(node, ast.Constant):
        value = node.value
    else:
        path = _below_self(node)
        value = module
        for part in path.split(".") if path and path != "training" else [""]:
            value = getattr(value, part, None)
    return value if isinstance(value, int | float) else None
