"""Reader of torch.export archives (`.pt2`): a zip with JSON inside, read without torch and without any weight.

Source of the format: torch/_export/serde/schema.py (schema major 8) and torch/export/pt2_archive/constants.py. The
archive is untrusted: member sizes are bounded, nothing is unpickled, expressions are parsed by `graph.expressions`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staticmem import dtypes
from staticmem.dtypes import DType
from staticmem.errors import DimensionError, ModelFileError
from staticmem.graph import expressions
from staticmem.graph.ir import Arg, Frame, Graph, Note, Op, Parameter, Ref, Value
from staticmem.graph.model import Binding, InputSpec, SymbolRange
from staticmem.graph.source import source_lines

SUPPORTED_MAJOR = 8
MAX_JSON_BYTES = 1 << 30  # the JSON of a 100,000-op graph is about 100 MB
MAX_RATIO = 400  # JSON of this kind compresses 10-60 times; a bomb 1000 and more
MAX_INT64 = 2**63 - 1


def read_archive(path: str) -> ExportedArchive:
    """The model of a `.pt2` file.

    Raises:
        ModelFileError: not an archive of torch.export, or of a schema that this version does not know.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = _model_member(archive, path)
            document = _load_json(archive, name, path)
    except zipfile.BadZipFile as error:
        raise ModelFileError(
            f"{path} is a damaged archive",
            f"It starts like a zip file, but {str(error)[0].lower() + str(error)[1:]}.",
            "Copy or export it again; it may have been cut off.",
            code="SM102",
        ) from error
    except (NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be read", f"Reading it failed: {error}.", "Copy or export it again.", code="SM102"
        ) from error
    major = (document.get("schema_version") or {}).get("major") if isinstance(document, dict) else None
    if major != SUPPORTED_MAJOR:
        raise ModelFileError(
            f"{path} has torch.export schema {major}",
            f"This version of staticmem reads schema major {SUPPORTED_MAJOR} (PyTorch 2.6 and later).",
            "Export the model with a PyTorch of that schema, or update staticmem.",
            code="SM103",
        )
    try:
        return ExportedArchive(path, document)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _malformed(path, error) from error


def _malformed(path: str, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"{path} is not a well-formed torch.export archive",
        f"Its graph lacks or misplaces {error}.",
        "Export the model again with torch.export.save.",
        code="SM104",
    )


def _model_member(archive: zipfile.ZipFile, path: str) -> str:
    names = [n for n in archive.namelist() if n.endswith(".json") and ("/models/" in n or n.startswith("models/"))]
    if names:
        return sorted(names)[0]
    if any(n.endswith("data.pkl") for n in archive.namelist()):
        raise ModelFileError(
            f"{path} holds a pickle, not an exported graph",
            "It was written by torch.save or torch.jit.save; staticmem never unpickles a file.",
            "Export the model: torch.export.save(torch.export.export(model, args), 'model.pt2').",
            code="SM105",
        )
    raise ModelFileError(
        f"{path} is a zip file without a graph",
        "A torch.export archive has a member models/model.json.",
        "Write it with torch.export.save from PyTorch 2.6 or later.",
        code="SM105",
    )


def _load_json(archive: zipfile.ZipFile, name: str, path: str) -> Any:
    info = archive.getinfo(name)
    if info.file_size > MAX_JSON_BYTES or info.file_size > MAX_RATIO * max(info.compress_size, 1024):
        raise ModelFileError(
            f"{path} unpacks to an absurd size",
            f"Its member {name} says {info.file_size:,} bytes, {info.compress_size:,} compressed.",
            "If this is a real model, report it.",
            code="SM106",
        )
    try:
        return json.loads(archive.read(name))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(
            f"{path} has a damaged graph", f"{name} is not JSON: {error}.", "Export the model again.", code="SM104"
        ) from error


