"""Makes staticmem/devices/conv/*.json: convolution workspaces, derived from an installed cuDNN's answers.

    python scripts/convolutions/conv_workspace_tables.py ask answers.npz --seed 1 --count 4000   # minutes to an hour
    python scripts/convolutions/conv_workspace_tables.py ask fresh.npz --seed 2 --count 300
    python scripts/convolutions/conv_workspace_tables.py fit answers.npz   # more files of the same cuDNN: more seeds
    python scripts/convolutions/conv_workspace_tables.py check fresh.npz
    python scripts/convolutions/conv_workspace_tables.py search --count 200      # some minutes: search.json

`search` is for `torch.backends.cudnn.benchmark`, which tries every plan of a convolution in one buffer that holds the
largest workspace among them. Its file has, for each architecture, precision, layout and pass, that workspace as a
multiple of the bytes of input, weight and result: the quartiles over random convolutions. Quartiles, because a network
has many convolutions, and all of them at an extreme is not what a band should say.

The tables in the package are of seeds 1 (4,000) and, with TF32 or half precision, 3 (5,000); checks are of seed 2.

Needs a libcudnn of 9.8 or later (STATICMEM_CUDNN_LIBRARY names another one than the installed), NumPy, and no GPU. The
answers are data of the cuDNN that is asked; the tables hold which form of workspace it takes, not the answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from conv_sampling import cells, sample
from conv_trees import Agreement, Answer, agreement, fit

from staticmem.devices import conv_tables
from staticmem.devices.conv_tables import FEATURES, piece_bytes
from staticmem.devices.cudnn import ARCHITECTURES, Cudnn

PRECISIONS = ("tf32", "float32", "float16")
# Leaves of a tree: 132 trees are 250 KB for each cuDNN. Without TF32 most convolutions take next to nothing.
LEAVES = {"tf32": 140, "float32": 50, "float16": 130}
NONE = -1  # cuDNN has no plan
LEAST_TENSORS = 1 << 20  # bytes of the three tensors of a search: in smaller ones a constant of the engine decides
EVERY = 10_000  # more plans than cuDNN has


def architectures(precision: str) -> tuple[str, ...]:
    """Those that know the precision."""
    return tuple(a for a in ARCHITECTURES if precision != "tf32" or a not in conv_tables.WITHOUT_TF32)


def ask(path: Path, seed: int, count: int) -> None:
    """Asks cuDNN about a random sample; what is stored is the seed and the bytes, in the order of the sample."""
    cudnn = Cudnn()
    answers = {"seed": np.array([seed, count, cudnn.version])}
    for precision, last, direction in cells(PRECISIONS):
        convolutions = sample(seed, precision, last, direction, count)
        for architecture in architectures(precision):
            found = [cudnn.plans(conv, architecture) for conv in convolutions]
            name = f"{architecture} {conv_tables.table_name(precision, last, direction)}"
            answers[name] = np.array([plans[0].workspace if plans else NONE for plans in found])
        print(precision, "nhwc" if last else "nchw", direction, flush=True)
    np.savez_compressed(path, allow_pickle=False, **answers)


def answers_of(*paths: Path) -> Iterator[tuple[str, str, list[Answer]]]:
    """(architecture, table, answers) for each cell of files of one cuDNN."""
    files = [np.load(path) for path in paths]
    for precision, last, direction in cells(PRECISIONS):
        name = conv_tables.table_name(precision, last, direction)
        drawn = [sample(int(f["seed"][0]), precision, last, direction, int(f["seed"][1])) for f in files]
        for architecture in architectures(precision):
            key = f"{architecture} {name}"
            found: list[Answer] = []
            for file, convolutions in zip(files, drawn, strict=True):
                if key in file:
                    found += [(c, n) for c, n in zip(convolutions, file[key].tolist(), strict=True) if n != NONE]
            if found:
                yield architecture, name, found


def cudnn_of(path: Path) -> str:
    number = int(np.load(path)["seed"][2])
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def write(paths: list[Path]) -> None:
    """Fits and writes the tables of every architecture."""
    version, *others = {cudnn_of(path) for path in paths}
    if others:
        raise SystemExit(f"answers of different versions of cuDNN: {version}, {', '.join(others)}")
    trees: dict[str, dict[str, object]] = {}
    for architecture, name, answers in answers_of(*paths):
        names, nodes = conv_tables.dump(fit(answers, LEAVES[name.split()[0]]))
        trees.setdefault(architecture, {})[name] = {"forms": names, "nodes": nodes}
        print(architecture, name, flush=True)
    folder = conv_tables.FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    for architecture, made in trees.items():
        document = {"version": 1, "cudnn": version, "features": list(FEATURES), "trees": made}
        text = json.dumps(document, indent=0, ensure_ascii=True)
        (folder / f"{architecture}.json").write_text(text + "\n", encoding="utf-8")


def check(path: Path) -> None:
    """Prints the agreement of the tables with answers that they have not seen."""
    version = cudnn_of(path)
    groups: dict[tuple[str, str], list[Agreement]] = {}
    for architecture, name, answers in answers_of(path):
        tree = conv_tables.tree(version, architecture, name)
        if tree is not None:
            groups.setdefault((architecture, name), []).append(agreement(tree, answers))
    print(f"cuDNN {version}: table | exact | in band | median MiB | mean MiB")
    for name in sorted({name for _, name in groups}):
        _line(name, [a for (_, n), found in groups.items() if n == name for a in found])
    for architecture in ARCHITECTURES:
        _line(architecture, [a for (where, _), found in groups.items() if where == architecture for a in found])
    _line("all", [a for found in groups.values() for a in found])


def _line(what: str, found: list[Agreement]) -> None:
    if found:
        exact, band, median, mean = (
            float(np.mean([getattr(a, key) for a in found])) for key in ("exact", "in_band", "median", "mean")
        )
        print(f"{what:32} | {exact:.0%} | {band:.0%} | {median:.2f} | {mean:.0f}")


def ranges(cudnn: Cudnn, architecture: str, cell: tuple[str, bool, str], count: int) -> list[float]:
    """Three quantiles of largest workspace / (input + weight + result)."""
    ratios = []
    for conv in sample(7, *cell, count):
        total = sum(piece_bytes(conv).values())
        plans = cudnn.plans(conv, architecture, limit=EVERY) if total >= LEAST_TENSORS else []
        if plans:
            ratios.append(max(plan.workspace for plan in plans) / total)
    ratios.sort()
    return [round(ratios[int(q * (len(ratios) - 1))], 3) for q in (0.25, 0.5, 0.75)] if ratios else [0.0, 0.0, 0.0]


def search(count: int) -> None:
    """Writes search.json."""
    cudnn = Cudnn()
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells(PRECISIONS):
        for architecture in architectures(cell[0]):
            found.setdefault(architecture, {})[conv_tables.table_name(*cell)] = ranges(cudnn, architecture, cell, count)
        print(*cell, flush=True)
    ordered = {architecture: found[architecture] for architecture in ARCHITECTURES}
    document = {"version": 1, "cudnn": cudnn.name, "count": count, "ranges": ordered}
    text = json.dumps(document, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
    (conv_tables.FOLDER / "search.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ask", "fit", "check", "search"))
    parser.add_argument("answers", type=Path, nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="convolutions of a cell; default: 4000, of a search 200")
    given = parser.parse_args()
    if given.what == "search":
        search(given.count or 200)
    elif not given.answers:
        parser.error("a file of answers is missing")
    elif given.what == "ask":
        ask(given.answers[0], given.seed, given.count or 4000)
    elif given.what == "fit":
        write(given.answers)
    else:
        for path in given.answers:
            check(path)


if __name__ == "__main__":
    main()
