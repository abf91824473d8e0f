"""Lifetimes: intervals of buffers, the live curve, the peak and who is alive there."""
