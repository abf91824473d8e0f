"""The process that runs a model with PyTorch: `python -m staticmem.validate.torch_child JOB`.

It is a process of its own, because PyTorch can crash, hang, or take all memory, and because the allocator's figures are
those of a process. The job is JSON: the model's path, the words of the request, the device; the answer is JSON too.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from staticmem.validate.child import FailedError, answer


def main(path: str) -> int:
    return answer(path, _work)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise FailedError("import", str(error)) from error
    import warnings

    from staticmem.validate.torch_graph import NotRunnableError

    warnings.simplefilter("ignore")
    if job["memory_limit"]:
        _limit(int(job["memory_limit"]))
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if job["device"] == "cuda" and not torch.cuda.is_available():
        raise FailedError("device", f"PyTorch {torch.__version__} sees no CUDA device")
    try:
        steps = _steps(job)
        found = _on_cuda(job, steps) if job["device"] == "cuda" else _on_cpu(job, steps)
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
    return {"version": torch.__version__, "stand_ins": dict(steps.stand_ins), **found}


def _steps(job: dict[str, Any]) -> Any:
    """The steps of the job: the graph is read as `analyze` reads it, and cleaned as a prediction has it."""
    from staticmem.validate.torch_predict import predicted
    from staticmem.validate.torch_step import Steps

    found = predicted(job["model"], job["words"], job["device"])
    return Steps(found.result.graph, found.scenario, found.result.loss, job["device"])


def _on_cpu(job: dict[str, Any], steps: Any) -> dict[str, Any]:
    from staticmem.validate.torch_live import ADDS_IN_PLACE, LiveStorages

    program = steps.program
    live = LiveStorages(
        lambda: int(program.at), {i for i, op in enumerate(program.graph.ops) if op.base in ADDS_IN_PLACE}
    )
    steps.place()
    steps.place_target(job["output_shape"])
    placed = [*program.parameters, *program.other]
    for tensor in placed if steps.target is None else [*placed, steps.target]:
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
        "live_phase": live.peak_at[0],
        "live_op": live.peak_at[1],
        "forward_end": forward_end,
        "scalars": live.skipped,
        "rows": [[r.phase, r.op, r.node, r.sizes, r.live, r.optional] for r in live.rows],
        "peak_rss": _peak_rss(),
        "device": {},
    }


def _on_cuda(job: dict[str, Any], steps: Any) -> dict[str, Any]:
    from staticmem.validate.torch_cuda import Driver, workspaces

    import torch  # isort: skip

    driver = Driver()
    context = driver.context()
    if job["snapshot"]:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    steps.place()
    steps.place_target(job["output_shape"])
    steps.make_optimizer()
    for _ in range(job["runs"]):
        steps.step()
    torch.cuda.synchronize()
    found = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_now": torch.cuda.memory_reserved(),
        "context": context,
        "process": driver.process(),
        "cudnn": torch.backends.cudnn.version(),
        "device": driver.facts(),
    }
    if job["snapshot"]:
        torch.cuda.memory._dump_snapshot(job["snapshot"])
        torch.cuda.memory._record_memory_history(enabled=None)
    steps.program.placed.clear()
    steps.__dict__.clear()
    gc.collect()
    steps.stand_ins = {}
    return {**found, **workspaces()}


def _limit(size: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
