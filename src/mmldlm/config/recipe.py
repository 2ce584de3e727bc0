"""Recipes: a YAML file plus `section.key=value` words become a checked `Config`.

Unknown settings are rejected with their nearest match, and all problems are reported together. Values of a recipe and
of words may refer to other settings (`${name}`) and to environment variables (`${oc.env:NAME}`, with a default
`${oc.env:NAME,default}`). Saved settings, which come with runs and exports, may not: they could read the environment of
whoever loads them.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MappingNode, Node, SafeLoader, ScalarNode, YAMLError, compose

from mmldlm.config import MODES, Config, find_problems
from mmldlm.config.old_settings import explain_old, flatten, is_old, nearest_old, old_settings_message
from mmldlm.errors import SettingsError, UserError, first_line
from mmldlm.reports import counted

_RECIPE = "a recipe is a mapping of sections, such as 'data:' and 'model:'"

SAVED = "the saved settings"
MOST_BYTES, MOST_VALUES, LARGEST, DEEPEST = 2**20, 50_000, 2**53, 20
"""Of a settings file, of the values in it with aliases written out, and of a whole number."""
MOST_PROBLEMS = 8
"""That one message names."""
_PLAIN_LISTS = {
    "list[int]": "a list of whole numbers is needed, such as [1, 2]",
    "list[float]": "a list of numbers is needed, such as [1, 1.5]",
    "list[str]": "a list of words is needed, such as [one, two]",
}
_TROUBLE = (OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError)
"""What OmegaConf raises for values of odd kinds."""


def list_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    folder = Path(str(files("mmldlm") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(recipe: str, overrides: list[str] | None = None, *, said_in: str = "command line") -> Config:
    """A recipe by name or file, with settings changed by `section.key=value`. All problems are reported together.

    `said_in` is what a message calls the place of the changes.
    """
    path = find_recipe(recipe)
    values = read_mapping(path, _RECIPE)
    if is_old(values):
        raise UserError(old_settings_message(values, str(path)))
    return _build(values, overrides or [], source=str(path), said_in=said_in)


def make_config(
    recipe: str | Path | Config | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Config:
    """A config from a recipe's name or file, from settings, or from a nested mapping, with some settings changed.

    `overrides` are `{"section.key": value}` or words `section.key=value`.
    """
    words = override_words(overrides)
    if isinstance(recipe, str | Path):
        return load_recipe(str(recipe), words, said_in="overrides")
    if not isinstance(recipe, Config | Mapping):
        raise UserError(f"recipe={recipe!r}: a name, a file, a Config or a mapping is needed")
    values = config_to_dict(recipe) if isinstance(recipe, Config) else dict(recipe)
    return _build(values, words, source="the recipe", said_in="overrides")


def override_words(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as words `section.key=value`, as the command line has them."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def config_from_dict(values: dict[str, Any]) -> Config:
    """A config from plain nested values, as checkpoints and exports carry them."""
    return _build(values, [], source=SAVED)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain nested values; a checkpoint takes them while the run waits, so not by way of OmegaConf."""
    return asdict(config)


def config_to_yaml(config: Config) -> str:
    """The whole config as a recipe."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by name or path."""
    known = list_recipes()
    if recipe in known:
        return known[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    near = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"recipe {recipe}: no such file, and no recipe of that name; {hint}recipes are {', '.join(known)}"
    )


