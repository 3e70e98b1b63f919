"""Loops that keep k states for their derivative."""

from remat.loops._loops import fori_loop, scan, while_loop

__all__ = ["fori_loop", "scan", "while_loop"]
