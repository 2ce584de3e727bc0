"""Commands: they parse their words, call the library and show the answer."""

import time

BEGAN = time.perf_counter()
"""When the command began, as far as Python can tell."""
