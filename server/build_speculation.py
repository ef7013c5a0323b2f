"""The part of the composition root that decides who drafts tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from whalepod.ep_comm.interface import ExpertPlacement
from whalepod.kernels.interface import Kernels
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.weights import CheckpointWeights, Weights, WeightsError, mtp_layer
from whalepod.mtp.config import SpeculationConfig
from whalepod.mtp.depth import AdaptiveDepth, Depth, FixedDepth
from whalepod.mtp.draft import new_drafter
from whalepod.mtp.module import MtpModule
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.engine.acceptance_check import (
    builtin_prompts,
    measure_acceptance,
    report_acceptance,
)
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.speculation import Speculator
from whalepod.server.errors import StartupError

logger = logging.getLogger(__name__)


def wants_mtp(speculation: SpeculationConfig, config: ModelConfig) -> bool:
    """Say whether the model's own layer drafts. Raises StartupError if it must and is not there."""
    if speculation.is_off or speculation.speculation_method == "lookup":
        return False
    if config.num_mtp_layers:
        return True
    if speculation.speculation_method == "mtp":
        raise StartupError(
            "--speculation-method mtp needs a multi-token-prediction layer, and config.json has "
            "num_nextn_predict_layers = 0: use --speculation-method lookup"
        )
    return False


def load_mtp(
    model: DeepseekV3,
    weights: Weights,
    kernels: Kernels,
    max_depth: int,
    placement: ExpertPlacement | None = None,
) -> tuple[MtpModule, ...]:
    """Load the modules, the first `max_depth` of them: module i makes the draft of depth i + 1.

    A checkpoint that lacks whole layers, as some quantised ones do, is served with those before
    them, or without drafts; one that has a part of a layer raises WeightsError.
    """
    num_modules = model.config.num_mtp_layers
    if isinstance(weights, CheckpointWeights):
        num_modules = _count_mtp_layers(weights, model.config)
    modules = tuple(
        MtpModule(model, weights, kernels, index=index, placement=placement)
        for index in range(min(num_modules, max_depth))
    )
    if isinstance(weights, CheckpointWeights):
        for index in range(len(modules)):
            _refuse_unused(weights.unused_mtp_names(index))
    return modules


def _count_mtp_layers(weights: CheckpointWeights, config: ModelConfig) -> int:
    """Return how many layers the checkpoint has from the first one on; warn if some lack."""
    num_named = config.num_mtp_layers
    stored = {mtp_layer(name, config) for name in weights.mtp_names()}
    num_stored = next(i for i in range(num_named + 1) if i not in stored)
    if num_stored < num_named:
        logger.warning(
            "WARNING: config.json names %d multi-token-prediction layers, but the checkpoint has "
            "no tensor of number %d: %s",
            num_named,
            num_stored + 1,
            f"drafts come from the first {num_stored}" if num_stored else "no drafts",
        )
    return num_stored


def _refuse_unused(names: Sequence[str]) -> None:
    if names:
        raise WeightsError(
            f"{names[0]} is unexpected (and {len(names) - 1} more): the multi-token-prediction "
            "layer that config.json describes has no place for it"
        )


def _wants_lookup(speculation: SpeculationConfig, has_mtp: bool) -> bool:
    """Say whether drafts are looked up: beside the model's own, or where they are asked for."""
    if speculation.is_off or speculation.speculation_method == "mtp":
        return False
    return has_mtp or speculation.is_explicit


def new_speculator(
    speculation: SpeculationConfig,
    mtp: Sequence[MtpModule],
    cache: LatentCache,
    batches: BatchBuilder,
    sampler: Sampler,
    *,
    hidden_size: int,
) -> Speculator | None:
    """Put whoever drafts together; None when nobody does."""
    with_lookup = _wants_lookup(speculation, bool(mtp))
    if not mtp and not with_lookup:
        return None
    drafter = new_drafter(mtp, cache, batches, hidden_size=hidden_size) if mtp else None
    return Speculator(drafter, sampler, with_lookup=with_lookup)


def check_acceptance(
    runner: Runner,
    limits: SchedulerConfig,
    model_config: ModelConfig,
    folder: Path,
    *,
    num_blocks: int,
    eos_token_ids: frozenset[int],
) -> None:
    """Continue a few prompts and warn if the layer never guesses right.

    `runner` drafts with the layer alone: looked-up drafts would hide a broken one.
    """
    prompts = builtin_prompts(folder, model_config.vocab_size)
    found = measure_acceptance(
        runner, limits, prompts, num_blocks=num_blocks, eos_token_ids=eos_token_ids
    )
    report_acceptance(found, layer=model_config.num_layers)


def new_depth(speculation: SpeculationConfig) -> Depth:
    """Return who chooses the number of drafts of each step."""
    if speculation.is_fixed:
        return FixedDepth(speculation.max_depth)
    return AdaptiveDepth(speculation.max_depth)


def describe_speculation(speculation: SpeculationConfig, makers: Sequence[str]) -> str:
    """Say for people who drafts and how many tokens: "mtp, adaptive up to 4, ..."."""
    if not makers:
        return "off"
    kind = "fixed at" if speculation.is_fixed else "adaptive up to"
    acceptance = speculation.speculation_acceptance
    return f"{' + '.join(makers)}, {kind} {speculation.max_depth}, {acceptance}"
