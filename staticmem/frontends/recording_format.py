"""The document of a recording: what `staticmem.recording` writes and `frontends.recorded` reads.

JSON, packed with LZMA. `schemas/recording-1.schema.json` is its schema.

| key | content |
|---|---|
| `format`, `version` | `staticmem.recording` and a number: a reader takes no higher one |
| `torch`, `staticmem` | versions that recorded it |
| `graph` | fingerprint of the graph of the file that carries it (`carried`) |
| `model` | class of the module |
| `loss` | whether the first output of the programs of training is the loss |
| `symbols` | name of each open size: smallest and largest value; null: no bound |
| `sizes` | the sizes of the example, and what the code asked of sizes (`frontends.traced_sizes`) |
| `training_conditions` | what the code asked of sizes in training alone |
| `replaced` | of open sizes that the code fixed, or found equal to others, after ops that have them: what they are |
| `bounds` | of a size that is in the data: `[shape, op]`, it is at most the number of elements of that shape |
| `in_data` | each size in the data: of the example `[size, most]`, null where unknown (older lack it) |
| `inputs` | `[name, dtype, shape]`; shapes have integers and expressions of symbols as text |
| `inputs_of_mode` | those that go in in training (true) or inference (false) alone, as labels |
| `parameters` | `[shared, name, shape, dtype, requires_grad, same]` |
| `buffers` | the same |
| `targets` | ATen targets, which ops name by their index |
| `stacks` | module calls `[up, path, class, call]` |
| `functions` | calls of custom `autograd.Function`s that differ, which ops name by their index |
| `programs` | those that differ, each with its `modes`: `[training, dtype of autocast or null]` |
| `halved` | of the module cast to bfloat16: inference, and all modes where more differs than casts. Older lack it |
| `part` | of a recording that is kept for one question: what it has (`part_of`) |
| `input_embeddings` | of transformers: `paths` of what `enable_input_require_grads()` hooks, `require_grad`: it was |
| `files` | of the code: paths from the folder of the model's file. Older recordings lack this and the next two keys |
| `lines`, `names` | of the code that `unused` is about: `[file, number, function]`, and what variables are called |
| `decided` | branches on what tensors hold, as a run on example inputs took them: `[file, line, function, answer]` |
| `use_cache` | of transformers: the outputs have keys and values of the tokens |
| `own_loss` | of transformers: the loss is the one that the model computes from labels |
| `unlabelled` | of transformers: why its own loss could not be recorded |
| `read_values` | where the code read values of its inputs, which were those of the example (older lack it) |
| `drawn_values` | where the code read what its network found, which was drawn (older lack it) |
| `limits` | of inference: sizes that limits of the code decide, with the least of each (older lack it) |
| `fixed_axes` | of a model that is built on demand: names of sizes that the code fixed, by their places |
| `asked_of_gpu` | functions that told the code which GPU it runs on, with the answers of an H100 (older lack it) |

The name of a parameter begins with as many components of the name before as `shared` says; `same` is the index of the
one whose storage it shares, or -1. The call that a module call is within is `up` rows before (0: none); a path that
begins with a dot goes on from that of the caller; `call` counts the calls of one module.

Values have numbers: inputs, parameters and buffers first, then each in the order in which it is made. `next` is the
number of the value that is made next. A program has

- `kept`, values from the call before: `[dtype, shape, base]`; `base` is the one whose storage it shares or -1
- `released_before`, values that Python lets go of before the first op: `next` less their number
- `ops`: `[target, step, args, released, outputs, flags, kwargs, results]`. `step` leads from the module call of the op
  before to its own. `released` are values that Python lets go of after it: `next`, once it has made its results, less
  their number. `outputs` says how many values it makes, or of each result whether it is one. `flags` are those in which
  it differs from `usual_flags` of the mode, and one of ops behind which autocast drops copies of weights (older
  recordings do not have it). `results` are dtypes and shapes where no rule gives them
- `regions` of checkpoints: `[start, end, depth, reentrant, name]`
- `unread_of_calls` and `unread_of_regions`: tensors that a module call or a checkpoint is given, and none of its ops
  reads: `[step, values]`. `step` leads from the call of the row before (from 0 in the first) to its own, which is a
  later one. A checkpoint keeps them. Older recordings do not have these keys
- `outputs`, their shapes `output_shapes` (older recordings do not have this key), and `output_names`: what each is
  called in what the model returns (`frontends.output_names`), if any has a name; `lasting`: values that the module
  keeps when its forward has returned
- `unused`: values that the code holds and does not read again: `[value, op, holders]`. Python could let go of it after
  the op (-1: before the first), once all of the `holders` let go: `[name, how, line]`. One that only its views hold, by
  their `_base`, has no holders, and goes with them. `how` is `DELETED` by `del` of a variable behind the line,
  `EMPTIED` by `None` in its place (in a loop), `BEFORE` by that before the line (behind a block), `ITEM` of a container
  when the op ran in the line, or `ATTRIBUTE` of a module, which the line assigns. Older recordings lack this key
- `other_call`, where calls of the code differ: the program of a later call that is unlike this one, the second, without
  `modes`. Older recordings do not have this key

An argument that is a string begins with what it is: `%3` is the value `next - 3`; `@1` the parameter (or input) that is
1 after the last one named so, and `#1` the buffer; `=` is an expression of sizes, `:` a dtype, `'` a text, `~` a float
that JSON does not have. The argument of a `staticmem::function` is the index of the function.

Some ops are of autograd. `staticmem::requires_grad` makes its argument a leaf that needs a gradient, and
`staticmem::requires_no_grad` one that needs none, where the code switches it for a parameter. The arguments of
`staticmem::backward` and `staticmem::grad` are the tensors that a backward begins with, their gradients (null: ones),
leaves, and whether the graph is retained; their results are the gradients of these leaves. `backward` adds to those of
parameters, too. `staticmem::set_data` gives its first argument the storage of its second: `p.data = x`.
`staticmem::not_recorded` says, by its argument, what the code does to autograd that is not in the recording.

A function has `name`, `inputs`, `results`, `saved` and `attributes`, and if its backward could run, `released_before`,
the ops of `backward`, and the `gradients` that it returns. The incoming gradients, one for each result, are the next
values before its ops. Its values are written as arguments are, null for what is no tensor. `materializes` is false
after `ctx.set_materialize_grads(False)`: results without a gradient have none then, in place of zeros.

A `staticmem::hook` is written as such a call: its `results` are the tensors whose gradients it takes, `attributes` what
its function holds, `gradients` those that it gives in place of the incoming ones (null: it leaves them), and `kept`
values that are alive when it has run. Hooks are the last ops of a program. `released` of their ops may end values of
the call before.

What is usual may be left out: keys with nothing in them, and the last items of rows (`USUAL_OP`; float32, no storage
shared, the first call; parameters require a gradient, buffers do not).
"""

