"""Records the forward of a module in every mode that decides its memory.

The module's tensors are replaced by fake ones on the meta device, and its own Python runs: no weight is read, nothing
is computed. Sizes of the inputs that stay open are symbols (`torch.fx.experimental.symbolic_shapes`).
"""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from staticmem.errors import ModelFileError
from staticmem.frontends import recording_format as written
from staticmem.frontends import traced_sizes
from staticmem.frontends.output_names import name_of
from staticmem.ir.model_file import TracedSizes
from staticmem.recording import WITHOUT_DATA, asks_for_contents, gpu, halved, rows, tracing
from staticmem.recording.attempts import first_accepted
from staticmem.recording.contents import MOST_WEIGHTS, Contents, Made, can_follow, known_literals
from staticmem.recording.device_answers import as_on_gpu
from staticmem.recording.functions import recorded
from staticmem.recording.gradient_hooks import note_hooks_of_parameters, record_hooks, watched_hooks
from staticmem.recording.inner_autograd import recorded_autograd
from staticmem.recording.input_embeddings import input_embeddings
from staticmem.recording.patched import watched_calls
from staticmem.recording.plain_integers import symbolic_integers
from staticmem.recording.repeated_calls import fake_mode, known_arithmetic
from staticmem.recording.sizes import Sizes
from staticmem.recording.tracing import known_answers
from staticmem.recording.watch import Program, Watch
from staticmem.version import __version__

# training, amp; bfloat16 and float16 have the same sizes. Inference first: what the code asks of sizes in training
# alone, as batch norm does (`F._verify_batch_size`), is no condition of inference
Mode = tuple[bool, torch.dtype | None]
MODES: tuple[Mode, ...] = ((False, None), (True, None), (False, torch.bfloat16), (True, torch.bfloat16))
MOST_CALLS = 4  # behind the second one: until one is like a call before it
PARTS = len(MODES) + 1  # of a whole recording: the modes, and the module cast to 16 bits
# By the part that is recorded: its modes. A part of the module cast to 16 bits has its mode with that and without
MODES_OF: Mapping[str, tuple[Mode, ...]] = {
    written.ALL: MODES,
    **{written.part_of(training, amp is not None, False): ((training, amp),) for training, amp in MODES},
    **{written.part_of(training, False, True): ((training, None),) for training in (False, True)},
}
_PARTS_CAST = (written.ALL, written.part_of(False, False, True), written.part_of(True, False, True))
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)
_NOT_PLAIN = (torch.nn.Module, torch.Tensor, ModuleType, FunctionType, type)
_DEEPEST = 6  # objects within each other that a result may have: one may name what made it


@dataclass(frozen=True)
class Loop:
    """What differs between training and inference beside the module's mode: inputs by keyword that go in in one of
    them alone (training: true), and what is set before the first call."""

    inputs: Mapping[str, bool] = field(default_factory=dict)
    begin: Callable[[bool], None] = lambda training: None


USUAL_LOOP = Loop()


