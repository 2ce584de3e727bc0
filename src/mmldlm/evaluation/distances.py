"""Distances between two sets: of latents (Fréchet), and of lengths (Fréchet and Wasserstein).

Shapes: n and m documents, d dimensions.
"""

from __future__ import annotations

import numpy as np


def frechet_distance(left: np.ndarray, right: np.ndarray) -> float:
    """|mean - mean|^2 + tr(A + B - 2 (AB)^(1/2)) of the covariances A, B of (n, d) and (m, d).

    With A = aa' and B = bb', the trace of the root of AB is the sum of the singular values of a'b; so nothing is
    squared, and few documents cost little in many dimensions.
    """
    first, second = _root(left), _root(right)
    shared = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    apart = ((left.mean(0, dtype=np.float64) - right.mean(0, dtype=np.float64)) ** 2).sum()
    return float(apart + (first**2).sum() + (second**2).sum() - 2.0 * shared)


def _root(values: np.ndarray) -> np.ndarray:
    """(d, min(n, d)) a factor of the covariance."""
    centred = (values - values.mean(0, dtype=np.float64)).T / np.sqrt(len(values) - 1)
    if centred.shape[1] <= centred.shape[0]:
        return centred
    triangle: np.ndarray = np.linalg.qr(centred.T)[1]
    return triangle.T


def main_directions(values: np.ndarray, count: int) -> np.ndarray:
    """(d, count) the directions in which (n, d) varies most; all, where there are no more."""
    _, _, directions = np.linalg.svd(values - values.mean(0, dtype=np.float64), full_matrices=False)
    return directions[:count].T


def wasserstein(left: np.ndarray, right: np.ndarray) -> float:
    """Mean distance that one set of numbers has to be moved to become the other."""
    places = np.sort(np.concatenate([left, right]).astype(np.float64))
    shares = [np.searchsorted(np.sort(side), places[:-1], side="right") / len(side) for side in (left, right)]
    return float((np.abs(shares[0] - shares[1]) * np.diff(places)).sum())
