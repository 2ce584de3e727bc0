"""Trainers whose name has an odd last digit in its SHA-1: kept apart while the monitor was written."""

from . import elders, language, others, pretraining, vision

TRAINERS = [*language.TRAINERS, *pretraining.TRAINERS, *vision.TRAINERS, *others.TRAINERS, *elders.TRAINERS]
