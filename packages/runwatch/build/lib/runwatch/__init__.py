"""Watches training runs, ours or anybody's, live or afterwards: what is wrong, since when, how sure, what to do.

follow -> formats -> Record -> detectors -> alerts -> screen, page, sinks, report. Nothing here imports torch, and the
detectors do no input or output, so that a trainer can use them on its own numbers.
"""
