"""The engine inside the caller's own process, without HTTP: `whalepod.Engine`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import TracebackType
from typing import Any, Self

from whalepod.models.source import resolve_model
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput, TokenLogprob
from whalepod.server.build import build_engine
from whalepod.server.config import EngineConfig
from whalepod.server.engine.grammar_queue import MAX_COMPILING
from whalepod.server.messages import Abort, Rejected, Submit
from whalepod.server.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer. `text` lacks special tokens and the token that ended it; `token_ids` has all."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    """"stop", "length" or "error"."""
    num_cached_tokens: int
    error: str | None = None


class Engine:
    """Generate text with a model, from Python.

    The same scheduler, runner and sampler as in the server, so the same answers:

        with Engine("tiny", max_model_len=2048) as engine:
            [answer] = engine.generate("2 + 2 =", SamplingParams(temperature=0, max_tokens=8))

    `options` are fields of `EngineConfig` and its parts by their names (dtype, load_format,
    batch_invariant, max_num_seqs, record, ...). Raises StartupError when the model cannot be
    loaded and TypeError for an unknown option.
    """

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        config = _new_config(model, options)
        self._core = build_engine(config)
        source = config.source
        folder = resolve_model(
            source.model, source.revision, with_weights=source.load_format != "dummy"
        )
        self._tokenizer = TextTokenizer.from_folder(folder)
        self._max_waiting = min(config.scheduler.max_num_queued_reqs, MAX_COMPILING)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the record, if one is written."""
        self._core.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Answer each prompt (a text, or its token ids) and return when all are done.

        params  one for all, or one for each prompt; None: OpenAI's defaults

        A failed answer has finish_reason "error". Raises RequestRejected, and runs none to its
        end, when a prompt is too long or a parameter does not fit the model.
        """
        listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else [*prompts]
        submits = [
            self._new_submit(prompt, one)
            for prompt, one in zip(listed, _params_of_each(params, len(listed)), strict=True)
        ]
        answers = self._run(submits)
        return [self._generation(answers[submit.request_id]) for submit in submits]

    def _new_submit(self, prompt: str | Sequence[int], params: SamplingParams) -> Submit:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._num_requests += 1
        return Submit(
            request_id=f"local-{self._num_requests}",
            prompt_token_ids=tuple(token_ids),
            params=params,
        )

    def _run(self, submits: Sequence[Submit]) -> dict[str, SequenceOutput]:
        answers: dict[str, SequenceOutput] = {}
        pending = deque(submits)
        try:
            while pending or self._core.has_work:
                while pending and self._core.num_waiting < self._max_waiting:
                    self._submit(pending.popleft())
                step = self._core.step()
                for output in step.outputs if step is not None else ():
                    before = answers.get(output.request_id)
                    answers[output.request_id] = before.join(output) if before else output
        finally:  # also after a refusal or Ctrl-C: nothing of this call stays
            self._core.receive([Abort(request_id=submit.request_id) for submit in submits])
        return answers

    def _submit(self, submit: Submit) -> None:
        for reply in self._core.receive([submit]):
            if isinstance(reply, Rejected):
                raise RequestRejected(reply.code, reply.message, reply.param)

    def _generation(self, answer: SequenceOutput) -> Generation:
        token_ids = answer.token_ids
        shown = token_ids if answer.stop_token_id is None else token_ids[:-1]
        return Generation(
            text=self._tokenizer.decode(shown, skip_special_tokens=True),
            token_ids=token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason or "error",
            num_cached_tokens=answer.num_cached_tokens,
            error=answer.error,
        )


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts need as many params (or one), got {len(params)}")
    return list(params)


def _new_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Put each option into the part of the configuration that has a field of its name."""
    rest = {"model": model, **options}
    changes: dict[str, Any] = {}
    for part in fields(EngineConfig):
        default = getattr(EngineConfig(), part.name)
        if is_dataclass(default) and not isinstance(default, type):
            known = {f.name: rest.pop(f.name) for f in fields(default) if f.name in rest}
            changes[part.name] = replace(default, **known)
        elif part.name in rest:
            changes[part.name] = rest.pop(part.name)
    if rest:
        raise TypeError(f"unknown options of Engine: {', '.join(sorted(rest))}")
    return EngineConfig(**changes)
