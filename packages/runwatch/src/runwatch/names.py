"""What the name of a number means: the role table that every format shares.

A key is cut into words (`train/CrossEntropyLoss` -> train, cross, entropy, loss) and the words decide: a step, an
epoch, a loss of training or of validation, a learning rate, a gradient norm, a rate, a time, memory. Losses carry a
rank, so that the best name of a line becomes *the* loss of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runwatch.errors import UserError

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+|#")
VALIDATION = frozenset(
    ("val", "valid", "validation", "validate", "validating", "eval", "evaluation", "evaluating", "dev", "test",
     "testing", "heldout", "holdout", "cv", "vali")
)  # fmt: skip
_TRAIN = frozenset(("train", "training", "trn", "tr", "trainer"))
_LOSS = frozenset(("loss", "losses", "nll", "xent", "cost", "objective"))
_NOT_A_LOSS = frozenset(
    ("scale", "scaler", "scaling", "weight", "weights", "coef", "coeff", "lambda", "best", "min", "max", "lowest",
     "target", "threshold", "type", "fn", "function", "ratio", "std", "stdev", "var", "count", "num", "prev",
     "previous", "smoothing", "every", "interval", "patience", "alpha", "beta", "gamma", "delta", "diff",
     "improved", "change", "time", "improvement", "from", "seconds", "tokens", "window", "reduction", "per", "of",
     "freq", "mask", "chunks", "scores", "signs")
)  # fmt: skip
_WHOLE = frozenset(
    ("total", "batch", "step", "lm", "reduced", "minibatch", "iter", "iteration", "learning", "current", "cur",
     "model", "all", "sum", "language", "modeling", "task", "metrics", "metric", "raw", "micro", "mb",
     "is", "was", "avgs")
)  # fmt: skip
_NAMED = frozenset(
    ("ce", "cross", "entropy", "nll", "xent", "mlm", "causal", "pg", "policy", "gradient", "learn", "cost", "dpo",
     "sft", "ppo", "grpo", "kd", "contrastive", "diffusion", "denoising", "recon", "reconstruction", "next",
     "token", "objective", "generator", "actor")
)  # fmt: skip
_MEANS = frozenset(
    ("avg", "average", "mean", "epoch", "running", "smooth", "smoothed", "ema", "overall", "final", "med")
)
_ERRORS = frozenset(
    ("rmse", "mae", "mse", "logloss", "mlogloss", "rmsle", "merror", "mape", "huber", "poisson", "quantile",
     "binary_logloss", "multi_logloss", "crossentropy")
)  # fmt: skip
DISCRIMINATOR = frozenset(("d", "dis", "disc", "discriminator"))
GENERATOR = frozenset(("g", "gen", "generator"))
_ADVERSARIES = DISCRIMINATOR | GENERATOR | {"gan", "adv"}
_SIDES = frozenset(
    ("a", "b", "real", "fake", "gan", "adv", "l", "1", "2", "vgg", "feat", "err", "tv", "cls", "rec")
)
_RECONSTRUCTED = frozenset(("cycle", "cyc", "idt", "identity", "recon"))
_REGULARISED = frozenset(("action", "kernel", "decay", "reg"))
"""What an L1 or L2 may be the coefficient of."""
_STEPS = {
    "step": 1, "steps": 3, "update": 1, "updates": 1, "timesteps": 1, "iteration": 2, "iterations": 3, "iter": 2,
    "iters": 3, "it": 2, "itr": 2, "up": 2, "round": 2, "batch": 4, "minibatch": 4, "batches": 5,
}  # fmt: skip
_BESIDE_STEP = frozenset(
    ("global", "current", "cur", "trainer", "training", "train", "optimizer", "opt", "completed", "num", "gradient",
     "at", "on", "the", "info", "idx", "index", "no", "number", "n", "id", "learner", "epoch", "progress", "debug",
     "after", "finished", "i", "main", "root", "rank", "in", "for", "log", "batch", "loop", "and", "mini", "learning")
)  # fmt: skip
_BESIDE_EPOCH = (
    _BESIDE_STEP | _TRAIN | VALIDATION | {"ep", "e", "during", "begin", "start", "starting", "end", "of"}
)
_GROUPS_OF_COUNTERS = ("time", "total", "progress", "counters")
"""Under such a group a count is the one so far: `total/steps`."""
_TOKENS = frozenset(("tok", "toks", "token", "tokens", "word", "words", "tps", "wps", "tgs"))
_DOCUMENTS = frozenset(
    ("sample", "samples", "img", "imgs", "image", "images", "example", "examples", "ex", "seq", "seqs", "sequence",
     "sequences", "sent", "sents", "sentences", "doc", "docs", "documents", "fps", "ips", "frames", "throughput",
     "pairs")
)  # fmt: skip
_UPDATES = frozenset(
    (
        "it",
        "its",
        "iter",
        "iters",
        "iteration",
        "iterations",
        "step",
        "steps",
        "batch",
        "batches",
        "update",
        "updates",
        "ups",
    )
)
_SECONDS = frozenset(("s", "sec", "secs", "second", "seconds", "persec"))
_NO_RATE = frozenset(
    ("tflop", "tflops", "flop", "flops", "gflops", "eta", "total", "val", "eval", "test", "mb", "gb")
)
_NO_TIME = frozenset(
    ("total", "elapsed", "remaining", "eta", "wall", "start", "load", "loading", "forward", "backward", "optimizer",
     "opt", "save", "comm", "since", "train", "training", "epoch", "left", "stamp", "limit", "out", "fwd", "bwd",
     "avg", "prep", "eval", "val", "validation", "test", "mins", "minutes", "hours")
)  # fmt: skip
_NO_RATE_OF_LEARNING = frozenset(
    ("decay", "scheduler", "min", "max", "base", "init", "initial", "warmup", "mult", "multiplier", "schedule",
     "final", "peak", "target", "factor", "ratio", "reduce", "reducing", "end", "power", "gamma", "group", "groups")
)  # fmt: skip
_NO_GRADIENT = frozenset(
    ("scale", "accum", "accumulation", "acc", "clip", "clipping", "checkpointing", "steps", "step", "threshold",
     "max", "min", "var", "std", "penalty", "time", "loss")
)  # fmt: skip
_HOST = frozenset(
    ("ram", "cpu", "cpumem", "swap", "host", "percent", "pct", "util", "frac", "free", "efficient", "gpus")
)
_REWARDS = frozenset(("reward", "rewards", "rew", "return", "returns", "winrate", "elo"))
_EPISODES = frozenset(
    ("episode", "episodes", "ep", "episodic", "game", "games", "rollout", "eprewmean", "eplenmean")
)
_BESIDE_REWARD = (
    _EPISODES | _MEANS | _TRAIN | VALIDATION
    | {"total", "max", "min", "std", "last", "cumulative", "discounted", "best", "moving", "recent", "env", "batch",
       "raw", "per", "the", "sum", "current", "policy", "agent", "median", "len", "length", "score", "scores",
       "ret", "s"}
)  # fmt: skip
_KEY_UNITS = {"ms": 1e-3, "mb": 1e6, "mib": 2.0**20, "gb": 1e9, "gib": 2.0**30, "us": 1e-6}
OWN = {
    name: name
    for name in (
    "loss", "text_loss", "latent_loss", "length_loss", "valid_loss", "valid_text_loss", "valid_latent_loss",
    "valid_length_loss", "valid_text_accuracy", "valid_text_loss_shuffled", "text_accuracy", "lr", "grad_norm",
     "tokens_per_second", "documents_per_second", "steps_per_second", "step_seconds",
    "gpu_memory_allocated", "gpu_memory_reserved", "data_wait", "batch_size", "mfu", "gpu_busy", "skipped_steps",
    "micro_tokens", "mode_stage", "tokens", "documents", "latent_prediction_norm", "latent_prediction_std",
    "latent_prediction_variance", "valid_latent_prediction_norm", "valid_latent_prediction_std", 
    )
} | {"text": "text_loss", "latent": "latent_loss"}  # fmt: skip
"""Names of MM-LDLM's own log, and of the research code before it; they mean themselves."""
ROLES = (
    "loss", "valid_loss", "step", "epoch", "lr", "grad_norm", "tokens_per_second", "documents_per_second",
    "steps_per_second", "step_seconds", "gpu_memory_allocated", "mfu", "text_accuracy", "total_steps",
)  # fmt: skip
"""What `--map` may name."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a key means."""

    role: str
    key: str
    """The words of the key, the same for every way to write it."""
    rank: int = 0
    """0 is best; decides between several numbers of one role in a line."""
    factor: float = 1.0
    """What the unit in the key makes of the number."""


