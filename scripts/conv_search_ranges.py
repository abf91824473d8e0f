"""Makes staticmem/devices/conv/search.json: the largest plan of a convolution, from an installed cuDNN's answers.

    python scripts/conv_search_ranges.py --count 200      # some minutes; STATICMEM_CUDNN_LIBRARY names a libcudnn

`torch.backends.cudnn.benchmark` tries every plan of a convolution, in one buffer that holds the largest workspace among
them. The file has, for each architecture, precision, layout and pass, that workspace as a multiple of the bytes of
input, weight and result: the quartiles over random convolutions of `conv_sampling`. Quartiles, because a network has
many convolutions, and all of them at an extreme is not what a band should say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conv_sampling import cells, sample

from staticmem.devices import conv_tables
from staticmem.devices.conv_tables import piece_bytes
from staticmem.devices.cudnn import ARCHITECTURES, Cudnn

PRECISIONS = ("tf32", "float32", "float16")
LEAST = 1 << 20  # bytes of the three tensors: in smaller ones a constant of the engine decides
EVERY = 10_000  # more plans than cuDNN has


def ranges(cudnn: Cudnn, architecture: str, cell: tuple[str, bool, str], count: int) -> list[float]:
    """Three quantiles of largest workspace / (input + weight + result)."""
    ratios = []
    for conv in sample(7, *cell, count):
        total = sum(piece_bytes(conv).values())
        plans = cudnn.plans(conv, architecture, limit=EVERY) if total >= LEAST else []
        if plans:
            ratios.append(max(plan.workspace for plan in plans) / total)
    ratios.sort()
    return [round(ratios[int(q * (len(ratios) - 1))], 3) for q in (0.25, 0.5, 0.75)] if ratios else [0.0, 0.0, 0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    cudnn = Cudnn()
    found: dict[str, dict[str, list[float]]] = {}
    for architecture in ARCHITECTURES:
        for cell in cells(PRECISIONS):
            if cell[0] != "tf32" or architecture not in conv_tables.WITHOUT_TF32:
                name = conv_tables.table_name(*cell)
                found.setdefault(architecture, {})[name] = ranges(cudnn, architecture, cell, count)
        print(architecture, flush=True)
    document = {"version": 1, "cudnn": cudnn.name, "count": count, "ranges": found}
    text = json.dumps(document, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
    (conv_tables.FOLDER / "search.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