from __future__ import annotations

import base64
import json
import lzma
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir import graph

FORMAT, VERSION = "staticmem.recording", 1
FUNCTION, HOOK, SET_DATA, NOT_RECORDED = graph.FUNCTION, graph.HOOK, graph.SET_DATA, graph.NOT_RECORDED
REQUIRES_GRAD, REQUIRES_NO_GRAD = graph.REQUIRES_GRAD, graph.REQUIRES_NO_GRAD
BACKWARD, GRAD = graph.BACKWARD, graph.GRAD
ITERATED = "aten::unbind.__iter__"  # `q, k, v = tensor`: an unbind, which Dynamo sees as one index after the other
CPU_TENSOR = "staticmem::cpu_tensor"
# the arguments of NOT_RECORDED
SAVED_HOOKS, SELECTIVE, HOOKS, SCRIPTED = "saved_tensors_hooks", "context_fn", "hooks", "torch.jit.script"
INNER = "create_graph"  # a gradient with a history reads what an op has kept beside its results
DELETED, EMPTIED, ITEM, ATTRIBUTE, BEFORE = range(5)  # how a value of `unused` is let go of
NO_GRAD = 1  # flag of an op: it runs under no_grad()
AUTOCAST = {2: "bfloat16", 4: "float16"}  # flags of an op: the dtype of the region of torch.autocast that it runs in
# flag of an op: behind it `torch.clear_autocast_cache` is called, as it is where the outermost region ends
CLEARS_AUTOCAST = 8
# the first character of an argument that is a string
REF, PARAMETER, BUFFER, SIZE, DTYPE, TEXT, FLOAT = "%", "@", "#", "=", ":", "'", "~"
USUAL_OP: tuple[Any, ...] = ([], 1, 0, {})  # released, outputs, flags, kwargs
MEMBER = "staticmem_recording.txt"  # extra file of a .pt2 archive
PROPERTY = "staticmem.recording"  # metadata property of a ModelProto
# ResNet-50 takes 70 bytes of text for an op, so 100,000 ops that differ in all four modes take 28 MB; packed a tenth
MAX_PACKED = 1 << 24  # bytes
MAX_BYTES = 1 << 26  # of the text
MAX_RATIO = 400  # of a long text to packed bytes: recordings have 2 to 20, a text that repeats itself has thousands
LONG = 1 << 23  # bytes: shorter texts are harmless, and Swin-B, whose blocks are alike, has 2.4 MB in 5.5 KB
MAX_LISTS = 1 << 22  # lists and objects in the text, each of which takes 56 bytes or more: 100,000 ops have a million
_MEMORY = 1 << 25  # bytes that the unpacker may take: a dictionary of 16 MiB, and tables
# texts without alignment: no context of the literal's position or of the byte before it
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 24, "lc": 0, "lp": 0, "pb": 0, "nice_len": 273}]


