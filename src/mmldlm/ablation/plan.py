"""The plan of an ablation: a recipe, its arms, and how all of them are evaluated; read strictly, before anything runs.

An arm either trains with settings of its own, or uses the runs of another arm in another way: other sampling, or the
weights of the last step instead of their average.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from mmldlm.config import Config
from mmldlm.config.recipe import config_to_dict, find_recipe, load_recipe, read_mapping
from mmldlm.errors import UserError
from mmldlm.evaluation.decoding import require_possible
from mmldlm.objective.joint import Active
from mmldlm.untrusted import misfit

AVERAGED, LAST = "averaged", "last"
_KEYS = ("recipe", "base", "eval", "quantities", "arms")
_ARM_KEYS = ("of", "sampling", "weights")
_OURS = {
    "name": "a run has the name of its arm",
    "train.seed": "the seeds are 0 to --seeds minus 1",
    "train.device": "choose it with --device",
}
"""Settings that the ablation itself chooses."""
_SETTINGS = {"steps": "step_counts"}
_SIZES = ("num_documents", "num_decoded", "num_generated", "num_draws", "steps")
_EVAL_KEYS = (*_SIZES, "split", "seed", "encoder")
_EVAL_DEFAULTS = {
    "num_documents": 512, "num_decoded": 256, "num_generated": 0, "steps": [16], "seed": 0, "encoder": False,
    "split": None,
}  # fmt: skip


class _EvalKinds(TypedDict):
    """Types of what the settings do not check."""

    steps: list[int]
    seed: int
    encoder: bool
    split: str | None


@dataclass(frozen=True)
class EvaluationPlan:
    """How every arm is evaluated: the same documents, the same noise."""

    words: tuple[str, ...]
    steps: tuple[int, ...]
    seed: int
    encoder: bool
    split: str | None


@dataclass(frozen=True)
class Arm:
    """One row of the table."""

    name: str
    words: tuple[str, ...]
    """`section.key=value`, besides those of the base; for an arm that uses another's runs, of sampling alone."""
    of: str | None = None
    """The arm whose runs are used; None: it trains its own."""
    weights: str = AVERAGED

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in self.name)

    @property
    def change(self) -> str:
        """What is different, for people."""
        last = ["weights of the last step"] if self.weights == LAST else []
        words = " ".join(self.words)
        if self.of is not None:
            return f"{self.of}, with {', '.join([*last, *([words] if words else [])])}"
        return words or "the recipe and the base"


@dataclass(frozen=True)
class Plan:
    """A plan whose every arm has loaded."""

    path: Path
    recipe: str
    base: tuple[str, ...]
    evaluation: EvaluationPlan
    arms: tuple[Arm, ...]
    quantities: tuple[str, ...] | None = None
    """Columns of the table; None: what the arms can do."""
    device: str = "auto"
    configs: dict[str, Config] = field(default_factory=dict, compare=False)
    """Settings of each arm, for seed 0."""

    @property
    def trained(self) -> list[Arm]:
        """Arms that have runs of their own."""
        return [arm for arm in self.arms if arm.of is None]

    def users(self, arm: Arm) -> list[Arm]:
        """An arm and those that use its runs."""
        return [one for one in self.arms if one == arm or one.of == arm.name]

    def config(self, arm: Arm, seed: int) -> Config:
        config = self.configs[arm.name]
        return replace(config, train=replace(config.train, seed=seed))

    def to_json(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "recipe": self.recipe,
            "base": list(self.base),
            "eval": asdict(self.evaluation),
            "arms": {arm.name: asdict(arm) for arm in self.arms},
        }


