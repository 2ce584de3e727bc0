"""Randomness as a function: the same words in, the same numbers out, in any batch, on any number of ranks.

A key is a 64-bit hash of its words (seed, epoch, document, ...). Uniform and normal numbers are hashes of a key, a tag
that says what they are for, and an index. Nothing here keeps a state, so nothing has to be saved.
"""

from __future__ import annotations

import numpy as np

# What a stream of numbers is for. Part of every hash: changing one changes all results.
ORDER, TEXT_MASK, LATENT_NOISE, CONDITION, TOKEN_CHOICE, UNMASK, LENGTH, TIME_SHIFT, SHUFFLE = range(1, 10)
MODE = 11

Words = int | np.ndarray
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_TWO23 = np.float32(2.0**-23)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every bit depends on every other."""
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)


def _word(value: Words) -> np.ndarray:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value).astype(np.uint64, copy=False)
    return np.asarray(value % 2**64, dtype=np.uint64)


def make_key(*words: Words) -> np.ndarray:
    """Hash of the words in order; integers and integer arrays broadcast against each other."""
    with np.errstate(over="ignore"):
        key = np.zeros((), dtype=np.uint64)
        for word in words:
            key = _mix((key ^ _word(word)) + _GOLDEN)
    return key


def _bits(keys: np.ndarray, tag: int, index: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _mix(make_key(keys, tag) + (_word(index) + np.uint64(1)) * _GOLDEN)


def _to_unit(bits: np.ndarray) -> np.ndarray:
    """The upper 23 bits as float32 strictly inside (0, 1); with 24 the largest would round to 1."""
    return ((bits >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * _TWO23


def uniform(keys: np.ndarray, tag: int, index: np.ndarray) -> np.ndarray:
    """One float32 in (0, 1) for each pair of key and index, both of one shape or broadcast."""
    return _to_unit(_bits(keys, tag, index))


def normal(keys: np.ndarray, tag: int, count: int) -> np.ndarray:
    """`count` standard normal float32 for each of the (n,) keys, by Box and Muller."""
    half = (count + 1) // 2
    bits = _bits(keys[:, None], tag, np.arange(half, dtype=np.uint64)[None, :])
    radius = np.sqrt(np.float32(-2.0) * np.log(_to_unit(bits)))
    angle = _to_unit(bits << np.uint64(24)) * np.float32(2.0 * np.pi)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :count]


def _root(dimensions: int) -> float:
    """The positive root of x^(d+1) = x + 1, the golden ratio in d dimensions."""
    x = 2.0
    for _ in range(64):
        x = (1.0 + x) ** (1.0 / (dimensions + 1))
    return x


LOW_DISCREPANCY_DIMENSIONS = 3
_STEPS = [np.uint64(int(_root(LOW_DISCREPANCY_DIMENSIONS) ** -(i + 1) * 2**64)) for i in range(3)]


def low_discrepancy(positions: np.ndarray, dimension: int, seed: int) -> np.ndarray:
    """Evenly spread numbers in (0, 1): any run of consecutive positions covers the interval with small gaps.

    A Kronecker sequence of the generalised golden ratio with a random shift, so each number alone is uniform. The
    three dimensions together fill the cube evenly. Integer arithmetic modulo 2^64 keeps it exact at any position.
    """
    shift = make_key(seed, TIME_SHIFT, dimension)
    with np.errstate(over="ignore"):
        return _to_unit(_word(positions) * _STEPS[dimension] + shift)


def permute(ranks: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """A random permutation of range(size), evaluated only where asked: no table, no memory.

    A Feistel network on the next power of two; what falls outside is walked on until it is inside again.
    """
    if size == 1:
        return np.zeros_like(ranks, dtype=np.int64)
    bits = int(size - 1).bit_length()
    result = _feistel(ranks.astype(np.uint64), bits, key)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = _feistel(result[outside], bits, key)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(x: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits - int(low_bits))) - 1)
    high, low = x >> low_bits, x & low_mask
    for turn in range(4):
        high = high ^ (make_key(key, 2 * turn, low) & high_mask)
        low = low ^ (make_key(key, 2 * turn + 1, high) & low_mask)
    return (high << low_bits) | low
