"""Settings: keys that no code reads, keys that contradict each other, values that are not what they look like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import yaml

from traindoctor.programs import Program, Project
from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Fix, Kind, Setting, Severity, TextEdit
from traindoctor.yaml_file import YamlFile

_ACCUMULATION = re.compile(r"accum", re.IGNORECASE)
_FOLDERS = {
    "conf",
    "confs",
    "config",
    "configs",
    "cfg",
    "cfgs",
    "settings",
    "recipes",
    "experiments",
    "hparams",
}
_FOREIGN = re.compile(
    r"(^|/)\.|docker-compose|(^|/)compose\.|environment\.ya?ml|mkdocs|codecov|(^|/)action\.ya?ml|(^|/)(templates?|workflows|tests?)/|"
    r"accelerate|deepspeed|(^|/)(ci|helm|charts|k8s|kubernetes)/|readthedocs|conda|"
    # what was written down about a run that was
    r"(^|/)\.?hydra/(config|hydra|overrides)\.ya?ml$|(^|/)(outputs|multirun|runs|wandb|lightning_logs|mlruns)/"
)
_OF_DEEPSPEED = {"fp16", "bf16", "amp", "zero_optimization", "activation_checkpointing", "flops_profiler"}
"""Sections that DeepSpeed reads itself, however they reach it."""
_MIN_READ = 0.6
"""A file of which less is read belongs to something else than this code."""


def _is_settings_file(path: str, keys: set[str], readers: list[Program]) -> bool:
    if _FOREIGN.search(path):
        return False
    place = PurePosixPath(path)
    in_folder = any(part.lower() in _FOLDERS for part in place.parts[:-1])
    if in_folder or keys & {"defaults", "hydra"} or place.stem in ("config", "conf", "settings", "params"):
        return True
    return any(reader.mentions(place.stem) or reader.mentions(place.name) for reader in readers)


def _settings_by_file(project: Project) -> dict[str, list[Setting]]:
    by_file: dict[str, list[Setting]] = {}
    for setting in project.settings:
        by_file.setdefault(setting.path, []).append(setting)
    return by_file


def _unread(project: Project) -> Iterator[tuple[Setting, list[Program]]]:
    """Settings with the programs that load their file and never mention their name; conservative on purpose.

    A setting that one program reads counts as read by the others, except accumulation, which every trainer must read.
    """
    interpolated = {
        word[13:]
        for part in project.parts
        if part.settings
        for word in part.words
        if word.startswith("interpolated:")
    }
    last_parts = {key.rsplit(".", 1)[-1] for key in interpolated}
    for path, settings in _settings_by_file(project).items():
        readers = [p for p in project.programs_of(path) if p.features & {"omegaconf", "yaml"}]
        top = {setting.key.split(".", 1)[0] for setting in settings}
        if not readers or not _is_settings_file(path, top, readers):
            continue
        leaves = [
            setting for setting in _leaves(settings) if setting.key.rsplit(".", 1)[-1] not in last_parts
        ]
        chosen = {setting.value for setting in settings}
        ignored = {s.key: [r for r in readers if not _reads(r, s.key, chosen)] for s in leaves}
        missing = [setting for setting in leaves if len(ignored[setting.key]) == len(readers)]
        if leaves and 1 - len(missing) / len(leaves) >= _MIN_READ:
            yield from ((setting, readers) for setting in missing)
        for setting in leaves:
            trainers = [r for r in ignored[setting.key] if "training" in r.features and _names(r, path)]
            if trainers and setting not in missing and _is_accumulation(setting):
                yield setting, trainers


def _leaves(settings: list[Setting]) -> list[Setting]:
    """Settings that hold a value and are not built into an object by Hydra."""
    built = {
        s.key.rsplit(".", 1)[0]
        for s in settings
        if re.search(r"\._[a-z]+_$", s.key)
        or (s.key.endswith(".class") and "." in s.value)  # Hydra before 1.0
    }
    return [
        setting
        for setting in settings
        if setting.value != "{"
        and setting.key.split(".", 1)[0] not in ("hydra", "defaults")
        and not setting.key.rsplit(".", 1)[-1].startswith("_")
        and not any(part.isdigit() for part in setting.key.split("."))
        and not any(setting.key.startswith(prefix + ".") for prefix in built)
    ]


def _reads(program: Program, key: str, chosen: set[str]) -> bool:
    """Whether the code of a program mentions a setting, or passes on a section around it.

    `chosen`: the values in its file; one of them may name the section that is passed on.
    """
    parts = key.split(".")
    mentioned = program.mentions(parts[-1]) or program.mentions(parts[-1].replace("-", "_"))
    around = set(parts[:-1])
    deepspeed = "deepspeed" in program.features and around & _OF_DEEPSPEED
    picked = "*" in program.spread and around & chosen
    return bool(mentioned or around & program.spread or deepspeed or picked)


def _names(program: Program, path: str) -> bool:
    """Whether a program names this settings file itself, so that it certainly loads it."""
    name = path.rsplit("/", 1)[-1]
    return any(word.rsplit("/", 1)[-1] == name for word in program.configs)


def _is_accumulation(setting: Setting) -> bool:
    return bool(_ACCUMULATION.search(setting.key.rsplit(".", 1)[-1]))


def _is_active(setting: Setting) -> bool:
    """Whether an accumulation asks for more than one micro-batch."""
    return setting.value not in ("1", "null", "~", "", "false", "False")


@rule(
    Kind.YAML,
    project=True,
    code="CFG001",
    name="setting-nobody-reads",
    severity=Severity.WARNING,
    summary="A setting that no code in the project reads",
    why="Changing it has no effect, and nothing reports this. Half of a tuning campaign can be spent on such a key.",
    effect="Conservative: the name occurs in no Python file of a program that loads the file, neither as attribute, "
    "string, argument nor "
    "keyword, and its section is not passed on whole (**cfg.section, instantiate, items()).",
    source="This project's audit of the original MM-LDLM code (docs/accuracy.md)",
    remedy="Remove it, or read it.",
    bad="optimizer:\n  use_fused: true   # nothing reads use_fused",
    good="optimizer:\n  lr: 1e-4",
)
def nobody_reads(project: Project, about: Rule) -> Iterator[Finding]:
    for setting, programs in _unread(project):
        if not _is_accumulation(setting):
            yield about.at(setting.path, setting.span, f"{setting.key} is read by no code {_of(programs)}")


def _of(programs: list[Program]) -> str:
    """`of train.py`, for the message."""
    trainers_first = sorted(
        programs, key=lambda program: "training" not in program.features or program.evaluates
    )
    entries = [program.entry for program in trainers_first if program.entry]
    return f"of {' and '.join(entries)}" if 0 < len(entries) < 3 else "in this project"


@rule(
    Kind.YAML,
    project=True,
    code="CFG002",
    name="accumulation-nobody-reads",
    severity=Severity.ERROR,
    summary="Gradient accumulation is set, but no code reads it",
    why="The effective batch is smaller than the settings say, while the learning rate is often scaled as if "
    "it were not.",
    effect="A different experiment from the one that is written down.",
    source="This project's audit of the original MM-LDLM code (docs/accuracy.md)",
    remedy="Implement it (divide the loss, step every n micro-batches, no_sync in between) or remove the key.",
    bad="training:\n  gradient_accumulation_steps: 4",
    good="for micro in range(cfg.training.gradient_accumulation_steps): ...",
)
def accumulation_unread(project: Project, about: Rule) -> Iterator[Finding]:
    for setting, programs in _unread(project):
        if _is_accumulation(setting):
            message = (
                f"{setting.key}={setting.value} is read by no code {_of(programs)}: "
                "the effective batch is not what it says"
            )
            severity = None if _is_active(setting) else Severity.WARNING
            yield about.at(setting.path, setting.span, message, severity=severity)


_NAMESPACES = {
    "args",
    "opt",
    "opts",
    "options",
    "hparams",
    "config",
    "cfg",
    "flags",
    "FLAGS",
    "params",
    "namespace",
    "parsed",
}


@rule(
    Kind.PYTHON,
    project=True,
    code="CFG003",
    name="option-nobody-reads",
    severity=Severity.WARNING,
    summary="A command-line option that no code reads",
    why="Users set it and nothing happens.",
    effect="Conservative: silent wherever the namespace is used as a whole (vars(args), args.__dict__).",
    source="Python docs, argparse",
    remedy="Remove it, or read it.",
    bad='parser.add_argument("--grad-clip", type=float)  # args.grad_clip occurs nowhere',
    good="clip_grad_norm_(params, args.grad_clip)",
)
def option_unread(project: Project, about: Rule) -> Iterator[Finding]:
    for option in (option for part in project.parts for option in part.options):
        programs = project.programs_of(option.path)
        if any(program.spread & _NAMESPACES or program.mentions(option.key) for program in programs):
            continue
        if (
            option.key.isidentifier() and option.key != "local_rank"
        ):  # the launcher gives it, whoever reads it
            severity = Severity.ERROR if _ACCUMULATION.search(option.key) else None
            message = f"{option.value} is read by no code {_of(programs)}"
            yield about.at(option.path, option.span, message, severity=severity)


@rule(
    Kind.YAML,
    code="CFG004",
    name="key-given-twice",
    severity=Severity.ERROR,
    summary="A key occurs twice in one mapping",
    why="YAML loaders silently keep the last value (Hydra's loader rejects the file).",
    effect="The first value is ignored.",
    source="YAML 1.2, mapping keys are unique; PyYAML keeps the last",
    remedy="Keep one.",
    bad="lr: 1.0e-4\nlr: 5.0e-5",
    good="lr: 5.0e-5",
)
def key_twice(file: YamlFile, about: Rule) -> Iterator[Finding]:
    for mapping, path in file.mappings():
        seen: dict[str, int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                name = f"{path}.{key.value}" if path else key.value
                message = f"{name} occurs twice; the value on line {seen[key.value]} is ignored"
                yield about.at(file.path, file.span(key), message)
            seen[key.value] = key.start_mark.line + 1


_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d+")
_YAML_FLOAT = re.compile(r"[-+]?\d[\d_]*\.[\d_]*[eE][-+]\d+")


@rule(
    Kind.YAML,
    code="CFG005",
    name="number-read-as-text",
    severity=Severity.ERROR,
    summary="1e-4 is a string for PyYAML",
    why="YAML 1.1 wants a dot and a sign: PyYAML reads `1e-4` as the text '1e-4'. The optimizer then fails, "
    "or a comparison "
    "silently does something else. OmegaConf and Hydra read it as a number; projects that use them are not reported.",
    effect="Checked with PyYAML 6.0: safe_load('lr: 1e-4') gives a str.",
    source="YAML 1.1 float type; PyYAML's resolver",
    fix="unsafe",
    bad="lr: 1e-4",
    good="lr: 1.0e-4",
)
def number_as_text(file: YamlFile, about: Rule) -> Iterator[Finding]:
    for entry in file.entries:
        value = entry.scalar
        if (
            value is None
            or entry.is_quoted
            or not _SCIENTIFIC.fullmatch(value)
            or _YAML_FLOAT.fullmatch(value)
        ):
            continue
        mantissa, exponent = re.split("[eE]", value)
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        exact = f"{mantissa}e{exponent if exponent[0] in '+-' else '+' + exponent}"
        fix = Fix(f"write {exact}", False, text_edits=(TextEdit(*file.range(entry.value), exact),))
        message = f"{entry.key}: {value} is text for PyYAML, not a number; write {exact}"
        yield about.at(
            file.path,
            file.span(entry.value),
            message,
            fix,
            needs=["yaml"],
            nowhere=["omegaconf", f"float:{entry.name.lower()}"],  # read as a number, or made one
        )


@rule(
    Kind.SHELL,
    project=True,
    code="CFG006",
    name="override-of-unknown-section",
    severity=Severity.ERROR,
    summary="A command line overrides a section that no settings file has",
    why="Hydra rejects the run ('Could not override'); a loader without checks ignores the word. Mostly a "
    "typing error.",
    effect="The run does not start, or starts with another value.",
    source="Hydra docs, override grammar",
    remedy="Correct the name; +section.key=value adds a new one.",
    bad="python train.py ptimizer.lr=1e-5",
    good="python train.py optimizer.lr=1e-5",
)
def unknown_section(project: Project, about: Rule) -> Iterator[Finding]:
    whole = project.whole
    if "omegaconf" not in whole.features or not project.settings:
        return
    known = {setting.key.split(".", 1)[0] for setting in project.settings}
    known |= {part for setting in project.settings for part in PurePosixPath(setting.path).parts[:-1]}
    # Hydra without a ConfigStore knows its YAML files only; elsewhere a name in the code may be a section.
    only_files = whole.mentions("hydra") and not whole.mentions("ConfigStore")
    for override in (override for part in project.parts for override in part.overrides):
        section = override.key.split(".", 1)[0]
        if section in known or section == "hydra" or not (only_files or not whole.mentions(section)):
            continue
        near = difflib.get_close_matches(section, known, 1, cutoff=0.8) or _shortened(section, known)
        if near:
            message = f"no settings file has a section {section!r}; did you mean {near[0]!r}?"
            yield about.at(override.path, override.span, message)


def _shortened(section: str, known: set[str]) -> list[str]:
    """Names that begin like this one: `optim` for `optimizer`."""
    pairs = [(name, *sorted((name, section), key=len)) for name in sorted(known)]
    return [name for name, short, long in pairs if len(short) >= 4 and long.startswith(short)]


_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "width", "dim")
_HEADS = ("n_heads", "num_heads", "n_head", "num_attention_heads", "heads", "nhead")
_HEAD_WIDTHS = ("head_dim", "dim_head", "head_width", "d_head", "head_size")


@rule(
    Kind.YAML,
    code="CFG007",
    name="width-not-divisible-by-heads",
    severity=Severity.WARNING,
    summary="The width is no multiple of the number of heads",
    why="Attention splits the width evenly. Either the model rejects these settings, or it ignores one of them.",
    effect="An error at start, or a setting that does nothing.",
    source="PyTorch docs, torch.nn.MultiheadAttention (embed_dim must be divisible by num_heads)",
    remedy="Choose a divisor, or give the head width.",
    bad="hidden_size: 1024\nn_heads: 24",
    good="hidden_size: 1024\nn_heads: 16",
)
def not_divisible(file: YamlFile, about: Rule) -> Iterator[Finding]:
    for mapping, path in file.mappings():
        values = {
            k.value: v
            for k, v in mapping.value
            if isinstance(k, yaml.ScalarNode) and isinstance(v, yaml.ScalarNode)
        }
        if any(name in values for name in _HEAD_WIDTHS):
            continue
        width = next((name for name in _WIDTHS if name in values and values[name].value.isdigit()), None)
        heads = next((name for name in _HEADS if name in values and values[name].value.isdigit()), None)
        if (
            width
            and heads
            and int(values[heads].value) > 0
            and int(values[width].value) % int(values[heads].value)
        ):
            where = f"{path}." if path else ""
            given = f"{where}{heads}={values[heads].value}"
            message = f"{where}{width}={values[width].value} cannot be split over {given} heads"
            yield about.at(file.path, file.span(values[heads]), message)
