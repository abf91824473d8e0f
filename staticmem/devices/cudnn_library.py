"""Where an installed libcudnn is, and what has to be loaded before it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path


def find_library() -> Path | None:
    """libcudnn.so.9: `STATICMEM_CUDNN_LIBRARY`, else the one in NVIDIA's wheels, which a CUDA build of torch brings."""
    named = os.environ.get("STATICMEM_CUDNN_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        path = Path(root) / "cudnn" / "lib" / "libcudnn.so.9"
        if path.exists():
            return path
    return None


def load_dependencies(library: Path) -> None:
    """cuBLAS and NVRTC of the same wheels first: libcudnn names them without a path."""
    root = library.parents[2]
    for pattern in ("libcublasLt.so.*", "libcublas.so.*", "libnvrtc.so.*"):
        for path in sorted(root.glob(f"*/lib/{pattern}")):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
