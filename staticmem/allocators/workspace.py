"""What kernels allocate for themselves while they run: the contract with whoever knows the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from staticmem.ir.record import record

FIRST, LAST = -2, -1


@record(frozen=True, slots=True)
class Workspace:
    """Bytes that a kernel takes from the caching allocator beside its results.

    `after` says when: behind the kernel's own allocation of this number (0 for its first result), LAST for behind all
    of them, FIRST for before any. It is released before the kernel's next allocation, so that two workspaces never
    coexist; with `held` it is released at the end of the kernel.

    `keep` names one that stays: it is allocated when the name first occurs in the process and never released (the
    workspace of a cuBLAS handle). `fallbacks` are smaller sizes to try where it does not fit, 0 for none at all
    (the next plans of a convolution). `what` is for people. `bounds` are the least and the most bytes where `nbytes` is
    not certain; `nbytes` may be 0 then. `strays` are wider ones, for what lies outside of `bounds` now and then.

    `once` names one that is taken when the name first occurs and never again; behind it cached memory goes back to the
    driver (the search of `cudnn.benchmark`).
    """

    nbytes: int
    after: int = LAST
    held: bool = False
    keep: str | None = None
    fallbacks: tuple[int, ...] = ()
    what: str = "workspace"
    bounds: tuple[int, int] | None = None
    once: str | None = None
    strays: tuple[int, int] | None = None


class WorkspaceModel(Protocol):
    """Knows the workspaces of the kernels of one trace."""

    def taken(self) -> Iterable[tuple[int, Sequence[Workspace]]]:
        """The kernels that take workspaces, as indices into `trace.kernels` from the first to the last, each with its
        own in the order in which it takes them."""
        ...
