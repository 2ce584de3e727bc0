"""Ablations: trainings that differ by settings, several seeds each, and a table with error bars."""
