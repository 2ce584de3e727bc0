"""Datasets: random generators that workers share, failed reads that become data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import is_method
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.loading import LOADER_DOCS
from traindoctor.types import Finding, Kind, Severity

_GENERATORS = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random", "torch.Generator")


@rule(
    Kind.PYTHON,
    code="DAT006",
    name="workers-share-one-seed",
    severity=Severity.WARNING,
    summary="A dataset carries its own random generator into its workers",
    why="DataLoader seeds random, numpy.random and torch in each worker, but a generator object stored in "
    "the dataset is "
    "copied with its state: every worker draws the same numbers, so augmentations repeat num_workers times.",
    effect="Checked with torch 2.13: two workers return identical draws from `self.rng`, different ones from "
    "torch.rand.",
    source=f"{LOADER_DOCS}, randomness in multi-process data loading",
    remedy="Make the generator in worker_init_fn or from torch.initial_seed() on first use in the worker.",
    bad="self.rng = np.random.default_rng(0)  # in __init__, used in __getitem__",
    good="rng = np.random.default_rng([seed, index])  # in __getitem__",
)
def shared_seed(file: PythonFile, about: Rule) -> Iterator[Finding]:
    for node in file.of(ast.ClassDef):
        if not any(_is_dataset(file, base) for base in node.bases):
            continue
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        items = [methods[name] for name in ("__getitem__", "__iter__") if name in methods]
        if (
            "__init__" not in methods
            or not items
            or _knows_workers(node)
            or "worker_init_fn" in file.identifiers
        ):
            continue
        used = {
            dotted(part) for method in items for part in ast.walk(method) if isinstance(part, ast.Attribute)
        }
        for part in ast.walk(methods["__init__"]):
            if isinstance(part, ast.Assign | ast.AnnAssign) and isinstance(part.value, ast.Call):
                target = dotted(part.targets[0] if isinstance(part, ast.Assign) else part.target) or ""
                call = part.value
                if is_method(call, "manual_seed") and isinstance(call.func, ast.Attribute):
                    call = call.func.value if isinstance(call.func.value, ast.Call) else call
                made = file.resolve(call.func)
                seeded = bool(call.args or call.keywords) or made == "torch.Generator"
                if target.startswith("self.") and target in used and made in _GENERATORS and seeded:
                    message = f"{target} is copied into every worker with its state: all workers draw the same numbers"
                    yield about.at(file.path, file.span(part), message)


def _is_dataset(file: PythonFile, base: ast.expr) -> bool:
    base = base.value if isinstance(base, ast.Subscript) else base
    return (file.resolve(base) or "") in ("torch.utils.data.Dataset", "torch.utils.data.IterableDataset")


def _knows_workers(node: ast.ClassDef) -> bool:
    return any(
        isinstance(part, ast.Name | ast.Attribute)
        and (part.id if isinstance(part, ast.Name) else part.attr)
        in ("get_worker_info", "set_epoch", "initial_seed")
        for part in ast.walk(node)
    )


@rule(
    Kind.PYTHON,
    code="DAT009",
    name="load-error-becomes-data",
    severity=Severity.ERROR,
    summary="A dataset answers a failed read with zeros or noise",
    why="A missing or broken file turns into a training example. Nothing fails, the loss goes down on "
    "garbage, and nobody "
    "learns that a share of the data was never read.",
    effect="No number was measured: the model is trained on made-up examples.",
    source="This project's audit of the original MM-LDLM code (docs/accuracy.md)",
    remedy="Let the error through, or skip the example and count it in the log.",
    bad="except Exception:\n    return torch.zeros(512)",
    good="except OSError as error:\n    raise RuntimeError(f'cannot read {path}') from error",
)
def error_becomes_data(file: PythonFile, about: Rule) -> Iterator[Finding]:
    made_up = {
        f"{module}.{name}" for module in ("torch", "numpy") for name in ("zeros", "ones", "full", "empty")
    }
    made_up |= {"torch.randn", "torch.rand", "numpy.random.randn"}
    for node in file.of(ast.ExceptHandler):
        function = file.function_of(node)
        if not isinstance(function, ast.FunctionDef) or function.name not in ("__getitem__", "__iter__"):
            continue
        if any(isinstance(part, ast.Raise) for part in ast.walk(node)):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and file.resolve(part.func) in made_up:
                message = "a failed read becomes made-up data that is trained on; raise, or skip and count"
                yield about.at(file.path, file.span(part), message)
                break
