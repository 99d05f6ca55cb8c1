"""A rank ends with whoever started it, under any launcher and from its first moment on.

Our own launcher also arms the kernel's parent-death signal where it can. Other launchers do not,
and a rank may not arm it for them: the signal follows the thread that started it, not the process.
"""

import os
import threading
import time

LOOK_S = 0.5
WORKERS = "stretto train --workers"
"""What our own launcher calls itself."""
PARENT = "STRETTO_PARENT"
"""Set by our launcher: a rank whose launcher died before it could look would take the wrong one."""


def end_with_parent() -> None:
    """Watch from a thread of our own; end the process, silently, when its parent is gone."""
    parent = int(os.environ.get(PARENT, os.getppid()))
    threading.Thread(target=_watch, args=(parent,), name="stretto-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
