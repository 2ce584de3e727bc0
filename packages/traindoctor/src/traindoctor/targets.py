"""Hydra blocks: a YAML mapping with `_target_: torch.utils.data.DataLoader` is a call, its keys are the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from traindoctor.names import canonical
from traindoctor.types import Fix, Span, TextEdit
from traindoctor.yaml_file import YamlFile

_KEYS = ("_target_", "target", "class_path")
"""Hydra's key; that of the latent-diffusion family; that of LightningCLI, whose arguments stand below `init_args`."""
_SHORT = {
    "lightning.pytorch.strategies.DDPStrategy": "DDPStrategy",
    "pytorch_lightning.strategies.DDPStrategy": "DDPStrategy",
    "lightning.fabric.strategies.DDPStrategy": "DDPStrategy",
    "pytorch_lightning.strategies.ddp.DDPStrategy": "DDPStrategy",
}
"""One name for the same strategy of several packages."""


@dataclass(frozen=True)
class Target:
    """One block: what it builds and with which arguments."""

    name: str
    """Canonical dotted name of what is built."""
    path: str
    """Dotted path of the block; the name of the file where it is the whole file."""
    anchor: yaml.ScalarNode
    """The value that names what is built."""
    arguments: yaml.MappingNode
    """The mapping that holds the arguments."""
    first: yaml.ScalarNode
    """A key of that mapping, for the column of the others."""

    def get(self, name: str) -> yaml.Node | None:
        """The value given for an argument."""
        for key, value in self.arguments.value:
            if isinstance(key, yaml.ScalarNode) and key.value == name:
                return value  # type: ignore[no-any-return]
        return None

    def scalar(self, name: str) -> str | None:
        """The value given for an argument as written, where it is a scalar."""
        value = self.get(name)
        return value.value if isinstance(value, yaml.ScalarNode) else None

    def is_true(self, name: str) -> bool:
        """Whether an argument is switched on."""
        return (self.scalar(name) or "").lower() in ("true", "yes", "on")

    def is_merged(self) -> bool:
        """Whether keys come from elsewhere: a YAML merge, or a list of defaults next to them."""
        names = {key.value for key, _ in self.arguments.value if isinstance(key, yaml.ScalarNode)}
        return bool(names & {"<<", "defaults", "_args_"})


def find_targets(file: YamlFile) -> Iterator[Target]:
    """Every block of a file that says what it builds."""
    stem = file.path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    for mapping, path in file.mappings():
        entries = {k.value: (k, v) for k, v in mapping.value if isinstance(k, yaml.ScalarNode)}
        for key in _KEYS:
            node, value = entries.get(key, (None, None))
            if node is None or not isinstance(value, yaml.ScalarNode) or "." not in value.value:
                continue
            arguments, first = mapping, node
            inner = entries.get({"class_path": "init_args", "target": "params"}.get(key, ""), (None, None))[1]
            if isinstance(inner, yaml.MappingNode) and inner.value:
                arguments, first = inner, inner.value[0][0]
            elif key == "class_path":
                continue
            name = canonical(value.value)
            yield Target(_SHORT.get(name, name), path or stem, value, arguments, first)


def set_argument(
    file: YamlFile,
    target: Target,
    name: str,
    value: str,
    *,
    safe: bool,
    unsafe_if: frozenset[str] = frozenset(),
    dropped_if: frozenset[str] = frozenset(),
) -> Fix | None:
    """Give a block `name: value`, replacing what is there; None where it cannot be written at one exact place."""
    title = f"set {name}: {value}"
    given = target.get(name)
    if given is not None:
        if not isinstance(given, yaml.ScalarNode) or given.style in ("|", ">"):
            return None
        edits = (TextEdit(*file.range(given), value),)
        return Fix(title, safe, text_edits=edits, unsafe_if=unsafe_if, dropped_if=dropped_if)
    start, column = file.range(target.first)[0], target.first.start_mark.column
    shares = any(value is target.anchor for _, value in target.arguments.value)
    behind = file.range(target.anchor)[1]
    number = target.anchor.start_mark.line + 1
    if target.arguments.flow_style:
        added = (behind, f", {name}: {value}") if shares else (start, f"{name}: {value}, ")
    elif file.source.line(target.first.start_mark.line + 1)[:column].strip(" -"):
        return None
    elif shares:
        end = file.source.offset(number, len(file.source.line(number)) + 1)
        added = (end, f"{file.source.newline}{' ' * column}{name}: {value}")
    else:  # the arguments stand in a mapping of their own
        added = (start, f"{name}: {value}{file.source.newline}{' ' * column}")
    edits = (TextEdit(added[0], added[0], added[1]),)
    return Fix(title, safe, text_edits=edits, unsafe_if=unsafe_if, dropped_if=dropped_if)


def place(file: YamlFile, target: Target) -> Span:
    """Where a block is reported: at what it builds."""
    return file.span(target.anchor)