def read_mapping(path: Path, expected: str) -> dict[str, Any]:
    """A YAML file that holds a mapping; `expected` names its content, for the error message."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{path}: has more than {MOST_BYTES} bytes, which no settings need; {expected}")
        if _num_values(compose(content, Loader=SafeLoader), {}) > MOST_VALUES:
            raise UserError(f"{path}: its aliases stand for more than {MOST_VALUES} values; {expected}")
        loaded = OmegaConf.to_container(OmegaConf.load(io.BytesIO(content)))  # type: ignore[arg-type]
    except RecursionError as error:
        raise UserError(f"{path}: is nested too deeply; {expected}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {expected}") from error
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: {expected}")
    return {str(key): value for key, value in loaded.items()}


def _num_values(node: Node | None, known: dict[int, int]) -> int:
    """How many values a document has with all aliases written out; one that contains itself has no end."""
    if node is None or isinstance(node, ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1
        pairs = node.value if isinstance(node, MappingNode) else ((item,) for item in node.value)
        known[id(node)] = 1 + sum(_num_values(part, known) for pair in pairs for part in pair)
    return known[id(node)]


def _build(
    values: dict[str, Any], overrides: list[str], *, source: str, said_in: str = "command line"
) -> Config:
    config = OmegaConf.structured(Config)
    problems: list[str] = []
    try:
        leaves = flatten(_complete_modes(values))
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply; {_RECIPE}") from error
    for key, value in leaves.items():
        problems += _set(config, key, value, source)
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(f"{word[:80]!r}: settings are written section.key=value")
            continue
        parsed = _parse(value)
        if isinstance(parsed, str) and value.startswith(("{", "[")) and _kind(key) != "str":
            problems.append(f"{word[:80]}: no list or mapping; is a bracket not closed, or a quote missing?")
            continue
        for name, part in _spread(key, parsed):
            problems += _set(config, name, part, said_in)
    unresolved = [problem for key in setting_names() for problem in _unresolved(config, key)]
    if not unresolved:
        try:
            built = cast(Config, OmegaConf.to_object(config))
        except _TROUBLE as error:
            raise UserError(f"{source}: {_first_line(error)}") from error
        problems += find_problems(built)
        if not problems:
            return built
    listed = list(dict.fromkeys([*problems, *unresolved]))
    more = (
        [f"and {counted(len(listed) - MOST_PROBLEMS, 'more problem')}"] if len(listed) > MOST_PROBLEMS else []
    )
    raise SettingsError(*listed[:MOST_PROBLEMS], *more)


def _unresolved(config: DictConfig, key: str) -> list[str]:
    """The problem with a setting that is `???`, or refers to something that does not exist."""
    try:
        value = OmegaConf.select(config, key, throw_on_missing=True)
        if isinstance(value, DictConfig | ListConfig):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        return [f"{key}=???: a value is needed; set it in the recipe, or add {key}=VALUE"]
    except _TROUBLE as error:
        written = _as_written(config, key)
        unset = [name for name in re.findall(r"oc\.env:\s*([^},\s]+)", written) if name not in os.environ]
        reason = f"the environment variable {unset[0]} is not set" if unset else _first_line(error)
        remedy = f"export {unset[0]}, or " if unset else ""
        return [f"{key}={written}: {reason}; {remedy}add {key}=VALUE"]
    return []


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply"
    return first_line(error)[:200]


def _as_written(config: DictConfig, key: str) -> str:
    """The value of a setting before anything that it refers to is put in."""
    section, _, name = key.rpartition(".")
    values = OmegaConf.to_container(OmegaConf.select(config, section) if section else config, resolve=False)
    return str(cast(dict[str, Any], values)[name])


def _complete_modes(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe that names some modes means those alone."""
    corruption = values.get("corruption")
    if isinstance(corruption, dict) and isinstance(corruption.get("mode_weights"), dict):
        weights = dict.fromkeys(MODES, 0.0) | corruption["mode_weights"]
        return values | {"corruption": corruption | {"mode_weights": weights}}
    return values


def _spread(key: str, value: Any) -> list[tuple[str, Any]]:
    """The settings of one word: several where a section is given as a mapping, as a recipe does."""
    is_section = any(name.startswith(f"{key}.") for name in setting_names())
    if not (is_section and isinstance(value, dict) and value):
        return [(key, value)]
    for part in reversed(key.split(".")):
        value = {part: value}
    return list(flatten(_complete_modes(value)).items())


