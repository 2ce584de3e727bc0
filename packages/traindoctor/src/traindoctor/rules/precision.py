"""Mixed precision: deprecated calls, scalers, weights in half precision."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from traindoctor.expressions import argument, has_spread, is_constant, is_method, words_of
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.registry import Rule, rule
from traindoctor.rules.blocks import PURE_HALF, half_weights_asked_for
from traindoctor.rules.optimizer import picked_optimizers
from traindoctor.types import Finding, Kind, Severity
from traindoctor.yaml_file import YamlFile

AMP_DOCS = "PyTorch docs, torch.amp"
_HALF = ("torch.bfloat16", "torch.float16", "torch.half")
_ADAMS = tuple(f"torch.optim.{name}" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"))


def _autocasts(file: PythonFile) -> list[ast.Call]:
    return file.calls_of(
        "torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"
    )


def _scalers(file: PythonFile) -> list[ast.Call]:
    return file.calls_of("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")


def _autocast_dtype(file: PythonFile, call: ast.Call) -> str | None:
    position = 1 if file.resolve(call.func) in ("torch.autocast", "torch.amp.autocast") else None
    given = argument(call, "dtype", position)
    return file.resolve(file.value_of(given)) if given is not None else None


@rule(
    Kind.PYTHON,
    code="AMP002",
    name="scaler-with-bfloat16",
    severity=Severity.WARNING,
    summary="A gradient scaler although autocast runs in bfloat16",
    why="bfloat16 has the exponent range of float32, so gradients do not underflow. The scaler only adds a "
    "pass over all "
    "gradients and a host synchronisation per step, and skips steps while it looks for a scale.",
    effect="No number was measured: one unscale pass and one sync per step for nothing.",
    source=f"{AMP_DOCS}, gradient scaling; PyTorch AMP recipe",
    remedy="GradScaler(enabled=False), or none.",
    bad='scaler = GradScaler("cuda")\nwith autocast("cuda", dtype=torch.bfloat16): ...',
    good='with autocast("cuda", dtype=torch.bfloat16): ...\nloss.backward()',
)
def scaler_with_bf16(file: PythonFile, about: Rule) -> Iterator[Finding]:
    kinds = {_autocast_dtype(file, call) for call in _autocasts(file)}
    if kinds != {"torch.bfloat16"}:
        return
    for call in _scalers(file):
        if (
            argument(call, "enabled") is None
            and not has_spread(call)
            and not file.conditions(call, file.tree)
        ):
            yield about.at(
                file.path, file.span(call), "autocast runs in bfloat16, which needs no gradient scaler"
            )


@rule(
    Kind.PYTHON,
    code="AMP003",
    name="float16-without-scaler",
    severity=Severity.ERROR,
    summary="float16 autocast and backward, but no gradient scaler",
    why="Gradients below 6e-8 become 0 in float16; small ones vanish silently.",
    effect="Parameters with small gradients stop learning.",
    source=f"{AMP_DOCS}, gradient scaling",
    remedy="Use torch.amp.GradScaler, or bfloat16.",
    bad='with autocast("cuda", dtype=torch.float16):\n    loss = model(x)\nloss.backward()',
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
def fp16_without_scaler(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if not file.training_loops or any("scaler" in name.lower() for name in file.identifiers):
        return
    plain = [c for calls in file.backward_calls.values() for c in calls if not c.args]
    for call in _autocasts(file) if plain else []:
        if _is_float16(file, call) and file.loop_of(call) in file.training_loops:
            yield about.at(
                file.path, file.span(call), "float16 gradients underflow without a gradient scaler"
            )


def _is_float16(file: PythonFile, call: ast.Call) -> bool:
    """Whether autocast runs in float16, which is also what it does on a GPU when nobody says otherwise."""
    name = file.resolve(call.func)
    if argument(call, "dtype", 1 if name in ("torch.autocast", "torch.amp.autocast") else None) is not None:
        return _autocast_dtype(file, call) in ("torch.float16", "torch.half")
    if has_spread(call) or is_constant(argument(call, "enabled"), False):
        return False
    if {"set_autocast_gpu_dtype", "set_autocast_dtype"} & file.identifiers:
        return False
    return name == "torch.cuda.amp.autocast" or is_constant(argument(call, "device_type", 0), "cuda")


@rule(
    Kind.PYTHON,
    code="AMP004",
    name="clips-scaled-gradients",
    severity=Severity.ERROR,
    summary="Gradients are clipped while they still carry the loss scale",
    why="After scaler.scale(loss).backward() gradients are multiplied by the scale (65536 at first); "
    "clipping them to 1.0 "
    "before scaler.unscale_ shrinks every update by the scale.",
    effect="The clip threshold is off by the loss scale.",
    source="PyTorch AMP examples, gradient clipping",
    remedy="scaler.unscale_(optimizer) before clip_grad_norm_.",
    bad="scaler.scale(loss).backward()\nclip_grad_norm_(params, 1.0)\nscaler.step(optimizer)",
    good="scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nclip_grad_norm_(params, "
    "1.0)\nscaler.step(optimizer)",
)
def clips_scaled(file: PythonFile, about: Rule) -> Iterator[Finding]:
    if "unscale_" in file.identifiers:
        return
    for call in file.calls_of("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
        function = file.function_of(call)
        scaled = [n for n in file.inside(function) if is_method(n, "backward") and _is_scaled(n)]
        if any(not _is_alternative(file, backward, call) for backward in scaled):
            yield about.at(
                file.path, file.span(call), "clips gradients that still carry the loss scale; unscale_ first"
            )


def _is_alternative(file: PythonFile, first: ast.AST, second: ast.AST) -> bool:
    """Whether two nodes stand in different branches of one `if`, so that only one of them runs."""
    around = [set(file.ancestors(node)) for node in (first, second)]
    return any(
        around[0].isdisjoint(branch.body) != around[1].isdisjoint(branch.body)
        for branch in around[0] & around[1]
        if isinstance(branch, ast.If)
    )


def _is_scaled(node: ast.AST) -> bool:
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    inner = node.func.value
    return is_method(inner, "scale") and "scaler" in " ".join(words_of(inner))


@rule(
    Kind.PYTHON,
    Kind.YAML,
    code="AMP005",
    name="half-precision-weights-under-adam",
    severity=Severity.ERROR,
    summary="The weights themselves are cast to half precision and trained",
    why="bfloat16 has 8 bits of mantissa: an update smaller than 1/256 of a weight is rounded away. With "
    "usual learning "
    "rates that is most updates. Autocast computes in half precision and keeps the weights in float32.",
    effect="Measured on the CPU: an AdamW step of 1e-5 leaves 84.4 % of bfloat16 weights unchanged, of fp32 "
    "weights none.",
    source=f"{AMP_DOCS}; arithmetic of bfloat16",
    remedy="Keep the model in float32 and wrap the forward in torch.autocast.",
    bad="model = Model().to(device, dtype=torch.bfloat16)\noptimizer = AdamW(model.parameters())",
    good='model = Model().to(device)\nwith torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = model(batch)',
)
def half_weights(file: PythonFile | YamlFile, about: Rule) -> Iterator[Finding]:
    if isinstance(file, YamlFile):
        yield from half_weights_asked_for(file, about)
        return
    for keyword in file.of(ast.keyword):
        call = file.parents.get(keyword)
        named = isinstance(call, ast.Call) and (dotted(call.func) or "").endswith(("Trainer", "Fabric"))
        if named and keyword.arg == "precision" and is_constant(keyword.value, *PURE_HALF):
            message = "the weights themselves are kept in half precision; use bf16-mixed"
            yield about.at(file.path, file.span(keyword.value), message)
    trains = bool(file.training_loops or file.step_functions)
    # The loop may live in another file; an optimizer over these very weights is evidence enough.
    trained = _trained_names(file) if trains else _optimized_names(file)
    for call in file.calls_of("torch.set_default_dtype") if trains else []:
        if call.args and file.resolve(call.args[0]) in _HALF:
            message = "every new weight is in half precision; small updates are rounded away"
            yield about.at(file.path, file.span(call), message)
    for node in file.of(ast.Assign, ast.Expr):
        cast = _cast_of(file, node, trained)
        if cast is None:
            continue
        literal = _casts_to_half(file, cast)
        what = "to half precision" if literal else _cast_from_settings(file, cast)
        if what:
            message = (
                f"the trained weights are cast {what}: Adam's small updates are rounded away; use autocast"
            )
            severity = Severity.ERROR if literal else Severity.WARNING
            yield about.at(file.path, file.span(cast), message, severity=severity)


def _cast_of(file: PythonFile, node: ast.AST, trained: set[str]) -> ast.Call | None:
    """The call that makes or changes a trained module: `self.model = Net().to(...).cuda()`, `model.bfloat16()`."""
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call):
        return None
    links = []
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        links.append(call)
        call = call.func.value
    held = (
        dotted(node.targets[0])
        if isinstance(node, ast.Assign)
        else dotted(call)
        if call is not None
        else None
    )
    if held not in trained:
        return None
    return next(
        (link for link in links if _casts_to_half(file, link) or _cast_from_settings(file, link)), None
    )


def _dtype_given(cast: ast.Call) -> ast.expr | None:
    given = cast.args[0] if cast.args else None
    return argument(cast, "dtype") or (cast.args[1] if len(cast.args) > 1 else given)


def _casts_to_half(file: PythonFile, cast: ast.Call) -> bool:
    assert isinstance(cast.func, ast.Attribute)
    if cast.func.attr in ("bfloat16", "half"):
        return not cast.args
    dtype = _dtype_given(cast)
    return cast.func.attr == "to" and dtype is not None and file.resolve(file.value_of(dtype)) in _HALF


def _cast_from_settings(file: PythonFile, cast: ast.Call) -> str:
    """Where the type comes from the settings and nothing in the file uses autocast: the sentence, else ''."""
    assert isinstance(cast.func, ast.Attribute)
    dtype = argument(cast, "dtype")
    if cast.func.attr != "to" or not isinstance(dtype, ast.Name) or "autocast" in file.identifiers:
        return ""
    value = file.value_of(dtype)
    asked = isinstance(value, ast.Call) and words_of(value) & {"config", "cfg", "args", "hparams"}
    return f"to `{file.text(dtype)}` from the settings" if asked else ""


def _names_in(node: ast.AST) -> set[str]:
    return {
        name
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute) and (name := dotted(part))
    }


def _optimized_names(file: PythonFile) -> set[str]:
    picked = [call for call, names in picked_optimizers(file) if names & set(_ADAMS)]
    calls = [*file.calls_of(*_ADAMS), *picked]
    return {name for call in calls for value in call.args[:1] for name in _names_in(value)}


def _trained_names(file: PythonFile) -> set[str]:
    """Names whose parameters go to an optimizer, or that are handed as `model` to a trainer whose parameters do."""
    names = _optimized_names(file)
    for call, _ in file.calls:
        if isinstance(call.func, ast.Name) and "optimizer" in call.func.id.lower():
            names |= {name for value in call.args for name in _names_in(value)}
    for call, _ in file.calls:
        parent = file.parents.get(call)
        # One step back: `trainer = Trainer(model=model, ...)` and `trainer = Trainer(...).to(device)`.
        while isinstance(parent, ast.Attribute | ast.Call):
            parent = file.parents.get(parent)
        if isinstance(parent, ast.Assign) and dotted(parent.targets[0]) in names:
            names |= {name for k in call.keywords if k.arg == "model" and (name := dotted(k.value))}
    return names - {"self"}


@rule(
    Kind.PYTHON,
    code="AMP006",
    name="backward-under-autocast",
    severity=Severity.WARNING,
    summary="backward() runs inside the autocast block",
    why="Autocast belongs around the forward and the loss. Backward operations take the types of their "
    "forward ones anyway; "
    "inside the block, operations outside the graph (hooks, checkpoint recomputation) are cast again.",
    effect="Documented: 'Backward passes under autocast are not recommended.'",
    source=AMP_DOCS,
    remedy="Move backward() out of the with block.",
    bad='with autocast("cuda"):\n    loss = model(x)\n    loss.backward()',
    good='with autocast("cuda"):\n    loss = model(x)\nloss.backward()',
)
def backward_under_autocast(file: PythonFile, about: Rule) -> Iterator[Finding]:
    contexts = set(_autocasts(file))
    for call, _ in file.calls:
        if not is_method(call, "backward"):
            continue
        for parent in file.ancestors(call):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(parent, ast.With) and any(item.context_expr in contexts for item in parent.items):
                yield about.at(
                    file.path, file.span(call), "backward() inside autocast; move it out of the with block"
                )
                break
