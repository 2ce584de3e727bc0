"""Results of version 0.1 (format 2): the same numbers in other places."""

from __future__ import annotations

from typing import Any

OLD_FORMAT = "mmldlm-evaluation-2"
_KINDS = ("right", "shuffled", "none")


def from_format_2(old: dict[str, Any]) -> dict[str, Any]:
    """What a result of format 2 is in the present one."""
    text, latent, trip = old["text_bound"], old["latent_bound"], old["round_trips"]
    new = dict(old) | {
        "bounds": {"text": _old_text(text), "latent": _old_latent(latent)},
        "calibration": _old_calibration(text) if text else None,
        "decoding": None,
        "round_trip": None,
    }
    if old["self_check"]:
        new["notes"] = [*old["notes"], "ways to decode of this older result are not shown"]
    if trip:
        text_scores = trip["text_latent_text"] | {"num_sampling_steps": trip["num_sampling_steps"]}
        new["round_trip"] = {
            "num_documents": trip["num_documents"],
            "latent": trip["latent_text_latent"],
            "text": text_scores,
        }
    return new


def _old_estimate(row: dict[str, Any], key: str) -> dict[str, Any]:
    low, high = row["interval"]
    return {"value": row[key], "standard_error": row["standard_error"], "low": low, "high": high}


def _old_text(text: dict[str, Any] | None) -> dict[str, Any] | None:
    if not text:
        return None
    sizes = {key: text["right"][key] for key in ("num_documents", "num_tokens", "num_draws")}
    rows = {
        kind: text[kind] | {"nats_per_token": _old_estimate(text[kind], "nats_per_token")} for kind in _KINDS
    }
    return {**rows, "gain": text["gain"], **sizes}


def _old_latent(latent: dict[str, Any] | None) -> dict[str, Any] | None:
    if not latent:
        return None
    key = "nats_per_dimension"
    return latent | {kind: latent[kind] | {key: _old_estimate(latent[kind], key)} for kind in _KINDS}


def _old_calibration(text: dict[str, Any]) -> dict[str, Any]:
    def one(row: dict[str, Any], buckets: str) -> dict[str, Any]:
        return {"error": row["calibration_error"][buckets], "buckets": row["reliability"][buckets]}

    return {
        kind: {buckets: one(text[kind], buckets) for buckets in ("equal_width", "equal_mass")}
        for kind in _KINDS
    }
