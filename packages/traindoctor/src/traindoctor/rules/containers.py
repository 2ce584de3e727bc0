"""Containers: shared memory, signals, exit codes, pinned images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from traindoctor.line_files import DockerFile, Instruction
from traindoctor.registry import Rule, rule
from traindoctor.shell_file import ShellError, ShellFile
from traindoctor.source import Source
from traindoctor.types import Finding, Kind, Severity, Span
from traindoctor.yaml_file import YamlFile


@rule(
    Kind.SHELL,
    Kind.YAML,
    code="DKR001",
    name="container-without-shared-memory",
    severity=Severity.WARNING,
    summary="A GPU container with Docker's 64 MB of shared memory",
    why="DataLoader workers hand batches over through /dev/shm. Docker gives 64 MB; a worker dies with 'Bus error'.",
    effect="Documented in PyTorch's README (use --ipc=host or --shm-size).",
    source="PyTorch README, Docker image; Docker docs, --shm-size",
    remedy="--ipc=host or --shm-size=16g; shm_size: in a compose file.",
    bad="docker run --gpus all image python train.py",
    good="docker run --gpus all --ipc=host image python train.py",
)
def no_shared_memory(file: ShellFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from _compose(file, about)
        return
    for command in file.commands:
        words = command.arguments
        if command.name not in ("docker", "podman", "nvidia-docker") or words[:1] != ["run"]:
            continue
        gpu = any(word.startswith(("--gpus", "--runtime=nvidia")) for word in words)
        shared = any(
            word.startswith(("--ipc", "--shm-size", "/dev/shm")) or "/dev/shm" in word for word in words
        )
        hidden = any(
            re.fullmatch(r"\$\{?\w*(OPTS|ARGS|FLAGS|options|args)\w*(\[@\])?\}?", word) for word in words
        )
        if gpu and not shared and not hidden:
            yield about.at(
                file.path,
                file.command_span(command),
                "64 MB of shared memory: loader workers die with 'Bus error'",
            )


def _compose(file: YamlFile, about: Rule) -> Iterator[Finding]:
    if not file.has("services"):
        return
    services = next((e.value for e in file.entries if e.key == "services"), None)
    if not isinstance(services, yaml.MappingNode):
        return
    for key, service in services.value:
        if not isinstance(service, yaml.MappingNode):
            continue
        names = {k.value for k, _ in service.value if isinstance(k, yaml.ScalarNode)}
        text = yaml.serialize(service)
        if (
            ("nvidia" in text or "gpus" in names)
            and not names & {"shm_size", "ipc", "extends"}
            and "/dev/shm" not in text
        ):
            message = f"service {key.value} has a GPU but 64 MB of shared memory; add shm_size or ipc: host"
            yield about.at(file.path, file.span(key), message)


def _script_of(file: DockerFile, instruction: Instruction) -> ShellFile | None:
    """The shell text of a CMD or ENTRYPOINT in shell form, with positions of the Dockerfile."""
    if instruction.name not in ("CMD", "ENTRYPOINT") or file.body(instruction).lstrip().startswith("["):
        return None
    try:
        return ShellFile(file.source, instruction.body_start, instruction.end)
    except ShellError:
        return None


@rule(
    Kind.DOCKERFILE,
    Kind.YAML,
    code="DKR005",
    name="container-hides-a-crash",
    severity=Severity.ERROR,
    summary="The container's command pipes training into tee and loses its exit code and signals",
    why="The shell reports the exit code of tee, so Docker, Kubernetes and restart policies see success where the "
    "trainer crashed; the shell is PID 1 and passes no SIGTERM on.",
    effect="Checked with bash 5.2: `false | tee x` exits with 0.",
    source="GNU Bash manual, Pipelines; Dockerfile reference, SHELL; Docker docs, building best practices (pipes)",
    remedy="Write to stdout and let the container's log driver keep it; or bash -o pipefail -c 'program > >(tee log)'.",
    bad="CMD python train.py 2>&1 | tee /logs/train.log",
    good='CMD ["python", "train.py"]',
)
def hidden_crash(file: DockerFile | YamlFile, about: Rule) -> Iterator[Finding]:
    for text, span in _yaml_scripts(file) if isinstance(file, YamlFile) else _docker_scripts(file):
        lost = _piped_training(text)
        if lost:
            message = f"the exit code of {lost} is lost in a pipe: a crash looks like success"
            yield about.at(file.path, span, message)


def _piped_training(text: str) -> str:
    """The name of a training program at the head of a pipe whose exit code nobody sees, or ''."""
    try:
        script = ShellFile(Source("", Kind.SHELL, b"", text, "utf-8"))
    except ShellError:
        return ""
    for pipeline in script.pipelines():
        first = pipeline[0]
        watched = "pipefail" in script.option_state(first.start) or "PIPESTATUS" in text
        if len(pipeline) > 1 and first.is_training() and not watched:
            return first.name
    return ""


def _docker_scripts(file: DockerFile) -> Iterator[tuple[str, Span]]:
    """What a shell runs when the container starts: shell form, or exec form with `bash -c`."""
    watched = False
    for instruction in file.instructions:
        body = file.body(instruction)
        if instruction.name == "FROM":
            watched = False
        elif instruction.name == "SHELL":
            watched = "pipefail" in body
        if instruction.name not in ("CMD", "ENTRYPOINT"):
            continue
        span = file.span(instruction.start, instruction.end)
        if not body.lstrip().startswith("["):
            if not watched:
                yield body, span
            continue
        try:
            words = json.loads(body)
        except ValueError:
            continue
        script = _given_to_shell(words if isinstance(words, list) else [])
        if script is not None:
            yield script, span


def _given_to_shell(words: list[Any]) -> str | None:
    """The script in `["bash", "-c", script]`, unless pipefail is switched on beside it."""
    if len(words) < 3 or not all(isinstance(word, str) for word in words):
        return None
    shell = words[0].rsplit("/", 1)[-1] in ("sh", "bash", "dash", "zsh")
    flag = next((i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
    if not shell or flag is None or flag + 1 >= len(words) or "pipefail" in words[:flag]:
        return None
    return str(words[flag + 1])


def _yaml_scripts(file: YamlFile) -> Iterator[tuple[str, Span]]:
    """Scripts of Kubernetes and compose: `command: [bash, -c]` with `args: [script]`, or all in one list."""
    for mapping, _ in file.mappings():
        given = {k.value: v for k, v in mapping.value if isinstance(k, yaml.ScalarNode)}
        command, rest = given.get("command") or given.get("entrypoint"), given.get("args")
        if not isinstance(command, yaml.SequenceNode):
            continue
        parts = [*command.value, *(rest.value if isinstance(rest, yaml.SequenceNode) else [])]
        script = _given_to_shell([part.value for part in parts])
        if script is not None:
            place = next(part for part in parts if part.value == script)
            yield script, file.span(place)
