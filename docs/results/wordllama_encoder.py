"""WordLlama, one vector for each piece of a word and their mean for a text, as an encoder (`pip install wordllama`):

PYTHONPATH=docs/results mmldlm prepare TEXT --encoder wordllama_encoder:encode --out STORE
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
