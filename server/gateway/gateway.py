"""What the routes share."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence

from fastapi import Request

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.engine_client import EngineClient
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.chat_formats.registry import choose_chat_format
from whalepod.server.gateway.grammar_checks import GrammarChecks
from whalepod.server.gateway.limits import (
    MAX_PENDING_TOKENIZATIONS,
    MAX_STORED_RESPONSES,
    MAX_STORED_RESPONSES_BYTES,
    NUM_TOKENIZER_THREADS,
)
from whalepod.server.gateway.live_requests import LiveRequests
from whalepod.server.gateway.metrics import Metrics
from whalepod.server.gateway.preparation import Preparation
from whalepod.server.gateway.response_store import ResponseStore
from whalepod.server.tokenizer import TextTokenizer, TokenizerPool


class Gateway:
    """What serves one engine over HTTP: everything that lives as long as the application."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        default_params: Mapping[str, float],
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = Metrics(lambda: engine.stats, lambda: engine.rank_stats)
        self.requests = LiveRequests(config.request_timeout_s)
        self.tokenizer_pool = TokenizerPool(NUM_TOKENIZER_THREADS, MAX_PENDING_TOKENIZATIONS)
        chat_format = choose_chat_format(
            tokenizer.template,
            reasoning_parser=config.reasoning_parser,
            tool_call_parser=config.tool_call_parser,
        )
        self.preparation = Preparation(
            engine.info,
            tokenizer,
            default_params,
            chat_format,
            allows_priority=config.allow_priority,
        )
        self.stored_responses = ResponseStore(MAX_STORED_RESPONSES, MAX_STORED_RESPONSES_BYTES)
        self.grammars = GrammarChecks(tokenizer, engine.info)
        self.model_names: Sequence[str] = config.served_model_name or (engine.info.model_type,)
        self.created = int(time.time())
        self.system_fingerprint = _fingerprint(engine)

    def check_model(self, name: str | None) -> str:
        """Return the model's name to answer with; ApiError model_not_found for an unknown one."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist here; this server has: {known}"
            raise ApiError("model_not_found", message, "model")
        return name

    async def close(self) -> None:
        """End the threads and processes that help with requests."""
        self.tokenizer_pool.close()
        await self.grammars.close()

    def header(self, prefix: str, model: str | None) -> dict[str, object]:
        """Return what tells a new answer from others; its `object` is still to be named."""
        model = self.check_model(model)
        return {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.system_fingerprint,
        }


def gateway_of(request: Request) -> Gateway:
    """Return the gateway of the application that serves `request`."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway), type(gateway)
    return gateway


def _fingerprint(engine: EngineClient) -> str:
    info = engine.info
    facts = (whalepod.__version__, info.model_type, info.dtype, info.kernels)
    return "fp_" + hashlib.sha256("|".join(facts).encode()).hexdigest()[:10]
