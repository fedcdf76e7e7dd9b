"""Ends a rank whose launcher is gone: nobody would notice when it fails, or stop it.

It gets a SIGTERM, so it saves and stops as if a scheduler had asked. Only Linux tells a process that its parent died.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        signal.raise_signal(signal.SIGTERM)
