"""What one file tells about its project: features that conditions ask for, words that settings are compared with."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable
from typing import Any

import yaml

from traindoctor.expressions import argument, has_spread, is_constant, is_measurement, is_method, words_of
from traindoctor.line_files import DockerFile, EnvFile
from traindoctor.names import dotted
from traindoctor.python_file import PythonFile
from traindoctor.shell_file import ShellFile
from traindoctor.types import Facts, Kind, Setting
from traindoctor.yaml_file import YamlFile

DISTRIBUTED_CALLS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.init_process_group",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard",
    "deepspeed.initialize",
)
_BY_ATTRIBUTE = {
    "no_sync": "no_sync",
    "require_backward_grad_sync": "no_sync",
    "set_requires_gradient_sync": "no_sync",
    "set_epoch": "set_epoch",
    "destroy_process_group": "destroy_process_group",
    "get_rng_state": "rng_saved",
    "get_rng_state_all": "rng_saved",
    "getstate": "rng_saved",
    "unscale_": "unscale",
    "_orig_mod": "orig_mod",
}
_OVERRIDE = re.compile(r"\+{0,2}~?([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_SHELL_READ = re.compile(r"\$\{?([A-Z_][A-Z0-9_]+)")


def gather(file: Any, place: str) -> Facts:
    """The facts of one parsed file; `place` is its path in the project, from which its imports are resolved."""
    readers: dict[type, Callable[[Any], Facts]] = {
        PythonFile: _python,
        ShellFile: _shell,
        YamlFile: _yaml,
        DockerFile: _lines,
        EnvFile: _lines,
    }
    facts = readers[type(file)](file)
    if isinstance(file, PythonFile):
        _python_program(file, facts, place)
    return facts


def _python(file: PythonFile) -> Facts:
    facts = Facts()
    facts.words |= file.identifiers | {node.arg for node in file.of(ast.arg)}
    strings = {
        node.value for node in file.of(ast.Constant) if isinstance(node.value, str) and len(node.value) < 200
    }
    facts.words |= strings
    facts.words.update(
        part for text in strings if not text.isidentifier() for part in re.split(r"[^\w-]+", text) if part
    )
    for keyword in file.of(ast.keyword):
        if keyword.arg:
            facts.words.add(keyword.arg)
        else:
            _add_spread(facts, keyword.value)
    words = facts.words
    facts.features |= {feature for name, feature in _BY_ATTRIBUTE.items() if name in words}
    if any("BatchNorm" in word or "batch_norm" in word for word in words):
        facts.features.add("batch_norm")
    if file.training_loops or file.step_functions:
        facts.features.add("training")
    _python_calls(file, facts)
    for module, feature in (
        ("omegaconf", "omegaconf"),
        ("hydra", "omegaconf"),
        ("yacs", "omegaconf"),  # both read 1e-4 as a number
        ("yaml", "yaml"),
        ("torch", "torch"),
        ("deepspeed", "deepspeed"),
    ):
        if file.uses(module):
            facts.features.add(feature)
    if file.uses("accelerate") and "accumulate" in words:
        facts.features.add("no_sync")
    _python_features(file, facts)
    return facts


_TRAINERS = ("lightning", "pytorch_lightning", "transformers", "trl", "accelerate", "deepspeed", "composer")


def _python_features(file: PythonFile, facts: Facts) -> None:
    """What decides about the safety of a fix, or about whether a program trains at all."""
    attributes, words = file.attributes, facts.words
    present = {
        "grad_read": "grad" in attributes or "grad" in words,
        "detached_in_place": "detach_" in attributes,
        "sparse": any(k.arg == "sparse" and not is_constant(k.value, False) for k in file.of(ast.keyword))
        or bool({"to_sparse", "sparse_coo_tensor", "SparseAdam"} & words),
        "lightning": any(file.uses(name) for name in ("lightning", "pytorch_lightning", "lightning_fabric")),
        "autocast_settings": any(word.startswith("set_autocast") for word in file.identifiers),
        "buffers": "register_buffer" in attributes,
        "spawns": bool({"spawn", "start_processes"} & attributes) and file.uses("torch.multiprocessing"),
        "inference": bool({"no_grad", "inference_mode", "eval", "generate"} & attributes),
        "trains_at_import": any(file.function_of(loop) is file.tree for loop in file.training_loops),
        "resumes": bool({"load_state_dict", "load_checkpoint", "resume_from_checkpoint"} & file.identifiers),
        "deletes_files": bool(
            {"remove", "unlink", "rmtree", "save_total_limit", "keep_last", "max_to_keep"} & words
        ),
        "activation_checkpointing": file.uses("torch.utils.checkpoint")
        or any((name or "").startswith("torch.utils.checkpoint.") for _, name in file.calls)
        or bool({"gradient_checkpointing", "gradient_checkpointing_enable", "checkpoint_wrapper"} & words)
        or any(dotted(call.func) == "checkpoint" for call in file.of(ast.Call)),  # one of its own
    }
    if any(not is_measurement(getattr(function, "name", "")) for function in file.backward_calls) or (
        any(file.uses(name) for name in _TRAINERS) and {"fit", "train", "Trainer"} & file.identifiers
    ):
        facts.features.add("training")
    facts.features |= {name for name, holds in present.items() if holds}


def _python_program(file: PythonFile, facts: Facts, place: str) -> None:
    """What the file imports, whether it is started itself, and which settings files it names."""
    folder = place.split("/")[:-1]
    for node in file.of(ast.Import):
        facts.imports |= {alias.name for alias in node.names}
    for source in file.of(ast.ImportFrom):
        base = source.module or ""
        if source.level:
            above = folder[: len(folder) - source.level + 1]
            base = "." + ".".join([*above, *([base] if base else [])])
        names = [alias.name for alias in source.names]
        if names == ["*"] and source.level and not source.module:  # a package that lists its modules
            names = [item for node in file.of(ast.Assign) for item in _listed(node)] or names
        facts.imports |= {f"{base}.{name}" if base.strip(".") else f".{name}" for name in names}
    facts.is_entry = file.source.kind is Kind.NOTEBOOK or any(
        isinstance(node.test, ast.Compare) and dotted(node.test.left) == "__name__"
        for node in file.of(ast.If)
    )
    for call, name in file.calls:
        if name in ("importlib.import_module", "__import__") or dotted(call.func) == "__import__":
            if call.args and isinstance(call.args[0], ast.Constant):
                facts.imports.add(str(call.args[0].value))
            else:
                facts.features.add("dynamic_import")
        elif name in ("hydra.main", "hydra.initialize", "hydra.compose"):
            given = argument(call, "config_path", 0)
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                facts.configs.add(posixpath.normpath("/".join([*folder, given.value])))
            elif given is not None and not is_constant(given, None):
                facts.configs.add("*")  # a folder that is computed: any settings file may be read
            named = argument(call, "config_name", 1)
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                facts.configs.add(f"{named.value.removesuffix('.yaml')}.yaml")
    facts.configs |= {word for word in facts.words if word.endswith((".yaml", ".yml")) and "*" not in word}


def _listed(node: ast.Assign) -> list[str]:
    """The names in `__all__ = [...]`."""
    is_list = dotted(node.targets[0]) == "__all__" and isinstance(node.value, ast.List | ast.Tuple)
    items = node.value.elts if is_list and isinstance(node.value, ast.List | ast.Tuple) else []
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _python_calls(file: PythonFile, facts: Facts) -> None:
    for call, name in file.calls:
        if name in DISTRIBUTED_CALLS or _asks_for_ranks(call, name):
            facts.features.add("distributed")
        if name == "torch.nn.parallel.DistributedDataParallel":
            facts.features.add("ddp")
        if name == "torch.compile" or (name is None and _is_module_compile(file, call)):
            facts.features.add("compile")
        if name in ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop") and call.args:
            _add_env_read(facts, call.args[0])
        if name in ("hydra.utils.instantiate", "vars", "dataclasses.asdict") or (
            isinstance(call.func, ast.Name)
            and call.func.id in ("vars", "instantiate", "dict", "SimpleNamespace")
        ):
            for value in call.args:
                _add_spread(facts, value)
        if isinstance(call.func, ast.Attribute) and call.func.attr in (
            "items",
            "keys",
            "values",
            "to_dict",
            "__dict__",
        ):
            _add_spread(facts, call.func.value)
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in ("to_container", "to_object")
            and call.args
        ):
            _add_spread(facts, call.args[0])
            if isinstance(call.args[0], ast.Call) and dotted(call.args[0].func) == "getattr":
                facts.spread.add("*")  # whichever section is named at run time
        if (
            isinstance(call.func, ast.Name)
            and call.func.id in ("getattr", "setattr", "hasattr")
            and len(call.args) > 1
        ) and not isinstance(call.args[1], ast.Constant):
            _add_spread(facts, call.args[0])
        if isinstance(call.func, ast.Name) and call.func.id == "float" and call.args:
            facts.features |= {f"float:{word}" for word in words_of(call.args[0])}
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            _add_option(file, call, facts)
    for item in file.of(ast.Subscript):
        if isinstance(item.ctx, ast.Load) and file.resolve(item.value) == "os.environ":
            _add_env_read(facts, item.slice)
        elif not isinstance(item.slice, ast.Constant | ast.Slice | ast.UnaryOp | ast.Tuple):
            _add_spread(facts, item.value, indexed=True)
    for iterated in [loop.iter for loop in file.of(ast.For)] + [
        part.iter for part in file.of(ast.comprehension)
    ]:
        _add_spread(facts, iterated, indexed=True)
    for attribute in file.of(ast.Attribute):
        if attribute.attr == "__dict__":
            _add_spread(facts, attribute.value)
    for assigned in file.of(ast.Assign):  # section = config.get("section"), and **section elsewhere
        if any(isinstance(target, ast.Name) and target.id in facts.spread for target in assigned.targets):
            _add_spread(facts, assigned.value)


def _asks_for_ranks(call: ast.Call, name: str | None) -> bool:
    """A Lightning strategy, a Lightning trainer with one, or Accelerate: several processes, started elsewhere."""
    if name in ("accelerate.Accelerator", "accelerate.accelerator.Accelerator"):
        return True
    lightning = name is not None and name.split(".", 1)[0] in (
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
    )
    if not lightning or name is None:
        return False
    return name.endswith("DDPStrategy") or (
        name.endswith((".Trainer", ".Fabric")) and any(keyword.arg == "strategy" for keyword in call.keywords)
    )


def _is_module_compile(file: PythonFile, call: ast.Call) -> bool:
    """`block.compile()` of a torch module; other libraries have a method of the same name with other arguments."""
    given = {keyword.arg for keyword in call.keywords}
    own = not call.args and given <= {None, "fullgraph", "dynamic", "backend", "mode", "options", "disable"}
    keras = file.uses("tensorflow") or file.uses("keras")
    return is_method(call, "compile") and file.uses("torch") and own and not keras


def _add_spread(facts: Facts, value: ast.expr, indexed: bool = False) -> None:
    """Remember that an object is used as a whole, so that each of its settings may be read."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args:
        is_lookup = value.func.attr in ("get", "pop") and isinstance(value.args[0], ast.Constant)
        value = ast.Subscript(value.func.value, value.args[0], ast.Load()) if is_lookup else value.args[0]
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        facts.spread.add(str(value.slice.value))
        return
    name = dotted(value)
    if (name and not indexed) or (name and "." in name):
        facts.spread.add(name.rsplit(".", 1)[-1])


