"""Turns the MODEL of the command line into a checkpoint folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from whalepod.models.config import parse_config
from whalepod.models.presets import PRESETS, preset_config

EMBEDDED_MODEL = "tiny"
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model")
DOWNLOADED_FILES = ("*.safetensors", *SMALL_FILES)
MAX_CACHED_PRESET_BYTES = 4 << 30
_GENERATOR_VERSION = 1
"""Raise it when the same preset gets other bytes: cached folders are made anew."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceError(ValueError):
    """MODEL does not lead to a checkpoint folder; the message says what would."""


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    with_weights: bool = True,
    cache_folder: Path | None = None,
) -> Path:
    """Return the folder of `tiny`, a preset, an existing folder or a Hugging Face id.

    A preset is written to the cache on first use, with seeded random weights; a Hugging Face id is
    downloaded into huggingface_hub's own cache, and a broken download goes on where it stopped.
    with_weights  False: config and tokenizer only (`--load-format dummy`)
    cache_folder  where presets go; None: `$XDG_CACHE_HOME/whalepod`, `~/.cache/whalepod`
    Raises SourceError, in one sentence.
    """
    is_hub_id = _HUB_ID.fullmatch(model) is not None and not os.path.exists(model)
    if revision is not None and not is_hub_id:
        raise SourceError(f"revision {revision!r} needs a Hugging Face id, but MODEL is {model!r}")
    if model == EMBEDDED_MODEL:
        return Path(__file__).parent / EMBEDDED_MODEL
    if model in PRESETS:
        return _cached_preset(model, with_weights, cache_folder or default_cache_folder())
    if os.path.isdir(model):
        return Path(model)
    if os.path.exists(model):
        raise SourceError(f"{model} is a file; give the folder that holds config.json")
    if is_hub_id:
        return _download(model, revision, DOWNLOADED_FILES if with_weights else SMALL_FILES)
    raise SourceError(
        f"{model!r} is no model: give a checkpoint folder that exists, a Hugging Face id "
        f"(organisation/name), {EMBEDDED_MODEL!r}, or one of {', '.join(PRESETS)}"
    )


def default_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/whalepod`, or `~/.cache/whalepod` without that variable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whalepod"


def compiled_code_folder() -> Path:
    """Return where the machine code of compiled kernels is kept."""
    return default_cache_folder() / "kernels"


def _cached_preset(preset: str, with_weights: bool, cache_folder: Path) -> Path:
    # imported here because it loads torch, which the gateway's process does without
    from safetensors import SafetensorError

    from whalepod.models.synthetic import SynthesisError, plan_tensors, synthesize

    raw = preset_config(preset)
    num_bytes = sum(tensor.num_bytes for tensor in plan_tensors(parse_config(raw), "bf16"))
    if with_weights and num_bytes > MAX_CACHED_PRESET_BYTES:
        raise SourceError(
            f"{preset} would put {num_bytes / 2**30:.0f} GiB of random weights into the cache: "
            f"use --load-format dummy, or write it with `whalepod synth {preset} FOLDER`"
        )
    fingerprint = json.dumps([_GENERATOR_VERSION, raw], sort_keys=True).encode()
    version = hashlib.blake2b(fingerprint, digest_size=6).hexdigest()
    kind = "" if with_weights else "-no-weights"
    folder = cache_folder / "synth" / f"{preset}-{version}{kind}"
    if folder.is_dir():
        return folder
    try:
        return synthesize(preset, folder, with_weights=with_weights)
    except (OSError, SafetensorError, SynthesisError) as error:
        if folder.is_dir():  # another process was faster; its folder is the same
            return folder
        raise SourceError(f"{preset} cannot be written to {folder}: {error}") from None


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    # imported here: nothing else needs it, and it takes a while
    import httpx2
    from huggingface_hub import errors, snapshot_download

    at = "" if revision is None else f" at revision {revision}"
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(patterns))
    except errors.GatedRepoError:
        reason = "its owner must grant access, and HF_TOKEN must be set"
    except errors.RevisionNotFoundError:
        reason = "the repository has no such revision"
    except errors.RepositoryNotFoundError:
        reason = "there is no such repository, or it is private and HF_TOKEN is not set"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx2.TransportError):
        reason = "the hub cannot be reached and the files are not in the local cache"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
    else:
        return Path(folder)
    raise SourceError(
        f"{model} is no folder here, and cannot be downloaded from Hugging Face{at}: {reason}"
    )
