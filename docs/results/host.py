"""CPU time of tokenizing and writing texts, docs/log.md: python docs/results/host.py RUN STORE

Milliseconds for 1,000 texts of the training split, three rounds over the same 8,192; one thread by the environment.
"""

import sys
import time

import numpy as np

import mmldlm

model = mmldlm.load(sys.argv[1], "cpu")
split = mmldlm.PairStore.open(sys.argv[2]).splits["train"]
texts = [str(text) for text in split.read_texts(np.arange(min(8192, len(split))))]
for _ in range(3):
    began = time.process_time()
    tokens = model.tokenize(texts)
    middle = time.process_time()
    model.codec.texts_of(tokens)
    both = (middle - began, time.process_time() - middle)
    print("tokenize {:.1f}, write {:.1f}".format(*(1e6 * seconds / len(texts) for seconds in both)))
