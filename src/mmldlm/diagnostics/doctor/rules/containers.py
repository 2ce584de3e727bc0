"""Containers: shared memory, signals, pinned images."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from mmldlm.diagnostics.doctor.line_files import DockerFile
from mmldlm.diagnostics.doctor.registry import Rule, rule
from mmldlm.diagnostics.doctor.shell_file import ShellFile
from mmldlm.diagnostics.doctor.types import Finding, Kind, Severity
from mmldlm.diagnostics.doctor.yaml_file import YamlFile


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


@rule(
    Kind.DOCKERFILE,
    code="DKR002",
    name="image-without-a-version",
    severity=Severity.WARNING,
    summary="The base image has no version",
    why="`latest` changes under your feet: the same Dockerfile builds another CUDA and another PyTorch next month.",
    effect="Qualitative: results cannot be reproduced.",
    source="Docker docs, building best practices (pin base image versions)",
    remedy="A tag or digest.",
    bad="FROM pytorch/pytorch:latest",
    good="FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime",
)
def unpinned_image(file: DockerFile, about: Rule) -> Iterator[Finding]:
    stages: set[str] = set()
    for instruction in file.instructions:
        if instruction.name != "FROM":
            continue
        words = [word for word in file.body(instruction).split() if not word.startswith("--")]
        image = words[0] if words else ""
        if len(words) > 2 and words[1].lower() == "as":
            stages.add(words[2])
        if "$" in image or image in stages or image == "scratch" or "@" in image:
            continue
        name = image.rsplit("/", 1)[-1]
        if ":" not in name or name.endswith(":latest"):
            message = f"{image} has no version; the next build may hold another CUDA and PyTorch"
            yield about.at(file.path, file.span(instruction.start, instruction.end), message)


@rule(
    Kind.DOCKERFILE,
    code="DKR003",
    name="torch-without-a-version",
    severity=Severity.INFO,
    summary="pip installs torch without a version",
    why="The next build gets another release, perhaps for another CUDA.",
    effect="Qualitative: results cannot be reproduced.",
    source="pip docs, repeatable installs",
    remedy="torch==2.11.0, or a constraints file.",
    bad="RUN pip install torch",
    good="RUN pip install torch==2.11.0",
)
def unpinned_torch(file: DockerFile, about: Rule) -> Iterator[Finding]:
    for instruction in file.instructions:
        body = file.body(instruction)
        if (
            instruction.name == "RUN"
            and re.search(r"\bpip3?\s+install\b", body)
            and not re.search(r"\s-c\s|--constraint", body)
        ):
            match = re.search(r"\bpip3?\s+install\b[^;&|]*?(?<=\s)(torch)(?=\s|$)", body)
            if match:
                start = instruction.body_start + match.start(1)
                yield about.at(
                    file.path,
                    file.span(start, start + 5),
                    "torch without a version; the next build gets another",
                )


@rule(
    Kind.DOCKERFILE,
    code="DKR004",
    name="signals-do-not-arrive",
    severity=Severity.WARNING,
    summary="CMD or ENTRYPOINT in shell form",
    why="In shell form PID 1 is /bin/sh, which does not pass SIGTERM on: at preemption the trainer is killed "
    "without saving.",
    effect="Documented by Docker: 'the executable … will not receive Unix signals'.",
    source="Dockerfile reference, shell and exec form",
    remedy='Exec form: CMD ["python", "train.py"], or `exec` in front.',
    bad="CMD python train.py",
    good='CMD ["python", "train.py"]',
)
def shell_form(file: DockerFile, about: Rule) -> Iterator[Finding]:
    for instruction in file.instructions:
        body = file.body(instruction).strip()
        if (
            (
                instruction.name in ("CMD", "ENTRYPOINT")
                and not body.startswith("[")
                and not body.startswith("exec ")
            )
            and re.match(r"(python3?|torchrun|accelerate|deepspeed)\b", body)
            and not re.search(r"&&|\||;", body)
        ):
            message = f"{instruction.name} in shell form: SIGTERM never reaches the program"
            yield about.at(file.path, file.span(instruction.start, instruction.end), message)
