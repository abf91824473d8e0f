"""Rules: what each ATen op allocates, saves and does in backward. `registry` has the table; the modules fill it."""

from staticmem.rules import (  # noqa: F401  (importing a module registers its rules)
    activations,
    aliases,
    attention,
    casts,
    comparison,
    complexes,
    composed,
    convolution,
    custom,
    distances,
    dynamic,
    einsum,
    elementary,
    factory,
    fourier,
    indexing,
    joining,
    linear,
    loss,
    normalization,
    order,
    padding,
    pointwise,
    pooling,
    recurrent,
    reduction,
    resample,
    scattering,
    statistics,
    ternary,
    various,
    views,
)
from staticmem.rules.registry import RULES, Rule, lookup

__all__ = ["RULES", "Rule", "lookup"]
