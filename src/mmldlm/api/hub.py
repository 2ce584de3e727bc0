"""Models where others find them: a folder in the layout of the Hugging Face Hub, with a card, and the upload.

model.safetensors        the weights, with settings and data description in its metadata
config.json              the same description, for people
generation_config.json   how it samples unless told otherwise, under transformers' names
tokenizer/               the tokenizer's own files
README.md                the card: use, data, figures, settings, limits
figures/                 the pictures of the evaluation
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Template

from mmldlm import durable
from mmldlm.checkpoint.export import Export, write_export
from mmldlm.checkpoint.load import LoadedModel, export_of
from mmldlm.config import SamplingConfig, chosen_modes
from mmldlm.config.recipe import config_to_dict
from mmldlm.corruption.times import modes_of_run
from mmldlm.errors import UserError, first_line
from mmldlm.evaluation.report import load_evaluated, markdown

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

GENERATION, CARD, FIGURES = "generation_config.json", "README.md", "figures"
_NAMES = {
    "max_denoising_steps": "num_sampling_steps",
    "temperature": "temperature",
    "top_p": "top_p",
    "guidance_scale": "guidance",
}
"""transformers' name -> setting of the section sampling."""
_IGNORED = {"do_sample", "max_length", "transformers_version", "_from_model_config"}


class Sharing:
    """The methods of a `Model` that write and publish it."""

    loaded: LoadedModel
    source: str

    def save(self, folder: str | os.PathLike[str], *, precision: str = "fp32") -> None:
        """Write an export that `load` reads, with weights, settings, tokenizer and normaliser.

        `precision` of the stored weights: fp32, fp16, or int8 with a scale for each row of a matrix.

        >>> model.save(tmp / "copy")
        >>> load(tmp / "copy").step == model.step
        True
        """
        path = Path(folder)
        durable.require_writable(path)
        write_export(path, export_of(self.loaded), precision)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, precision: str = "fp32",
        report: str | os.PathLike[str] | None = None, name: str | None = None, license: str | None = None,
    ) -> None:  # fmt: skip
        """Write a folder that can be published as it is: what `save` writes, generation_config.json and a model card.

        `report`: folder of an evaluation for the card; None: that of the run, if it has been evaluated. `name`: what
        the card calls the model and its users load, such as "me/my-model". `license`: its identifier on the Hub.

        >>> model.save_pretrained(tmp / "published", name="me/words")
        >>> "mmldlm.load" in (tmp / "published" / "README.md").read_text()
        True
        """
        path = Path(folder)
        evaluated = _report_of(self.source, report)
        durable.require_writable(path)
        write_export(path, without_places(export_of(self.loaded)), precision)
        durable.replace_file(path / GENERATION, generation_config(self.loaded))
        pictures = [] if evaluated is None else sorted(evaluated[1].glob("*.png"))
        shutil.rmtree(path / FIGURES, ignore_errors=True)
        for picture in pictures:
            (path / FIGURES).mkdir(exist_ok=True)
            shutil.copyfile(picture, path / FIGURES / picture.name)
        text = card(
            self.loaded, name or str(folder), evaluated and evaluated[0], [p.name for p in pictures], license
        )
        durable.replace_file(path / CARD, text.encode("utf-8"))

    def push_to_hub(
        self, name: str, *, precision: str = "fp32", report: str | os.PathLike[str] | None = None,
        license: str | None = None, private: bool | None = None, token: str | None = None,
        message: str = "Upload model",
    ) -> CommitInfo:  # fmt: skip
        """Publish the folder of `save_pretrained` as NAME, such as "me/my-model", on the Hugging Face Hub.

        `token`: None takes the one of `hf auth login`. The repository is created where there is none.
        """
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise UserError(f"name={name!r}: a name on the Hub is needed, such as me/my-model")
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            self.save_pretrained(path, precision=precision, report=report, name=name, license=license)
            api = HfApi(token=token)
            try:
                target = api.create_repo(name, private=private, exist_ok=True).repo_id
                return api.upload_folder(repo_id=target, folder_path=path, commit_message=message)
            except Exception as error:  # network, token, name: each has an error class of its own
                raise UserError(f"{name}: could not be published on the Hub ({first_line(error)})") from error


