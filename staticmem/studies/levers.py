"""What would make a step smaller: each lever is a scenario of its own that is analysed in full."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from staticmem.devices.architectures import computes_in_bfloat16
from staticmem.devices.gpus import Gpu, find
from staticmem.errors import StaticmemError
from staticmem.frontends.recent import Recent
from staticmem.ir.graph import Graph
from staticmem.ops.registry import kinds_of
from staticmem.passes.requested.layers import EMBEDDING, layers_of
from staticmem.report.sweep import CANNOT_RUN, LEVERS_SCHEMA, NUMERICS, SAME, TRAINING, LeverRow, Levers
from staticmem.scenario.adapters import ALL_LINEAR
from staticmem.scenario.compiling import DEFAULT_MODE, WHOLE
from staticmem.scenario.optimizers import APOLLO, COMPILED_OPTIMIZERS, FUSED, GALORE, OPTIMIZERS
from staticmem.scenario.step import AFTER_FORWARD, FIRST, ON_GPU, PINNED
from staticmem.studies import Request, Study, workers
from staticmem.studies.checkpoints import best_set, last_layer, repeated_blocks
from staticmem.studies.let_go import letting_go
from staticmem.studies.study import key_of, unused
from staticmem.studies.trials import Lever, Trials
from staticmem.studies.workers import WORTH_PROCESSES

BUDGET_NOT_USED = "--budget is not used: it looks for checkpoints, which a training step alone has"
Progress = Callable[[int, int], None]  # levers that are done, and how many there are


def levers(
    study: Study,
    gpu: str | None = None,
    budget: int | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
    config: bool = False,
) -> Levers:
    """The levers of a study's request, those that save most first.

    Args:
        gpu: a card: device memory is what is saved, and each lever says whether it fits.
        budget: bytes that the step may need; with it the best set of checkpoints is looked for. With a card and no
            budget it is what the card gives, where the request does not fit.
        jobs: processes, where the work is longer than their start.
        config: there is a config, which would add to the flags of commands.

    Raises:
        StaticmemError: the request cannot be analysed as it is.
    """
    begun = time.process_time()
    trials = Trials(study, gpu)
    card, seconds = trials.card, time.process_time() - begun
    idle = [BUDGET_NOT_USED] if budget is not None and not study.scenario.training else []
    if budget is None and card is not None and card.fit == "does not fit":
        budget = card.usable_bytes
    listed = list(candidates(study))
    path = workers.name_to_reopen(study.model)
    if jobs > 1 and seconds * len(listed) > WORTH_PROCESSES and path is not None:
        rows = _in_processes(path, study.request, gpu, listed, jobs, progress)
    else:
        rows = try_out(trials, listed, progress)
    if budget is not None and study.scenario.training and (best := best_set(trials, budget)) is not None:
        rows.append(best)
    without = " --no-config" * config
    rows = [replace(row, command=f"{row.command}{without}") for row in in_order(rows)]
    name, usable = (card.gpu, card.usable_bytes) if card is not None else (None, None)
    stands: tuple[Any, ...] = ("", "", 0, None)
    if card is not None:
        stands = (card.why, card.condition, card.missing_bytes, card.least_usable_bytes)
    unsaid = find(gpu, study.request.gpus_file).unsaid if gpu is not None else ()
    answer = Levers(LEVERS_SCHEMA, study.model.path, name, usable, budget, trials.base, tuple(rows), *stands)
    return replace(answer, assumed=(*unsaid, *unused(study.request, study.notes), *idle))


def try_out(trials: Trials, listed: Sequence[Lever], progress: Progress | None = None) -> list[LeverRow]:
    """The rows of levers but for those that do not go with the request: rmsprop has no fused kernels."""
    rows = []
    for index, lever in enumerate(listed):
        try:
            rows.append(trials.try_out(lever))
        except StaticmemError:
            continue
        finally:
            if progress is not None:
                progress(index + 1, len(listed))
    return rows


_of_process: Recent[Trials] = Recent(1)  # what a process of `jobs` works on


def rows_of(path: str, request: Request, gpu: str | None, some: Sequence[Lever]) -> list[list[LeverRow]]:
    """The rows of some levers of a model, each one or none: a function of plain values, for other processes."""
    key = path, key_of(request)
    trials = _of_process.get(key)
    if trials is None:
        trials = Trials(Study.open(path, request), gpu)
        _of_process.put(key, trials)
    return [try_out(trials, [lever]) for lever in some]


def _in_processes(
    path: str, request: Request, gpu: str | None, listed: Sequence[Lever], jobs: int, progress: Progress | None
) -> list[LeverRow]:
    """The rows of `try_out`, in its order."""
    count = len(listed)
    parts = min(2 * jobs, count)  # levers beside one another cost the same: each part has some of all kinds
    tasks = [range(count)[start::parts] for start in range(parts)]
    rows: dict[int, list[LeverRow]] = {}

    def run(task: Sequence[int]) -> tuple[Any, ...]:
        return rows_of, path, request, gpu, [listed[number] for number in task]

    for task, result in workers.in_processes(tasks, run, jobs, lambda task: [range(n, n + 1) for n in task]):
        if isinstance(result, StaticmemError):
            raise result
        rows.update(zip(task, result, strict=True))
        if progress is not None:
            progress(len(rows), count)
    return [row for number in range(count) for row in rows[number]]


def in_order(rows: Iterable[LeverRow]) -> list[LeverRow]:
    """Those that save something and run on the card, the largest saving first."""
    saving = [row for row in rows if row.saved_bytes and row.fit != CANNOT_RUN]
    return sorted(saving, key=lambda row: (-row.saved_bytes, row.compute, row.does))


def candidates(study: Study) -> Iterator[Lever]:
    request, scenario = study.request, study.scenario
    card = study.device.gpu
    yield from precision_levers(request, card, scenario.training)
    if not request.compile and not request.communicators:
        note = "the first step takes minutes longer; what is saved is in docs/compile.md"
        yield Lever("torch.compile(model)", {"compile": (WHOLE,)}, SAME, note)
    elif scenario.training and scenario.activation_memory_budget == 1:
        for share in (0.75, 0.5, 0.25):
            does = f"an activation memory budget of {share:.0%} for the compiler"
            yield Lever(does, {"activation_memory_budget": share}, SAME, "torch._functorch.config has it")
    if scenario.cuda_graphs:
        note = "their pool keeps what eager code could use between them"
        yield Lever("compiled code without CUDA graphs", {"compile_mode": DEFAULT_MODE}, SAME, note)
    yield from (lever for lever, _ in letting_go(study))
    if scenario.training:
        yield from checkpoint_levers(study)
        yield from _offloading(study)
        yield from _in_place_norms(study)
        yield from _accumulation(study)
        if scenario.zero_grad == AFTER_FORWARD and scenario.accumulate == 1:
            yield Lever("zero_grad() before the forward", {"zero_grad": FIRST}, SAME)
        yield from _losses(study)
        yield from optimizer_levers(study)
        yield from _freezing(study)
        yield from adapter_levers(study)
        yield from _projections(study)
    if not study.graph.inplace_known and request.inplace_activations != "all":
        yield Lever("run activations in place", {"inplace_activations": "all"}, SAME, "ReLU(inplace=True) and the like")
    if request.alloc_conf is None:
        yield Lever("let segments of the allocator grow", {"alloc_conf": "expandable_segments:True"}, SAME)
    if not request.channels_last:
        yield Lever("channels_last", {"channels_last": True}, SAME, "workspaces of convolutions")


def precision_levers(request: Request, card: Gpu, training: bool) -> Iterator[Lever]:
    """In the 16-bit type that the card computes in. A model that is float16 as a whole does not train."""
    if request.dtype is not None or request.amp not in (None, "none"):
        return
    autocast = autocast_on(card, training)
    yield Lever(f"mixed precision (autocast to {autocast['amp']})", autocast, NUMERICS)
    if computes_in_bfloat16(card):
        yield Lever("the whole model in bf16", {"dtype": "bf16"}, NUMERICS, "weights and optimizer state too")
    elif not training:
        yield Lever("the whole model in fp16", {"dtype": "fp16"}, NUMERICS, "weights too")


def autocast_on(card: Gpu, training: bool) -> dict[str, Any]:
    """Mixed precision in the type that the card computes in; gradients in float16 are scaled."""
    if computes_in_bfloat16(card):
        return {"amp": "bf16"}
    return {"amp": "fp16", "grad_scaler": True} if training else {"amp": "fp16"}


def checkpoint_levers(study: Study) -> Iterator[Lever]:
    request = study.request
    if request.checkpoint or request.checkpoint_segments:
        return
    blocks = repeated_blocks(study.result.graph)
    for block in blocks[:3]:
        options: dict[str, Any] = {"checkpoint": (block.selector,)}
        yield Lever(f"checkpoint every {_called(block.selector)}", options, SAME, f"{len(block.paths)} blocks")
        groups = round(len(block.paths) ** 0.5)
        if 2 <= groups <= block.row:
            options = {"checkpoint": (block.selector,), "checkpoint_every": groups}
            yield Lever(f"checkpoint {groups} of {_called(block.selector)} together", options, SAME)
        if request.amp in (None, "none") and request.dtype is None:
            autocast = autocast_on(study.device.gpu, True)
            does = f"autocast to {autocast['amp']}, and checkpoint every {_called(block.selector)}"
            yield Lever(does, {**autocast, "checkpoint": (block.selector,)}, NUMERICS)
    yield Lever("checkpoint_sequential in sqrt(n) segments", {"checkpoint_segments": "sqrt"}, SAME)


def _in_place_norms(study: Study) -> Iterator[Lever]:
    """A graph without a batch norm behind which an activation follows refuses it."""
    if not study.request.inplace_abn and "aten::batch_norm" in study.result.graph.bases:
        note = "InPlaceABN of mapillary; ReLU becomes leaky ReLU"
        yield Lever("batch norms with their ReLU in place", {"inplace_abn": True}, TRAINING, note)


def _offloading(study: Study) -> Iterator[Lever]:
    """Alone, and of the inputs of checkpointed blocks."""
    request = study.request
    if request.offload_activations != ON_GPU or request.compile:
        return
    options: dict[str, Any] = {"offload_activations": PINNED}
    note = "save_on_cpu(pin_memory=True): what is saved crosses the bus twice a step"
    yield Lever("saved tensors on the CPU", options, SAME, note)
    if not request.checkpoint and not request.checkpoint_segments:
        for block in repeated_blocks(study.result.graph)[:1]:
            does = f"checkpoint every {_called(block.selector)}, and saved tensors on the CPU"
            yield Lever(does, {**options, "checkpoint": (block.selector,)}, SAME, note)


def _called(selector: str) -> str:
    return selector if "*" not in selector else f"module of {selector}"


def _accumulation(study: Study) -> Iterator[Lever]:
    request = study.request
    batch = next((shape[0] for shape in study.binding.shapes.values() if shape), None)
    for parts in (2, 4, 8):
        if batch is not None and batch % parts == 0 and batch > parts:
            options = {"batch": batch // parts, "accumulate": request.accumulate * parts}
            changes = changed_by_micro_batches(study.graph)
            note = "batch norms see fewer samples" if changes == TRAINING else "the same samples a step"
            yield Lever(f"accumulate gradients over {parts} micro-batches of {batch // parts}", options, changes, note)


def changed_by_micro_batches(graph: Graph) -> str:
    """What smaller micro-batches of the same samples change: the statistics of batch norms, where there are any."""
    return TRAINING if any("batch_norm" in kinds_of(op.base) for op in graph.ops) else SAME


def _losses(study: Study) -> Iterator[Lever]:
    """Cross entropy of tokens together with the last linear layer; a graph without one refuses them."""
    result = study.result
    if result.loss not in ("cross-entropy", "causal-lm") or 3 not in map(len, result.output_shapes[:2]):
        return
    liger = "gradients of the logits in the dtype of the model; Liger-Kernel"
    yield Lever("the loss fused with the last linear layer", {"loss": "fused-linear-cross-entropy"}, NUMERICS, liger)
    yield Lever("the last linear layer in the loss, by parts", {"loss": "linear-cross-entropy"}, SAME, "torchtune")
    yield Lever("logits and their loss by parts", {"loss": "chunked-cross-entropy"}, SAME, "torchtune")


# optimizers with less state than another; those of one family first
_LIGHTER = ("adafactor", "adam-8bit", "adamw-8bit", "lion", "lion-8bit", "sgd")


def optimizer_levers(study: Study) -> Iterator[Lever]:
    request, optimizer = study.request, study.scenario.optimizer
    if optimizer is None:
        return
    if study.scenario.optimizer_impl != "fused" and optimizer in FUSED:
        yield Lever("the fused optimizer", {"optimizer_impl": "fused"}, SAME)
    if study.scenario.optimizer_impl == "foreach":
        yield Lever("the optimizer parameter by parameter", {"optimizer_impl": "for-loop"}, SAME, "a slower step")
    if optimizer in COMPILED_OPTIMIZERS and not request.compile_optimizer and not request.offload_optimizer:
        yield Lever("torch.compile(optimizer.step)", {"compile_optimizer": True}, SAME)
    if not request.offload_optimizer:
        yield Lever("optimizer state on the CPU", {"offload_optimizer": True}, SAME, "gradients and parameters move")
    plain: dict[str, Any] = {
        "momentum": 0.0,
        "nesterov": False,
        "dampening": 0.0,
        "amsgrad": False,
        "centered": False,
        "optim_target_modules": (),
        "optim_args": None,
    }
    for other in _LIGHTER:
        fits = not other.endswith("-8bit") or other == f"{optimizer}-8bit" or not other.startswith("adam")
        if other in OPTIMIZERS and other != optimizer and fits:
            options = {**plain, "optimizer": other, "optimizer_impl": "foreach", "compile_optimizer": False}
            yield Lever(f"{other} instead of {optimizer}", options, TRAINING)
    if optimizer == "sgd" and request.momentum:
        yield Lever("sgd without momentum", {**plain}, TRAINING)


def _freezing(study: Study) -> Iterator[Lever]:
    head = last_layer(study.result.graph)
    if head and study.request.freeze is None:
        options = {"freeze": f"^(?!{re.escape(head)}\\.)"}
        yield Lever(f"train {head} alone", options, TRAINING, "the other parameters are frozen")


_FEWEST_LAYERS = 8  # adapters are for networks of blocks


def adapter_levers(study: Study) -> Iterator[Lever]:
    """Where blocks of linear layers repeat: what fine-tuning of decoders and encoders uses."""
    if study.request.lora is None and study.request.freeze is None and _linear_layers(study) >= _FEWEST_LAYERS:
        options = {"lora": "r=16,alpha=32,targets=all-linear"}
        yield Lever("LoRA of rank 16 beside all linear layers", options, TRAINING, "the model itself is frozen")
        packed = {**options, "quantize": "nf4-dq"}
        yield Lever("QLoRA: the same beside weights in nf4", packed, TRAINING, "bitsandbytes, with double quantisation")


def _projections(study: Study) -> Iterator[Lever]:
    """Gradients of linear layers in a space of low rank, where Adam's states are."""
    if study.scenario.optimizer in ("adam", "adamw") and _linear_layers(study) >= _FEWEST_LAYERS:
        for name in (GALORE, APOLLO):
            options: dict[str, Any] = {"optimizer": name, "optimizer_impl": "foreach", "amsgrad": False}
            options |= {"compile_optimizer": False, "optim_target_modules": (ALL_LINEAR,)}
            yield Lever(f"{name} over all linear layers", options, TRAINING, "rank 128")


def _linear_layers(study: Study) -> int:
    """How many linear layers are called."""
    return len({layer.path for layer in layers_of(study.result.graph) if layer.kind != EMBEDDING})
