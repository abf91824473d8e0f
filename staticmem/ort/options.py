"""`SessionOptions`: the options of a session of the ONNX Runtime, declared as those of `Request` are."""

from __future__ import annotations

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import SESSION, declared, option, unknown

STRATEGIES = ("kNextPowerOfTwo", "kSameAsRequested")


# fmt: off
@record(frozen=True)
class SessionOptions:
    """Options of a session that change memory, under the runtime's own names and defaults."""

    provider: str = option(
        "cpu", SESSION, "choice", "NAME", "what the session runs on", choices=("cpu", "cuda"),
        details="`CPUExecutionProvider` or `CUDAExecutionProvider`",
    )
    enable_mem_pattern: bool = option(
        True, SESSION, "switch", "", "enable_mem_pattern", flag="--mem-pattern",
        details="One block for all values from the second run on",
    )
    enable_mem_reuse: bool = option(
        True, SESSION, "switch", "", "enable_mem_reuse", flag="--mem-reuse",
        details="Freed buffers serve later values",
    )
    enable_cpu_mem_arena: bool = option(
        True, SESSION, "switch", "", "enable_cpu_mem_arena", flag="--cpu-mem-arena", provider="cpu",
        details="Without it memory is the system's, and given back",
    )
    arena_extend_strategy: str = option(
        "kNextPowerOfTwo", SESSION, "choice", "NAME", "CUDA: how the arena grows", choices=STRATEGIES, provider="cuda",
    )
    graph_optimization_level: str = option(
        "all", SESSION, "choice", "LEVEL", "what the runtime does to the graph", flag="--optimization",
        choices=("disable", "basic", "extended", "layout", "all"),
        details="Unless it is `disable`, the graph of the file is not the one that is executed, which the report notes",
    )
    intra_op_num_threads: int = option(
        1, SESSION, "whole", "N", "intra_op_num_threads", flag="--threads", unset="16",
        details="16 are the most for which convolutions take memory",
    )
    processor: str = option(
        "unknown", SESSION, "choice", "CPU", "what integer weights are packed for", flag="--cpu", provider="cpu",
        choices=("unknown", "avx2", "avx512"),
        details="`validate` takes that of the machine",
    )
    gpu_mem_limit: int | None = option(
        None, SESSION, "bytes", "SIZE", "CUDA: the most that the arena may hold", provider="cuda", example="4GiB",
    )
    cudnn_conv_algo_search: str = option(
        "EXHAUSTIVE", SESSION, "choice", "NAME", "CUDA: how cuDNN's algorithms are searched",
        choices=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), provider="cuda",
    )
    runs: int = 3
    # fmt: on

    def __post_init__(self) -> None:
        for name, one in SESSION_OPTIONS.items():
            if one.choices and getattr(self, name) not in one.choices:
                raise unknown(one.flag[2:], getattr(self, name), one.choices)
        if self.runs < 1 or self.intra_op_num_threads < 1:
            raise UsageError("runs and threads are whole numbers of at least 1", code="SM110")


SESSION_OPTIONS = declared(SessionOptions)
