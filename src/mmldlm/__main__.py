"""The command `mmldlm`, also as `python -m mmldlm`. Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
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


def keep_bytecode() -> None:
    """Where nobody keeps the compiled modules of PyTorch, keep all compiled modules in `~/.cache/mmldlm`.

    Containers are often built without them and may not write them (PYTHONDONTWRITEBYTECODE, files of another user).
    Then every start compiles hundreds of modules again, which takes seconds. Python itself notices changed files.
    """
    from importlib.util import cache_from_source, find_spec

    torch = find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix is not None:
        return
    kept = os.path.exists(cache_from_source(torch.origin))
    if kept or (not sys.dont_write_bytecode and os.access(os.path.dirname(torch.origin), os.W_OK)):
        return
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    sys.pycache_prefix = os.path.join(folder, "mmldlm", "python")
    sys.dont_write_bytecode = False


def main() -> None:
    """Run the command line."""
    keep_bytecode()
    from mmldlm.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
