"""Lets memory that is given back leave the process, where the C library would keep it.

glibc serves tensors of up to 32 MB from a heap that only shrinks at its end: a rank that had the
whole model for a moment, or lets gradients go in another order than they came, keeps the holes.
"""

import ctypes

_MMAP_THRESHOLD = -3
_LARGE = 8 << 20
"""Tensors from here on come from the system and return to it; their pages are made anew each time,
which costs little beside what is computed with so many elements."""


def let_memory_leave() -> None:
    """Do so from now on, and with what is free already; nothing where there is no glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
