"""Runs three steps of torchvision and transformers networks on the stub of CUDA: what kernels take for themselves.

As `processes.py`, for networks whose kernels allocate inside of themselves: sums over many rows, layer_norm, attention.
The recorded file is of PyTorch 2.14.1; torchvision and transformers are needed beside it.

    STUB=/tmp/stub python tests/allocators/real/kernels.py

The result is tests/data/allocator/kernels.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOTAL = 140 * 2**30

CASES: list[dict[str, Any]] = [
    {"model": "convnext_tiny", "batch": 16, "optimizer": "adam"},
    {"model": "convnext_tiny", "batch": 64, "optimizer": "adam"},
    {"model": "convnext_tiny", "batch": 32, "optimizer": "sgd"},
    {"model": "efficientnet_b0", "batch": 32, "optimizer": "sgd"},
    {"model": "shufflenet_v2_x1_0", "batch": 64, "optimizer": "adam"},
    {"model": "densenet121", "batch": 16, "optimizer": "adam"},
    {"model": "vit_b_16", "batch": 16, "optimizer": "adam"},
    {"model": "gpt2", "batch": 4, "sequence": 512, "optimizer": "adam"},
    {"model": "gpt2", "batch": 4, "sequence": 512, "optimizer": "sgd", "amp": True},
    {"model": "bert-base", "batch": 4, "sequence": 256, "optimizer": "adam"},
]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """[phase, max_memory_allocated, max_memory_reserved] since the start, after each phase of three steps."""
    import torch
    from torch.nn import functional

    torch.cuda.init()
    language = "sequence" in case
    with torch.device("meta"):
        model = _language(case["model"]) if language else _vision(case["model"])
    model = model.to_empty(device="cpu")
    if language:
        model.tie_weights()
    model = model.to("cuda").train()
    shape = (case["batch"], case["sequence"]) if language else (case["batch"], 3, 224, 224)
    x = torch.zeros(shape, dtype=torch.int64 if language else torch.float32).to("cuda")
    y = torch.zeros(shape if language else shape[:1], dtype=torch.int64).to("cuda")
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[case["optimizer"]](model.parameters(), lr=0.1)
    amp = torch.autocast("cuda", dtype=torch.bfloat16) if case.get("amp") else contextlib.nullcontext()
    phases: list[tuple[str, int, int]] = []
    for _ in range(3):
        optimizer.zero_grad()
        with amp:
            out = model(input_ids=x).logits if language else model(x)
            loss = functional.cross_entropy(out.flatten(0, -2), y.flatten())
            del out
        phases.append(("forward", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        loss.backward()
        phases.append(("backward", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        optimizer.step()
        phases.append(("optimizer", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return {**case, "torch": torch.__version__, "phases": phases}


def _vision(name: str) -> Any:
    import torchvision

    return getattr(torchvision.models, name)()


def _language(name: str) -> Any:
    import transformers

    config = transformers.GPT2Config(use_cache=False) if name == "gpt2" else transformers.BertConfig()
    config._attn_implementation = "sdpa"
    return transformers.GPT2LMHeadModel(config) if name == "gpt2" else transformers.BertForMaskedLM(config)


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from record import OUT, under_stub

    rows = []
    for case in CASES:
        rows.append(under_stub("kernels.py", case, STUB_TOTAL=str(TOTAL), STUB_CAPACITY=str(TOTAL)))
        print(case, rows[-1]["phases"][-1], flush=True)
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (OUT / "kernels.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
