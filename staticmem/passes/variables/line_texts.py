"""What the text of a source line says: its statements, the names that it assigns, the functions that it calls."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from staticmem.ops.registry import SIGNS, one_name

_NAMES = r"[A-Za-z_][\w.]*(?:\s*,\s*\*?[A-Za-z_][\w.]*)*"
ASSIGN = re.compile(rf"^\(?\s*({_NAMES})\s*,?\s*\)?\s*(?::[^=]+)?(?:[-+*/@|&]|//)?=(?!=)")
_CALL = re.compile(r"[\w\])]\(")
_CONDITIONAL = re.compile(r"(.*)\bif\b(.+)\belse\b(.*)")
BUILTINS = frozenset(
    "len range zip enumerate reversed int float list tuple isinstance getattr hasattr sum max min".split()
)
_TORCH = frozenset(("torch", "F", "nn", "math", "functional"))
_ADDED_BY = ("append", "insert")
_ELEMENT = re.compile(r"\)\s*(?:\[\s*(-?\d{1,4})\s*\]|\.(values|indices)\b)\s*(?:#.*)?$")
_FIELDS = {"values": 0, "indices": 1}  # of what `topk`, `sort`, `max` return
_BY_VARIABLE = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?:\[[^\]]*\])?\(")  # `norm(x)`, `blocks[i](x)`
_INDEX = re.compile(r"\[[^][]*\]")
_ONE_LINE = re.compile(r"^(?:if|elif|else|for|while|with|try|except|finally)\b.*:\s*\S|;")  # may have statements in it


def without_indices(text: str) -> str:
    """The line without what stands between brackets: `blocks[i * n + j](x)` adds numbers there, no tensors."""
    return _INDEX.sub("[]", text)


@lru_cache(4096)
def statements_of(text: str) -> tuple[str, ...]:
    """The simple statements of a line, each as it is written: two of `a = f(x); b = g(a)`, that behind the colon of
    `if self.pre: x = self.pre(x)`. A line that is a part of a statement is one."""
    text = text.strip()
    if not _ONE_LINE.search(text):
        return (text,)
    for whole in (text, f"if 1: pass\n{text}", f"try: pass\n{text}"):
        try:
            body = ast.parse(whole).body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        inner = [node for statement in body for node in _simple(statement)]
        return tuple([ast.get_source_segment(whole, node) or "" for node in inner if not isinstance(node, ast.Pass)])
    return (text,)


def element_of(text: str, results: tuple[str, ...]) -> tuple[str, ...]:
    """What is left of the results of a statement's last call where the statement takes one of them: the second of
    `i = scores.topk(k)[1]`."""
    match = _ELEMENT.search(text) if len(results) > 1 else None
    if match is None:
        return results
    place = int(match[1]) if match[1] is not None else _FIELDS[match[2]]
    return results[place : place + 1 or None] or results


def _simple(statement: ast.stmt) -> list[ast.stmt]:
    bodies = [getattr(statement, part, ()) for part in ("body", "orelse", "finalbody")]
    bodies += [handler.body for handler in getattr(statement, "handlers", ())]
    return [node for body in bodies for inner in body for node in _simple(inner)] if any(bodies) else [statement]


@lru_cache(4096)
def assigned_names(statements: tuple[str, ...]) -> tuple[str, ...]:
    """The variables that statements give values to."""
    nodes = (node for text in statements for node in ast.walk(ast.parse(text)))
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return tuple(dict.fromkeys(stored))


def most_calls(text: str) -> int:
    """How many calls a line makes at most: of `f(x) if c else g(x)` one."""
    conditional = _CONDITIONAL.search(text)
    if conditional is None:
        return len(_CALL.findall(text))
    body, test, other = (len(_CALL.findall(part)) for part in conditional.groups())
    return test + max(body, other)


def attribute_of(child: str) -> str:
    """The last name in the path of a child module."""
    return next((part for part in reversed(child.split(".")) if part != "*"), "")


@lru_cache(4096)
def calls_of(text: str, child: str) -> int:
    """How many calls of a line may be of a child module, of which the path is given with `*` for numbers: those by its
    name, or by a variable where there are none."""
    name = attribute_of(child)
    named = len(re.findall(rf"\b{re.escape(name)}(?:\[[^\]]*\])?\(", text)) if name else 0
    return named or sum(name not in BUILTINS for name in _BY_VARIABLE.findall(text))


@lru_cache(4096)
def parsed_statement(text: str) -> ast.stmt | None:
    """The statement that a line is; None for a part of one, and for several. The header of a compound statement counts
    as a whole."""
    if len(statements_of(text)) > 1:
        return None
    text = text.strip()
    for whole in (text, f"{text} pass", f"if 1: pass\n{text} pass"):
        try:
            body = ast.parse(whole).body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        part = not body or (isinstance(body[-1], ast.Expr) and not isinstance(body[-1].value, ast.Call))
        return None if part else body[-1]
    return None


def calls_hidden_code(text: str, children: frozenset[str]) -> bool:
    """Whether a line may run Python code that no trace shows: of functions and methods other than PyTorch's."""
    return hidden_calls(text, children) > 0


