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
from whalepod.models.weights import CheckpointWeights, Weights, WeightsError
from whalepod.mtp.config import SpeculationConfig
from whalepod.mtp.depth import AdaptiveDepth, Depth, FixedDepth
from whalepod.mtp.drafter import Drafter
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
    placement: ExpertPlacement | None = None,
) -> MtpModule | None:
    """Load the module.

    A checkpoint that lacks the whole layer, as some quantised ones do, is served without its
    drafts; one that has a part of the layer raises WeightsError.
    """
    if isinstance(weights, CheckpointWeights) and not weights.mtp_names():
        logger.warning(
            "WARNING: config.json names a multi-token-prediction layer, but the checkpoint has no "
            "tensor of it: no drafts"
        )
        return None
    module = MtpModule(model, weights, kernels, placement=placement)
    unused = weights.unused_mtp_names() if isinstance(weights, CheckpointWeights) else ()
    if unused:
        raise WeightsError(
            f"{unused[0]} is unexpected (and {len(unused) - 1} more): the multi-token-prediction "
            "layer that config.json describes has no place for it"
        )
    return module


def _wants_lookup(speculation: SpeculationConfig, *, has_mtp: bool) -> bool:
    """Say whether drafts are looked up: beside the model's own, or where they are asked for."""
    if speculation.is_off or speculation.speculation_method == "mtp":
        return False
    return has_mtp or speculation.is_explicit


def new_speculator(
    speculation: SpeculationConfig,
    mtp: MtpModule | None,
    cache: LatentCache,
    batches: BatchBuilder,
    sampler: Sampler,
    *,
    hidden_size: int,
) -> Speculator | None:
    """Put whoever drafts together; None when nobody does."""
    with_lookup = _wants_lookup(speculation, has_mtp=mtp is not None)
    if mtp is None and not with_lookup:
        return None
    drafter = None
    if mtp is not None:
        drafter = Drafter(mtp, cache, batches.build, hidden_size=hidden_size)
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
