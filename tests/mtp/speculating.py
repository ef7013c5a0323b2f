"""Engines on a small random model whose multi-token-prediction layer is often right."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.oracle import make_model, make_oracle
from tests.mtp.test_module import MtpOracleWeights, make_mtp_oracle
from whalepod.kernels.cpu import CpuKernels
from whalepod.models.cache import LatentCache
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.mtp.depth import Depth, FixedDepth
from whalepod.mtp.drafter import Drafter
from whalepod.mtp.module import MtpModule
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.plan import Plan, StepResult
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.speculation import Speculator
from whalepod.server.messages import EngineInfo

EOS = 1
VOCAB_SIZE = 96


@dataclass(frozen=True)
class Models:
    oracle: PreTrainedModel
    mtp_oracle: MtpModel
    model: DeepseekV3
    module: MtpModule


@cache
def make_models() -> Models:
    """Build a model whose next token follows mostly from the last one, and a module that sees it.

    The layers add little to the embedding, and the module's projection takes the embedding and a
    little of the hidden state: so both come to the same logits, up to what the layers add.
    """
    torch.set_num_threads(1)
    oracle = make_oracle(num_nextn_predict_layers=1)
    mtp_oracle = make_mtp_oracle(oracle)
    with torch.no_grad():
        for name, tensor in [
            *oracle.named_parameters(),
            *mtp_oracle.layers.named_parameters(),
        ]:
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                tensor.mul_(0.15)
        hidden = oracle.config.hidden_size
        identity = torch.eye(hidden)
        mtp_oracle.layers[0].eh_proj.weight.copy_(torch.cat([identity, 0.1 * identity], dim=1))
    kernels = CpuKernels(is_invariant=True)
    model = make_model(oracle, kernels)
    weights = MtpOracleWeights(oracle, mtp_oracle)
    return Models(oracle, mtp_oracle, model, MtpModule(model, weights, kernels))


class RecordedRunner(Runner):
    """Remembers every plan and its result."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.steps: list[tuple[Plan, StepResult]] = []

    def run(self, plan: Plan, num_passes: int = 0) -> StepResult:
        result = super().run(plan, num_passes)
        self.steps.append((plan, result))
        return result


@dataclass
class Settings:
    depth: Depth = field(default_factory=lambda: FixedDepth(0))
    num_blocks: int = 32
    max_num_seqs: int = 8
    chunk: int = 64
    max_model_len: int = 400
    has_module: bool = True
    with_lookup: bool = False
    grammars: GrammarStore | None = None


def make_engine(settings: Settings) -> EngineCore:
    """Build an engine on the models; cache rows that nobody wrote are NaN."""
    models = make_models()
    cache = LatentCache(
        num_layers=models.model.config.num_layers + settings.has_module,
        num_blocks=settings.num_blocks,
        row_width=models.model.config.cache_row_width,
        dtype=torch.float32,
        device="cpu",
    )
    cache.rows_LPBC.fill_(torch.nan)
    limits = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.chunk,
        max_model_len=settings.max_model_len,
    )
    batches = BatchBuilder(
        max_tokens=settings.chunk,
        max_rows=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
    )
    sampler = Sampler(CpuKernels(is_invariant=True))
    hidden_size = models.model.config.hidden_size
    drafter = None
    if settings.has_module:
        drafter = Drafter(models.module, cache, batches.build, hidden_size=hidden_size)
    scheduler = Scheduler(
        limits,
        num_blocks=settings.num_blocks,
        eos_token_ids=frozenset({EOS}),
        num_lookback_tokens=int(settings.has_module),
    )
    speculator = Speculator(drafter, sampler, with_lookup=settings.with_lookup)
    runner = RecordedRunner(models.model, cache, sampler, batches, speculator)
    info = EngineInfo(
        model_type="deepseek_v3", dtype="float32", kernels="invariant",
        max_model_len=settings.max_model_len, vocab_size=VOCAB_SIZE,
        num_blocks=settings.num_blocks, block_tokens=64, max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.chunk, weights_bytes=0, kv_bytes_per_token=1,
        load_seconds=0.0,
    )  # fmt: skip
    return EngineCore(scheduler, runner, info, depth=settings.depth, grammars=settings.grammars)