def _parse(value: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={value}"]))["x"]  # type: ignore[index,call-overload]
    except (YAMLError, *_TROUBLE):
        return value


def _set(config: DictConfig, key: str, value: Any, source: str) -> list[str]:
    if key not in known_settings():
        return [f"{source}: {_unknown(key)}"]
    if problem := _unusable(value, source):
        shown = "" if "nested" in problem else f"={str(value)[:80]}"  # too deep to be printed
        return [f"{source}: {key}{shown}: {problem}"]
    if isinstance(value, bool) and "off" in known_settings()[key].metadata.get("allowed", ()):
        value = "on" if value else "off"  # YAML takes these words for truth values
    if isinstance(value, float) and value.is_integer() and _kind(key) == "int":
        value = int(value)  # 1e3
    try:
        if (
            isinstance(value, list)
            and _kind(key) in _PLAIN_LISTS
            and any(isinstance(x, list | dict) for x in value)
        ):
            raise TypeError("a list inside a list")
        OmegaConf.update(config, key, value)
    except _TROUBLE as error:
        reason = _kind_needed(key) or _first_line(error)
        return [f"{source}: {key}={str(value)[:80]}: {reason}"]
    return []


def _unusable(value: Any, source: str, depth: int = 0) -> str | None:
    """What is wrong with a value, whatever the setting: numbers without measure, references in saved settings."""
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            return f"lists and tables are nested at most {DEEPEST} deep"
        parts = value.values() if isinstance(value, dict) else value
        return next((problem for part in parts if (problem := _unusable(part, source, depth + 1))), None)
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"whole numbers are at most {LARGEST}"
    if isinstance(value, float) and value.is_integer() and abs(value) > LARGEST:
        return f"numbers are at most {LARGEST}"
    if isinstance(value, str) and "${" in value and source == SAVED:
        return "saved settings hold plain values and no references; only a recipe of your own may refer to others"
    return None


def _kind(key: str) -> str | None:
    """Type of a setting, null left out; None where there is no such setting."""
    return str(known_settings()[key].type).partition(" | ")[0] if key in known_settings() else None


def _kind_needed(key: str) -> str | None:
    """Which kind of value a setting takes; None where a list of sections makes that a longer story."""
    kind, _, optional = str(known_settings()[key].type).partition(" | ")
    words = {
        "int": "a whole number is needed",
        "float": "a number is needed",
        "bool": "true or false is needed",
        "str": "a word is needed",
    } | _PLAIN_LISTS
    return words[kind] + (", or null" if optional else "") if kind in words else None


def _unknown(key: str) -> str:
    names, old = setting_names(), explain_old(key)
    if inside := [name for name in names if name.startswith(f"{key}.")]:
        return f"{key} is a section; set its keys, such as {inside[0]}=..."
    if old is not None:
        return f"unknown setting {key}; {old}"
    sections = dict.fromkeys(name.split(".")[0] for name in names if "." in name)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    last = key.rsplit(".", 1)[-1]
    same = [name for name in names if name.rsplit(".", 1)[-1] == last]
    if not same and (old := explain_old(key, by_last_name=True)):
        return f"unknown setting {key}; {old}"
    if not same and key.split(".")[0] not in sections and (old_key := nearest_old(key)):
        return f"unknown setting {key}; did you mean {old_key}? That is {explain_old(old_key)}"
    hint = same[0] if same else (near[0] if near else None)
    remedy = f"did you mean {hint}?" if hint else f"sections are {', '.join(sections)}"
    if same and "." not in key and explain_old(key, by_last_name=True):
        remedy += " 'mmldlm migrate' translates settings of the research code"
    return f"unknown setting {key}; {remedy}"


@cache
def known_settings() -> dict[str, Field[Any]]:
    """The fields of all settings by their dotted names."""
    return _fields_in(Config(), "")


def _fields_in(section: Any, prefix: str) -> dict[str, Field[Any]]:
    known: dict[str, Field[Any]] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        known |= (
            _fields_in(value, f"{prefix}{item.name}.") if is_dataclass(value) else {prefix + item.name: item}
        )
    return known


def setting_names() -> tuple[str, ...]:
    """Dotted names of all settings."""
    return tuple(known_settings())