def without_places(export: Export) -> Export:
    """The same without folders of the machine that trained it; the names of pair store and tokenizer stay."""
    data = copy.deepcopy(export.data)
    if data["tokenizer"] and Path(data["tokenizer"]["name"]).is_absolute():
        data["tokenizer"]["name"] = Path(data["tokenizer"]["name"]).name
    return dataclasses.replace(export, config=published_settings(export.config), data=data)


def published_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run whose folders are names."""
    settings = copy.deepcopy(settings)
    for section, key in (("data", "store"), ("train", "init")):
        settings[section][key] = settings[section][key] and Path(settings[section][key]).name
    return settings


def generation_config(model: LoadedModel) -> bytes:
    """The sampling settings under transformers' names."""
    sampling = model.config.sampling
    values: dict[str, Any] = {theirs: getattr(sampling, ours) for theirs, ours in _NAMES.items()}
    values |= {"do_sample": sampling.temperature > 0, "max_length": model.denoiser.shape.max_length}
    if not sampling.temperature:
        del values["temperature"]  # transformers warns about one that has no effect
    return json.dumps(values, indent=2).encode() + b"\n"


def apply_generation_config(folder: Path, sampling: SamplingConfig) -> None:
    """Sampling settings of a folder's generation_config.json in place of those of the run; nothing without the file."""
    path = folder / GENERATION
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_bytes())
        unknown = sorted(values.keys() - _NAMES.keys() - _IGNORED)
        numbers = {ours: values[theirs] for theirs, ours in _NAMES.items() if theirs in values}
        if values.get("do_sample") is False:
            numbers["temperature"] = 0.0
        if values.get("do_sample") is True and not numbers.get("temperature", sampling.temperature):
            numbers["temperature"] = 1.0
        good = all(isinstance(value, int | float) for value in numbers.values())
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); delete it or write it again"
        ) from error
    if unknown or not good:
        wrong = ", ".join(unknown) or f"values {numbers}"
        raise UserError(
            f"{path}: {wrong}: not understood; allowed are numbers for {', '.join(_NAMES)}, and do_sample"
        )
    for name, value in numbers.items():
        setattr(sampling, name, value)


def _report_of(source: str, report: str | os.PathLike[str] | None) -> tuple[Any, Path] | None:
    """The evaluation and its folder; None where the run has not been evaluated."""
    home = Path(source).parent if Path(source).name == "export" else Path(source)
    try:
        evaluated = load_evaluated(home if report is None else Path(report))
    except UserError:
        if report is not None:
            raise
        return None
    return (evaluated.result, evaluated.folder) if evaluated.folder is not None else None


def card(model: LoadedModel, name: str, result: Any, pictures: list[str], license: str | None) -> str:
    """The model card, from the run alone."""
    config = model.config
    modes = chosen_modes(modes_of_run(config.corruption))
    front: dict[str, Any] = {
        "library_name": "mmldlm",
        "tags": ["text-diffusion", "sentence-embeddings", *modes],
    }
    front |= {"license": license} if license else {}
    template = Template(
        (files("mmldlm") / "templates" / "model_card.md").read_text("utf-8"), trim_blocks=True
    )
    return template.render(
        front=yaml.safe_dump(front, sort_keys=False), name=name, modes=modes, step=model.step,
        num_parameters=sum(parameter.numel() for parameter in model.denoiser.parameters()),
        store=Path(config.data.store).name, fingerprint=model.fingerprint[:12], shape=model.denoiser.shape,
        encoder=(model.encoder or {}).get("name", "unknown"), pictures=pictures,
        figures=None if result is None else markdown(result).split("\n", 1)[1].replace("\n## ", "\n### ").strip(),
        settings=yaml.safe_dump(published_settings(config_to_dict(config)), sort_keys=False),
    )  # fmt: skip
