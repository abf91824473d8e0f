"""Runs random plans of several instants in PyTorch on a stub of CUDA, and writes its memory after every instant.

Everything but the kernels is PyTorch's own, as in `processes.py`: training loops, evaluations under no_grad, copies of
state dicts, models that move to the CPU and back. cuBLAS is given no workspace, and the stub's cuDNN needs none. In an
environment with a CUDA build of PyTorch (2.14.1 made the file that is here):

    tests/allocators/real/build.sh /tmp/stub
    STUB=/tmp/stub python tests/allocators/real/runs.py [COUNT]

The result is tests/data/allocator/runs.gz. `--evaluations` makes evaluations.gz: evaluations that gather as
transformers' Trainer does, in its own containers (transformers 5.24). `--filling` makes filling.gz: such evaluations
until a small GPU is full.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import gzip
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TOTAL = 140 * 2**30
NETWORKS = ("resnet18", "mobilenet_v2", "resnet50")
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}


def random_plan(draw: random.Random) -> dict[str, Any]:
    """A plan of three to eight instants over one or two models."""
    names = ["a"] if draw.random() < 0.5 else ["a", "b"]
    models = {name: draw.choice(NETWORKS) for name in names}
    optimizers = {name: draw.choice(list(OPTIMIZERS)) for name in names}
    trained: set[str] = set()
    asleep: set[str] = set()
    instants: list[dict[str, Any]] = []
    for _ in range(draw.randint(3, 8)):
        name = draw.choice(names)
        word = draw.choice(("step", "step", "step", "evaluate", "evaluate", "save", "sleep", "empty_cache", "resume"))
        sizes = {"batch": draw.randint(1, 24), "resolution": draw.choice((64, 96, 128, 160, 224))}
        one: dict[str, Any] = {"do": word, "model": name}
        if word == "step":
            one |= {"times": draw.randint(1, 3), "optimizer": optimizers[name], **sizes}
            trained.add(name)
        elif word == "evaluate":
            one |= {"times": draw.randint(1, 4), "gather": draw.choice(("none", "list", "concat")), **sizes}
        elif word == "save":
            one |= {"copies": draw.choice(("model", "all")), "stays": draw.random() < 0.3}
        elif word in ("sleep", "resume"):
            one |= {"parts": draw.choice(("model", "all"))}
        if word in ("save", "sleep", "resume") and (name not in trained or name in asleep):
            continue
        if word == "sleep":
            asleep.add(name)
        elif word in ("step", "evaluate"):
            asleep.discard(name)
        instants.append(one)
    if not any(one["do"] in ("step", "evaluate") for one in instants):
        return random_plan(draw)
    return {"models": models, "instants": instants}


def random_evaluations(draw: random.Random) -> dict[str, Any]:
    """A plan of one model with one to three evaluations that gather, between steps."""
    instants: list[dict[str, Any]] = []
    step = {
        "do": "step",
        "model": "a",
        "times": 2,
        "optimizer": "adamw",
        "batch": draw.randint(2, 16),
        "resolution": 96,
    }
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.6:
            instants.append(step)
        keep = draw.choice(("outputs", "outputs", "predictions", "loss"))
        one = {"do": "evaluate", "model": "a", "times": draw.randint(3, 14), "keep": keep}
        one |= {"gather": draw.choice(("list", "concat")), "labels": keep != "loss" and draw.random() < 0.5}
        one |= {"batch": draw.choice((4, 24, 96, 300, 700)), "resolution": draw.choice((32, 64))}
        if draw.random() < 0.6:
            one["accumulation_steps"] = draw.randint(1, 5)
        instants.append(one)
    if draw.random() < 0.5:
        instants.append(step)
    return {"models": {"a": draw.choice(NETWORKS[:2])}, "instants": instants}


def random_filling(draw: random.Random) -> dict[str, Any]:
    """A plan whose last evaluation gathers until a small GPU is full."""
    evaluate = {"do": "evaluate", "model": "a", "times": 2000, "keep": "outputs", "labels": draw.random() < 0.5}
    evaluate |= {"gather": draw.choice(("list", "concat")), "batch": draw.choice((200, 400, 700)), "resolution": 32}
    step = {
        "do": "step",
        "model": "a",
        "times": 2,
        "optimizer": "adamw",
        "batch": draw.randint(2, 16),
        "resolution": 96,
    }
    instants = [*[step] * draw.randint(0, 1), evaluate]
    return {"models": {"a": draw.choice(NETWORKS[:2])}, "instants": instants, "mib": draw.randint(500, 900)}


class Process:
    """The variables of a process."""

    def __init__(self, models: dict[str, str]) -> None:
        import torch

        self.torch, self.networks = torch, models
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.asleep: set[str] = set()
        self.loops: dict[str, dict[str, Any]] = {}
        self.kept: list[Any] = []
        self.batches = 0  # of the last evaluation that gathers

    def model(self, name: str) -> Any:
        if name not in self.models:
            architectures = importlib.import_module("architectures")
            with self.torch.device("meta"):
                made = getattr(architectures, self.networks[name])()
            self.models[name] = made.to_empty(device="cpu").to("cuda")
        if name in self.asleep:
            self.asleep.discard(name)
            self.models[name].to("cuda")
            self._move_state(name, "cuda")
        return self.models[name]

    def _move_state(self, name: str, device: str) -> None:
        if name in self.optimizers:
            for state in self.optimizers[name].state.values():
                for key, value in state.items():
                    if key != "step":
                        state[key] = value.to(device)

    def step(self, one: dict[str, Any]) -> None:
        torch, model = self.torch, self.model(one["model"]).train()
        loop = self.loops.setdefault(one["model"], {})
        shape = one["batch"], 3, one["resolution"], one["resolution"]
        if one["model"] not in self.optimizers:
            kind = getattr(torch.optim, OPTIMIZERS[one["optimizer"]])
            self.optimizers[one["model"]] = kind(model.parameters(), lr=0.1)
        optimizer = self.optimizers[one["model"]]
        for _ in range(one["times"]):
            if "x" not in loop or loop["x"].shape != shape:
                x = torch.empty(shape).to("cuda")
                y = torch.zeros(shape[0], dtype=torch.int64).to("cuda")
                loop["x"], loop["y"] = x, y
                del x, y
            optimizer.zero_grad()
            loop["outputs"] = model(loop["x"])
            loop["loss"] = torch.nn.functional.cross_entropy(loop["outputs"], loop["y"])
            loop["loss"].backward()
            optimizer.step()

    def evaluate(self, one: dict[str, Any]) -> None:
        torch, model = self.torch, self.model(one["model"]).eval()
        kept: list[Any] = []
        with torch.no_grad():
            x = torch.empty(one["batch"], 3, one["resolution"], one["resolution"]).to("cuda")
            for _ in range(one["times"]):
                outputs = model(x)
                if one["gather"] == "list" or (one["gather"] == "concat" and not kept):
                    kept.append(outputs)
                elif one["gather"] == "concat":
                    kept[0] = torch.cat((kept[0], outputs))

    def evaluate_as_trainer(self, one: dict[str, Any]) -> None:
        """`Trainer.evaluation_loop`, where nothing but one process is. Labels come when they are gathered, and the loss
        is a tensor of one element: the plan's evaluation computes none."""
        containers = importlib.import_module("transformers.trainer_pt_utils")
        torch, model, batch = self.torch, self.model(one["model"]).eval(), one["batch"]
        losses_of, outputs_of, labels_of = (containers.EvalLoopContainer(one["gather"] == "concat") for _ in range(3))
        x = torch.empty(batch, 3, one["resolution"], one["resolution"]).to("cuda")
        losses = logits = labels = None
        for step in range(one["times"]):
            losses, logits = self._predict(model, x, one)
            if losses is not None:
                losses = losses.repeat(batch)
                losses_of.add(losses)
            if logits is not None:
                if one["keep"] == "predictions":
                    logits = logits.argmax(-1)
                outputs_of.add(logits)
            if one["labels"]:
                labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
                labels_of.add(labels)
            self.batches = step + 1
            if "accumulation_steps" in one and (step + 1) % one["accumulation_steps"] == 0:
                for container in (losses_of, outputs_of, labels_of):
                    container.to_cpu_and_numpy()
                del losses, logits, labels
                losses = logits = labels = None
                torch.cuda.empty_cache()
        for container in (losses_of, outputs_of, labels_of):
            container.get_arrays()

    def _predict(self, model: Any, x: Any, one: dict[str, Any]) -> tuple[Any, Any]:
        """`Trainer.prediction_step`."""
        loss = None
        with self.torch.no_grad():
            outputs = model(x)
            if one["labels"] or one["keep"] == "loss":
                loss = self.torch.zeros((), device="cuda")
        return (loss, None) if one["keep"] == "loss" else (loss, outputs)

    def save(self, one: dict[str, Any]) -> None:
        copies = [copy.deepcopy(self.model(one["model"]).state_dict())]
        if one["copies"] == "all":
            copies.append(copy.deepcopy(self.optimizers[one["model"]].state_dict()))
        if one["stays"]:
            self.kept.append(copies)

    def sleep(self, one: dict[str, Any]) -> None:
        name = one["model"]
        self.models[name].to("cpu")
        if one["parts"] == "all":
            self._move_state(name, "cpu")
        self.asleep.add(name)

    def resume(self, one: dict[str, Any]) -> None:
        model = self.model(one["model"])
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
        state = None
        if one["parts"] == "all":
            state = self.optimizers[one["model"]].state_dict()
            held = {at: {k: v.clone() for k, v in of_one.items()} for at, of_one in state["state"].items()}
            state = {**state, "state": held}
            del held
        model.load_state_dict(loaded)
        if state is not None:
            self.optimizers[one["model"]].load_state_dict(state)

    def empty_cache(self, one: dict[str, Any]) -> None:
        self.torch.cuda.empty_cache()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Of each plan, after each instant: peaks of allocated and of reserved memory meanwhile, and both at its end."""
    import torch

    sys.path.insert(0, str(ROOT / "models"))
    torch.cuda.init()
    plans = []
    for plan in case["plans"]:
        process = Process(plan["models"])
        readings = []
        torch.cuda.set_per_process_memory_fraction(plan["mib"] * 2**20 / TOTAL if "mib" in plan else 1.0)
        for one in plan["instants"]:
            torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(torch.OutOfMemoryError):
                getattr(process, "evaluate_as_trainer" if "keep" in one else one["do"])(one)
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            readings.append([*peaks, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
        plans.append({**plan, "torch": torch.__version__, "readings": readings, "batches": process.batches})
        del process
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0, torch.cuda.memory_reserved()
    return {"plans": plans}


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from record import OUT, under_stub

    kinds = {"runs": (random_plan, 300), "evaluations": (random_evaluations, 40), "filling": (random_filling, 12)}
    name = next((name for name in kinds if f"--{name}" in sys.argv), "runs")
    make, count = kinds[name]
    count = next((int(word) for word in sys.argv[1:] if word.isdigit()), count)
    draw = random.Random(2026)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        plans = [make(draw) for _ in range(min(50, count - len(rows)))]
        sizes = {"STUB_TOTAL": str(TOTAL), "STUB_CAPACITY": str(TOTAL)}
        none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
        rows += under_stub("runs.py", {"plans": plans}, PYTORCH_CUDA_ALLOC_CONF="", **sizes, **none)["plans"]
        print(f"{len(rows)} plans", flush=True)
    data = json.dumps(rows, separators=(",", ":")).encode()
    with open(OUT / f"{name}.gz", "wb") as file:
        file.write(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
