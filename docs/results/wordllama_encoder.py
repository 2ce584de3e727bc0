"""WordLlama, a table of vectors for pieces of words, as an encoder; a text gets the mean of its vectors.

    pip install wordllama && cp docs/results/wordllama_encoder.py .
    mmldlm prepare TEXT --encoder wordllama_encoder:encode --out STORE
"""

from functools import cache

import numpy as np
from wordllama import WordLlama


@cache
def _model() -> WordLlama:
    return WordLlama.load()


def encode(texts: list[str]) -> np.ndarray:
    """(texts, 256), of length 1."""
    return np.asarray(_model().embed(texts, norm=True))
