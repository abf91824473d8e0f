"""Runs sequences of allocations through PyTorch's own CUDA caching allocator, on a stub of CUDA.

No GPU is needed: `stub_cuda.c` gives addresses without memory behind them, and what is recorded is decided by
libc10_cuda alone. In an environment with a CUDA build of PyTorch (2.15.0 made the files that are here):

    tests/allocators/real/build.sh /tmp/stub
    STUB=/tmp/stub python tests/allocators/real/record.py [NAME...]

Every case runs in a process of its own. The results are tests/data/allocator/*.json.gz; `test_real.py` replays them.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "data" / "allocator"


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case inside a process with the stub: its addresses, and both meters after each event."""
    import torch

    torch.cuda.init()
    pool = torch.cuda.graph_pool_handle()
    pointers: dict[int, int] = {}
    addresses, allocated, reserved = [], [], []
    oom = None
    for index, (key, nbytes, stream) in enumerate(case["events"]):
        if nbytes < 0:
            torch.cuda.caching_allocator_delete(pointers.pop(key))
        else:
            for size in (nbytes, *case["fallbacks"].get(str(key), ())):
                if stream < 0:  # as in a warm-up of torch/_inductor/cudagraph_trees.py; never released, it stays in use
                    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
                try:
                    pointers[key] = torch.cuda.caching_allocator_alloc(size, 0, max(stream, 0))
                    break
                except torch.OutOfMemoryError:
                    continue
                finally:
                    if stream < 0:
                        torch._C._cuda_endAllocateToPool(0, pool)
            else:
                oom = index
                break
            addresses.append(pointers[key])
        stats = torch._C._cuda_memoryStats(0)
        allocated.append(stats["allocated_bytes"]["all"]["current"])
        reserved.append(stats["reserved_bytes"]["all"]["current"])
    stats = torch._C._cuda_memoryStats(0)
    return {
        **case,
        "torch": torch.__version__,
        "addresses": addresses,
        "allocated": allocated,
        "reserved": reserved,
        "peak_allocated": stats["allocated_bytes"]["all"]["peak"],
        "peak_reserved": stats["reserved_bytes"]["all"]["peak"],
        "retries": stats["num_alloc_retries"],
        "oom": oom,
        "segments": [
            [s["address"], s["total_size"], -1 if s["segment_pool_id"] != (0, 0) else s["stream"], s["segment_type"],
             s["is_expandable"],
             [[b["address"], b["size"], b["requested_size"], b["state"]] for b in s["blocks"]]]
            for s in torch._C._cuda_memorySnapshot(None)["segments"]
        ],
    }  # fmt: skip


def record(case: dict[str, Any]) -> dict[str, Any]:
    """The case, run in a fresh process under the stub."""
    sizes = {"STUB_TOTAL": str(case["total"]), "STUB_CAPACITY": str(case["capacity"])}
    return under_stub("record.py", case, PYTORCH_CUDA_ALLOC_CONF=case["settings"], **sizes)


def under_stub(script: str, case: dict[str, Any], **variables: str) -> dict[str, Any]:
    """What `script --one` prints for a case, in a process that takes the stub for CUDA."""
    stub = os.environ["STUB"]
    paths = {"LD_LIBRARY_PATH": stub, "LD_PRELOAD": f"{stub}/libstub_cuda.so"}
    command = [sys.executable, str(HERE / script), "--one"]
    environment = {**os.environ, **paths, **variables}
    done = subprocess.run(command, input=json.dumps(case), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from cases import cases

    OUT.mkdir(parents=True, exist_ok=True)
    only = sys.argv[1:]
    for case in [case for case in cases() if not only or case["name"] in only]:
        result = record(case)
        data = json.dumps(result, separators=(",", ":")).encode()
        with open(OUT / f"{case['name']}.json.gz", "wb") as file:
            file.write(gzip.compress(data, mtime=0))
        events, name = len(result["events"]), case["name"]
        print(f"{name:28} {events:6} events, reserved {result['peak_reserved'] / 2**20:8.0f} MiB, oom {result['oom']}")


if __name__ == "__main__":
    main()