def list_plans() -> dict[str, Path]:
    """Plans that come with the package, by name."""
    folder = Path(str(files("mmldlm") / "recipes" / "ablations"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_plan(name: str, more: list[str] | None = None, device: str = "auto") -> Plan:
    """A plan by name or file, with more settings for its base. Every arm is loaded; an error names the arm."""
    path = _find(name)
    values = read_mapping(path, f"a plan is a mapping with the keys {', '.join(_KEYS)}")
    try:
        return _build(path, values, more or [], device)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _find(name: str) -> Path:
    known = list_plans()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise UserError(f"{name}: no such file, and no plan of that name; plans are {', '.join(known)}")
    return path


def _build(path: Path, values: dict[str, Any], more: list[str], device: str) -> Plan:
    _reject_unknown(values, _KEYS, "")
    if not isinstance(values.get("recipe"), str):
        raise UserError("recipe: the name or file of a recipe is needed")
    beside = path.parent / values["recipe"]
    recipe = str(beside if beside.is_file() else find_recipe(values["recipe"]))
    evaluation = _evaluation(values.get("eval", {}))
    base = (*_words("base", values.get("base", [])), *_words("the command line", more))
    arms = _arms(values.get("arms"))
    quantities = values.get("quantities")
    if quantities is not None:
        check_names(quantities, evaluation.steps)
        quantities = tuple(quantities)
    plan = Plan(path, recipe, base, evaluation, arms, quantities, device)
    for arm in arms:
        try:
            plan.configs[arm.name] = _config(plan, arm)
        except UserError as error:
            raise UserError(f"arm {arm.name!r}: {error}") from error
    _check_same_data(plan)
    return plan


def _reject_unknown(values: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"{where}unknown key {key!r}; allowed are {', '.join(known)}")


def _words(where: str, values: Any) -> tuple[str, ...]:
    if misfit(list[str], values, where):
        raise UserError(
            f"{where}: a list of settings is needed, such as [optim.lr=1e-3]; quote those with braces"
        )
    for word in values:
        if (key := word.partition("=")[0]) in _OURS:
            raise UserError(f"{where}: {word}: {_OURS[key]}; leave it out")
    return tuple(values)


def _evaluation(values: Any) -> EvaluationPlan:
    if not isinstance(values, dict):
        raise UserError(f"eval: a mapping is needed, with keys of {', '.join(_EVAL_KEYS)}")
    _reject_unknown(values, _EVAL_KEYS, "eval: ")
    values = _EVAL_DEFAULTS | values
    if problem := misfit(_EvalKinds, values, "eval"):
        raise UserError(
            f"{problem}; write it as in eval: {{steps: [16], seed: 0, encoder: true, split: test}}"
        )
    if not values["steps"]:
        raise UserError("eval.steps: is empty; give numbers of sampling steps, such as [16]")
    if values["seed"] < 0:
        raise UserError(f"eval.seed: {values['seed']}: at least 0 is needed")
    words = tuple(
        f"evaluation.{_SETTINGS.get(key, key)}={json.dumps(values[key])}" for key in _SIZES if key in values
    )
    return EvaluationPlan(words, tuple(values["steps"]), values["seed"], values["encoder"], values["split"])


def _arms(values: Any) -> tuple[Arm, ...]:
    if not isinstance(values, dict) or len(values) < 2:
        raise UserError("arms: two arms or more are needed, each a name with a list of settings")
    arms = tuple(_arm(name, value) for name, value in values.items())
    by_folder: dict[str, str] = {}
    for arm in arms:
        other = by_folder.setdefault(arm.folder.lower(), arm.name)
        if other != arm.name:
            raise UserError(
                f"arms: {other!r} and {arm.name!r} would have the same folder; rename one of them"
            )
    trained = [arm.name for arm in arms if arm.of is None]
    for arm in arms:
        if arm.of is not None and arm.of not in trained:
            raise UserError(
                f"arm {arm.name!r}: of: {arm.of}: an arm that trains is needed: {', '.join(trained)}"
            )
    return arms


def _arm(name: Any, value: Any) -> Arm:
    where = f"arm {name!r}"
    if not isinstance(name, str) or not re.fullmatch(r"[^\W_][^/|\n]{0,59}", name):
        raise UserError(
            f"{where}: a name of at most 60 characters is needed that begins with a letter or digit and has no / or |"
        )
    if isinstance(value, list):
        return Arm(name, _words(where, value))
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: a list of settings is needed, or {{of: ARM, sampling: {{...}}}} to use another arm's runs"
        )
    _reject_unknown(value, _ARM_KEYS, f"{where}: ")
    sampling, weights = value.get("sampling", {}), value.get("weights", AVERAGED)
    if not isinstance(value.get("of"), str):
        raise UserError(f"{where}: of: the name of the arm whose runs are used is needed")
    if not isinstance(sampling, dict):
        raise UserError(f"{where}: sampling: a mapping is needed, such as {{guidance: 1.5}}")
    if weights not in (AVERAGED, LAST):
        raise UserError(f"{where}: weights: {weights}: allowed are {AVERAGED}, {LAST}")
    if not sampling and weights == AVERAGED:
        raise UserError(f"{where}: is the same as {value['of']!r}; give sampling, or weights: {LAST}")
    words = tuple(f"sampling.{key}={json.dumps(setting)}" for key, setting in sampling.items())
    return Arm(name, words, value["of"], weights)


def _config(plan: Plan, arm: Arm) -> Config:
    """The settings of an arm, with everything rejected that would only fail after its training."""
    words = ["train.step_timeout_action=exit", *plan.base, *plan.evaluation.words]
    own = [f"name={arm.folder}", f"train.device={plan.device}"]
    if arm.of is not None:
        words += next(one for one in plan.arms if one.name == arm.of).words
    words += [*arm.words, *own]
    config = load_recipe(plan.recipe, words, said_in="its settings")
    active = Active.of(config.corruption, config.objective, length_modelled=True)
    require_possible(config, text=active.text, latent=active.latent, encoder=plan.evaluation.encoder)
    if arm.weights == LAST and not config.optim.ema_decay:
        raise UserError(
            f"weights: {LAST}: {arm.of!r} keeps no average (optim.ema_decay=0), so this would be the same"
        )
    return config


def _check_same_data(plan: Plan) -> None:
    first = plan.arms[0]
    for arm in plan.arms[1:]:
        for name in ("store", "valid_split"):
            mine, other = (getattr(plan.configs[one.name].data, name) for one in (first, arm))
            if mine != other:
                raise UserError(
                    f"arm {arm.name!r}: data.{name}={other}, but {mine} in {first.name!r}: arms are compared on the "
                    "same held-out documents; set it in base"
                )


def training_settings(config: Config) -> dict[str, Any]:
    """What decides what a run becomes, whatever its seed; sampling and evaluation may change afterwards."""
    values = config_to_dict(config)
    for section in ("sampling", "evaluation"):
        del values[section]
    del values["train"]["seed"]
    values["data"]["store"] = str(Path(values["data"]["store"]).absolute())
    return values


_SCORES = "(token_accuracy|tokens_aligned|token_f1|exact_match|bleu|reencoded_cosine|right_length)"
_NAMES = (
    r"(text_bound|bits_per_byte|bits_per_character|latent_bound)/(right|shuffled|none)",
    r"calibration/(right|shuffled|none)/(equal_width|equal_mass)",
    r"(text_gain|latent_gain)/(shuffled|none)",
    r"decode/(given|modelled)/(?P<steps>\d+)/" + _SCORES,
    r"checked/(?P<steps>\d+)/[a-z_]+/-?[\d.e+-]+/\d+/\d+/(" + _SCORES + r"|passes)",
    r"round_trip/latent/(own|encoder)",
    r"round_trip/text/" + _SCORES,
    r"t2l/(cosine|stranger_cosine|retrieval_at_\d+)",
    r"generated/(agreement/(own|encoder)|memorised_(whole|inside)|repeated_\d+|self_bleu)",
)
"""Of everything that an evaluation as a plan may ask for it measures."""
_EXAMPLES = (
    "text_bound/right",
    "text_gain/shuffled",
    "decode/given/{steps}/token_accuracy",
    "decode/given/{steps}/exact_match",
    "latent_bound/right",
    "t2l/cosine",
    "t2l/retrieval_at_1",
    "round_trip/text/token_accuracy",
    "generated/agreement/own",
    "generated/repeated_1",
)
"""The default columns, where some arm has them."""


def default_names(measured: Iterable[str], steps: Sequence[int]) -> list[str]:
    """What text and latent sides are judged by, and the ways to decode that were asked for."""
    known = list(dict.fromkeys(measured))
    main = [name.format(steps=max(steps)) for name in _EXAMPLES]
    ways = [name for name in known if re.fullmatch(r"checked/.*/token_accuracy", name)]
    return [name for name in [*main, *ways] if name in known]


def is_known(name: str, steps: Sequence[int]) -> bool:
    """Whether an evaluation at these numbers of steps can have a quantity of this name."""
    for pattern in _NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return "steps" not in match.groupdict() or int(match["steps"]) in steps
    return False


def check_names(names: Any, steps: Sequence[int]) -> None:
    """Reject columns that no evaluation has."""
    if not names or misfit(list[str], names, "quantities"):
        raise UserError("quantities: a list of names is needed, such as [text_bound/right, t2l/cosine]")
    examples = [name.format(steps=max(steps)) for name in _EXAMPLES]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"quantities: {name} is there twice; leave one out")
        if not is_known(name, steps):
            near = difflib.get_close_matches(name, examples, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"names are such as {', '.join(examples[:4])}"
            raise UserError(f"quantities: {name}: nothing of this name is measured; {hint}")
