"""Processes as a person starts them."""

import signal


def heed_ctrl_c() -> None:
    """For `preexec_fn`: a job in the background of a script begins with Ctrl-C ignored, and so do
    its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