def _add_env_read(facts: Facts, node: ast.expr) -> None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        facts.features.add(f"reads:{node.value}")


def _add_option(file: PythonFile, call: ast.Call, facts: Facts) -> None:
    flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if has_spread(call) or not flags or not all(flag.startswith("-") for flag in flags):
        return
    if not file.identifiers & {"parse_args", "parse_known_args"}:
        return  # parsed elsewhere, perhaps outside the audited folder
    action, given = argument(call, "action"), argument(call, "dest")
    if action is not None and not (
        isinstance(action, ast.Constant)
        and action.value in ("store", "store_true", "store_false", "append", "count")
    ):
        return
    if given is not None and not isinstance(given, ast.Constant):
        return
    longest = next((flag for flag in flags if flag.startswith("--")), flags[0])
    name = str(given.value) if isinstance(given, ast.Constant) else longest.lstrip("-").replace("-", "_")
    facts.options.append(Setting(file.path, name, longest, file.span(call)))


def _shell(file: ShellFile) -> Facts:
    facts = Facts()
    facts.features |= {f"reads:{name}" for name in _SHELL_READ.findall(file.source.text)}
    for command in file.commands:
        before = ""
        for word in command.words:
            if word.raw.endswith(".py"):
                facts.launches.add(word.plain.removeprefix("./"))
            elif word.raw.endswith((".yaml", ".yml")):
                facts.configs.add(word.plain.rsplit("=", 1)[-1])
            elif before == "--config-name" or word.plain.startswith("--config-name="):
                facts.configs.add(f"{word.plain.removeprefix('--config-name=')}.yaml")
            before = word.plain
        if "-m" in (arguments := command.arguments) and arguments.index("-m") + 1 < len(arguments):
            facts.launches.add(arguments[arguments.index("-m") + 1].replace(".", "/") + ".py")
        if command.is_training():
            for word in command.words[1:]:
                match = _OVERRIDE.fullmatch(word.raw)
                if match and not word.raw.startswith(("+", "~", "-")):
                    facts.overrides.append(Setting(file.path, match[1], match[2], file.word_span(word)))
    return facts


def _yaml(file: YamlFile) -> Facts:
    facts = Facts()
    for entry in file.entries:
        value = (
            entry.scalar
            if entry.scalar is not None
            else "{"
            if isinstance(entry.value, yaml.MappingNode)
            else "["
        )
        facts.settings.append(Setting(file.path, entry.key, value, file.span(entry.key_node)))
        if entry.name in ("_target_", "class_path", "target") and entry.scalar:
            facts.imports.add(entry.scalar)
            if entry.scalar.endswith("DDPStrategy"):
                facts.features.add("distributed")
        if entry.scalar and "$" in entry.scalar:
            facts.words |= {f"interpolated:{key}" for key in re.findall(r"\$\{([\w.]+)\}", entry.scalar)}
    return facts


def _lines(file: DockerFile | EnvFile) -> Facts:
    return Facts(features={f"reads:{name}" for name in _SHELL_READ.findall(file.source.text)})