def needs_shapes(target: str) -> bool:
    """Whether the results of an op are written with their shapes: no rule may know the op."""
    return not target.startswith("aten::") and target != CPU_TENSOR


ALL = "all"  # the part of a recording that is the whole


def part_of(training: bool, autocast: bool, cast: bool) -> str:
    """The part of a recording that has what a step of one mode needs; `cast`: of the module cast to 16 bits."""
    mode = "training" if training else "inference"
    if autocast:
        return ALL if cast else f"{mode} under autocast"
    return f"{mode} in 16 bits" if cast else mode


def usual_flags(training: bool, amp: str | None) -> int:
    """The flags of most ops of a mode."""
    return (0 if training else NO_GRAD) | next((bit for bit, dtype in AUTOCAST.items() if dtype == amp), 0)


def pack(document: Any) -> bytes:
    """The bytes of a document."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)


def unpack(data: bytes, path: str) -> Any:
    """The document in bytes.

    Raises:
        ModelFileError: they are damaged, or unpack to more than any recording.
    """
    try:
        if len(data) > MAX_PACKED:
            raise ValueError(f"it has {len(data):,} bytes")
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
        text = decompressor.decompress(data, MAX_BYTES)
        if not decompressor.eof:
            raise ValueError("it ends too early, or unpacks to more than a recording has")
        if len(text) > max(LONG, MAX_RATIO * len(data)) or text.count(b"[") + text.count(b"{") > MAX_LISTS:
            raise ValueError(f"{len(data):,} bytes unpack to {len(text):,}, more than a recording has")
        document = json.loads(text, parse_constant=_no_constant)
    except (lzma.LZMAError, ValueError, EOFError, RecursionError, MemoryError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise damaged(path, "it is another document")
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def damaged(path: str, why: str) -> ModelFileError:
    """The error for a recording that breaks this format."""
    return ModelFileError(
        f"the recording in {path} is damaged",
        f"Reason: {why[:160]}.",
        "Record the model again: staticmem export or staticmem annotate.",
        code="SM108",
    )


def to_text(data: bytes) -> str:
    """Packed bytes as a text: PyTorch reads extra files as UTF-8, and metadata properties are strings."""
    return base64.b64encode(data).decode()


def from_text(text: str, path: str) -> bytes:
    """The bytes in a metadata property."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise damaged(path, str(error)) from error
