"""How a rank's process ends once its work is done."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process at once, without tearing the interpreter down.

    For a rank whose files are written and whose groups are left. Threads that native libraries keep
    (Gloo's, OpenMP's) sometimes outlive the interpreter's end and abort the process there: about
    once in thirty ranks here, which turned a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