@dataclass
class ExportedArchive:
    """A `ModelFile` over the archive's JSON."""

    path: str
    document: Mapping[str, Any] = field(repr=False)
    format: str = "pt2"

    def __post_init__(self) -> None:
        module = self.document["graph_module"]
        self._graph = module["graph"]
        self._signature = module["signature"]
        self._tensors: Mapping[str, Any] = self._graph["tensor_values"]
        self.producer = f"torch.export {self.document.get('torch_version', '')}".strip()
        self.symbols: dict[str, SymbolRange] = {}
        for name, bounds in (self.document.get("range_constraints") or {}).items():
            low, high = bounds.get("min_val"), bounds.get("max_val")
            self.symbols[name] = SymbolRange(max(low or 1, 1), None if high is None or high >= MAX_INT64 else high)
        self.inputs = tuple(self._input(name) for name in self._user_inputs())

    def _user_inputs(self) -> list[str]:
        names = []
        for spec in self._signature["input_specs"]:
            arg = (spec.get("user_input") or {}).get("arg") or {}
            if "as_tensor" in arg:
                names.append(arg["as_tensor"]["name"])
        return names

    def _input(self, name: str) -> InputSpec:
        meta = self._tensors[name]
        shape: list[int | str] = []
        for axis, size in enumerate(meta["sizes"]):
            if "as_int" in size:
                shape.append(int(size["as_int"]))
                continue
            expression = expressions.parse(size["as_expr"]["expr_str"])
            # a derived input size (2*s0) cannot be given directly: its symbol is asked for elsewhere
            symbol = expression if isinstance(expression, str) else f"{name}[{axis}]"
            shape.append(symbol)
            self.symbols.setdefault(symbol, SymbolRange())
        return InputSpec(name, _dtype(meta["dtype"]), tuple(shape))

    def bind(self, binding: Binding) -> Graph:
        """The graph at concrete sizes. Fixed sizes that a user overrides are replaced where views repeat them."""
        try:
            return _Binder(self, binding).graph()
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise _malformed(self.path, error) from error


def _dtype(code: int) -> DType:
    return dtypes.PT2_CODES[code]


