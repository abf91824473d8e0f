"""The process that runs a model with PyTorch: `main` is called with the path of its job.

It is a process of its own, because PyTorch can crash, hang, or take all memory, and because the allocator's figures are
those of a process. The job is JSON: the model's path, the words of the request, the device; the answer is JSON too.
"""

from __future__ import annotations

import gc
from typing import Any

from staticmem.child import FailedError, answer, limit_memory
from staticmem.eager.trace import round_up
from staticmem.validate.nvml import Nvml


def main(path: str) -> int:
    return answer(path, _work)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise FailedError("import", str(error)) from error
    import warnings

    from staticmem.validate.pytorch.program import NotRunnableError

    warnings.simplefilter("ignore")
    limit_memory(job)
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if job["device"] == "cuda" and not torch.cuda.is_available():
        raise FailedError("device", f"PyTorch {torch.__version__} sees no CUDA device")
    try:
        steps = _steps(job)
        readings = _run_on_cuda(job, steps) if job["device"] == "cuda" else _run_on_cpu(job, steps)
    except NotRunnableError as error:
        raise FailedError("op", str(error)) from error
    except torch.OutOfMemoryError as error:
        raise FailedError("memory", " ".join(str(error).split())[:300]) from error
    except (RuntimeError, ValueError, TypeError) as error:
        if "allocate memory" in str(error):
            raise FailedError("memory", " ".join(str(error).split())[:300]) from error
        if job["debug"]:
            raise
        raise FailedError("step", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return {"version": torch.__version__, "stand_ins": dict(steps.stand_ins), **readings}


def _steps(job: dict[str, Any]) -> Any:
    """The steps of the job: the graph is read as `analyze` reads it, and cleaned as a prediction has it."""
    from staticmem.validate.pytorch.prediction import predicted
    from staticmem.validate.pytorch.steps import Steps

    prediction = predicted(job["model"], job["options"], job["device"])
    return Steps(prediction.result.graph, prediction.scenario, prediction.result.loss, job["device"])


def _run_on_cpu(job: dict[str, Any], steps: Any) -> dict[str, Any]:
    from staticmem.validate.pytorch.live_storages import ADDS_IN_PLACE, LiveStorages

    program = steps.program
    live = LiveStorages(
        lambda: int(program.at), {i for i, op in enumerate(program.graph.ops) if op.base in ADDS_IN_PLACE}
    )
    steps.place()
    steps.place_target(job["output_shape"])
    placed = [*program.parameters, *program.other]
    for tensor in [*placed, *steps.targets.values()]:
        live.count(tensor)
    del placed
    forward_end = 0

    def phase(name: str) -> None:
        nonlocal forward_end
        live.settle()
        if name == "backward" or (name == "end" and not steps.scenario.training):
            forward_end = live.live
        live.phase = name

    def begin() -> None:
        gc.collect()  # PyTorch leaves cycles when it meets an op for the first time
        live.begin()

    steps.phase, steps.before_step = phase, begin
    gc.disable()  # cycles would be freed at moments that nobody chose
    with live:
        live.phase = "optimizer"
        steps.make_optimizer()
        for _ in range(job["runs"]):
            steps.step()
            live.settle()
            for number in steps.counters():
                live.ignore(number)
    return {
        "live_peak": live.peak,
        "live_at": list(live.peak_at),
        "forward_end": forward_end,
        "scalars": live.skipped,
        "rows": [[r.phase, r.op, r.node, r.sizes, r.live, r.optional] for r in live.rows],
        "device": {},
    }


def _run_on_cuda(job: dict[str, Any], steps: Any) -> dict[str, Any]:
    import torch

    nvml = Nvml()
    properties = torch.cuda.get_device_properties(0)
    nvml.choose(f"GPU-{getattr(properties, 'uuid', '')}")
    nvml.facts |= {"name": properties.name, "total": int(properties.total_memory)}
    torch.cuda.init()
    one = torch.zeros(1, device="cuda")  # the context is there with the first kernel
    torch.cuda.synchronize()
    del one
    torch.cuda.empty_cache()
    context = _process(nvml)
    torch.cuda.reset_peak_memory_stats()
    if job["snapshot"]:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    steps.place()
    steps.place_target(job["output_shape"])
    steps.make_optimizer()
    for _ in range(job["runs"]):
        steps.step()
    torch.cuda.synchronize()
    readings = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_now": torch.cuda.memory_reserved(),
        "context": context,
        "process": _process(nvml),
        "cudnn": torch.backends.cudnn.version(),
        "device": nvml.facts,
    }
    if job["snapshot"]:
        torch.cuda.memory._dump_snapshot(job["snapshot"])
        torch.cuda.memory._record_memory_history(enabled=None)
    steps.program.placed.clear()
    steps.__dict__.clear()
    gc.collect()
    steps.stand_ins = {}
    return {**readings, **_workspaces()}


def _process(nvml: Nvml) -> int | None:
    """Bytes of this process; where a container hides its number, what the device has more than before."""
    import torch

    torch.cuda.synchronize()
    memory = nvml.memory()
    if memory is None:
        return None
    used, own = memory
    nvml.facts["meter"] = "NVML, this process" if own is not None else "NVML, growth of the device"
    return used - nvml.before if own is None else own


def _workspaces() -> dict[str, int]:
    """Workspaces of cuBLAS and, beyond them, of cublasLt, and how much of both stays after the calls: bytes.

    To be called when no tensor of the model is left.
    """
    import torch

    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    a, bias = torch.zeros(128, 128, device="cuda"), torch.zeros(128, device="cuda")
    before = torch.cuda.memory_allocated()
    cublas = _extra(lambda: torch.mm(a, a))
    stays = torch.cuda.memory_allocated() - before
    lt = _extra(lambda: torch.addmm(bias, a, a))  # with a bias it is cublasLt's product
    if not stays and lt == cublas:
        lt = 0  # it takes the handle's, for each call anew
    return {"cublas": cublas, "cublaslt": lt, "kept": torch.cuda.memory_allocated() - before}


def _extra(call: Any) -> int:
    """Bytes that a call allocates beside its result."""
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    own = round_up(int(result.untyped_storage().nbytes()))
    return int(torch.cuda.max_memory_allocated()) - int(before) - own