@lru_cache(4096)
def hidden_calls(text: str, children: frozenset[str]) -> float:
    """How many calls of a line may be of functions and methods other than PyTorch's, or of child modules that the line
    calls by a variable; without an end for a part of a statement."""
    statement = parsed_statement(text)
    if statement is None:
        return float("inf")
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return sum(_may_be_hidden(function, children) for function in calls)


def _may_be_hidden(function: ast.expr, children: frozenset[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id not in BUILTINS
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    if isinstance(owner, ast.Name) and owner.id == "self":
        return function.attr not in children
    root = owner
    while isinstance(root, ast.Attribute):
        root = root.value
    of_another = isinstance(root, ast.Name) and root is not owner and root.id not in (*_TORCH, "self")
    return function.attr == "apply" or of_another


def op_that_ends(text: str) -> str:
    """The name of the op that a whole statement ends with, where no other op of it has that name: `add` of
    `x = x + f(y)`; "" where that is not known."""
    names = _names_of_ops(text)
    return names[0] if names and names.count(names[0]) == 1 else ""


@lru_cache(4096)
def ends_with_call(text: str, child: str) -> bool:
    """Whether the value of a whole statement may be what a child module returned: `x = norm(f(x))` of `norm`."""
    statement = parsed_statement(text)
    value = _find_value(statement) if statement is not None else None
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    if isinstance(function, ast.Attribute):
        return function.attr == attribute_of(child)
    return isinstance(function, ast.Name) and "*" in child


def _find_value(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns, or adds to a list."""
    value: ast.expr | None = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr):
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ADDED_BY:
            return call.args[-1] if call.args else None
        return None
    return value if isinstance(statement, ast.Assign | ast.AnnAssign) else None


def _name_operator(operator: ast.operator) -> str:
    sign = ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b")))[2:-2]
    return SIGNS.get(sign, "")


@lru_cache(4096)
def _names_of_ops(text: str) -> tuple[str, ...]:
    """The names of the functions and methods that a statement calls, and of its operators; the outermost first."""
    statement = parsed_statement(text)
    names: list[str] = []
    value = _find_value(statement) if statement is not None else None
    if isinstance(statement, ast.AugAssign):
        names, value = [_name_operator(statement.op)], statement.value
    if value is None:
        return ()
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp):
            names.append(_name_operator(node.op))
        elif isinstance(node, ast.Call):
            called = node.func.attr.rstrip("_") if isinstance(node.func, ast.Attribute) else ""
            names.append(one_name(f"aten::{called}").removeprefix("aten::"))
        elif node is value:
            names.append("")
    return tuple(names)


@lru_cache(4096)
def returned_names(text: str) -> frozenset[str]:
    """Names of values that a line returns beside another one."""
    statement = parsed_statement(text)
    if not isinstance(statement, ast.Return) or not isinstance(statement.value, ast.Tuple):
        return frozenset()
    return frozenset(element.id for element in statement.value.elts if isinstance(element, ast.Name))


@lru_cache(4096)
def assigns_one_result(text: str) -> bool:
    """Whether a line is a whole statement that gives the result of its expression to at most one name."""
    statement = parsed_statement(text)
    if isinstance(statement, ast.Assign):
        return len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    return isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return)