def record(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    as_given: bool = False,
    axes: Sequence[tracing.Axes] | None = None,
    progress: Callable[[int, int], None] | None = None,
    loop: Loop = USUAL_LOOP,
    input_values: Mapping[str, Made] | None = None,
    part: str = written.ALL,
    spread: float | None = None,
) -> dict[str, Any]:
    """The document of a recording (`frontends.recording_format`).

    `args` and `kwargs` are example inputs, on any device. The sizes of `axes`, by default those of `tracing.open_axes`,
    are open if the code allows it; a batch of 1 is recorded as 2, unless the code takes another way then and the
    recording is for the sizes `as_given`. `loss` takes what the module returns, in training. The module is as it was
    afterwards. `progress` is told how many modes of how many are recorded. `input_values` makes what inputs hold.
    `part`: which modes are recorded (`MODES_OF`). `spread`: what the network finds is drawn (`contents`).

    Raises:
        ModelFileError: the code cannot run without data; the message is PyTorch's. Or a weight is a tensor of a class
            that wraps other tensors.
    """
    _refuse_wrapped_weights(module)
    keywords = dict(kwargs or {})
    leaves = tree_leaves((tuple(args), keywords))
    last: Exception | None = None
    of_inference: dict[str, Any] | None = None  # one that has the sizes as given in inference alone
    attempts = tracing.attempts(axes if axes is not None else tracing.open_axes(args, keywords))
    # `model.cuda()` leaves plain tensors on the CPU. Code that does not run so may move them in another way
    hosts = (True, False) if _has_plain_tensors(module) else (False,)

    def documents(opened: Sequence[tracing.Axes]) -> Iterator[dict[str, Any]]:
        nonlocal last
        for on_host, decides in itertools.product(hosts, (False, True)):
            asks = spread is None and asks_for_contents(f"{type(last).__name__} {last}")
            if decides and not (asks and can_follow()):
                continue
            given, named = tracing.doubled(args, keywords, opened)
            try:
                with (
                    torch.random.fork_rng(devices=[]),
                    _fake(module, given, named, opened, on_host) as call,
                    gpu.meta_as_gpu(),
                    as_on_gpu() as asked_of_gpu,
                    tracing.quiet(),
                    tracing.oblivious(),
                    known_arithmetic(),
                    known_answers(),
                    call.knowing_contents(leaves, decides, input_values or {}, spread),
                ):
                    call.loss, call.progress, call.loop = loss, progress or call.progress, loop
                    call.part = part
                    document = call.document(leaves, opened)
                    document |= {"asked_of_gpu": sorted(asked_of_gpu)} if asked_of_gpu else {}
            except Exception as error:
                last = error
                if "saved tensor hooks" in str(error):  # as it runs: torch.func allows none, and they see what is saved
                    last = gpu.UnrecordedGradientError("it takes gradients by torch.func (grad, vjp, jacrev)")
                continue
            yield document

    def accept(document: dict[str, Any]) -> bool:
        nonlocal of_inference
        sizes = traced_sizes.of_content(document["sizes"])
        asked = replace(sizes, conditions=tuple(document["training_conditions"]))
        fixed = _note_fixed_axes(document, leaves, axes or ())
        if as_given and any(size != given for size, given in fixed):
            return False
        holds = sizes.refusal(sizes.example) is None
        of_inference = of_inference or (document if holds else None)
        return not as_given or (holds and asked.refusal(sizes.example) is None)

    document = first_accepted(attempts, documents, accept, not _is_doubled(args, keywords, attempts[0]))
    document = of_inference if document is None else document
    if document is not None:
        return document
    assert last is not None
    reason = next((line.strip() for line in str(last).splitlines() if line.strip()), type(last).__name__)
    hint = WITHOUT_DATA
    if isinstance(last, gpu.UnrecordedGradientError):
        hint = "Take gradients of x.detach().requires_grad_() by torch.autograd.grad, or with create_graph=True."
    raise ModelFileError(
        f"{type(module).__name__} cannot be recorded", f"{type(last).__name__}: {reason[:300]}", hint, code="SM175"
    ) from last


def _is_doubled(args: Sequence[Any], kwargs: Mapping[str, Any], axes: Sequence[tracing.Axes]) -> bool:
    """Whether a batch of 1 is recorded as 2 where it is open: code may not run with 1 (batch norm in training)."""
    before, after = tree_leaves((tuple(args), kwargs)), tree_leaves(tracing.doubled(args, kwargs, axes))
    return any(one is not other for one, other in zip(before, after, strict=True))


def _note_fixed_axes(
    document: dict[str, Any], leaves: Sequence[Any], axes: Sequence[tracing.Axes]
) -> list[tuple[int, int]]:
    """Has a document say what the sizes are called that the code fixed. Gives each with that of the example: a batch of
    1 is recorded as 2."""
    rows = iter(document["inputs"])
    fixed, sizes = {}, []
    for leaf, names in zip(leaves, axes, strict=False):
        if not isinstance(leaf, torch.Tensor):
            continue
        title, _, shape = next(rows)
        for axis, name in names.items():
            if isinstance(shape[axis], int):
                fixed[f"{title}[{axis}]"] = name
                sizes.append((shape[axis], int(leaf.shape[axis])))
                document["sizes"]["example"].setdefault(name, shape[axis])
    if fixed:
        document["fixed_axes"] = fixed
    return sizes


