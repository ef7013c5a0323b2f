"""What the routes share."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence

from fastapi import Request

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.encoder import AnswerHeader
from whalepod.server.gateway.families.registry import choose_family
from whalepod.server.gateway.limits import MAX_PENDING_TOKENIZATIONS, NUM_TOKENIZER_THREADS
from whalepod.server.gateway.metrics import Metrics
from whalepod.server.gateway.offload import Offload
from whalepod.server.gateway.preparation import Preparation
from whalepod.server.gateway.tokenizer import TextTokenizer
from whalepod.server.upstream import Upstream


class Gateway:
    """One engine behind HTTP: everything that lives as long as the application."""

    def __init__(
        self,
        config: GatewayConfig,
        upstream: Upstream,
        tokenizer: TextTokenizer,
        default_params: Mapping[str, float],
    ) -> None:
        self.config = config
        self.upstream = upstream
        self.tokenizer = tokenizer
        self.metrics = Metrics(lambda: upstream.stats)
        self.offload = Offload(NUM_TOKENIZER_THREADS, MAX_PENDING_TOKENIZATIONS)
        family = choose_family(
            tokenizer.chat_template,
            reasoning_parser=config.reasoning_parser,
            tool_call_parser=config.tool_call_parser,
        )
        self.preparation = Preparation(
            upstream.info, tokenizer, default_params, config.enable_test_hooks, family
        )
        self.model_names: Sequence[str] = config.served_model_name or (upstream.info.model_type,)
        self.created = int(time.time())
        self.system_fingerprint = _fingerprint(upstream)

    def check_model(self, name: str | None) -> str:
        """Return the model's name to answer with; ApiError model_not_found for an unknown one."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist here; this server has: {known}"
            raise ApiError("model_not_found", message, "model")
        return name

    def header(self, prefix: str, model: str) -> AnswerHeader:
        """Return the identity of a new answer."""
        return AnswerHeader(
            id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=model,
            system_fingerprint=self.system_fingerprint,
        )


def gateway_of(request: Request) -> Gateway:
    """Return the gateway of the application that serves `request`."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway), type(gateway)
    return gateway


def _fingerprint(upstream: Upstream) -> str:
    info = upstream.info
    facts = (whalepod.__version__, info.model_type, info.dtype, info.kernels)
    return "fp_" + hashlib.sha256("|".join(facts).encode()).hexdigest()[:10]