class Names:
    """Keys -> names, with what a user mapped by hand before anything else."""

    def __init__(self, mapped: Mapping[str, str] | None = None) -> None:
        self._known: dict[str, Name | None] = {}
        self._mapped = {" ".join(words_of(key)): role for role, key in (mapped or {}).items()}

    @property
    def is_mapped(self) -> bool:
        """Whether a user named a number by hand."""
        return bool(self._mapped)

    def of(self, key: str) -> Name | None:
        """What a key means; None if it is no number of a training curve."""
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) > 20_000:
                self._known.clear()
            name = self._known[key] = self._find(key)
            return name

    def _find(self, key: str) -> Name | None:
        words = words_of(key)
        joined = " ".join(words)
        role = self._mapped.get(joined)
        if role is not None:
            return Name(role, joined, -1)
        name = Name(OWN[key.lower()], joined) if key.lower() in OWN else classify(words)
        group, _, counter = key.lower().rpartition("/")
        if group in _GROUPS_OF_COUNTERS and (name is None or name.role == "total_steps"):
            plain = classify([word for word in words_of(counter) if word != "total"])
            name = replace(plain, key=joined) if plain is not None and plain.role == "step" else name
        if name is None or name.role not in self._mapped.values():
            return name
        # the user named another number for this role
        return replace(name, role="other_loss") if name.role == "loss" else None


