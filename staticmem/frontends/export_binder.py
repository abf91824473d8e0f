"""A torch.export archive at concrete sizes: its JSON nodes become ATen ops.

Nothing here trusts the file: fields go through `fields`, sizes through `expressions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends import fields
from staticmem.frontends.export_program import ExportedArchive, dtype_of, malformed
from staticmem.frontends.export_sizes import BatchRebinder, DataBounds, check_derived
from staticmem.frontends.traced_sizes import LEAST_FOUND
from staticmem.ir import dtypes, expressions
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Graph, Note, Op, Parameter, Ref, Value
from staticmem.ir.model_file import MAX_DIM, Binding
from staticmem.ir.stacks import source_lines

_BODIES = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "wrap", "checkpoint")
_CONSTANTS = ("tensor_constant", "custom_obj")
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}


def decode(archive: ExportedArchive, binding: Binding) -> Graph:
    """The graph at concrete sizes. A batch size that the export fixed is replaced where views repeat it."""
    try:
        return Binder(archive, binding).graph()
    except fields.MALFORMED as error:
        raise malformed(archive.path, error) from error


class Binder:
    """Translates one archive at one binding."""

    def __init__(self, archive: ExportedArchive, binding: Binding) -> None:
        self.archive, self.binding = archive, binding
        self.symbols = dict(check_derived(archive.tensors, archive.inputs, binding))
        self.tensors: dict[str, Any] = dict(archive.tensors)
        self.bounds = DataBounds(self.symbols, self.tensors, self.sized)
        self.notes: list[Note] = [*archive.notes]
        self.frames: dict[str, tuple[Frame, ...]] = {}
        self.known_frames: dict[Frame, Frame] = {}
        self.rename: dict[str, str] = {}  # names of the graph that is read now -> those of the values
        self.repeated: Counter[str] = Counter()
        self.regions = 0  # of autocast, around the op that is read now
        self.rebinder = BatchRebinder(archive.inputs, binding)

    def graph(self) -> Graph:
        archive = self.archive
        parameters, buffers, constants = [], [], {}
        for spec in fields.items(archive.signature["input_specs"]):
            kind, body = fields.only(spec)
            if kind == "parameter":
                parameters.append(self.parameter(body["arg"]["name"], body["parameter_name"], True))
            elif kind == "buffer":
                buffers.append(self.parameter(body["arg"]["name"], body["buffer_name"], False))
            elif kind in _CONSTANTS and body["arg"]["name"] in self.tensors:
                constants[body["arg"]["name"]] = self.sized(body["arg"]["name"])
        ops: list[Op] = []
        self.operations(archive.graph["nodes"], ops, True)
        parameters, buffers = self.tied(parameters, ops), self.tied(buffers, ops)
        ops = self.rebinder.follow(ops, self.recorded)
        inputs = tuple(Value(s.name, s.dtype, self.binding.shapes[s.name]) for s in archive.inputs)
        outputs, output_names = self.outputs(fields.items(archive.signature["output_specs"]))
        values = {name: self.value(name) for op in ops for name in op.outputs if name in self.tensors}
        if self.binding.rebound:
            changed = ", ".join(self.binding.rebound)
            text = (
                f"sizes that the export fixed were changed ({changed}); views that repeat the old batch size follow it"
            )
            self.notes.append(Note("assumption", "SM320", text))
        self.notes += self.bounds.notes()
        return Graph(
            name=archive.path, format="pt2", producer=archive.producer, inputs=inputs, parameters=tuple(parameters),
            buffers=tuple(buffers), ops=tuple(ops), outputs=outputs, values={} if self.binding.rebound else values,
            constant_values=constants, notes=tuple(self.notes), output_names=output_names,
            least_in_data=dict.fromkeys(self.bounds.assumed, LEAST_FOUND),
        )  # fmt: skip

    def outputs(self, specs: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values that are outputs, and what they are called in what the model returns."""
        leaves = [body["arg"] for kind, body in map(fields.only, specs) if kind == "user_output"]
        called = self.archive.output_names
        called = called if len(called) == len(leaves) else [""] * len(leaves)
        tensors = [
            (self.resolve(arg["as_tensor"]["name"]), name)
            for arg, name in zip(map(fields.mapping, leaves), called, strict=True)
            if "as_tensor" in arg
        ]
        return tuple([value for value, _ in tensors]), tuple([name for _, name in tensors])

    # -- tensors and sizes ---------------------------------------------------------------------------------------

    def parameter(self, name: str, fqn: str, trainable: bool) -> Parameter:
        """`requires_grad` as at the export: a frozen backbone stays frozen."""
        value = self.sized(name)
        trainable = trainable and value.dtype.is_differentiable and self.tensors[name].get("requires_grad") is not False
        return Parameter(value, fields.text(fqn), trainable)

    def tied(self, owned: list[Parameter], ops: Sequence[Op]) -> list[Parameter]:
        """Names of one tensor: all but one, which ops read, are aliases, and come after it."""
        groups: dict[str, list[Parameter]] = {}
        for p in owned:
            groups.setdefault(self.archive.tied.get(p.fqn, p.fqn), []).append(p)
        if len(groups) == len(owned):
            return owned
        read = {name for op in ops for name in op.refs()}
        names: list[str] = []
        parameters: list[Parameter] = []
        for group in groups.values():
            kept = next((p for p in group if p.value.name in read), group[0])
            others = [replace(p, alias_of=kept.value.name) for p in group if p is not kept]
            names += [p.fqn for p in others]
            parameters += [kept, *others]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        text = f"tied parameters (one storage under several names): {listed}"
        self.notes.append(Note("assumption", "SM321", text, len(names)))
        return sorted(parameters, key=lambda p: p.alias_of is not None)

    def sized(self, name: str) -> Value:
        """A tensor that the model owns, which must have a size."""
        meta = self.tensors[fields.text(name)]
        return Value(name, dtype_of(meta["dtype"]), tuple(self.size(s) for s in fields.items(meta["sizes"])))

    def value(self, name: str) -> Value:
        """What the file says of an op's result; no shape where it depends on data."""
        try:
            return self.sized(name)
        except DimensionError:
            return Value(name, dtype_of(self.tensors[name]["dtype"]), None)

    def recorded(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value at the sizes of the export."""
        return self.value(name).shape if name in self.tensors else None

    def size(self, size: Mapping[str, Any]) -> int:
        if "as_int" in size:
            return fields.size(size["as_int"])
        text = fields.text(size["as_expr"]["expr_str"])
        result = self.evaluated(expressions.parse(text))
        if not 0 <= result <= MAX_DIM:
            raise DimensionError(
                f"a size becomes {result} here",
                f"The export computes it as {text[:120]}.",
                "Choose sizes for which it is positive.",
                code="SM118",
            )
        return result

    def evaluated(self, expression: expressions.Expr) -> int:
        try:
            return expressions.evaluate(expression, self.symbols)
        except KeyError as error:
            raise DimensionError(
                f"a size depends on {error}, which only the data tells",
                "The export has a size that is computed from tensor values.",
                f"Give an upper bound with --dim {error.args[0]}=N.",
                code="SM117",
            ) from error

    # -- ops -----------------------------------------------------------------------------------------------------

    def operations(self, nodes: Any, ops: list[Op], grad: bool, amp: bool | DType = True) -> None:
        for node in fields.items(nodes):
            target = fields.text(node["target"])
            name = fields.text(node.get("name") or "")
            if target.startswith("torch.ops.higher_order."):
                self.higher_order(node, name, ops, grad, amp)
                continue
            outputs = tuple(self.output_names(node["outputs"]))
            args: list[Arg] = []
            kwargs: dict[str, Arg] = {}
            for item in fields.items(node["inputs"]):
                value = self.arg(item["arg"])
                if item.get("kind", 1) == 1 and not kwargs:
                    args.append(value)
                else:
                    kwargs[fields.text(item["name"])] = value
            count = self.bounds.of(node, target, outputs)
            if count is not None:
                kwargs["size"] = count
            metadata = fields.mapping(node.get("metadata") or {})
            ops.append(
                Op(
                    name=name or (outputs[0] if outputs else target),
                    target=_target(target),
                    args=tuple(args),
                    kwargs=kwargs or NO_KWARGS,
                    outputs=outputs,
                    modules=self.modules(fields.text(metadata.get("nn_module_stack", ""))),
                    stack=source_lines(fields.text(metadata.get("stack_trace", ""))),
                    grad=grad,
                    amp=amp,
                )
            )

    def higher_order(self, node: Mapping[str, Any], given: str, ops: list[Op], grad: bool, amp: bool | DType) -> None:
        """`wrap_with_set_grad_enabled`, `wrap_with_autocast`: the graph is run in place, without autograd or without
        the step's autocast where the node says so."""
        name = fields.text(node["target"]).removeprefix("torch.ops.higher_order.")
        args = [fields.mapping(item["arg"]) for item in fields.items(node["inputs"])]
        bodies = [a["as_graph"]["graph"] for a in args if "as_graph" in a]
        if name not in _BODIES or len(bodies) != 1:
            outputs = tuple(self.output_names(node["outputs"]))
            refs = tuple(self.arg(a) for a in args if "as_graph" not in a)
            ops.append(Op(given or name, f"higher_order::{name}", refs, {}, outputs, grad=grad, amp=amp))
            return
        body = fields.mapping(bodies[0])
        if name == "wrap_with_set_grad_enabled":
            grad = grad and fields.boolean(args[0]["as_bool"])
        autocast = name == "wrap_with_autocast"
        if autocast:
            amp = self.autocast(args)
            self.regions += 1
        at = next(i for i, a in enumerate(args) if "as_graph" in a)
        # a graph has names of its own: exporters give those of the graph around it, and of other bodies, again
        around, self.rename = self.rename, self.given_names(body["inputs"], args[at + 1 :])
        for own, value in fields.mapping(body["tensor_values"]).items():
            if own not in self.rename:
                self.rename[own] = self.unused(own)
                self.tensors[self.rename[own]] = value
        first = len(ops)
        self.operations(body["nodes"], ops, grad, amp)
        if autocast:
            self.regions -= 1
            if self.regions == 0 and len(ops) > first:  # the outermost one
                ops[-1] = replace(ops[-1], clears=True)
        results = [
            self.resolve(r["as_tensor"]["name"]) if "as_tensor" in r else "" for r in fields.items(body["outputs"])
        ]
        self.rename = around
        for outer_name, result in zip(self.output_names(node["outputs"]), results, strict=False):
            if result:
                self.rename[outer_name] = result

    def autocast(self, args: Sequence[Mapping[str, Any]]) -> bool | DType:
        """The dtype of a region of autocast, or False where it is not enabled. `args` are device_type, dtype, enabled.

        A machine without CUDA exports `torch.autocast("cuda", dtype)` as not enabled. Its dtype is float16 where the
        code gives none, as in `torch.autocast("cuda", enabled=False)`; bfloat16 is given to a region that is enabled.
        """
        dtype = dtype_of(args[1]["as_scalar_type"]) if "as_scalar_type" in args[1] else None
        if fields.boolean(args[2]["as_bool"]):
            return dtype or True
        if fields.text(args[0]["as_string"]) != "cuda" or dtype is not dtypes.bfloat16:
            return False
        text = "torch.autocast() of the code was exported without CUDA, as not enabled: taken to be enabled in bfloat16"
        if not any(note.text == text for note in self.notes):
            self.notes.append(Note("assumption", "SM263", text))
        return dtype

    def given_names(self, inputs: Any, args: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """What the inputs of a body are called around it."""
        return {
            fields.text(inner["as_tensor"]["name"]): self.resolve(outer["as_tensor"]["name"])
            for inner, outer in zip(fields.items(inputs), args, strict=False)
            if "as_tensor" in inner and "as_tensor" in outer
        }

    def unused(self, name: str) -> str:
        """A name that no value has yet."""
        candidate = name
        while candidate in self.tensors:
            self.repeated[name] += 1
            candidate = f"{name}.{self.repeated[name]}"
        return candidate

    def resolve(self, name: Any) -> str:
        original = fields.text(name)
        return self.rename.get(original, original)

    def output_names(self, outputs: Any) -> list[str]:
        """Names of an op's results in order; "" for one that is absent."""
        names: list[str] = []
        for output in fields.items(outputs):
            kind, value = fields.only(output)
            if kind == "as_tensor":
                names.append(self.resolve(value["name"]))
            elif kind == "as_tensors":
                names.extend(self.resolve(t["name"]) for t in fields.items(value))
            elif kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
                names.append(fields.text(value.get("as_name", "")))
            elif kind in ("as_optional_tensor", "as_optional_tensors"):
                each = fields.items(value) if kind == "as_optional_tensors" else [value]
                names.extend(self.resolve((t.get("as_tensor") or {}).get("name", "")) for t in each)
        return names

    def arg(self, arg: Any) -> Arg:
        kind, value = fields.only(arg)
        if kind == "as_tensor":
            return Ref(self.resolve(value["name"]))
        if kind == "as_optional_tensor":
            return self.optional_tensor(value)
        if kind in ("as_tensors", "as_optional_tensors"):
            return tuple(self.optional_tensor(v) for v in fields.items(value))
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _LISTS:
            return tuple(_LISTS[kind](v) for v in fields.items(value))
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self.symbolic(value)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return tuple(self.symbolic(v) for v in fields.items(value))
        return None  # none, device, layout: no influence on memory

    def optional_tensor(self, value: Mapping[str, Any]) -> Arg:
        if "name" in value:
            return Ref(self.resolve(value["name"]))
        return Ref(self.resolve(value["as_tensor"]["name"])) if "as_tensor" in value else None

    def symbolic(self, value: Any) -> Arg:
        kind, value = fields.only(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind != "as_name":
            raise TypeError(f"a size: {kind[:80]!r} stands there")
        name = fields.text(value)
        symbol = fields.mapping(self.archive.graph.get("sym_int_values") or {}).get(name)
        if symbol is None:
            return Ref(name)
        if "as_int" in symbol:
            return fields.integer(symbol["as_int"])
        return self.evaluated(expressions.parse(fields.text(symbol["as_expr"]["expr_str"])))

    def modules(self, stack: str) -> tuple[Frame, ...]:
        """`path,fqn,class;...` -> frames; the path's `@n` tells repeated calls of one module apart."""
        frames = self.frames.get(stack)
        if frames is None:
            entered = []
            for item in stack.split(";"):
                key, _, rest = item.partition(",")
                fqn, _, cls = rest.rpartition(",")
                if not cls or fqn.startswith("_empty_nn_module_stack"):
                    continue
                call = key.rpartition("@")[2] if "@" in key else ""
                frame = Frame(fqn, cls, int(call) if call.isdecimal() and len(call) < 16 else 0)
                entered.append(self.known_frames.setdefault(frame, frame))  # one object each: they are compared a lot
            frames = self.frames[stack] = tuple(entered)
        return frames


def _memory_format(value: Any) -> str | None:
    return _MEMORY_FORMATS.get(fields.integer(value))


_SCALARS: Mapping[str, Callable[[Any], Arg]] = {
    "as_int": fields.integer, "as_float": fields.number, "as_bool": fields.boolean, "as_string": fields.text,
    "as_scalar_type": dtype_of, "as_memory_format": _memory_format,
}  # fmt: skip
_LISTS: Mapping[str, Callable[[Any], Arg]] = {
    "as_ints": fields.integer, "as_floats": fields.number, "as_bools": fields.boolean, "as_strings": fields.text,
    "as_int_lists": lambda values: tuple(fields.integer(v) for v in fields.items(values)),
}  # fmt: skip


def _target(target: str) -> str:
    """`torch.ops.aten.conv2d.default` -> `aten::conv2d`; other overloads keep their name."""
    parts = target.split(".")
    if target.startswith("torch.ops.") and len(parts) >= 5:
        name = f"{parts[2]}::{parts[3]}"
        return name if parts[4] == "default" else f"{name}.{parts[4]}"
    return target.replace("_operator.", "operator::", 1)
