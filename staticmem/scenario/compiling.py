"""What runs under `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterable

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import LEVERS, STEP, option

WHOLE = "all"  # for `compile`: the whole model
DEFAULT_MODE = "default"  # of torch.compile
# those with CUDA graphs (torch/_inductor/__init__.py, list_mode_options)
GRAPH_MODES = ("reduce-overhead", "max-autotune")
AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")  # those that measure kernels on the card
COMPILE_MODES = (DEFAULT_MODE, *GRAPH_MODES, AUTOTUNED[1])


# fmt: off
@record(frozen=True, kw_only=True)
class CompileOptions:
    """What is compiled, and how."""

    compile: bool | str | tuple[str, ...] = option(
        (), STEP, "modules", "CLASS|PATH", "runs under torch.compile: the whole model, or modules by class or path",
        example="true",
        details="Without a value the whole model. Loss and optimizer stay eager ([compile](compile.md))",
    )
    compile_mode: str = option(
        DEFAULT_MODE, STEP, "choice", "MODE", "the mode of torch.compile", choices=COMPILE_MODES,
        example="reduce-overhead",
        details="[CUDA graphs](compile.md#cuda-graphs)",
    )
    activation_memory_budget: float = option(
        1.0, LEVERS, "fraction", "SHARE", "share of what the compiler would save for the backward that it may keep",
        example="0.5", details="1 keeps what is cheapest in time, 0 nothing of the forward",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: the budget is no share.
        """
        if not 0 <= self.activation_memory_budget <= 1:
            raise UsageError(
                f"--activation-memory-budget {self.activation_memory_budget} is not a share",
                "It is between 0 (nothing is saved but inputs) and 1 (the default).",
                "Try 0.5.",
                code="SM168",
            )

    @property
    def cuda_graphs(self) -> bool:
        """Whether compiled code runs as CUDA graphs."""
        return self.compile_mode in GRAPH_MODES


def compiled_modules(value: bool | str | Iterable[str] | None) -> tuple[str, ...]:
    """`compile` as names of modules."""
    if isinstance(value, bool) or value is None:
        return (WHOLE,) if value else ()
    names = (value,) if isinstance(value, str) else tuple(value)
    return (WHOLE,) if WHOLE in names else tuple([name for name in names if name != "none"])
