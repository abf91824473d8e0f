"""What a training step asks of PyTorch's allocator, call by call, recorded on a stub of CUDA.

As in `runs.py` everything but the kernels is PyTorch's own. In an environment with a CUDA build of PyTorch (2.14.1 made
the file that is here):

    tests/allocators/real/build.sh /tmp/stub
    STUB=/tmp/stub python tests/allocators/real/orders.py

The result is tests/data/allocator/orders.gz: of each network the calls of its second step, an allocation as its bytes
and a release as theirs below zero.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NETWORKS = ("resnet18", "mobilenet_v2", "resnet50")
BATCH, SIDE = 4, 64
SIGNS = {"alloc": 1, "free_requested": -1}  # events of PyTorch's history that a program asks for


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The calls of the second step of each network."""
    import torch

    sys.path.insert(0, str(HERE.parents[2] / "models"))
    torch.cuda.init()
    architectures = importlib.import_module("architectures")
    return {"torch": torch.__version__, **{name: _second_step(torch, architectures, name) for name in case["networks"]}}


def _second_step(torch: Any, architectures: Any, name: str) -> list[int]:
    memory = torch.cuda.memory
    with torch.device("meta"):
        made = getattr(architectures, name)()
    model = made.to_empty(device="cpu").to("cuda").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(BATCH, 3, SIDE, SIDE).to("cuda")
    y = torch.zeros(BATCH, dtype=torch.int64).to("cuda")
    for step in (1, 2):
        memory._record_memory_history("all" if step == 2 else None, stacks="python", context=None)
        optimizer.zero_grad()
        outputs = model(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
    events = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(None)
    return [SIGNS[event["action"]] * event["size"] for event in events if event["action"] in SIGNS]


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from record import OUT, under_stub

    total = str(140 * 2**30)
    none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    sizes = {"STUB_TOTAL": total, "STUB_CAPACITY": total}
    calls = under_stub("orders.py", {"networks": NETWORKS}, PYTORCH_CUDA_ALLOC_CONF="", **sizes, **none)
    data = json.dumps(calls, separators=(",", ":")).encode()
    (OUT / "orders.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
