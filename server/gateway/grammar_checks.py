"""Whether the grammars of requests compile, known before the engine gets them."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from whalepod.server.gateway.api_errors import ApiError, invalid
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.limits import GRAMMAR_TIMEOUT_S
from whalepod.server.messages import EngineInfo
from whalepod.server.structured.checker import GrammarChecker
from whalepod.server.structured.interface import CompilerUnavailableError, GrammarError
from whalepod.server.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class GrammarChecks:
    """Compiles grammars for one model; its processes start when they are needed."""

    def __init__(self, tokenizer: TextTokenizer, info: EngineInfo) -> None:
        self._tokenizer, self._info = tokenizer, info
        self._checker: GrammarChecker | None = None

    async def check(self, runs: Sequence[PromptRun], client: Hashable) -> None:
        """Return when the grammars of a request are known to compile; ApiError says why not.

        Clients take turns. `client` is who asks.
        """
        for run in runs:
            constraint = run.submit.params.constraint
            if constraint is None or constraint.kind == "any":
                continue
            if self._checker is None:
                self._checker = self._new_checker()
            try:
                await self._checker.check(constraint, client)
            except GrammarError as error:
                param = run.constraint_param
                raise invalid(param, f"{param}: the grammar cannot be compiled: {error}") from None
            except CompilerUnavailableError as error:
                logger.error("%s: %r", error, error.__cause__)
                raise ApiError("compiler_unavailable", str(error)) from error

    async def close(self) -> None:
        """End the processes that compile."""
        if self._checker is not None:
            await self._checker.close()

    def _new_checker(self) -> GrammarChecker:
        return GrammarChecker(
            self._tokenizer.transformers.backend_tokenizer.to_str(),
            self._info.vocab_size,
            self._info.eos_token_ids,
            timeout_s=GRAMMAR_TIMEOUT_S,
        )