def parse_mapping(words: list[str]) -> dict[str, str]:
    """`loss=step_loss` words of `--map` as role -> key."""
    mapped: dict[str, str] = {}
    for word in words:
        role, equals, key = (part.strip() for part in word.partition("="))
        if not equals or not words_of(key):
            raise UserError(
                f"--map {word}: write ROLE=NAME with the name as the log has it, such as loss=step_loss"
            )
        if role not in ROLES:
            raise UserError(f"--map {word}: {role} is not a role; allowed are {', '.join(ROLES)}")
        mapped[role] = key
    return mapped


def words_of(key: str) -> list[str]:
    """The words of a key in lower case; `trainloss` and `TrainLoss` are two words."""
    words: list[str] = []
    for word in _WORD.findall(key):
        word = word.lower()
        if word.endswith("loss") and len(word) > 4 and word not in _ERRORS:
            words += [word[:-4], "loss"]
        else:
            words.append(word)
    return words


def classify(words: list[str]) -> Name | None:
    """The role of a key from its words."""
    if not words or len(words) > 12:
        return None
    held, key = frozenset(words), " ".join(words)
    for find in (_counter, _loss, _learning_rate, _speed, _gradient, _memory, _other):
        name = find(words, held, key)
        if name is not None:
            return name
    return None


def _counter(words: list[str], held: frozenset[str], key: str) -> Name | None:
    while len(words) > 1 and words[-1] in _TRAIN | VALIDATION:  # Epoch(train), Iter(val)
        words = words[:-1]
    if words[-1] == "epoch" and held <= _BESIDE_EPOCH:
        return Name("epoch", key)
    if key in ("ep", "epochs completed", "tick"):
        return Name("epoch" if key != "tick" else "step", key, 5)
    kinds = [word for word in words if word in _STEPS]
    if not kinds:
        return None
    if held & VALIDATION and kinds[-1] in ("steps", "iters", "iterations", "batches", "updates"):
        return None  # eval_steps=500 is a setting
    if words[0] in ("n", "num") and words[1] in ("batch", "batches"):
        return None  # a number of batches, not the number of a batch
    rest = held - set(kinds) - VALIDATION
    if rest & {"total", "max"} and kinds[-1] in ("step", "steps", "iters", "iter", "iterations", "updates"):
        return Name("total_steps", key) if rest <= {"total", "max", "num", "train", "training"} else None
    if not rest <= (_BESIDE_STEP | {"total"} if "timesteps" in kinds else _BESIDE_STEP):
        return None
    if words[-1] not in _STEPS and words[-1] not in (
        "idx",
        "index",
        "no",
        "num",
        "id",
        "number",
        "completed",
    ):
        return None
    rank = 0 if "global" in held or "num updates" in key else min(_STEPS[word] for word in kinds)
    return Name("step", key, rank)


