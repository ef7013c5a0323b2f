"""What the routes share."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

from fastapi import Request

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.engine_client import EngineClient
from whalepod.server.gateway.api_errors import ApiError, invalid
from whalepod.server.gateway.chat_formats.registry import choose_chat_format
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.limits import (
    GRAMMAR_TIMEOUT_S,
    MAX_PENDING_TOKENIZATIONS,
    MAX_STORED_RESPONSES,
    MAX_STORED_RESPONSES_BYTES,
    NUM_TOKENIZER_THREADS,
)
from whalepod.server.gateway.live_requests import LiveRequests
from whalepod.server.gateway.metrics import Metrics
from whalepod.server.gateway.preparation import Preparation
from whalepod.server.gateway.response_store import ResponseStore
from whalepod.server.structured.checker import GrammarChecker
from whalepod.server.structured.interface import CompilerUnavailableError, GrammarError
from whalepod.server.tokenizer import TextTokenizer, TokenizerPool

logger = logging.getLogger(__name__)


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
            tokenizer.chat_template,
            reasoning_parser=config.reasoning_parser,
            tool_call_parser=config.tool_call_parser,
        )
        self.preparation = Preparation(engine.info, tokenizer, default_params, chat_format)
        self.stored_responses = ResponseStore(MAX_STORED_RESPONSES, MAX_STORED_RESPONSES_BYTES)
        self._grammars: GrammarChecker | None = None
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

    async def check_grammars(self, runs: Sequence[PromptRun]) -> None:
        """Return when the grammars of a request are known to compile; ApiError says why not."""
        for run in runs:
            constraint = run.submit.params.constraint
            if constraint is None or constraint.kind == "any":
                continue
            if self._grammars is None:
                self._grammars = self._new_checker()
            try:
                await self._grammars.check(constraint)
            except GrammarError as error:
                param = run.constraint_param
                raise invalid(param, f"{param}: the grammar cannot be compiled: {error}") from None
            except CompilerUnavailableError as error:
                logger.error("%s: %r", error, error.__cause__)
                raise ApiError("compiler_unavailable", str(error)) from error

    async def close(self) -> None:
        """End the threads and processes that help with requests."""
        self.tokenizer_pool.close()
        if self._grammars is not None:
            await self._grammars.close()

    def _new_checker(self) -> GrammarChecker:
        return GrammarChecker(
            self.tokenizer.transformers.backend_tokenizer.to_str(),
            self.engine.info.vocab_size,
            self.engine.info.eos_token_ids,
            timeout_s=GRAMMAR_TIMEOUT_S,
        )

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
