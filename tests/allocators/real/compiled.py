"""Runs four steps under `torch.compile(mode="reduce-overhead")` in PyTorch on a stub of CUDA, and writes its memory.

As in `processes.py`. Dynamo, AOTAutograd, Inductor, the trees of CUDA graphs and the caching allocator are the real
ones; Triton's kernels are not compiled, and a CUDA graph holds nothing. In an environment with a CUDA build of PyTorch
and torchvision's requirements (2.15.0 made the file that is here):

    tests/allocators/real/build.sh /tmp/stub
    STUB=/tmp/stub python tests/allocators/real/compiled.py

The result is tests/data/allocator/compiled.json.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MODE = "reduce-overhead"
STEPS = 4
TOTAL = 140 * 2**30

CASES: list[dict[str, Any]] = [
    {"model": "resnet18", "batch": 32, "optimizer": "adam"},
    {"model": "resnet18", "batch": 32},
    {"model": "resnet18", "batch": 32, "optimizer": "adam", "compile": "BasicBlock"},
    {"model": "resnet18", "batch": 16, "optimizer": "sgd", "settings": "expandable_segments:True"},
    {"model": "resnet18", "batch": 32, "optimizer": "adam", "capacity": 1_150 * 2**20},
]


class Driver:
    """What Inductor asks of Triton's driver."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    @staticmethod
    def is_active() -> bool:
        return True


class NoKernel:
    """A kernel that does nothing."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def without_kernels() -> None:
    """Inductor writes its code, and compiles and measures no kernel."""
    import torch
    from torch._inductor import async_compile, config
    from torch._inductor.fx_passes import pad_mm

    config.compile_threads, config.force_disable_caches = 1, True
    importlib.import_module("triton").runtime.driver.set_active(Driver())
    compiler: Any = async_compile.AsyncCompile
    compiler.triton = compiler.multi_kernel = lambda self, *args, **kwargs: NoKernel()
    compiler.wait = lambda self, scope: None
    patched: Any = torch.cuda
    patched.get_device_capability = lambda *args, **kwargs: (9, 0)
    padding: Any = pad_mm
    padding._should_pad = lambda *args, **kwargs: False


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Steps; [phase, max_memory_allocated, max_memory_reserved] since the start, and what is both, after each phase."""
    import torch
    from torch.nn import functional

    without_kernels()
    sys.path.insert(0, str(ROOT / "models"))
    architectures = importlib.import_module("architectures")
    torch.cuda.init()
    training = "optimizer" in case
    with torch.device("meta"):
        model = getattr(architectures, case["model"])()
    model.to_empty(device="cpu").to("cuda").train(training)
    x = torch.empty(case["batch"], 3, 224, 224).to("cuda")
    y = torch.zeros(case["batch"], dtype=torch.int64).to("cuda") if training else None
    name = {"sgd": "SGD", "adam": "Adam"}
    optimizer = getattr(torch.optim, name[case["optimizer"]])(model.parameters(), lr=0.1) if training else None
    called = model
    if "compile" in case:
        for module in model.modules():
            if type(module).__name__ == case["compile"]:
                module.compile(mode=MODE)
    else:
        called = torch.compile(model, mode=MODE)
    phases: list[tuple[Any, ...]] = []

    def mark(phase: str) -> None:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        phases.append((phase, *peaks, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    mark("setup")
    oom, step = None, 0
    try:
        while step < STEPS:
            step += 1
            if optimizer is None:
                with torch.no_grad():
                    out = called(x)
                del out
                mark("forward")
                continue
            optimizer.zero_grad()
            out = called(x)
            loss = functional.cross_entropy(out, y)
            del out
            mark("forward")
            loss.backward()
            mark("backward")
            optimizer.step()
            mark("optimizer")
    except torch.OutOfMemoryError:
        oom = step
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    pool = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    return {**case, "torch": torch.__version__, "phases": phases, "oom": oom, "retries": retries, "pool": pool}


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from record import OUT, under_stub

    rows = []
    for case in CASES:
        sizes = {"STUB_TOTAL": str(TOTAL), "STUB_CAPACITY": str(case.get("capacity", TOTAL))}
        row = under_stub("compiled.py", case, PYTORCH_CUDA_ALLOC_CONF=case.get("settings", ""), **sizes)
        rows.append(row)
        _, allocated, reserved, *_ = row["phases"][-1]
        print(f"{case} allocated {allocated / 2**20:.2f} MiB, reserved {reserved / 2**20:.0f} MiB, oom {row['oom']}")
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (OUT / "compiled.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
