"""The command `mmldlm`, also as `python -m mmldlm`. Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    """While something is imported, KeyboardInterrupt may be swallowed or end in a traceback: leave at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"mmldlm: interrupted; run the same command to go on\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)


def main() -> None:
    """Run the command line."""
    from mmldlm.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
