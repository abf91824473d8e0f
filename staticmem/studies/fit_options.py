"""What `fit` is asked, and what of it has no answer: no training step, no settings, samples that cannot be shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staticmem.errors import UsageError
from staticmem.report.settings import LIBRARIES
from staticmem.report.settings.optimizers import WRITTEN
from staticmem.scenario.combinations import FIT, check
from staticmem.scenario.request import Request
from staticmem.scenario.strategies import DATA_PARALLEL, PYTORCH, STRATEGIES, titles
from staticmem.studies import Study

# strategies that are tried on several devices where none is named: those of PyTorch
SHARED = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == PYTORCH])


@dataclass(frozen=True)
class Options:
    """What `fit` is asked, apart from the step. The request's `devices` are there to be used, its `parallel` is a
    strategy that is taken in place of those that would be tried.

    Attributes:
        gpu: a card by name or size.
        global_batch: samples of a step of the optimizer over all devices; None: those of the request.
        allow: changes of training that may be made, of `CHANGES`.
        library: the settings of this one are needed, a key of `LIBRARIES`.
        config: settings of a config or of the environment are in the request, so that commands have to leave them out.
        progress: is called with the number of ways that were tried, and of all.
    """

    gpu: str
    global_batch: int | None = None
    allow: tuple[str, ...] = ()
    library: str | None = None
    config: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None


def strategies_of(request: Request, library: str | None) -> tuple[str | None, ...]:
    """Those that are tried, that which gives up least first.

    Raises:
        UsageError: there are none.
    """
    if request.context_parallel is not None:
        raise UsageError(
            "fit has no settings for context parallelism",
            "It writes settings of libraries, and those for context parallelism are not covered.",
            "Leave --context-parallel out, or ask 'staticmem size --max-dim' for the longest sequence.",
            code="SM295",
        )
    if request.parallel is not None and request.parallel not in DATA_PARALLEL:
        why = f"Settings are written for {titles(DATA_PARALLEL)}."
        raise UsageError(
            f"fit has no settings for {STRATEGIES[request.parallel].title}",
            why,
            "Example: --parallel fsdp --devices 8",
            "SM295",
        )
    several = (request.devices or 1) > 1
    asked: tuple[str | None, ...] = SHARED if several else (None,)
    if request.parallel is not None and several:
        asked = (request.parallel,)
    if library is None:
        return asked
    able = LIBRARIES[library].strategies
    if several and request.parallel is None and not set(asked) & set(able):
        asked = able[1:]  # ZeRO-1 saves little where ZeRO-2 communicates as much
    tried = tuple(name for name in asked if name in able)
    if not tried:
        why = f"Its settings are those of {titles(able)}, on several devices."
        raise UsageError(f"there are no {LIBRARIES[library].title} settings for this", why,
                         "Example: --devices 8 --parallel zero3", "SM295")  # fmt: skip
    return tried


def check_fit(study: Study, options: Options) -> None:
    """Raises:
    UsageError: nothing is trained, or options do not go together.
    """
    request = study.request
    check(FIT, request.given(global_batch=options.global_batch))
    if not study.scenario.training or request.optimizer is None:
        why = "Settings are those of a training step with an optimizer."
        raise UsageError("there is no training step to fit", why, "Name an optimizer: --optimizer adamw", "SM294")
    if request.optimizer not in WRITTEN:
        why = "Which parameters it has, and which another optimizer, the author of the model decides."
        hint = "'staticmem levers' says what makes the step smaller."
        raise UsageError(f"fit has no settings for {request.optimizer}", why, hint, "SM295")


def no_gpu() -> UsageError:
    """The error of a question without a card."""
    return UsageError("fit needs a GPU", "What fits depends on its memory.", "Example: --gpu rtx-4090", "SM297")
