"""Which op releases each value: its last use, or later, where a Python frame or a module still holds it.

Attributes: a hook of `torch.nn.utils.weight_norm` and of `spectral_norm` computes `weight` before each forward and
assigns it to the module. It lives until the next forward assigns it again, so through backward and the optimizer, and
in the next step until its turn comes. The newer `torch.nn.utils.parametrizations` keep nothing.

Source: torch/nn/utils/weight_norm.py (`__call__`: setattr of `_weight_norm(v, g)`; parameters `weight_g`, `weight_v`),
torch/nn/utils/spectral_norm.py (`__call__`: setattr of `weight_orig / sigma`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set

from staticmem.ir.graph import Graph, Op, Ref, bases_of
from staticmem.ir.record import record
from staticmem.ir.stacks import Stack, common_depth
from staticmem.ops import kinds_of
from staticmem.passes.variables.policy import Attribute, Held, held_by_policy

_NORMED = {"aten::_weight_norm": "_v", "aten::div": "_orig"}  # op -> how the name of its first operand ends


@record(frozen=True)
class Releases:
    """When the values that ops make end.

    `last_use` has the op during which a value is held last, in the order in which they are made: what ends with one op
    ends in that order. `after` has for each op the names whose last use it is: one for most, or none; `frames` the
    depth of the frame that holds a value on until it returns, and `attributes` the results that a module keeps.
    """

    last_use: Mapping[str, int]
    after: Sequence[str | list[str] | None]
    frames: Mapping[str, int]
    attributes: Mapping[str, Attribute]


def releases_of(graph: Graph, policy: str, training: bool, cast: bool = False) -> Releases:
    """The releases of a graph under a policy of `variables.policy`; worked out once for each.

    `cast`: the model is run in another type than the one that it was recorded in.
    """
    key = f"releases {policy} training={training} cast={cast and graph.recorded is not None}"
    releases: Releases | None = graph.derived.get(key)
    if releases is None:
        if graph.recorded is not None:
            last_held = graph.recorded.last_held
            if cast:
                last_held = {**last_held, **_ends_of_cast_locals(graph, last_held)}
            releases = _recorded_releases(graph, last_held)
        elif graph.generated is not None:
            releases = _recorded_releases(graph, graph.generated.last_held[policy])
        else:
            held = held_values(graph, policy, training=training)
            releases = _releases(graph, held, kept_by_modules(graph, policy))
        graph.derived[key] = releases
    return releases


def ends_of_values(graph: Graph, policy: str) -> dict[str, int]:
    """The values of an inference, each with the index of the op after which nothing holds it, for a graph that is no
    recording: `releases_of`, with what frames of modules hold on. What is held to the end is not among them."""
    releases = releases_of(graph, policy, training=False)
    last = dict(releases.last_use)
    frames = _ends_of_frames(graph)
    made_in: dict[str, Stack] = {}
    stack: Stack = ()
    for index, op in enumerate(graph.ops):
        stack = op.modules or stack
        for name in op.refs():  # a frame holds what its module was called with
            if name in made_in:
                depth = common_depth(made_in[name], stack)
                if depth < len(stack):
                    last[name] = max(last[name], frames[index][depth])
        made_in.update(dict.fromkeys(op.outputs, stack))
    for name, depth in releases.frames.items():
        at = releases.last_use[name]
        if at < len(graph.ops) and depth < len(frames[at]):
            last[name] = max(last[name], frames[at][depth])
    return {name: index for name, index in last.items() if index < len(graph.ops)}


def _ends_of_frames(graph: Graph) -> list[tuple[int, ...]]:
    """For each op the last op of each of the module calls that it is in, outermost first."""
    ends: list[tuple[int, ...]] = []
    stack: Stack = ()
    last: tuple[int, ...] = ()
    for index in range(len(graph.ops) - 1, -1, -1):
        modules = graph.ops[index].modules
        if modules and modules is not stack:  # an op without modules is where the one before it is
            common = common_depth(stack, modules)
            stack = modules
            last = (*last[:common], *(index,) * (len(modules) - common))
        ends.append(last)
    return ends[::-1]


def _recorded_releases(graph: Graph, last_held: Mapping[str, int]) -> Releases:
    """As the code was seen to let go of its values; what it holds to the end the caller drops (`forget_outputs`)."""
    after: list[str | list[str] | None] = [None] * (len(graph.ops) + 1)
    for name, index in last_held.items():
        names = after[index] if index >= 0 else None
        if type(names) is list:
            names.append(name)
        elif index >= 0:
            after[index] = [name]
    return Releases(last_held, after, {}, {})


def _ends_of_cast_locals(graph: Graph, last_held: Mapping[str, int]) -> dict[str, int]:
    """When variables end that a module makes and returns cast: `cos = emb.cos(); return cos.to(x.dtype)`.

    In the type of the recording the cast gave the tensor itself, so that both were let go of together. A cast that
    copies leaves the variable to its frame, which ends with the module's call.
    """
    made_at = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    locals_of: dict[str, Stack] = {}
    for op in graph.ops:
        source = op.args[0] if op.args else None
        if not isinstance(source, Ref) or "cast" not in kinds_of(op.base) or source.name not in made_at:
            continue
        together = [name for name in op.outputs if last_held.get(name) == last_held.get(source.name, -1)]
        if together and op.modules and graph.ops[made_at[source.name]].modules == op.modules:
            locals_of[source.name] = op.modules
    calls = dict.fromkeys(locals_of.values(), 0)
    depths = {len(stack) for stack in calls}
    for index, op in enumerate(graph.ops):
        for depth in depths:
            if op.modules[:depth] in calls:
                calls[op.modules[:depth]] = index
    ends = {name: max(calls[stack], graph.last_read[name]) for name, stack in locals_of.items()}
    return {name: end for name, end in ends.items() if end < last_held[name]}


def _releases(graph: Graph, held: Held, attributes: Mapping[str, Attribute]) -> Releases:
    read = graph.last_read
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        for name in op.outputs:
            at = read.get(name, index)
            last[name] = at if at > index else index
    last.update(dict.fromkeys(graph.outputs, len(graph.ops)))
    for name, index in held.until.items():
        last[name] = max(last.get(name, index), index)
    for name, attribute in attributes.items():  # a variable has it until then
        last[name] = max(last[name], attribute.after)
    if graph.variables:
        indices = {op.name: index for index, op in enumerate(graph.ops)}
        for name, until in graph.variables.items():
            last[name] = max(last.get(name, 0), indices[until])
    after: list[str | list[str] | None] = [None] * (len(graph.ops) + 1)
    for name, index in last.items():
        names = after[index]
        if names is None:
            after[index] = name
        elif type(names) is str:
            after[index] = [names, name]
        else:
            names.append(name)  # type: ignore[union-attr]
    return Releases(last, after, held.frames, attributes)


def held_values(graph: Graph, policy: str = "expected", *, training: bool = False) -> Held:
    """What variables and, with the policy "most", a cache in evaluation mode may hold."""
    held = _held_values(graph, policy, training)
    if policy != "most" or training:
        return held
    from staticmem.passes.variables.unseen_bounds import keys_and_values

    cached = dict.fromkeys(keys_and_values(graph), len(graph.ops) - 1)
    return Held(held.frames, {**held.until, **cached}) if cached else held


def _held_values(graph: Graph, policy: str, training: bool) -> Held:
    """What variables hold: by the lines of the stack traces, by `policy` where there are none or a frame is missing."""
    # each source of what is held is imported where the graph has something for it: most have for one
    until: dict[str, int] = {}
    unseen: Set[str] | None = None  # the values that hidden frames may hold; None: any
    traced = any(line.text for op in graph.ops for line in op.stack)
    if traced:
        from staticmem.passes.variables.source_lines import certainly_held_by_lines, held_by_lines
        from staticmem.passes.variables.unseen_code import (
            held_in_functions,
            inputs_of_segments,
            values_of_unseen_code,
            values_on_crowded_lines,
        )

        until.update(certainly_held_by_lines(graph) if policy == "last-use" else held_by_lines(graph))
        if policy == "most":
            from staticmem.passes.variables.source_lines import longest_holds_of_lines
            from staticmem.passes.variables.unseen_bounds import longest_holds

            by_modules = longest_holds(graph, Held()).until
            by_lines, passed_on = longest_holds_of_lines(graph)
            for name, index in by_lines.items():
                latest = index if name in passed_on else min(index, by_modules.get(name, index))
                until[name] = max(until.get(name, latest), latest)
            open_names = [name for op in graph.ops if not op.stack for name in (*op.refs(), *op.outputs)]
            for name in (*open_names, *values_on_crowded_lines(graph)):  # no line says what the frames around it do
                until[name] = max(until.get(name, 0), by_modules.get(name, 0))
        for name, index in (*held_in_functions(graph).items(), *inputs_of_segments(graph).items()):
            until[name] = max(until.get(name, index), index)
        unseen = values_of_unseen_code(graph)
    if training and unseen is not None and not unseen:
        return Held(until=until)
    by_methods: dict[str, int] = {}
    if unseen is not None and policy == "expected":
        from staticmem.passes.variables.unseen_code import values_read_by_methods

        by_methods = values_read_by_methods(graph)
    if unseen is not None and not unseen and not by_methods:
        return Held(until=until)
    held = held_by_policy(graph, policy)
    if policy == "most" and not traced:
        from staticmem.passes.variables.unseen_bounds import longest_holds

        held = longest_holds(graph, held)
    if policy == "expected":
        from staticmem.passes.variables.unseen_bounds import with_likely_names

        held = with_likely_names(graph, held, traced=traced)
    if unseen is None:
        return held
    for name, index in held.until.items():
        end = index if name in unseen else min(index, by_methods.get(name, -1))
        if end >= 0:
            until[name] = max(until.get(name, end), end)
    frames = {name: depth for name, depth in held.frames.items() if name in unseen}
    if policy == "expected":
        from staticmem.passes.variables.unseen_code import ends_of_turns

        for name, index in ends_of_turns(graph, frames).items():
            until[name] = max(until.get(name, index), index)
            del frames[name]
    return Held(frames, until)


def kept_by_modules(graph: Graph, policy: str = "expected") -> Mapping[str, Attribute]:
    """Results that a module keeps as an attribute until its next forward.

    Lines say so (`self.x = value`). The policy "last-use" takes code without an op, of which there is no trace, to let
    go of them (`self.x = None`).
    """
    key = f"kept by modules {policy == 'last-use'}"
    kept: dict[str, Attribute] | None = graph.derived.get(key)
    if kept is None:
        kept = graph.derived[key] = _normed_weights(graph)
        if policy != "last-use" and _assigns_attributes(graph):
            from staticmem.passes.variables.source_lines import execution_of

            owned = {p.fqn: p.value.shape for p in (*graph.buffers, *graph.parameters)}
            for name, attribute in execution_of(graph).assigned.items():
                said = graph.values.get(name)
                shape = said.shape if said is not None else None
                # the tensor that takes a buffer's place takes no more memory where it has its size
                if attribute.path not in owned or shape not in (None, owned[attribute.path]):
                    kept[name] = attribute
    return kept


_ATTRIBUTE = re.compile(r"^[^=(]*\bself\.\w+\s*(?:,[^=(]*|:[^=(]*)?=(?!=)")


def _assigns_attributes(graph: Graph) -> bool:
    """Whether a line may assign to an attribute: most graphs have none."""
    stacks = {id(op.stack): op.stack for op in graph.ops}.values()
    return any(_ATTRIBUTE.match(text) for text in {line.text for stack in stacks for line in stack})


def lasting_values(graph: Graph) -> Collection[str]:
    """Values that modules keep when their forward has returned."""
    return kept_by_modules(graph) if graph.recorded is None else graph.recorded.lasting


def _normed_weights(graph: Graph) -> dict[str, Attribute]:
    """Weights that a hook computes and assigns to its module before the forward."""
    if bases_of(graph.ops).isdisjoint(_NORMED):
        return {}
    owned = {p.value.name: p for p in graph.parameters}
    names = {p.fqn for p in (*graph.parameters, *graph.buffers)}
    kept: dict[str, Attribute] = {}
    for index, op in enumerate(graph.ops):
        first = op.args[0] if op.base in _NORMED and op.args else None
        source = owned.get(first.name) if isinstance(first, Ref) else None
        if source is not None and len(op.outputs) == 1 and _is_normed(source.fqn, op, names):
            kept[op.outputs[0]] = Attribute(source.fqn.rpartition("_")[0], index)
    return kept


def _is_normed(fqn: str, op: Op, names: set[str]) -> bool:
    """`weight_v` has `weight_g` beside it, `weight_orig` the buffer `weight_u`. A file may have lost the
    buffer `weight_v`, which is computed anew."""
    module, ending, rest = fqn.rpartition(_NORMED[op.base])
    if not ending or rest:
        return False
    return f"{module}{'_g' if ending == '_v' else '_u'}" in names
