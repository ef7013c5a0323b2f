"""`whalepod doctor`: what this machine can serve, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from whalepod.server.errors import StartupError
from whalepod.tools.machine import Machine, Package, inspect_machine, is_port_free
from whalepod.tools.table import format_bytes, format_table

if TYPE_CHECKING:
    from whalepod.models.config import ModelConfig

EMBEDDED_MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    model: Annotated[
        str | None,
        "checkpoint folder, config.json, preset or downloaded Hugging Face id; none: machine only",
    ] = None
    memory_bytes: Annotated[int, "plan for this much memory; 0: what is free here"] = 0
    max_model_len: Annotated[int, "longest sequence; 0: the model's own limit"] = 0
    host: Annotated[str, "address that `whalepod serve` shall have"] = "127.0.0.1"
    port: Annotated[int, "port that `whalepod serve` shall have"] = 8000
    json: Annotated[bool, "print JSON"] = False


def doctor(config: DoctorConfig) -> int:
    """Report what this machine can serve and what is missing; with MODEL, what fits.

    The exit code is 1 if something required is missing or nothing fits.
    """
    machine = inspect_machine()
    port_free = is_port_free(config.host, config.port)
    model = examine_model(config, machine) if config.model else None
    problems = list(_problems(machine, model))
    if config.json:
        report = {
            "machine": asdict(machine),
            "port": {"host": config.host, "port": config.port, "free": port_free},
            "model": model,
            "problems": problems,
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_machine_lines(machine, config, port_free)))
        if model:
            print("\n" + "\n".join(_model_lines(model)))
        for problem in problems:
            print(f"\nPROBLEM: {problem}")
    return 1 if problems else 0


def examine_model(config: DoctorConfig, machine: Machine) -> dict[str, Any]:
    """Work out from `config.json` what the model takes, and what fits into the memory."""
    from whalepod.tools.sizing import WEIGHT_DTYPES, fit, kv_bytes_per_token, measure

    assert config.model is not None
    model = read_model_config(config.model)
    sizes = measure(model)
    of_gpus = sum(gpu.memory_bytes for gpu in machine.gpus)
    memory = config.memory_bytes or of_gpus or machine.available_memory_bytes
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise StartupError(
            f"max_model_len ({length}) is over the model's limit of "
            f"{model.max_position_embeddings} tokens"
        )
    fits = [fit(sizes, dtype, memory, length) for dtype in WEIGHT_DTYPES]
    return {
        "name": config.model,
        "model_type": model.model_type,
        "num_layers": model.num_layers,
        "num_mtp_layers": model.num_mtp_layers,
        **asdict(sizes),
        "kv_bytes_per_token_without_mtp": kv_bytes_per_token(model, 2, with_mtp=False),
        "memory_bytes": memory,
        "max_model_len": length,
        "fits": [asdict(f) for f in fits],
    }


def read_model_config(model: str) -> ModelConfig:
    """Find the config of a folder, a file, a preset or a downloaded Hugging Face id."""
    from whalepod.models.config import load_config, parse_config
    from whalepod.models.presets import PRESETS, preset_config

    if model == EMBEDDED_MODEL:
        import whalepod.models

        return load_config(Path(whalepod.models.__path__[0]) / EMBEDDED_MODEL)
    if model in PRESETS:
        return parse_config(preset_config(model))
    path = Path(model)
    if path.is_dir():
        return load_config(path)
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise StartupError(f"{path} is not a config.json: {error}") from None
        if not isinstance(raw, dict):
            raise StartupError(f"{path} is not a config.json: it holds a {type(raw).__name__}")
        return parse_config(raw)
    return load_config(_cached_config(model).parent)


def _cached_config(model: str) -> Path:
    """Find the config of a Hugging Face id in the local cache; doctor never uses the network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json") if model.count("/") == 1 else None
    if not isinstance(found, str):
        raise StartupError(
            f"{model!r} is no folder, config.json, preset or downloaded Hugging Face id: give the "
            "path of a config.json"
        )
    return Path(found)


def _problems(machine: Machine, model: dict[str, Any] | None) -> Iterator[str]:
    for package in machine.packages:
        if package.required and package.version is None:
            yield f"{package.name} is not installed: {package.hint}"
    if model and all(f["num_tokens"] == 0 for f in model["fits"]):
        smallest = min(model["weights_bytes"].values())
        yield (
            f"{model['name']} does not fit: its weights take {format_bytes(smallest)} at the "
            f"least, the memory is {format_bytes(model['memory_bytes'])}"
        )


def _machine_lines(machine: Machine, config: DoctorConfig, port_free: bool) -> Iterator[str]:
    yield "Machine"
    yield f"  system    {machine.system}, Python {machine.python}"
    yield f"  cpu       {machine.cpu}, {machine.num_cores} core{'s' * (machine.num_cores != 1)}"
    yield f"            {' '.join(machine.cpu_features) or 'no vector features found'}"
    free = format_bytes(machine.available_memory_bytes)
    yield f"  memory    {format_bytes(machine.memory_bytes)}, {free} available"
    gpus = [f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in machine.gpus]
    yield f"  gpu       {', '.join(gpus) or 'none'}"
    state = "free" if port_free else "in use: pass another --port to `whalepod serve`"
    yield f"  port      {config.host}:{config.port} is {state}"
    compiled = machine.num_compiled_kernels
    yield f"  kernels   {compiled} compiled" + ("" if compiled else "; the first start is slower")
    yield "Packages"
    for package in machine.packages:
        yield f"  {package.name:<16} {_package_state(package)}"


def _package_state(package: Package) -> str:
    if package.version is not None:
        return package.version
    return f"MISSING, {package.hint}" if package.required else f"- (for {package.hint})"


def _model_lines(model: dict[str, Any]) -> Iterator[str]:
    mtp = f" + {model['mtp_parameters']:,} in MTP layers" if model["num_mtp_layers"] else ""
    yield f"Model {model['name']} ({model['model_type']}, {model['num_layers']} layers)"
    yield f"  parameters  {model['parameters']:,}{mtp}"
    yield f"  active      {model['active_parameters']:,} per token"
    yield f"  KV cache    {model['kv_bytes_per_token']['bf16']:,} bytes per token in bf16"
    memory = format_bytes(model["memory_bytes"])
    yield f"  fits into {memory} at {model['max_model_len']:,} tokens each"
    rows = [["  weights", "size", "left for KV", "tokens", "sequences at once"]]
    for row in model["fits"]:
        left, fitting = row["kv_cache_bytes"], ["-", "-"]
        if left > 0:
            fitting = [f"{row['num_tokens']:,}", f"{row['max_concurrency']:.1f}"]
        room = format_bytes(left) if left > 0 else f"{format_bytes(-left)} short"
        rows.append([f"  {row['dtype']}", format_bytes(row["weights_bytes"]), room, *fitting])
    yield format_table(rows, numeric=True)
