"""Write a file aside and rename it, so that a reader meets the old text or the new, never half."""

import os
from pathlib import Path


def write_aside(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` in one move; folders above it are made where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
