"""A result in which nothing was measured, for tests of what is done with results."""

from __future__ import annotations

from mmldlm.evaluation.bounds import Bounds
from mmldlm.evaluation.results import (
    DataInfo,
    DocumentSet,
    Evaluation,
    Histogram,
    ModelInfo,
    Retrieval,
)
from mmldlm.statistics import Estimate

NOTHING = Estimate(0.0, 0.0, 0.0, 0.0)


def empty_evaluation(
    name: str, documents: dict[str, DocumentSet], *, fingerprint: str = "same", num_candidates: int = 20
) -> Evaluation:
    """With these values of single documents."""
    return Evaluation(
        model=ModelInfo(
            name, 7, fingerprint, 1_000_000, "tiny", {}, {}, 0.0, "clean", "linear", "cosine", "given", "cpu"
        ),
        data=DataInfo("store", "validation", fingerprint, 2, 20, 2, 0, 0, None, None),
        settings={"num_resamples": 1000},
        bounds=Bounds(None, None),
        calibration=None,
        inversion=None,
        decoding=None,
        round_trip=None,
        retrieval=Retrieval(
            *[NOTHING] * 4, 0.05, 0.5, 1.0, 2, num_candidates, Histogram([0.0, 1.0], [2], [2])
        ),
        similarity=None,
        generation=None,
        examples=[],
        notes=[],
        versions={},
        documents=documents,
    )
