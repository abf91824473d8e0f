"""One real process of `host_processes.py`: a case by name, which prints the peak of its own resident memory in KiB."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, WIDTH = 24, 2048  # 24 matrices of 16 MiB: 384 MiB in float32
SAMPLE = (3, 224, 224)  # 588 KiB in float32
BATCHES = 8


def model(layers: int = LAYERS, width: int = WIDTH) -> Any:
    """A model whose parameters are `layers` square matrices."""
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])


def made(folder: str, kind: str) -> str:
    """A checkpoint of the model, written by another process, so that this one has not held it."""
    import subprocess

    path = str(Path(folder) / f"model.{kind}")
    subprocess.run([sys.executable, __file__, f"write-{kind}", path], check=True, stdout=subprocess.DEVNULL)
    return path


def write_pt(path: str) -> None:
    import torch

    torch.save(model().state_dict(), path)


def write_safetensors(path: str) -> None:
    from safetensors.torch import save_file

    save_file(model().state_dict(), path)


def write_shards(path: str) -> None:
    from safetensors.torch import save_file

    state = list(model().state_dict().items())
    Path(path).mkdir()
    for number in range(4):
        save_file(dict(state[number::4]), f"{path}/{number}.safetensors")


def imports() -> None:
    import torch  # noqa: F401


def imports_transformers() -> None:
    import torch
    import transformers

    transformers.AutoModelForCausalLM  # noqa: B018  (which is imported at its first use)
    torch.ones(1)


def load(mmap: bool, assign: bool = False) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = made(folder, "pt")
        if assign:
            with torch.device("meta"):
                network = model()
        else:
            network = model()
        state = torch.load(path, map_location="cpu", mmap=mmap)
        network.load_state_dict(state, assign=assign)


def load_safetensors(kind: str = "safetensors") -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        path = made(folder, kind)
        network = model()
        files = [path] if kind == "safetensors" else sorted(map(str, Path(path).iterdir()))
        for file in files:
            state = load_file(file)
            network.load_state_dict(state, strict=False)
            del state


def from_pretrained() -> None:
    """A decoder of 97 million parameters, as transformers loads it, which goes through the file in order."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16384, hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=16
    )
    with tempfile.TemporaryDirectory() as folder:
        import subprocess

        code = (
            "import transformers as t; c = t.LlamaConfig(vocab_size=16384, hidden_size=1024, intermediate_size=2816, "
            f"num_hidden_layers=5, num_attention_heads=16); t.LlamaForCausalLM(c).save_pretrained({folder!r})"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        network = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="float32")
        assert config.hidden_size == network.config.hidden_size
        sum(float(p.detach().sum()) for p in network.parameters())


class Images:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.rand(*SAMPLE)


def loader(batch: int, workers: int, prefetch: int = 2) -> None:
    """The loop is slower than the workers, so that all that is fetched ahead is there."""
    import torch
    from torch.utils.data import DataLoader

    more = {"prefetch_factor": prefetch} if workers else {}
    data = DataLoader(Images(), batch_size=batch, num_workers=workers, **more)
    for number, images in enumerate(data):
        time.sleep(0.1 if number else 8)
        if number == BATCHES:
            break
        assert isinstance(images, torch.Tensor)


def train(optimizer: str, layers: int = LAYERS) -> None:
    """Parameters, gradients and optimizer state on the CPU, as an offloaded update has them."""
    import torch

    network = model(layers)
    chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](network.parameters(), lr=0.01)
    for _ in range(3):
        for parameter in network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        chosen.step()


def offloaded_activations() -> None:
    """Saved tensors are copied to the CPU, as `save_on_cpu` does from a GPU."""
    import torch

    network = model(12)
    batch = torch.rand(4096, WIDTH)

    def copied(tensor: Any) -> Any:
        return tensor.clone() if tensor.shape == batch.shape else tensor

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor), torch.no_grad():
        kept = [batch.clone() for _ in network]
    assert len(kept) == 12


def save(gathered: bool) -> None:
    """A checkpoint of parameters and of AdamW's state: as it is, or gathered into a copy on the CPU first."""
    import torch

    network = model(16)
    optimizer = torch.optim.AdamW(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state: Any = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    if gathered:
        state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
        moments = state["optimizer"]["state"]
        state["optimizer"]["state"] = {at: {k: v.clone() for k, v in s.items()} for at, s in moments.items()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/checkpoint.pt")


def save_to_memory() -> None:
    """`torch.save` into a buffer, as object stores are written to."""
    import io

    import torch

    torch.save(model().state_dict(), io.BytesIO())


CASES: dict[str, Callable[[], None]] = {
    "imports": imports,
    "imports transformers": imports_transformers,
    "torch.load": lambda: load(False),
    "torch.load mmap": lambda: load(True),
    "torch.load into an empty model": lambda: load(False, assign=True),
    "torch.load mmap into an empty model": lambda: load(True, assign=True),
    "safetensors": load_safetensors,
    "safetensors in shards": lambda: load_safetensors("shards"),
    "from_pretrained": from_pretrained,
    "batches of 64, no workers": lambda: loader(64, 0),
    "batches of 32, 2 workers": lambda: loader(32, 2),
    "batches of 64, 2 workers, prefetch 4": lambda: loader(64, 2, 4),
    "batches of 4, 4 workers": lambda: loader(4, 4),
    "batches of 128, 4 workers": lambda: loader(128, 4),
    "state of adamw": lambda: train("adamw"),
    "state of sgd": lambda: train("sgd"),
    "activations": offloaded_activations,
    "save": lambda: save(False),
    "save, gathered": lambda: save(True),
    "save to memory": save_to_memory,
    "write-pt": lambda: write_pt(sys.argv[2]),
    "write-safetensors": lambda: write_safetensors(sys.argv[2]),
    "write-shards": lambda: write_shards(sys.argv[2]),
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            print(line.split()[1])