class _Call:
    """A module on fake tensors, and the call of its forward."""

    def __init__(self, module: torch.nn.Module, fake: FakeTensorMode, sizes: Sizes, env: ShapeEnv) -> None:
        self.module, self.fake, self.sizes, self.env = module, fake, sizes, env
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.inputs: list[tuple[str, torch.Tensor]] = []
        self.symbols: dict[str, Any] = {}
        self.stacks: dict[Any, int] = {}
        self.targets: dict[str, int] = {}
        self.loss: Callable[[Any], torch.Tensor] | None = None
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the module: the fake one, and the real
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self.loop = USUAL_LOOP
        self.part = written.ALL
        self.casts = halved.Casts()  # of the last program
        self.guards: dict[bool, list[Any]] = {False: [], True: []}  # by the mode, training or not, that asked first

    @contextmanager
    def knowing_contents(
        self, examples: Sequence[Any], follows: bool, input_values: Mapping[str, Made], spread: float | None = None
    ) -> Iterator[None]:
        """Within it contents are known: those of inputs that are made, and of a run on the examples that it follows."""
        reads = bool(input_values) or spread is not None
        contents = Contents(self.fake, follows, reads, spread) if follows or reads else None
        self.fake.contents = contents
        inputs = zip(self.inputs, (x for x in examples if isinstance(x, torch.Tensor)), strict=True)
        for (name, tensor), example in inputs:
            if name in input_values and contents is not None:
                shape = tuple(int(n) if isinstance(n, int) else int(n.node.hint) for n in tensor.shape)
                contents.know(tensor, input_values[name](shape))
            elif follows and contents is not None:
                contents.give(tensor, example)
        owned = [*self.module.parameters(), *self.module.buffers()]
        if follows and contents is not None and sum(t.numel() for t in owned) <= MOST_WEIGHTS:
            for twin, tensor in self.replaced:
                contents.give(twin, tensor)
        with known_literals(self.fake):
            yield

    def document(self, examples: Sequence[Any], axes: Sequence[tracing.Axes]) -> dict[str, Any]:
        gc.collect()  # what others left is not mistaken for what this model keeps
        parameters = _named(self.module.named_parameters(remove_duplicate=False))
        buffers = _named(self.module.named_buffers(remove_duplicate=False))
        owned = [t for _, t in self.inputs] + [t for _, t, _ in parameters] + [t for _, t, _ in buffers]
        owned_before = len(self.inputs) + len(parameters)
        programs = rows.Rows(range(owned_before, len(owned)), self.targets)
        state, data = _state(self.module), [t.data for t in owned]
        needs = [t.requires_grad for t in owned]
        # parts in evaluation mode stay in it (frozen norms), unless the whole module is
        was_training = {m: m.training or not self.module.training for m in self.module.modules()}

        def row(mode: Mode, tensors: Sequence[torch.Tensor]) -> dict[str, Any] | None:
            """The program of a mode; None of code that does not run under autocast: who asks is told (SM328)."""
            training, amp = mode
            asked = len(self.env.guards)
            try:
                for casts_are_ops in (False, True):
                    _restore(state)  # no mode has what another one has left on the module
                    for tensor, own, need in zip(owned, tensors, needs, strict=True):
                        _reset(tensor, own, need)
                    for m, was in was_training.items():
                        m.training = was and training
                    self.loop.begin(training)
                    if self.fake.contents is not None:
                        self.fake.contents.start()
                    program, reads_casts = self._program(owned, training, amp, casts_are_ops)
                    if not reads_casts:
                        break
            except Exception:
                if amp is None:
                    raise
                return None
            finally:
                self.guards[training] += self.env.guards[asked:]
            self.casts = halved.casts_of(program, list(self.targets))
            return programs.row(program, *_named_mode(mode))

        try:
            of_modes: dict[Mode, dict[str, Any] | None] = {}
            modes = MODES_OF[self.part]
            for done, mode in enumerate(modes):
                self.progress(done, len(modes) + 1)
                of_modes[mode] = row(mode, data)
            self.progress(len(modes), len(modes) + 1)
            if not any(of_modes.values()):  # the one mode, which does not run under autocast
                of_modes[modes[0][0], None] = row((modes[0][0], None), data)
            for mode, program in of_modes.items():
                if program is not None:
                    programs.add(program, *_named_mode(mode))
            if self.part in _PARTS_CAST and halved.is_float32([t for _, t, _ in parameters]):
                self._add_halved(programs, of_modes[modes[0]], partial(row, tensors=halved.halved(data, self.fake)))
        finally:
            for tensor, own, need in zip(owned, data, needs, strict=True):
                _reset(tensor, own, need)
            _restore(state)
        shape = self.sizes.shape
        inputs = [[name, _name_of(t.dtype), shape(t.shape)] for name, t in self.inputs]

        def owned_row(name: str, tensor: torch.Tensor, same: int, trainable: bool) -> tuple[Any, ...]:
            return name, shape(tensor.shape), _name_of(tensor.dtype), trainable, same

        left_open = {size for _, t in self.inputs for size in shape(t.shape)}
        replaced = {
            name: self.sizes.text(size)
            for name, symbol in self.symbols.items()
            if name not in left_open and (size := self.env.replace(symbol)) != symbol
        }
        self.symbols = {name: symbol for name, symbol in self.symbols.items() if name in left_open}
        return {
            "format": written.FORMAT, "version": written.VERSION, "torch": torch.__version__, "staticmem": __version__,
            "model": type(self.module).__name__, "loss": self.loss is not None,
            "symbols": {name: self._range(symbol) for name, symbol in self.symbols.items()},
            "sizes": traced_sizes.content_of(self._sizes(examples, axes)), "bounds": self.sizes.bounds,
            "training_conditions": self._conditions_of_training(), "replaced": replaced,
            "inputs": inputs, **({"inputs_of_mode": dict(self.loop.inputs)} if self.loop.inputs else {}),
            "parameters": rows.owned((owned_row(*p, p[1].requires_grad) for p in parameters), True),
            "buffers": rows.owned((owned_row(*b, False) for b in buffers), False),
            "targets": list(self.targets), "stacks": rows.stacks(list(self.stacks)),
            "functions": programs.functions, "programs": programs.programs,
            **({"halved": programs.halved} if programs.halved else {}), **input_embeddings(self.module),
            **({"in_data": in_data} if (in_data := self.sizes.in_data()) else {}),
            **({} if self.part == written.ALL else {"part": self.part}),
            **programs.of_code(), **(self.fake.contents.rows() if self.fake.contents is not None else {}),
        }  # fmt: skip

    def _add_halved(
        self, programs: rows.Rows, of_float32: dict[str, Any] | None, row: Callable[[Mode], dict[str, Any] | None]
    ) -> None:
        """Adds the programs of the module cast to 16 bits: the one mode of a part; else that of inference, those of
        training where a loss of its own may cast, and all where other ops run then (`recording.halved`)."""

        def added(mode: Mode) -> dict[str, Any] | None:
            try:
                program = row(mode)
            except Exception:
                return None  # code that does not run so
            if program is not None:
                programs.add(program, *_named_mode(mode), cast=True)
            return program

        mode, *others = MODES_OF[self.part]
        first, parents = added(mode), [parent for parent, *_ in self.stacks]
        if first is None or of_float32 is None or not others:
            return
        differs = halved.differs(of_float32, first, self.casts, list(self.targets), parents)
        for mode in others:
            if differs or (mode[0] and self.loop.inputs):
                added(mode)

    def _program(
        self, owned: Sequence[torch.Tensor], training: bool, amp: torch.dtype | None, casts_are_ops: bool
    ) -> tuple[Program, bool]:
        """The program of a mode, and whether it has to be recorded with `casts_are_ops`."""
        watch = Watch(self.module, owned, self.sizes)
        watch.copies = {} if casts_are_ops else None
        contents = self.fake.contents
        if contents is not None:
            contents.place, watch.contents = watch.holders.now, contents if contents.follows else None
        watch.stacks, watch.targets = self.stacks, self.targets
        with (
            self.fake,
            torch.set_grad_enabled(training),
            enable_python_dispatcher(),
            watched_calls(watch, partial(recorded, watch)),
            symbolic_integers(watch),
            recorded_autograd(watch),
            watched_hooks(watch),
        ):
            before = _attributes(self.module)
            call = partial(self._called, watch, training, amp)
            program = call()
            # a step, or a call in a loop, is the second one: what its module keeps from the call before is there.
            # Where a call leaves nothing and changes nothing, the second is like the first
            wrote = contents is not None and contents.changed
            if wrote or watch.keeps_values() or _attributes(self.module) != before:
                first, program = watch.memory_of(program), self._again(watch, call)
                if watch.memory_of(program) != first:
                    program.other_call = self._other_call(watch, program, call)
        watch.paused = True
        return program, watch.reads_casts

    def _again(self, watch: Watch, call: Callable[[], Program]) -> Program:
        """The next call, for which the same is drawn."""
        watch.start()
        if self.fake.contents is not None and self.fake.contents.spread is not None:
            self.fake.contents.start()
        return call()

    def _other_call(self, watch: Watch, second: Program, call: Callable[[], Program]) -> Program | None:
        """The last of the calls behind the second one that is unlike all before it, as where the code counts its calls
        or keeps more after each; None where they are like it."""
        other, asked = None, len(self.env.guards)
        seen = [watch.memory_of(second)]
        try:
            for _ in range(MOST_CALLS):
                later = self._again(watch, call)
                if (memory := watch.memory_of(later)) in seen:
                    break
                seen.append(memory)
                other = later
        except Exception:  # what the code does in the second call holds
            watch.program = Program()
        del self.env.guards[asked:]  # conditions are those of the second call
        return other

    def _called(self, watch: Watch, training: bool, amp: torch.dtype | None) -> Program:
        """The ops of one call, whose results are dropped then."""
        with watch.running(), gpu.autocast(amp):
            if training:
                note_hooks_of_parameters(watch, [pair for pair in self.replaced if _has_hooks(pair[1])])
            given = {k: v for k, v in self.kwargs.items() if self.loop.inputs.get(k) in (None, training)}
            result = self.module(*self.args, **given)
            if training and self.loss is not None:
                result = self.loss(result)
            watch.end_forward()
            watch.note_holders(len(watch.program.ops))
            if training:
                record_hooks(watch)
            program = watch.program
            outputs = _named_values(watch, result)
            program.outputs = list(outputs)
            program.output_names = [name for name, _ in outputs.values()]
            program.output_shapes = [self.sizes.shape(t.shape) for _, t in outputs.values()]
        watch.program, watch.paused = Program(), True  # of what ends from here on no op is the last
        if watch.copies:
            watch.copies.clear()
        del result, outputs
        watch.paused = False
        watch.end_call(program)
        return program

    def _range(self, symbol: Any) -> list[int | None]:
        """The values that a size may have. A least one of 2 is PyTorch's own: sizes of 0 and 1 are constants to it. The
        ops at a size of 1 are the same, and the rules know what broadcasting and views make of it."""
        bounds = self.env.var_to_range[symbol]
        low, high = bounds.lower, bounds.upper
        asked = any(symbol in c.free_symbols for c in self._conditions())
        if not asked:  # only ops asked, about layouts
            return [1, None]
        return [int(low) if low.is_Integer and low > 2 else 1, int(high) if high.is_Integer else None]

    def _conditions(self, guards: Sequence[Any] | None = None) -> dict[Any, str]:
        return tracing.conditions(self.env, set(self.symbols.values()), self.sizes.text, guards)

    def _conditions_of_training(self) -> list[str]:
        """Those that inference does not have."""
        both = self._conditions(self.guards[False])
        return [text for condition, text in self._conditions(self.guards[True]).items() if condition not in both]

    def _sizes(self, examples: Sequence[Any], axes: Sequence[tracing.Axes]) -> TracedSizes:
        sizes: dict[str, int] = {}
        for example, names in zip(examples, axes, strict=True):
            for axis, name in names.items():
                sizes.setdefault(name, int(example.shape[axis]))
        hints = {n.node.expr: int(n.node.hint) for _, t in self.inputs for n in t.shape if isinstance(n, torch.SymInt)}
        fixed_symbols = self.fake.contents.fixed if self.fake.contents is not None else ()
        read = (symbol for symbol in fixed_symbols if symbol in hints)  # at the sizes recorded
        fixed = sorted(f"Eq({self.sizes.names[symbol]},{hints[symbol]})" for symbol in read)
        return TracedSizes(sizes, {}, (*fixed, *self._conditions(self.guards[False]).values()))


