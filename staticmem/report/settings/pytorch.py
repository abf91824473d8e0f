"""A training step in plain PyTorch: `prepare` makes model and optimizer as predicted, `train_step` runs a step.

Sources, PyTorch 2.13: torch/utils/checkpoint.py (`checkpoint`, use_reentrant=False),
torch/distributed/fsdp/_fully_shard (`fully_shard` of each block and then of the model, `MixedPrecisionPolicy`),
torch/nn/parallel/distributed.py (`no_sync`), torch/amp (`autocast`, `GradScaler`); of PEFT `LoraConfig` and
`get_peft_model`.
"""

from __future__ import annotations

from collections.abc import Iterator

from staticmem.ir.dtypes import DType
from staticmem.report.settings import OF_OUTPUTS, OF_TARGETS, OF_THE_MODEL, Run, comment
from staticmem.report.settings.optimizers import class_of, keywords
from staticmem.scenario.adapters import Lora, lora_of
from staticmem.scenario.edits import BATCH_OF_LOOP, LOSS_OF_LOOP
from staticmem.scenario.precision import precision
from staticmem.scenario.step import DROPPED, FIRST

_INDENT = "    "
_LOSSES = {
    OF_TARGETS: "loss_of(outputs, targets)",
    OF_OUTPUTS: "loss_of(outputs)",
    OF_THE_MODEL: "torch.utils._pytree.tree_leaves(outputs)[0]",
}
_SAID = {
    OF_TARGETS: (),
    OF_OUTPUTS: ("`loss_of` is the loss that was recorded.",),
    OF_THE_MODEL: ("It returns its loss first (of transformers, where they have labels).",),
}


def write(run: Run) -> str:
    """The text of a module."""
    lines = [*comment(run), "", *_imports(run), "", f"BATCH = {run.batch}  # samples of a micro-batch on each device"]
    lines.append(f"ACCUMULATE = {run.request.accumulate}  # micro-batches of a step")
    lines.append("LEARNING_RATE = 1e-4  # yours: it decides no memory")
    listed = [("CHECKPOINTED", run.checkpointed), ("SHARDED", run.sharded)]
    if any(modules.paths for _, modules in listed):
        lines += ["", "# paths in the module that was exported"]
    lines += [f"{name} = {paths_text(modules.paths)}" for name, modules in listed if modules.paths]
    return "\n".join([*lines, "", "", *_prepare(run), "", "", *_train_step(run)]) + "\n"


def paths_text(paths: tuple[str, ...]) -> str:
    """Paths as a Python expression: `["layers." + str(i) for i in range(32)]` for a row, else a list."""
    stem, _, last = paths[0].rpartition(".")
    if len(paths) > 2 and last == "0" and paths == tuple(f"{stem}.{i}" for i in range(len(paths))):
        pattern = f"{stem}." if stem else ""
        return f"[{pattern!r} + str(i) for i in range({len(paths)})]"
    rows = "".join(f"{_INDENT}{path!r},\n" for path in paths)
    return f"[\n{rows}]"


def dtype_text(dtype: DType) -> str:
    return f"torch.{dtype.name}"


def lora_text(lora: Lora) -> str:
    """The call of PEFT's LoraConfig."""
    targets: object = lora.pattern or (lora.targets[0] if lora.all_linear else list(lora.targets))
    parts = [
        f"r={lora.r}",
        f"lora_alpha={lora.alpha:g}",
        f"lora_dropout={lora.dropout:g}",
        f"target_modules={targets!r}",
    ]
    parts += [f"modules_to_save={list(lora.save)!r}"] if lora.save else []
    return f"peft.LoraConfig({', '.join(parts)})"


def optimizer_text(run: Run, parameters: str = "model.parameters()") -> str:
    """The call that makes the optimizer."""
    _, cls = class_of(run.request)
    options = "".join(f", {name}={value!r}" for name, value in keywords(run.request).items())
    return f"{cls}({parameters}, lr=LEARNING_RATE{options})"


def _imports(run: Run) -> list[str]:
    request, standard, others = run.request, [], {"torch"}
    if run.checkpointed.paths:
        standard.append("import functools")
    if run.strategy.keeps_whole and request.accumulate > 1:
        standard.append("import contextlib")
    if request.parallel is not None:
        standard.append("import os")
    others.add(class_of(request)[0])
    if request.lora:
        others.add("peft")
    lines = [f"import {name}" for name in sorted(others)]
    if (request.replicas or 1) > 1:
        lines.append("from torch.distributed.device_mesh import init_device_mesh")
    if run.strategy.shards_modules:
        names = "MixedPrecisionPolicy, fully_shard" if run.half is not None else "fully_shard"
        lines.append(f"from torch.distributed.fsdp import {names}")
    if run.strategy.keeps_whole:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if run.checkpointed.paths:
        lines.append("from torch.utils.checkpoint import checkpoint")
    return [*sorted(standard), *[""] * bool(standard), *lines]


def _prepare(run: Run) -> list[str]:
    """The function that makes the model and the optimizer."""
    return ["def prepare(model):", *_indented(_preparation(run))]


