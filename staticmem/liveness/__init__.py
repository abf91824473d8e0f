"""Lifetimes: the interval of every buffer from who held it, the peak, and who is alive there and why."""

from staticmem.liveness.intervals import Lifetimes, PhasePeak, liveness

__all__ = ["Lifetimes", "PhasePeak", "liveness"]