class _Binder:
    """Translates one archive at one binding."""

    def __init__(self, archive: ExportedArchive, binding: Binding) -> None:
        self.archive, self.binding = archive, binding
        self.symbols = dict(binding.symbols)
        self.tensors: dict[str, Any] = dict(archive._tensors)
        self.notes: list[Note] = []
        self.frames: dict[str, tuple[Frame, ...]] = {}
        self.shapes: dict[str, int] = {}
        self.rename: dict[str, str] = {}
        # sizes that --batch (and kin) changed although the export fixed them: old size -> new size, for axis 0
        self.rebound: dict[int, int] = {}
        for spec in archive.inputs:
            for old, new in zip(spec.shape or (), binding.shapes[spec.name], strict=True):
                if isinstance(old, int) and old != new:
                    self.rebound[old] = new

    def graph(self) -> Graph:
        archive = self.archive
        parameters, buffers, constants = [], [], {}
        for spec in archive._signature["input_specs"]:
            kind, body = next(iter(spec.items()))
            if kind == "parameter":
                parameters.append(self.parameter(body["arg"]["name"], body["parameter_name"], True))
            elif kind == "buffer":
                buffers.append(self.parameter(body["arg"]["name"], body["buffer_name"], False))
            elif kind in ("tensor_constant", "custom_obj", "lifted_tensor_constant"):
                name = body["arg"]["name"]
                if name in self.tensors:
                    constants[name] = self.value(name)
        ops: list[Op] = []
        self.operations(archive._graph["nodes"], ops, True)
        inputs = tuple(Value(s.name, s.dtype, binding_shape(self.binding, s.name)) for s in archive.inputs)
        outputs = self.outputs(archive._signature["output_specs"])
        values = {name: self.value(name) for op in ops for name in op.outputs if name in self.tensors}
        if self.rebound:
            changed = ", ".join(f"{a} -> {b}" for a, b in self.rebound.items())
            self.notes.append(
                Note("assumption", "SM320", f"sizes that the export fixed were changed ({changed}); views that repeat "
                     "the old size follow it")
            )  # fmt: skip
        return Graph(
            name=archive.path, format="pt2", producer=archive.producer, inputs=inputs, parameters=tuple(parameters),
            buffers=tuple(buffers), ops=tuple(ops), outputs=outputs, values={} if self.rebound else values,
            constant_values=constants, notes=tuple(self.notes),
        )  # fmt: skip

    def outputs(self, specs: Sequence[Any]) -> tuple[str, ...]:
        names = []
        for spec in specs:
            arg = (spec.get("user_output") or {}).get("arg") or {}
            if "as_tensor" in arg:
                name = arg["as_tensor"]["name"]
                names.append(self.rename.get(name, name))
        return tuple(names)

    def parameter(self, name: str, fqn: str, trainable: bool) -> Parameter:
        value = self.value(name)
        return Parameter(value, fqn, trainable and value.dtype.is_differentiable)

    def value(self, name: str) -> Value:
        meta = self.tensors[name]
        try:
            shape: tuple[int, ...] | None = tuple(self.size(s) for s in meta["sizes"])
        except DimensionError:
            shape = None
        return Value(name, _dtype(meta["dtype"]), shape)

    def size(self, size: Mapping[str, Any]) -> int:
        if "as_int" in size:
            return int(size["as_int"])
        expression = expressions.parse(size["as_expr"]["expr_str"])
        try:
            return expressions.evaluate(expression, self.symbols)
        except KeyError as error:
            raise DimensionError(
                f"a size depends on {error}, which only the data tells",
                "The export has a size that is computed from tensor values.",
                f"Give an upper bound with --dim {error.args[0]}=N.",
                code="SM117",
            ) from error

    def operations(self, nodes: Sequence[Any], ops: list[Op], grad: bool) -> None:
        for node in nodes:
            target = node["target"]
            if target.startswith("torch.ops.higher_order."):
                self.higher_order(node, ops, grad)
                continue
            outputs = tuple(self.output_names(node["outputs"]))
            args: list[Arg] = []
            kwargs: dict[str, Arg] = {}
            for item in node["inputs"]:
                value = self.arg(item["arg"])
                if item.get("kind", 1) == 1 and not kwargs:
                    args.append(value)
                else:
                    kwargs[item["name"]] = value
            ops.append(
                Op(
                    name=node.get("name") or (outputs[0] if outputs else target),
                    target=_target(target),
                    args=tuple(args),
                    kwargs=kwargs,
                    outputs=outputs,
                    modules=self.modules(node.get("metadata", {}).get("nn_module_stack", "")),
                    source=(node.get("name") or target,),
                    stack=source_lines(node.get("metadata", {}).get("stack_trace", "")),
                    grad=grad,
                )
            )

    def higher_order(self, node: Mapping[str, Any], ops: list[Op], grad: bool) -> None:
        """`wrap_with_set_grad_enabled`: its graph is run in place, without autograd where it says so."""
        name = node["target"].removeprefix("torch.ops.higher_order.")
        args = [item["arg"] for item in node["inputs"]]
        bodies = [a["as_graph"]["graph"] for a in args if "as_graph" in a]
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "wrap", "checkpoint") or len(bodies) != 1:
            outputs = tuple(self.output_names(node["outputs"]))
            refs = tuple(self.arg(a) for a in args if "as_graph" not in a)
            ops.append(Op(node.get("name") or name, f"higher_order::{name}", refs, {}, outputs, grad=grad))
            return
        body = bodies[0]
        if name == "wrap_with_set_grad_enabled":
            grad = grad and bool(args[0].get("as_bool"))
        at = next(i for i, a in enumerate(args) if "as_graph" in a)
        self.tensors.update(body["tensor_values"])
        for inner, outer in zip(body["inputs"], args[at + 1 :], strict=False):
            if "as_tensor" in inner and "as_tensor" in outer:
                self.rename[inner["as_tensor"]["name"]] = self.resolve(outer["as_tensor"]["name"])
        self.operations(body["nodes"], ops, grad)
        for inner, outer_name in zip(body["outputs"], self.output_names(node["outputs"]), strict=False):
            if "as_tensor" in inner:
                self.rename[outer_name] = self.resolve(inner["as_tensor"]["name"])

    def resolve(self, name: str) -> str:
        return self.rename.get(name, name)

    def output_names(self, outputs: Sequence[Any]) -> list[str]:
        names: list[str] = []
        for output in outputs:
            if "as_tensor" in output:
                names.append(output["as_tensor"]["name"])
            elif "as_tensors" in output:
                names.extend(t["name"] for t in output["as_tensors"])
            elif "as_sym_int" in output:
                names.append(output["as_sym_int"].get("as_name", ""))
            elif "as_optional_tensors" in output:
                names.extend((t.get("as_tensor") or {}).get("name", "") for t in output["as_optional_tensors"])
        return names

    def arg(self, arg: Mapping[str, Any]) -> Arg:
        kind, value = next(iter(arg.items()))
        if kind == "as_tensor":
            return Ref(self.resolve(value["name"]))
        if kind in ("as_tensors", "as_optional_tensors"):
            return tuple(self.optional_tensor(v) for v in value)
        if kind in ("as_int", "as_float", "as_bool", "as_string"):
            return value if kind != "as_float" else float(value)
        if kind in ("as_ints", "as_floats", "as_bools", "as_strings"):
            return tuple(value)
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self.symbolic(value)
        if kind in ("as_sym_ints", "as_sym_floats"):
            return tuple(self.symbolic(v) for v in value)
        if kind == "as_scalar_type":
            return _dtype(value)
        if kind == "as_memory_format":
            return {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}.get(value)
        return None  # none, device, layout: no influence on memory

    def optional_tensor(self, value: Mapping[str, Any]) -> Arg:
        if "name" in value:
            return Ref(self.resolve(value["name"]))
        return Ref(self.resolve(value["as_tensor"]["name"])) if "as_tensor" in value else None

    def symbolic(self, value: Mapping[str, Any]) -> Arg:
        if "as_int" in value:
            return int(value["as_int"])
        if "as_float" in value:
            return float(value["as_float"])
        if "as_bool" in value:
            return bool(value["as_bool"])
        name = value["as_name"]
        table = self.archive._graph.get("sym_int_values", {})
        known = table.get(name)
        if known is not None:
            return self.size(known)
        return Ref(name)

    def modules(self, stack: str) -> tuple[Frame, ...]:
        """`path,fqn,class;...` -> frames; the path's `@n` tells repeated calls of one module apart."""
        frames = self.frames.get(stack)
        if frames is None:
            made = []
            for item in stack.split(";"):
                key, _, rest = item.partition(",")
                fqn, _, cls = rest.rpartition(",")
                if not cls or fqn.startswith("_empty_nn_module_stack"):
                    continue
                call = key.rpartition("@")[2] if "@" in key else ""
                made.append(Frame(fqn, cls, int(call) if call.isdigit() else 0))
            frames = self.frames[stack] = tuple(made)
        return frames


def _target(target: str) -> str:
    """`torch.ops.aten.conv2d.default` -> `aten::conv2d`; other overloads keep their name."""
    parts = target.split(".")
    if target.startswith("torch.ops.") and len(parts) >= 5:
        name = f"{parts[2]}::{parts[3]}"
        return name if parts[4] == "default" else f"{name}.{parts[4]}"
    return target.replace("_operator.", "operator::", 1)


def binding_shape(binding: Binding, name: str) -> tuple[int, ...]:
    return binding.shapes[name]
