"""Lifetimes: the interval of every buffer from its holds, the peak, and which buffers are alive there and why."""

from staticmem.liveness.intervals import Lifetimes, PhasePeak

__all__ = ["Lifetimes", "PhasePeak"]
