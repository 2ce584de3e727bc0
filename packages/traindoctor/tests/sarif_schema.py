"""The part of the SARIF 2.1.0 schema that a report of findings can touch, and a reader that holds a report to it.

Taken from the specification (OASIS, sections 3.13 to 3.52): which properties an object may and must have, and what each
may hold. The schema forbids every other property.
"""

import re
from typing import Any
from urllib.parse import urlsplit

_TEXT = {"text": str, "id": str, "markdown": str, "arguments": list}
_LEVELS = {"none", "note", "warning", "error"}
OBJECTS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "log": ({"version", "runs"}, {"$schema": "uri", "version": {"2.1.0"}, "runs": ["run"]}),
    "run": (
        {"tool"},
        {"tool": "tool", "results": ["result"], "columnKind": {"utf16CodeUnits", "unicodeCodePoints"}},
    ),
    "tool": ({"driver"}, {"driver": "component", "extensions": ["component"]}),
    "component": ({"name"}, {"name": str, "version": str, "informationUri": "uri", "rules": ["descriptor"]}),
    "descriptor": (
        {"id"},
        {
            "id": str,
            "name": str,
            "shortDescription": "text",
            "fullDescription": "text",
            "help": "text",
            "helpUri": "uri",
            "defaultConfiguration": "configuration",
        },
    ),
    "configuration": (set(), {"level": _LEVELS, "enabled": bool, "rank": float}),
    "text": ({"text"}, {"text": str, "markdown": str}),
    "message": (set(), _TEXT),
    "result": (
        {"message"},
        {
            "ruleId": str,
            "ruleIndex": "index",
            "level": _LEVELS,
            "message": "message",
            "locations": ["location"],
            "fixes": ["fix"],
        },
    ),
    "fix": ({"artifactChanges"}, {"description": "message", "artifactChanges": ["change"]}),
    "change": (
        {"artifactLocation", "replacements"},
        {"artifactLocation": "artifact", "replacements": ["replacement"]},
    ),
    "replacement": ({"deletedRegion"}, {"deletedRegion": "region", "insertedContent": "content"}),
    "content": (set(), {"text": str}),
    "location": (set(), {"physicalLocation": "physical", "message": "message"}),
    "physical": ({"artifactLocation"}, {"artifactLocation": "artifact", "region": "region"}),
    "artifact": (set(), {"uri": "reference", "uriBaseId": str, "index": "index"}),
    "region": (
        set(),
        {"startLine": "count", "startColumn": "count", "endLine": "count", "endColumn": "count"},
    ),
}
"""Name -> required properties, allowed properties with their kind."""

_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")


def problems(value: Any, kind: Any = "log", place: str = "$") -> list[str]:
    """What a report gets wrong; empty where it keeps to the schema."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{place}: not an array"]
        return [p for number, item in enumerate(value) for p in problems(item, kind[0], f"{place}[{number}]")]
    if isinstance(kind, set):
        return [] if value in kind else [f"{place}: {value!r} is none of {sorted(kind)}"]
    if isinstance(kind, type):
        return [] if isinstance(value, kind) else [f"{place}: {value!r} is no {kind.__name__}"]
    if kind in ("count", "index"):
        good = isinstance(value, int) and value >= (1 if kind == "count" else -1)
        return [] if good else [f"{place}: {value!r} is no {kind}"]
    if kind in ("uri", "reference"):
        return _uri_problems(value, kind, place)
    return _object_problems(value, kind, place)


def _uri_problems(value: Any, kind: str, place: str) -> list[str]:
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        return [f"{place}: {value!r} is no URI reference"]
    return [f"{place}: {value!r} has no scheme"] if kind == "uri" and not urlsplit(value).scheme else []


def _object_problems(value: Any, kind: str, place: str) -> list[str]:
    required, allowed = OBJECTS[kind]
    if not isinstance(value, dict):
        return [f"{place}: not an object"]
    found = [f"{place}: {name} is missing" for name in sorted(required - value.keys())]
    found += [f"{place}: {name} is not allowed" for name in sorted(value.keys() - allowed.keys())]
    if kind == "message" and not {"text", "id"} & value.keys():
        found.append(f"{place}: neither text nor id")
    for name in value.keys() & allowed.keys():
        found += problems(value[name], allowed[name], f"{place}.{name}")
    return found
