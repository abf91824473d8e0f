"""Python code that stack traces leave out: methods other than `forward`, and functions of torch.nn.functional.

torch.export keeps only the frames of `forward` (torch/fx/proxy.py, `_record_forward_stack_traces_only`). A line such as
`x = self.forward_features(x)` then stands for a whole function, whose variables no line shows. It is told from a call
of a child module by the children that run during it and that it does not name.

Of functions of torch.nn.functional that are written in Python only those are listed that hold something longer than its
last use. Source: torch/nn/functional.py, `gumbel_softmax` (every intermediate has a name until the function returns),
`local_response_norm` (`div = div.mul(alpha).add(k).pow(beta)`: the name lets go of the pooled tensor when the line is
done) and `multilabel_soft_margin_loss` (a target that the call's line converts has no other name than the parameter,
which holds it until the loss is divided by the number of classes).

Experts of transformers run in a function as well (5.23, integrations/moe.py, `batched_mm_experts_forward`):
`selected_weights` has the weights of each token's experts until it is assigned again or the function returns, and
`selected_hidden_states` the repeated tokens until it returns. In `grouped_mm_experts_forward` it is
`selected_hidden_states_g`, and other names have the order of tokens and the sizes of groups.

So does attention that models write out (5.24, `eager_attention_forward` of models/llama/modeling_llama.py and others):
`key_states` and `value_states` have what `repeat_kv` gives until the function returns. Where the models have sinks
(models/gpt_oss/modeling_gpt_oss.py) so has `combined_logits` the scores with them, and `attn_weights` those without,
until it has the weights. The weights are the second result: the forward of the attention returns them, and a layer that
calls it with `hidden_states, _ = self.self_attn(` has them until it returns.

A loop in such code assigns its names again. All ops of a hidden function have the line that calls it: where the ops
from one on run once more in the same order, the function is taken to have a loop, and a variable to be held no longer
than until the next turn; what a later turn or another loop reads is in a container (`ends_of_turns`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from itertools import pairwise

from staticmem.ir.graph import Frame, Graph, Op, SourceLine
from staticmem.ir.stacks import Stack, common_depth, general_path
from staticmem.passes.variables.line_texts import statements_of
from staticmem.passes.variables.source_lines import is_of_torch, names_of_children

_TORCH = re.compile(r"[/\\]torch[/\\]")
_METHOD = re.compile(r"\bself\.(\w+)\(")
Line = tuple[Stack, str, int]  # a running module call, and where it is

_RETURN = ""  # held until the function returns
# function -> op whose result has a name -> the op that runs last while it has
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "gumbel_softmax": dict.fromkeys(("aten::div", "aten::softmax", "aten::max", "aten::scatter_"), _RETURN),
    "multilabel_soft_margin_loss": {"aten::to": "aten::div"},
    "local_response_norm": {"aten::avg_pool2d": "aten::pow", "aten::avg_pool3d": "aten::pow"},
}
_EXPERTS = "experts_forward("
_NAMED_IN_GROUPS = ("aten::sort", "aten::histc", "aten::cumsum")
_ATTENTION = re.compile(r"\battention_interface\(")
_TWO_RESULTS = re.compile(r"^\w+\s*,\s*\w+\s*=[^=]")
_FUNCTION = re.compile(rf"\b({'|'.join(_VARIABLES)})\(")


def has_unseen_code(graph: Graph) -> bool:
    """Whether some of the code that handles values is not in the stack traces, or all of it."""
    return not any(op.stack for op in graph.ops) or bool(values_of_unseen_code(graph))


def values_of_unseen_code(graph: Graph) -> set[str]:
    """Names of values that a variable may hold which no line shows."""
    return values_in_methods(graph) | values_on_crowded_lines(graph) | values_without_lines(graph)


# -- methods -----------------------------------------------------------------------------------------------------


def values_in_methods(graph: Graph) -> set[str]:
    """Names of values that a method which is not in the traces may hold."""
    lines = lines_of_methods(graph)
    values: set[str] = set()
    producers: dict[str, Op] = {}
    for op in graph.ops if lines else ():
        for name in op.refs():
            producer = producers.get(name)
            if producer is not None and len(op.stack) >= len(op.modules):
                level = common_depth(producer.modules, op.modules) - 1
                if level >= 0 and _place(op, level) in lines:
                    values.add(name)
        for name in op.outputs:
            producers[name] = op
    return values


def values_read_by_methods(graph: Graph) -> dict[str, int]:
    """Values that ops of methods read which no trace shows, and the last op of the line that calls the method: what
    such code names is a habit."""
    children = names_of_children(graph)
    values: dict[str, int] = {}
    running: tuple[object, ...] = ()
    read: set[str] = set()
    hides = False  # whether the running line calls a method
    for index, op in enumerate(graph.ops):
        line = line_at(op, len(op.modules) - 1) if op.modules and len(op.stack) >= len(op.modules) else None
        if running != (op.modules, line):
            running, read = (op.modules, line), set()
            hides = line is not None and not is_of_torch(line)
            hides = hides and any(method not in children for method in _METHOD.findall(line.text if line else ""))
        if line is None or not hides:
            continue
        if f"{op.base.removeprefix('aten::').rstrip('_')}(" not in line.text:  # which the line calls by itself
            read.update(op.refs())
            values.update(dict.fromkeys(read, index))
    return values


def values_on_crowded_lines(graph: Graph) -> set[str]:
    """Names of values that a variable of a line with several statements may hold (`x = f(x); y = g(x)`)."""
    texts = {line.text for stack in {id(op.stack): op.stack for op in graph.ops}.values() for line in stack}
    crowded = {text for text in texts if len(statements_of(text)) > 1}
    values: set[str] = set()
    producers: dict[str, Op] = {}
    for op in graph.ops if crowded else ():
        for name in op.refs():
            producer = producers.get(name)
            if producer is None:
                continue
            level = common_depth(producer.modules, op.modules) - 1
            whole = all(len(each.stack) >= len(each.modules) for each in (producer, op))
            if level >= 0 and whole and not crowded.isdisjoint(line_at(each, level).text for each in (producer, op)):
                values.add(name)
        for name in op.outputs:
            producers[name] = op
    return values


def values_without_lines(graph: Graph) -> set[str]:
    """Names of what the exported module reads or makes, where its source was not there at the export (code of `exec`).

    Traces leave out its lines, and begin with those of the layers of torch.nn that it calls.
    """
    if not any(map(_begins_with_a_layer, graph.ops)):
        return set()
    return {name for op in graph.ops if len(op.stack) < len(op.modules) for name in (*op.refs(), *op.outputs)}


def _begins_with_a_layer(op: Op) -> bool:
    if not 0 < len(op.stack) < len(op.modules):
        return False
    return _TORCH.search(op.stack[0].file) is not None and not op.modules[0].cls.startswith("torch.nn.")


def lines_of_methods(graph: Graph) -> set[Line]:
    """Lines that call a method, during which children run that they do not name."""
    children = _children(graph)
    lines: set[Line] = set()
    for op in graph.ops:
        if len(op.stack) < len(op.modules):
            continue
        for level, (module, inner) in enumerate(pairwise(op.modules)):
            text = line_at(op, level).text
            methods = _METHOD.findall(text)
            if not methods or all(method in children[module.path] for method in methods):
                continue
            child = _child(module, inner)
            if child and not re.search(rf"\b{re.escape(child)}\b", text):
                lines.add(_place(op, level))
    return lines


def _children(graph: Graph) -> Mapping[str, set[str]]:
    """The names of the children that run in each module."""
    children: dict[str, set[str]] = {}
    for stack in {op.modules for op in graph.ops}:
        for outer, inner in pairwise(stack):
            children.setdefault(outer.path, set()).add(_child(outer, inner))
    return children


def _child(parent: Frame, inner: Frame) -> str:
    """The name of the child module on the way to `inner`."""
    prefix = f"{parent.path}." if parent.path else ""
    below = inner.path.startswith(prefix) and inner.path != parent.path
    return inner.path[len(prefix) :].split(".", 1)[0] if below else ""


def line_at(op: Op, level: int) -> SourceLine:
    """The line of a module of an op, by its level; `super().forward(x)` is a frame more before those of modules."""
    return op.stack[len(op.stack) - len(op.modules) + level]


def _place(op: Op, level: int) -> Line:
    source = line_at(op, level)
    return op.modules[: level + 1], source.file, source.line


# -- custom functions --------------------------------------------------------------------------------------------

_APPLY = re.compile(r"\b[A-Za-z_]\w*\.apply\(")
_FORWARD_CALLED = re.compile(r"\bsuper\b|\.forward\(")


def is_of_called_module(op: Op, number: int) -> bool:
    """Whether a module runs an op that a line of its stack calls, and no function does: `self.head(Reverse.apply(x))`
    calls both, and each has a `forward`."""
    forwards = sum(line.function == "forward" for line in op.stack)
    return number < len(op.stack) - 1 and forwards <= len(op.modules)


def line_calling_function(op: Op) -> int | None:
    """The number of the line of an op's stack that calls a custom `torch.autograd.Function`; None where none does.

    Such a function has a `forward` of its own. Where a function that no trace shows calls `apply`, that is a frame more
    than there are modules, which no line calls by its name.
    """
    for number, line in enumerate(op.stack[:-1]):
        if ".apply(" in line.text and op.stack[number + 1].function == "forward" and _APPLY.search(line.text):
            return None if is_of_called_module(op, number) else number
    if not op.modules or op.modules[0].path or len(op.stack) <= len(op.modules):
        return None
    named = sum(_FORWARD_CALLED.search(line.text) is not None for line in op.stack[:-1])
    # a module that no other has, `nn.Sequential(*layers)(x)`, is a frame without a module as well
    of_torch = sum(_TORCH.search(line.file) is not None for line in op.stack)
    named += max(of_torch - sum(frame.cls.startswith("torch.nn.") for frame in op.modules), 0)
    number = len(op.modules) + named - 1
    if number >= len(op.stack) - 1 or any(map(is_of_torch, op.stack[number:])):
        return None
    return number


# -- functions of torch.nn.functional ----------------------------------------------------------------------------


def held_in_functions(graph: Graph) -> dict[str, int]:
    """For results that such a function names: the index of the last op during which it holds them."""
    held: dict[str, int] = {}
    ops = graph.ops
    start = 0
    while start < len(ops):
        stop = start + 1
        while stop < len(ops) and ops[stop].stack in (ops[start].stack, ()):  # an optimiser may have lost some
            stop += 1
        call = _FUNCTION.search(ops[start].stack[-1].text) if ops[start].stack else None
        if call is not None:
            held.update(_held_in_call(ops[start:stop], start, _VARIABLES[call[1]]))
        start = stop
    held.update(_held_by_experts(ops))
    held.update(_held_by_attention(ops))
    return held


_SEGMENTS = re.compile(r"(?<!\w)checkpoint_sequential\(\s*[\w.]+\s*,\s*(?:segments\s*=\s*)?(\d{1,4})\s*,")


_METHOD_OF_CHECKPOINT = re.compile(r"(?<!\w)checkpoint\(\s*self\.(\w+)\s*,")


def inputs_of_segments(graph: Graph) -> dict[str, int]:
    """What enters the segments of `checkpoint_sequential`, and the checkpoint of a method: the last op of each.

    Source: torch/utils/checkpoint.py, `checkpoint_sequential`: `input` has it until the checkpoint of the segment, or
    the call of the last one, has returned; `checkpoint` has its arguments until it returns.
    """
    held: dict[str, int] = {}
    runs: dict[tuple[Stack, tuple[SourceLine, ...]], list[int]] = {}  # the ops of each such line
    for index, op in enumerate(graph.ops):
        number = next((n for n, line in enumerate(op.stack) if _checkpointed(line.text)), None)
        if number is not None:
            runs.setdefault((op.modules[: number + 1], op.stack[: number + 1]), []).append(index)
    for (modules, stack), indices in runs.items():
        match = _SEGMENTS.search(stack[-1].text)
        if match is not None:
            held.update(_held_in_segments(graph.ops, indices, len(modules), int(match[1])))
        elif len({graph.ops[index].modules[: len(modules) + 1] for index in indices}) > 1:  # one module holds it itself
            held.update(_held_in_segments(graph.ops, indices, len(modules), 1))
    return held


def _checkpointed(text: str) -> bool:
    return "checkpoint" in text and bool(_SEGMENTS.search(text) or _METHOD_OF_CHECKPOINT.search(text))


def _held_in_segments(ops: tuple[Op, ...], indices: list[int], depth: int, count: int) -> dict[str, int]:
    """Of the modules that run at `depth` in the ops of a line, in `count` segments: the last one takes what the
    division leaves."""
    stop = indices[-1] + 1
    begins = [i for i in indices if i == indices[0] or ops[i].modules[: depth + 1] != ops[i - 1].modules[: depth + 1]]
    size = len(begins) // count if count else 0
    if size == 0:
        return {}
    firsts = [begins[size * number] for number in range(count)]
    makers = {name: index for index, op in enumerate(ops[:stop]) for name in op.outputs}
    held: dict[str, int] = {}
    for first, after in zip(firsts, [*firsts[1:], stop], strict=True):
        inputs = {name for op in ops[first:after] for name in op.refs() if name in makers and makers[name] < first}
        held.update(dict.fromkeys(inputs, after - 1))
    return held


def _held_by_attention(ops: tuple[Op, ...]) -> dict[str, int]:
    """What the variables of `eager_attention_forward` hold, and those that have the weights which it returns."""
    held: dict[str, int] = {}
    start = 0
    while start < len(ops):
        stop = start + 1
        while stop < len(ops) and ops[stop].stack in (ops[start].stack, ()):
            stop += 1
        own = ops[start:stop]
        if own[0].stack and _ATTENTION.search(own[0].stack[-1].text) and _is_of_transformers(own[0]):
            products = [op for op in own if op.base == "aten::matmul"]
            softmax = next((op for op in own if op.base in ("aten::softmax", "aten::_softmax")), None)
            if len(products) == 2 and softmax is not None:
                returned = {name: stop - 1 for op in own if op.base == "aten::reshape" for name in op.outputs}
                joined = next((op for op in own if op.base == "aten::cat"), None)
                if joined is not None:
                    returned.update(dict.fromkeys(softmax.refs()[:1], stop - 1))
                    returned[joined.refs()[0]] = start + own.index(products[1]) - 1
                held.update(returned)
                held[products[1].refs()[0]] = _end_of_weights(ops, stop - 1)
        start = stop
    return held


def _is_of_transformers(op: Op) -> bool:
    return bool(op.modules) and op.modules[-1].cls.startswith("transformers.")


def _end_of_weights(ops: tuple[Op, ...], last: int) -> int:
    """The last op during which a variable has the weights: of the forward of the attention, which ends the call at
    `last`, or of the layer that calls it."""
    modules, stack = ops[last].modules, ops[last].stack
    kept = len(modules) > 1 and len(stack) > 1 and _TWO_RESULTS.match(stack[-2].text) is not None
    frame = modules[:-1] if kept else modules
    end = last
    for index in range(last + 1, len(ops)):
        if ops[index].modules and ops[index].modules[: len(frame)] != frame:
            break
        end = index
    return end


def _held_by_experts(ops: tuple[Op, ...]) -> dict[str, int]:
    """What the variables of `batched_mm_experts_forward` hold, which multiplies with weights that it gathered by token,
    and those of `grouped_mm_experts_forward`, which sorts tokens by expert."""
    calls: dict[Stack, list[int]] = {}  # the ops of each call, those of its activation too
    for index, op in enumerate(ops):
        for number, line in enumerate(op.stack):
            level = number - len(op.stack) + len(op.modules)
            if _EXPERTS in line.text and level >= 0:
                calls.setdefault(op.modules[: level + 1], []).append(index)
    held: dict[str, int] = {}
    for indices in calls.values():
        own = [ops[index] for index in indices]
        if any(op.base == "aten::_grouped_mm" for op in own):
            named = [op for op in own if op.base in _NAMED_IN_GROUPS]
            tokens = {name for op in own if op.base == "aten::floor_divide" for name in op.outputs}
            named += [op for op in own if op.base == "aten::index" and not tokens.isdisjoint(op.refs())]
            held.update({name: indices[-1] for op in named for name in op.outputs})
            continue
        if not any(op.base == "aten::bmm" for op in own):
            continue
        gathers = [index for index, op in zip(indices, own, strict=True) if op.base == "aten::index"]
        for index, after in zip(gathers, [*gathers[1:], indices[-1]], strict=True):
            held[ops[index].outputs[0]] = after
        held.update({op.outputs[0]: indices[-1] for op in own if op.base == "aten::repeat_interleave"})
    return held


def _held_in_call(ops: tuple[Op, ...], start: int, variables: Mapping[str, str]) -> Mapping[str, int]:
    """Ops of one line: what they keep, and until which of them."""
    until = {op.outputs[-1]: variables[op.base] for op in ops if op.base in variables and op.outputs}  # max: the index
    last = {name: start + index for index, op in enumerate(ops) for name in op.refs()}
    end = max((last[name] for name in until if name in last), default=start)
    ends = {op.base: start + index for index, op in enumerate(ops)}
    return {name: end if base == _RETURN else ends.get(base, end) for name, base in until.items()}


_MOST_TURNS = 8  # that are compared: a turn may begin with the op that it has twice
_LONGEST = 500  # ops of a turn


def ends_of_turns(graph: Graph, frames: Mapping[str, int]) -> dict[str, int]:
    """For those of some values that a loop makes: the op that makes the next one of the name. `frames` has the level of
    the frame that holds each."""
    if not frames:
        return {}
    ops = graph.ops
    keys = [_key(op) for op in ops]
    places: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    ends: dict[str, int] = {}
    for place in places.values():
        for number, index in enumerate(place):
            names = [name for name in ops[index].outputs if name in frames]
            if not names or not _is_open(ops[index], frames[names[0]]):
                continue
            again = next((j for j in place[number + 1 : number + 1 + _MOST_TURNS] if _repeats(keys, index, j)), None)
            if again is not None:  # what is read later is in a container, which lives on
                ends.update((name, again) for name in names if graph.last_read.get(name, again) <= again)
    return ends


def _is_open(op: Op, level: int) -> bool:
    """Whether the line of a module of an op is of no layer of PyTorch."""
    return len(op.stack) >= len(op.modules) > level and not is_of_torch(line_at(op, level))


def _key(op: Op) -> Hashable:
    """What tells a statement of a hidden function: the op, the module that runs it (of a list any), and the line."""
    path = op.modules[-1].path if op.modules else ""
    return op.target, general_path(path), tuple((line.file, line.line) for line in op.stack)


def _repeats(keys: list[Hashable], index: int, again: int) -> bool:
    length = again - index
    return length <= _LONGEST and keys[index:again] == keys[again : again + length]
