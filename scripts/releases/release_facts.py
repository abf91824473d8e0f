"""What an installed PyTorch says of itself, as JSON on stdout: the facts that predictions stand on.

    PYTHON -I scripts/releases/release_facts.py    # a Python that has torch; staticmem is not needed

Sources: schemas and tags of `torch.ops.aten`; torchgen/packaged/autograd/derivatives.yaml; the lists of
include/ATen/autocast_mode.h; tables of decompositions; signatures of torch.optim; defaults of the compiler's settings.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

AUTOCAST_LISTS = (  # macros of autocast_mode.h
    "AT_FORALL_LOWER_PRECISION_FP",
    "AT_FORALL_FP32",
    "AT_FORALL_FP32_SET_OPT_DTYPE",
    "AT_FORALL_PROMOTE",
)
SETTINGS = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")
PLAIN = (bool, int, float, str, type(None))


def collect() -> dict[str, dict[str, str]]:
    """Section -> name -> what the release says."""
    return {
        "ops": collect_ops(),
        "derivatives": collect_derivatives(),
        "autocast": collect_autocast(),
        "decompositions": collect_decompositions(),
        "optimizers": collect_optimizers(),
        "settings": collect_settings(),
    }


def collect_ops() -> dict[str, str]:
    """Schema and tags of each overload."""
    import torch

    found: dict[str, str] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op: Any = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if op is not None:  # declared, and without an implementation
                found[name] = f"{op._schema} [{' '.join(sorted(tag.name for tag in op.tags))}]"
    return found


def collect_derivatives() -> dict[str, str]:
    """The entry of each op, by its schema: a formula for each input."""
    import torchgen
    import yaml

    path = Path(str(torchgen.__file__)).parent / "packaged" / "autograd" / "derivatives.yaml"
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {f"aten::{entry['name'].partition('(')[0]}": json.dumps(entry, sort_keys=True) for entry in entries}


def collect_autocast() -> dict[str, str]:
    """The list that an op is in."""
    import torch

    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, str] = {}
    for macro in AUTOCAST_LISTS:
        definition = re.search(rf"#define {macro}\(_\)(.*)", text)
        for names in re.findall(r"_\((\w+(?:, \w+)?)\)", definition[1] if definition else ""):
            found[f"aten::{names.replace(', ', '.')}"] = macro
    return found


def collect_decompositions() -> dict[str, str]:
    """The tables that take an op apart."""
    from torch._decomp import core_aten_decompositions
    from torch._inductor.decomposition import select_decomp_table

    found: dict[str, list[str]] = {}
    for table, ops in (("core", core_aten_decompositions()), ("inductor", select_decomp_table())):
        for op in ops:
            found.setdefault(str(op).replace("aten.", "aten::", 1), []).append(table)
    return {name: " ".join(tables) for name, tables in found.items()}


def collect_optimizers() -> dict[str, str]:
    """Arguments of the classes of torch.optim, with their defaults."""
    import torch

    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return {
        f"{cls.__name__}.{name}": repr(parameter.default)
        for cls in classes
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not parameter.empty
    }


def collect_settings() -> dict[str, str]:
    """Settings of the compiler that are plain values, in the process that asks."""
    found: dict[str, str] = {}
    for path in SETTINGS:
        for name, value in import_module(path).get_config_copy().items():
            if isinstance(value, PLAIN):
                found[f"{path}.{name}"] = repr(value)
    return found


if __name__ == "__main__":
    import torch

    print(json.dumps({"release": {"torch": torch.__version__}, **collect()}))
