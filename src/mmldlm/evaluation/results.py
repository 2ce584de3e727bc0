"""The result of an evaluation: nested dataclasses with `to_json()` and `from_json()`.

A part that was not measured is None; the notes say why.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import Bounds, Calibration
from mmldlm.json_lines import from_plain
from mmldlm.statistics import Estimate, Quantity

FORMAT = "mmldlm-evaluation-3"
HELD_OUT, GENERATED, SIMILARITY = "held_out", "generated", "similarity"
"""Sets of documents that quantities are about; quantities of one set can be compared between runs."""


@dataclass(frozen=True)
class ModelInfo:
    """What was evaluated."""

    name: str
    step: int | None
    fingerprint: str
    num_parameters: int
    preset: str
    shape: dict[str, int]
    mode_weights: dict[str, float]
    condition_dropout: float
    prediction_type: str
    text_schedule: str
    latent_schedule: str
    length: str
    device: str


@dataclass(frozen=True)
class DataInfo:
    """What it was evaluated on."""

    store: str
    split: str
    fingerprint: str
    num_documents: int
    num_tokens: int
    num_held_out: int
    """Documents of the split."""
    num_too_long: int
    """Documents of the split that are longer than the model can take."""
    num_special_tokens: int
    encoder: dict[str, Any] | None
    tokenizer: dict[str, Any] | None


@dataclass(frozen=True)
class TextScores:
    """How close decoded texts are to the true ones."""

    num_sampling_steps: int
    token_accuracy: Estimate
    token_f1: Estimate
    exact_match: Estimate
    bleu: Estimate | None
    reencoded_cosine: Estimate | None
    right_length: Estimate
    tokens_aligned: Estimate | None = None
    """Tokens right after alignment; None in results of older versions."""


@dataclass(frozen=True)
class LengthGroup:
    """The same scores for texts of similar length."""

    shortest: int
    longest: int
    num_documents: int
    length_given: list[TextScores]
    length_modelled: list[TextScores]


@dataclass(frozen=True)
class CosineReference:
    """Cosines to compare the re-encoded one with."""

    true_text: float
    """Of the true tokens as text: the best that can be reached."""
    strangers: float
    """Of two unrelated documents."""


@dataclass(frozen=True)
class Inversion:
    """Latents decoded into text, for each number of sampling steps from few to many."""

    num_documents: int
    num_tokens: int
    length_given: list[TextScores]
    length_modelled: list[TextScores]
    """Empty where the run does not model the length."""
    by_length: list[LengthGroup]
    cosine_reference: CosineReference | None
    sampling: dict[str, Any]
    bleu_signature: str | None

    @property
    def best(self) -> TextScores:
        """With the most sampling steps and the true length."""
        return self.length_given[-1]

    @property
    def tokens_right(self) -> Estimate:
        """Share of tokens right, with the most sampling steps and the true length."""
        return self.best.token_accuracy


@dataclass(frozen=True)
class Way:
    """One way to decode."""

    text_sampler: str
    guidance: float
    num_candidates: int = 1
    num_rounds: int = 0

    def name(self) -> str:
        """Part of the name of its quantities."""
        return f"{self.text_sampler}/{self.guidance:g}/{self.num_candidates}/{self.num_rounds}"

    def title(self) -> str:
        """For people; defaults are left out."""
        parts = [self.text_sampler]
        parts += [f"guidance {self.guidance:g}"] if self.guidance != 1.0 else []
        parts += [f"{self.num_candidates} candidates"] if self.num_candidates > 1 else []
        parts += [f"{self.num_rounds} rounds"] if self.num_rounds else []
        return ", ".join(parts)


@dataclass(frozen=True)
class WayScores:
    """What one way gave, how much more that is than the plain decode, and what it cost."""

    way: Way
    scores: TextScores
    token_accuracy_gain: Estimate
    exact_match_gain: Estimate
    bleu_gain: Estimate | None
    reencoded_cosine_gain: Estimate | None
    passes: Estimate
    """Passes of the network per document."""
    num_encoded: Estimate
    """Texts turned back into latents, per document."""
    seconds: float
    """For all documents together."""


@dataclass(frozen=True)
class WaysToDecode:
    """Text samplers, guidance, candidates and rounds beside each other."""

    num_documents: int
    num_sampling_steps: int
    judge: str | None
    """Which side turns candidates back into latents: model or encoder; None without candidates."""
    candidate_temperature: float
    plain: Way
    rows: list[WayScores]


@dataclass(frozen=True)
class Histogram:
    """Counts of both cosines in the same bins."""

    edges: list[float]
    own: list[int]
    strangers: list[int]


@dataclass(frozen=True)
class Retrieval:
    """Texts turned into latents by the model, compared with those of the encoder."""

    cosine: Estimate
    stranger_cosine: Estimate
    retrieval_at_1: Estimate
    retrieval_at_10: Estimate
    chance_at_1: float
    chance_at_10: float
    median_rank: float
    num_queries: int
    num_candidates: int
    histogram: Histogram

    @property
    def blind(self) -> bool:
        """The latents are no nearer to those of their own texts than to others: they do not depend on the text."""
        by_chance = self.retrieval_at_10.low <= self.chance_at_10
        return by_chance and self.cosine.low <= self.stranger_cosine.high


@dataclass(frozen=True)
class Similarity:
    """Rank correlation between cosines and the scores of people."""

    file: str
    num_pairs: int
    own: Estimate
    encoder: Estimate | None
    difference: Estimate | None


@dataclass(frozen=True)
class LatentTrip:
    """Cosines after latent to text to latent."""

    own: Estimate
    """The text is read by the model itself."""
    encoder: Estimate | None
    own_of_true_text: Estimate


@dataclass(frozen=True)
class RoundTrip:
    """Latent to text to latent, and text to latent to text."""

    num_documents: int
    latent: LatentTrip
    text: TextScores


@dataclass(frozen=True)
class Beside:
    """The same of generated and of held-out documents."""

    generated: Estimate
    real: Estimate


@dataclass(frozen=True)
class Diversity:
    """How varied texts are."""

    distinct_1: Beside
    distinct_2: Beside
    distinct_3: Beside
    repeated_1: Beside
    repeated_2: Beside
    repeated_4: Beside
    self_bleu: Beside | None

    def exceeds_real(self, figure: str) -> bool:
        """Whether a figure is measurably above that of held-out texts; random words repeat less than those."""
        beside: Beside | None = getattr(self, figure)
        return beside is not None and bool(beside.generated.low > beside.real.high)


@dataclass(frozen=True)
class ReferenceScore:
    """What a causal language model pays for the texts."""

    name: str
    first_token_scored: bool
    nats_per_token: Beside
    perplexity: Beside


@dataclass(frozen=True)
class Agreement:
    """Cosine between a generated latent and the latent of the text that was generated with it."""

    own: Estimate
    own_strangers: float
    """nan where there is one pair."""
    encoder: Estimate | None = None
    encoder_strangers: float | None = None


@dataclass(frozen=True)
class Distance:
    """Distance of generated documents from held-out ones, beside that of held-out ones from each other."""

    generated: float
    real: float
    real_low: float
    real_high: float


@dataclass(frozen=True)
class Distances:
    """Distances of latents and of lengths."""

    latent_frechet: Distance
    length_frechet: Distance
    length_wasserstein: Distance
    num_documents: int
    num_directions: int
    num_splits: int


@dataclass(frozen=True)
class Memorised:
    """Share of texts found in the training data."""

    num_searched: int
    whole: Beside
    """The text is a training document."""
    inside: Beside
    """The text is part of a training document."""


@dataclass(frozen=True)
class Generation:
    """Pairs generated from nothing."""

    num_documents: int
    num_real: int
    sampling: dict[str, Any]
    length: str
    diversity: Diversity
    reference_lm: ReferenceScore | None
    agreement: Agreement
    distance: Distances | None
    memorised: Memorised | None
    examples: list[str]

    @property
    def collapsed(self) -> str | None:
        """What shows that the model writes the same words again and again; None where it does not.

        Other figures of such texts mean nothing, however good they look.
        """
        repeated, different = self.diversity.repeated_1, self.diversity.distinct_2
        ours, real = 100 * repeated.generated.value, 100 * repeated.real.value
        if ours >= max(COLLAPSED_REPEATS, 3.0 * real):
            return f"{ours:.1f} % of its tokens repeat one of the same text ({real:.1f} % in held-out texts)"
        ours, real = 100 * different.generated.value, 100 * different.real.value
        if math.isnan(ours) and real > 0:
            return "its texts have no two tokens"
        if ours <= COLLAPSED_DISTINCT * real:
            return f"only {ours:.1f} % of its pairs of tokens differ ({real:.1f} % in held-out texts)"
        return None


COLLAPSED_REPEATS, COLLAPSED_DISTINCT = 40.0, 0.25
"""A model has collapsed where at least so many percent of its tokens repeat one of the same text, and three times that
of held-out texts; or where its share of different pairs of tokens is at most this part of theirs."""


@dataclass(frozen=True)
class DecodedExample:
    """A decoded text."""

    text: str
    token_accuracy: float
    reencoded_cosine: float | None


@dataclass(frozen=True)
class Example:
    """A true text beside what was decoded from its latent."""

    true: str
    decoded: dict[str, DecodedExample]


@dataclass(frozen=True)
class DocumentSet:
    """Values of single documents, which comparisons are made of."""

    ids: list[int]
    quantities: dict[str, Quantity]
    """By name; each is about the first documents, as many as it has values."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured."""

    model: ModelInfo
    data: DataInfo
    settings: dict[str, Any]
    bounds: Bounds
    calibration: Calibration | None
    inversion: Inversion | None
    decoding: WaysToDecode | None
    round_trip: RoundTrip | None
    retrieval: Retrieval | None
    similarity: Similarity | None
    generation: Generation | None
    examples: list[Example]
    notes: list[str]
    versions: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    command: str | None = None
    """The command line that gives this result again."""
    report: str | None = field(default=None, compare=False)
    """The page, where one was written."""
    documents: dict[str, DocumentSet] = field(default_factory=dict, compare=False, repr=False)
    """Values of single documents; `documents.json` holds them, `to_json` does not."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite are nan."""
        values = dataclasses.asdict(dataclasses.replace(self, documents={}))
        del values["documents"]
        return {"format": FORMAT, **values}

    def documents_json(self) -> dict[str, Any]:
        """Values of single documents as plain values."""
        return {
            name: {"id": one.ids, "quantities": {key: q.to_json() for key, q in one.quantities.items()}}
            for name, one in self.documents.items()
        }

    @classmethod
    def from_json(cls, values: Any, documents: dict[str, Any] | None = None) -> Evaluation:
        """The inverse of `to_json` and `documents_json`."""
        kind = values.get("format") if isinstance(values, dict) else None
        if kind != FORMAT:
            raise UserError(f"its format is {kind}; {FORMAT} is needed: evaluate the run again")
        try:
            sets = {
                about: DocumentSet(
                    one["id"], {key: Quantity.from_json(q) for key, q in one["quantities"].items()}
                )
                for about, one in (documents or {}).items()
            }
            return dataclasses.replace(from_plain(cls, values), documents=sets)  # type: ignore[no-any-return]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"it is damaged ({type(error).__name__}: {error}); evaluate the run again"
            raise UserError(problem) from error
