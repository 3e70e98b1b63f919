"""Loops that keep k states for their derivative."""

from remat.loops._loops import fori_loop as fori_loop
from remat.loops._loops import scan as scan
from remat.loops._loops import while_loop as while_loop

__all__ = ["fori_loop", "scan", "while_loop"]
