"""One thin file per command."""

import time

BEGAN = time.perf_counter()
"""When the command began, as far as Python can tell."""