def _loss(words: list[str], held: frozenset[str], key: str) -> Name | None:
    plain = held - _TRAIN - VALIDATION - {"s"}
    if (
        len(words) > 2
        and (words[-1] in _STEPS or words[-1] == "epoch")
        and words[-2] in ("at", "for", "after", "on", "in")
    ):
        return None  # `validation loss at iteration 1000`
    if "cost" in held and len(plain) > 1:
        return None  # batch_cost is a time
    role = "valid_loss" if held & VALIDATION else "loss"
    rank = _loss_rank(words, held, plain)
    if rank is None:
        bare = {"train": "bare_loss", "training": "bare_loss", "learn": "loss"}
        if key in VALIDATION:
            return Name("bare_valid", key, 9)
        return Name(bare[key], key, 4) if key in bare else None
    if role == "loss" and held & _TRAIN:
        rank += 1
    if "test" in held:
        rank += 1
    return Name(role, key, rank)


def _loss_rank(words: list[str], held: frozenset[str], plain: frozenset[str]) -> int | None:
    if held & _NOT_A_LOSS:
        return None
    is_loss = bool(plain & _LOSS) or {"cross", "entropy"} <= plain or (plain <= {"ce", "bce"} and bool(plain))
    if not is_loss:
        if _is_part_of_gan(plain):
            return 10
        if (
            plain & _ERRORS
            or (len(plain) == 1 and plain <= {"l1", "l2", "error"})
            or (words[-2:] in (["l", "2"], ["l", "1"]) and not held & _REGULARISED)
        ):
            return 12
        if words[0] == "l" and len(words) > 1 and words[1].isalpha() and words[1] not in ("r", "rate", "len"):
            return 10  # l_pix, as BasicSR writes it
        return 14 if plain <= {"ppl", "perplexity", "lm"} and plain & {"ppl", "perplexity"} else None
    if len(words) > 2 and words[-1] == "value":
        plain -= {"value"}
    rest = plain - {"loss", "losses"} - {word for word in plain if word.isdigit() and len(words) < 3}
    if rest & _MEANS:
        return 8
    if "entropy" in rest and "cross" not in rest:
        return 10  # the bonus of a policy
    if rest <= _WHOLE:
        return 2 if rest else 0
    return 4 if rest <= _NAMED | _WHOLE else 10


def _is_part_of_gan(held: frozenset[str]) -> bool:
    """CycleGAN's and pix2pix's `D_A`, `G_GAN`, `cycle_B`, DCGAN's `errD`; `D(x)` is a probability."""
    parts = _ADVERSARIES | _RECONSTRUCTED
    return bool(held & parts) and bool(held & _SIDES) and held <= parts | _SIDES


def is_adversarial(key: str) -> bool:
    """Whether a loss, by the words of its name, is that of one network against another: its level means nothing."""
    held = frozenset(key.split())
    return bool(held & _ADVERSARIES) and not held & (_RECONSTRUCTED | {"l", "vgg", "feat", "rec", "total"})


def _learning_rate(words: list[str], held: frozenset[str], key: str) -> Name | None:
    if "lr" in held or "learning rate" in key or key == "l r":
        return None if held & _NO_RATE_OF_LEARNING else Name("lr", key, len(words))
    return None


