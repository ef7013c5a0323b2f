"""The application around a real engine, for tests of what only a scheduler and a sampler can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tests.gateway.core_upstream import CoreUpstream
from tests.gateway.serving import TestClient
from tests.scripts import SCRIPT
from whalepod.mtp.config import SpeculationConfig
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.build import build_engine
from whalepod.server.config import (
    DeviceConfig,
    EngineConfig,
    GatewayConfig,
    ModelSource,
)
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

MAX_MODEL_LEN = 512
OFF = SpeculationConfig(speculation="off")


@dataclass
class RealGateway:
    upstream: CoreUpstream
    tokenizer: TextTokenizer
    app: FastAPI

    def client(self) -> TestClient:
        return TestClient(self.app)


@contextmanager
def real_gateway(
    checkpoint: Path,
    *,
    speculation: SpeculationConfig | None = None,
    **limits: Any,
) -> Iterator[RealGateway]:
    """Yield a gateway whose engine must be idle and whole at the end."""
    scheduler = SchedulerConfig(**{"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, **limits})
    core = build_engine(
        EngineConfig(
            source=ModelSource(model=str(checkpoint), dtype="fp32"),
            device=DeviceConfig(kernels="reference", num_threads=1),
            scheduler=scheduler,
            speculation=speculation or SpeculationConfig(),
            enable_test_hooks=True,
            test_script=str(SCRIPT),
        )
    )
    tokenizer = TextTokenizer.from_folder(checkpoint)
    upstream = CoreUpstream(core)
    config = GatewayConfig(served_model_name=("tiny",), allow_priority=True)
    yield RealGateway(upstream, tokenizer, create_app(config, upstream, tokenizer))
    assert not core.has_work
    core.check()
    core.close()