@contextmanager
def _fake(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Sequence[tracing.Axes], on_host: bool
) -> Iterator[_Call]:
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    fake = fake_mode(shape_env=env, allow_non_fake_inputs=True)
    sizes: dict[str, torch.SymInt] = {}
    call = _Call(module, fake, Sizes({}), env)
    names, opened = iter(_input_names(module, args, kwargs)), iter(axes)

    def size(n: int, symbol: str | None) -> Any:
        if symbol is None:
            return n
        if symbol not in sizes:
            source = ConstantSource(symbol)
            symbol_of_size = env.create_symbol(n, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
            sizes[symbol] = env.create_symintnode(symbol_of_size, hint=n, source=source)
            call.symbols[symbol] = symbol_of_size
            call.sizes.names[symbol_of_size] = symbol
        return sizes[symbol]

    def fake_input(x: Any) -> Any:
        open_axes = next(opened)
        if not isinstance(x, torch.Tensor):
            return x
        name = next(names)
        shape = [size(int(n), open_axes.get(axis)) for axis, n in enumerate(x.shape)]
        with fake:
            tensor = torch.empty(shape, dtype=x.dtype, device=gpu.DEVICE)
        call.inputs.append((name, tensor))
        return tensor

    call.args = tuple(tree_map(fake_input, list(args)))
    call.kwargs = {key: tree_map(fake_input, value) for key, value in kwargs.items()}
    state = _state(module)
    try:
        call.replaced = _replace_tensors(module, fake, on_host)
        yield call
    finally:
        _restore(state)


def _refuse_wrapped_weights(module: torch.nn.Module) -> None:
    """Weights whose class decides what ops do with them (`__tensor_flatten__`: quantised weights, weights that are
    trained in low precision, DTensor): a recording has plain tensors in their places, which run other ops."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            why = f"{name} is a {kind}, which wraps other tensors. A recording has plain ones, with other ops."
            hint = "Record the model before its weights are wrapped; --quantize packs those of a plain model. "
            hint += "Modules that convert what they multiply are recorded (torchao.float8.convert_to_float8_training)."
            raise ModelFileError(f"{type(module).__name__} cannot be recorded", why, hint, code="SM175")


def _replace_tensors(
    module: torch.nn.Module, fake: FakeTensorMode, on_host: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fake tensors in place of parameters and buffers; one that has several names stays one. Returns each with the real
    one. `on_host`: plain tensors that are on the CPU stay there."""
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake_of(tensor: torch.Tensor, device: str = gpu.DEVICE) -> torch.Tensor:
        if id(tensor) not in replaced:
            with fake:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    twin = torch.nn.Parameter(twin, tensor.requires_grad)
            replaced[id(tensor)] = twin, tensor
        return replaced[id(tensor)][0]

    children = _modules(module)
    for child in children:
        for owned in (child._parameters, child._buffers):
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = fake_of(tensor)
    for child in children:
        names = getattr(child, "_flat_weights_names", None)
        if names is not None:  # torch/nn/modules/rnn.py has a list of its own
            child.__dict__["_flat_weights"] = [getattr(child, name, None) for name in names]
        for name, value in _plain_tensors(child):
            child.__dict__[name] = fake_of(value, "cpu" if on_host and value.is_cpu else gpu.DEVICE)
    return list(replaced.values())


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _plain_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the code keeps as attributes, which are neither parameters nor buffers."""
    return [(name, value) for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)]


def _has_plain_tensors(module: torch.nn.Module) -> bool:
    """Whether there are some on the CPU."""
    return any(value.is_cpu for child in _modules(module) for _, value in _plain_tensors(child))


State = list[tuple[Any, Any]]


def _state(module: torch.nn.Module) -> State:
    """The attributes of all modules and of plain objects that they have, and the containers in them, each with a copy.
    They are put back in place: others, as handles that remove hooks, hold the container itself."""
    state: dict[int, tuple[Any, Any]] = {}
    stack = [vars(holder) for holder in _holders(module)]
    while stack:
        held = stack.pop()
        if id(held) not in state:
            state[id(held)] = held, copy(held)
            items = held.values() if isinstance(held, dict) else held
            stack += [item for item in items if type(item) in _CONTAINERS]
    return list(state.values())


def _holders(module: torch.nn.Module) -> list[Any]:
    """All modules, and the plain objects that are their attributes."""
    holders: dict[int, Any] = {id(child): child for child in _modules(module)}
    for child in list(holders.values()):
        for value in child.__dict__.values():
            if _is_plain(value):
                holders.setdefault(id(value), value)
    return list(holders.values())


def _is_plain(value: Any) -> bool:
    """Whether it is an object that has attributes of its own, and nothing that others know better."""
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, _NOT_PLAIN)


def _modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and those within it, also those in lists and dictionaries, which it does not register."""
    modules: dict[int, torch.nn.Module] = {}
    stack = [module]
    while stack:
        for child in stack.pop().modules():
            if id(child) not in modules:
                modules[id(child)] = child
                for value in child.__dict__.values():
                    if type(value) in (list, tuple, dict):
                        stack += [x for x in tree_leaves(value) if isinstance(x, torch.nn.Module)]
    return list(modules.values())


def _restore(state: State) -> None:
    for held, content in state:
        held.clear()
        (held.extend if isinstance(held, (list, deque)) else held.update)(content)


def _reset(tensor: torch.Tensor, data: torch.Tensor, requires_grad: bool) -> None:
    """Gives a tensor of the model the storage that it had, and whether it needs a gradient."""
    tensor.data = data
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:  # an op in place may have made it none
        tensor.requires_grad_(requires_grad)


def _attributes(module: torch.nn.Module) -> list[Any]:
    """What the attributes of modules are, and of the plain objects that they have: equal where a call changes nothing.
    It holds no tensor, whose references are counted."""
    return [(id(holder), _told(vars(holder))) for holder in _holders(module)]


def _told(value: Any, depth: int = 3) -> Any:
    """Equal for what is the same: plain values as they are, containers item by item, others by identity."""
    if isinstance(value, Mapping) and depth:
        return {key: _told(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)) and depth:
        return [_told(item, depth - 1) for item in value]
    return value if isinstance(value, (int, float, str, bytes, type(None))) else id(value)


def _input_names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names of the input tensors in order: those of the forward's parameters; `x_0`, `x_1` within containers."""
    import inspect

    parameters = list(inspect.signature(module.forward).parameters.values())
    names: list[str] = []

    def add(name: str, value: Any) -> None:
        leaves = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        if isinstance(value, torch.Tensor):
            names.append(name)
        else:
            names.extend(f"{name}_{i}" for i in range(len(leaves)))

    for position, value in enumerate(args):
        parameter = parameters[min(position, len(parameters) - 1)] if parameters else None
        variadic = parameter is not None and parameter.kind is parameter.VAR_POSITIONAL
        name = parameter.name if parameter is not None else "input"
        add(f"{name}_{position - len(parameters) + 1}" if variadic else name, value)
    for key, value in kwargs.items():
        add(key, value)
    return names


def _named(tensors: Any) -> list[tuple[str, torch.Tensor, int]]:
    """Names, tensors, and the index of the one that has the same storage before."""
    first: dict[int, int] = {}
    named = []
    for index, (name, tensor) in enumerate(tensors):
        key = tensor.untyped_storage()._cdata
        named.append((name, tensor, first.get(key, -1)))
        first.setdefault(key, index)
    return named


def _named_mode(mode: Mode) -> tuple[bool, str | None]:
    return mode[0], _name_of(mode[1])


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _named_values(watch: Watch, result: Any) -> dict[int, tuple[str, torch.Tensor]]:
    """The values that a result has, each once, with what they are called in it."""
    values: dict[int, tuple[str, torch.Tensor]] = {}
    for path, tensor in _tensors(result):
        values.setdefault(watch.value(tensor), (name_of(path), tensor))
    return values


def _tensors(result: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """All tensors of a result, also in dictionaries and in transformers' ModelOutput, each with the way to it."""
    if isinstance(result, torch.Tensor):
        if result.device.type == gpu.DEVICE:
            yield path, result
    elif isinstance(result, Mapping):
        for key, item in result.items():
            yield from _tensors(item, (*path, str(key)))
    elif isinstance(result, (list, tuple)):
        names = getattr(result, "_fields", None) or range(len(result))
        for name, item in zip(names, result, strict=True):
            yield from _tensors(item, (*path, str(name)))
    elif hasattr(result, "__dataclass_fields__"):
        for name in result.__dataclass_fields__:
            yield from _tensors(getattr(result, name), (*path, name))
    elif _is_plain(result) and len(path) < _DEEPEST:  # as a cache of keys and values
        for name, item in vars(result).items():
            yield from _tensors(item, (*path, name))