def _speed(words: list[str], held: frozenset[str], key: str) -> Name | None:
    """Rates and times of a step."""
    if key in ("batch t", "batch time t"):
        return Name("step_seconds", key)
    if key == "data t":
        return Name("data_seconds", key)
    if (held & {"data", "reader", "dataloader"} and held & {"time", "cost", "wait", "s"}) or key == "data":
        return None if held & {"dataset", "load"} else Name("data_seconds", key)
    factor = next((_KEY_UNITS[word] for word in words if word in ("ms", "us")), 1.0)
    per = held & (_SECONDS | {"ms"}) and (
        "per" in held or _per_second(words) or words[0] in _SECONDS | {"ms"}
    )
    if per and held & _UPDATES and words[-1] not in _SECONDS:  # ms/step, sec/it, seconds per step
        return None if held & _NO_RATE else Name("step_seconds", key, 0, factor)
    if (per or held & {"tps", "wps", "tgs", "ups", "fps", "ips", "throughput"}) and not held & (
        _NO_RATE | {"time", "timing"}
    ):
        for role, subjects in (
            ("tokens_per_second", _TOKENS), ("documents_per_second", _DOCUMENTS), ("steps_per_second", _UPDATES)
        ):  # fmt: skip
            if held & subjects:
                return Name(role, key)
        return Name("documents_per_second", key) if "throughput" in held else None
    return _duration(words, held, key, factor)


def _per_second(words: list[str]) -> bool:
    """tokens/s, tokens/s/device."""
    ends = words[:-1] if words[-1] in ("device", "gpu", "chip", "rank", "node") else words
    return bool(ends) and ends[-1] in _SECONDS


def _duration(words: list[str], held: frozenset[str], key: str, factor: float) -> Name | None:
    counted = words[-1] in ("iterations", "steps", "updates", "timesteps") or words[-2:] == ["time", "batch"]
    if not counted and held & {"time", "timing", "dt", "duration", "cost"} and held & (_UPDATES | {"dt"}):
        return (
            Name("step_seconds", key, 0, factor)
            if not held & (_NO_TIME - {"elapsed", "train", "avg"})
            else None
        )
    if key in (
        "time",
        "time ms",
        "time s",
        "time sec",
        "t ms",
        "seconds",
        "sec",
        "step avg",
        "duration",
        "bt",
        "took",
        "time cost",
        "cost time",
    ):
        return Name("plain_seconds", key, 1, factor)
    return None


def _gradient(words: list[str], held: frozenset[str], key: str) -> Name | None:
    is_gradient = held & {"grad", "gradient", "gnorm", "gradients", "grads"} and not held & _NO_GRADIENT
    if is_gradient and (held & {"norm", "gnorm"} or key in ("grad", "gradient")):
        return Name("grad_norm", key, len(words))
    return Name("grad_norm", key, 9) if key in ("norm", "total norm") else None


def _memory(words: list[str], held: frozenset[str], key: str) -> Name | None:
    if not held & {"mem", "memory", "vram", "gpumem", "maxmem"} or held & _HOST:
        return None
    factor = next((_KEY_UNITS[word] for word in words if word in _KEY_UNITS), 1.0)
    role = "gpu_memory_reserved" if held & {"reserved", "cached", "cache"} else "gpu_memory_allocated"
    return Name(role, key, 0, factor)


def _is_played(held: frozenset[str]) -> bool:
    """Whether a number only stands where something is learned by playing: a reward, the length of an episode."""
    if {"win", "rate"} <= held or {"win", "ratio"} <= held or {"explained", "var"} <= held:
        return True
    if {"explained", "variance"} <= held or held & {"eprewmean", "eplenmean"}:
        return True
    plain = frozenset(word for word in held if not word.isdigit())
    is_played = bool(held & _EPISODES) and bool(held & {"len", "length", "score", "scores", "ret"})
    return (is_played or bool(held & _REWARDS)) and plain <= _REWARDS | _BESIDE_REWARD


def _other(words: list[str], held: frozenset[str], key: str) -> Name | None:
    if _is_played(held):
        is_reward = held & (_REWARDS | {"ret", "score", "scores", "win"}) and not held & {
            "std",
            "min",
            "max",
            "best",
        }
        return Name("reward" if is_reward else "played", key)
    if "mfu" in held or "hfu" in held:
        return Name("mfu", key)
    if held & {"skipped", "skip"} and not held & {"tokens", "batches", "samples"}:
        return Name("skipped_total" if key == "skipped" else "skipped_steps", key)
    if "nan" in held and held & {"iterations", "steps", "batches"}:
        return Name("nan_steps", key)
    if held & {"acc", "accuracy", "top", "acc1"} and not held & (VALIDATION | {"best", "max", "target", "5"}):
        return Name("text_accuracy", key, len(words))
    return None