def _preparation(run: Run) -> Iterator[str]:
    request = run.request
    yield '"""The model on its device, and its optimizer."""'
    if request.parallel is not None:
        yield 'rank = int(os.environ["LOCAL_RANK"])  # torchrun --nproc-per-node'
        yield "torch.cuda.set_device(rank)"
        yield '# torch.distributed.init_process_group("nccl") has run'
    for name, modules in (("checkpointed", run.checkpointed), ("sharded", run.sharded)):
        if modules.paths:
            yield f"{name} = [model.get_submodule(path) for path in {name.upper()}]"
    # fully_shard moves what it shards, so that no device has the whole model
    moved = [] if run.strategy.shards_modules else ['"cuda"']
    dtype = precision("dtype", request.dtype)
    moved += [f"dtype={dtype_text(dtype)}"] if dtype is not None else []
    moved += ["memory_format=torch.channels_last"] if request.channels_last else []
    if moved:
        yield f"model = model.to({', '.join(moved)})"
    if request.lora:
        assert isinstance(request.lora, str)
        lora = lora_of(request.lora)
        yield f"model = peft.get_peft_model(model, {lora_text(lora)})"
        if lora.input_grads:
            yield "model.enable_input_require_grads()"
    if run.checkpointed.paths:
        yield "for block in checkpointed:"
        yield f"{_INDENT}block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    yield from _shared(run)
    yield f"optimizer = {optimizer_text(run, _trained(run))}"
    yield "return model, optimizer"


def _shared(run: Run) -> Iterator[str]:
    """The model as the devices share it."""
    if run.strategy.keeps_whole:
        yield "model = DistributedDataParallel(model, device_ids=[rank])"
    if not run.strategy.shards_modules:
        return
    policy, replicas = "", run.request.replicas or 1
    if run.half is not None:
        yield f"policy = MixedPrecisionPolicy(param_dtype={dtype_text(run.half)}, reduce_dtype=torch.float32)"
        policy = ", mp_policy=policy"
    if replicas > 1:
        sizes = f"({replicas}, {run.devices // replicas})"
        yield f'mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names=("replicate", "shard"))'
        policy += ", mesh=mesh"
    if run.sharded.paths:
        yield "for block in sharded:"
        yield f"{_INDENT}fully_shard(block{policy})"
    yield f"fully_shard(model{policy})"


def _trained(run: Run) -> str:
    return "[p for p in model.parameters() if p.requires_grad]" if run.request.lora else "model.parameters()"


def _train_step(run: Run) -> list[str]:
    """The function that runs a step."""
    scaler = ", scaler" if run.request.grad_scaler else ""
    function = "" if run.loss == OF_THE_MODEL else ", loss_of"
    return [f"def train_step(model, optimizer{function}, batches{scaler}):", *_indented(_step(run))]


def _step(run: Run) -> Iterator[str]:
    request = run.request
    taken = "pairs of inputs and targets" if run.loss == OF_TARGETS else "inputs"
    step = f'"""One step of the optimizer over ACCUMULATE {taken}, of BATCH samples each.'
    if run.takes_arguments:
        arguments = "Inputs are the arguments of the model: a tuple, or a dict by name."
        yield from (step, "", arguments, *_SAID[run.loss], '"""')
    else:
        yield f'{step}"""'
    zeroing = f"optimizer.zero_grad({'' if request.set_to_none else 'set_to_none=False'})"
    if request.zero_grad == FIRST:
        yield zeroing
    in_no_sync = run.strategy.keeps_whole and request.accumulate > 1
    counted = in_no_sync or request.zero_grad != FIRST
    each = "inputs, targets" if run.loss == OF_TARGETS else "inputs"
    yield f"for number, ({each}) in enumerate(batches):" if counted else f"for {each} in batches:"
    body = list(_micro_batch(run, zeroing))
    if in_no_sync:
        yield f"{_INDENT}last = number == ACCUMULATE - 1"
        yield f"{_INDENT}with contextlib.nullcontext() if last else model.no_sync():"
        body = [f"{_INDENT}{line}" for line in body]
    yield from (f"{_INDENT}{line}" for line in body)
    if request.clip_grad_norm:
        if request.grad_scaler:
            yield "scaler.unscale_(optimizer)"
        yield "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    if request.grad_scaler:  # torch.amp.GradScaler("cuda")
        yield from ("scaler.step(optimizer)", "scaler.update()")
    else:
        yield "optimizer.step()"


def _micro_batch(run: Run, zeroing: str) -> Iterator[str]:
    """Forward and backward of a micro-batch."""
    request = run.request
    call = "model(**inputs) if isinstance(inputs, dict) else model(*inputs)" if run.takes_arguments else "model(inputs)"
    forward = [f"outputs = {call}", f"loss = {_LOSSES[run.loss]} / ACCUMULATE"]
    if request.channels_last and not run.takes_arguments:
        yield "inputs = inputs.to(memory_format=torch.channels_last)"
    elif request.channels_last:
        yield "# inputs of four dimensions are in torch.channels_last"
    if run.half is not None and not run.strategy.shards_modules:  # its policy casts
        yield f'with torch.autocast("cuda", dtype={dtype_text(run.half)}):'
        forward = [f"{_INDENT}{line}" for line in forward]
    yield from forward
    if request.outputs == DROPPED:
        yield "del outputs"
    if BATCH_OF_LOOP in request.let_go:
        yield "del inputs, targets" if run.loss == OF_TARGETS else "del inputs"
    if request.zero_grad != FIRST:
        yield "if number == 0:"
        yield f"{_INDENT}{zeroing}"
    yield "scaler.scale(loss).backward()" if request.grad_scaler else "loss.backward()"
    if LOSS_OF_LOOP in request.let_go:
        yield "del loss" if request.outputs == DROPPED else "del loss, outputs"


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"{_INDENT}{line}".rstrip() for line in lines]
