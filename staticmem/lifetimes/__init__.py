"""Lifetimes: the interval of every buffer from who held it, the peak, and who is alive there and why."""

from staticmem.lifetimes.intervals import Lifetimes, PhasePeak, liveness

__all__ = ["Lifetimes", "PhasePeak", "liveness"]
