"""Record of everything that reaches a scheduler, and its replay.

A journal is a stream of msgpack values: a header, then for each call of the scheduler one frame
with its input and one with its outcome (a digest of what it returned, or the error's name). It
holds prompts, so its file is opened with mode 0600. Replay feeds the inputs to a fresh
scheduler, without a model, and stops at the first outcome that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, TypeVar

import msgpack

from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.params import Constraint, SamplingParams
from whalepod.scheduler.plan import Plan, RowResult, SequenceOutput, StepResult, TokenLogprob
from whalepod.scheduler.request import Request
from whalepod.scheduler.scheduler import Scheduler

FORMAT = "whalepod journal"
VERSION = 5
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_Returned = TypeVar("_Returned")


class JournalError(ValueError):
    """A file is not a journal of this version, or is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a replay first differs from what was recorded."""

    frame: int
    """Number of the input frame, from 1."""
    call: str
    step: int
    """Steps planned before the call."""
    recorded: str
    replayed: str


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _outcome(value: object) -> tuple[str, str]:
    return ("returned", hashlib.blake2b(_pack(value), digest_size=8).hexdigest())


class RecordedScheduler(Scheduler):
    """A scheduler that writes each of its inputs to `file` before it acts on it."""

    def __init__(self, config: SchedulerConfig, *, file: BinaryIO, **settings: Any) -> None:
        """settings: as Scheduler's"""
        super().__init__(config, **settings)
        self._file = file
        eos_token_ids = sorted(self.eos_token_ids)
        header = {"config": asdict(config), **settings, "eos_token_ids": eos_token_ids}
        self._write([FORMAT, VERSION, header])

    def add(self, request: Request) -> None:
        self._record("add", _request_values(request), super().add, request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._record("cancel", [request_id, index], super().cancel, request_id, index)

    def reset_prefix_cache(self) -> int:
        return self._record("reset_prefix_cache", [], super().reset_prefix_cache)

    def step(self, num_drafts: int = 0, max_tokens: int | None = None) -> Plan | None:
        values = [num_drafts, max_tokens]
        return self._record("step", values, super().step, num_drafts, max_tokens)

    def finish(self, result: StepResult) -> list[SequenceOutput]:
        return self._record("finish", [result], super().finish, result)

    def finish_failed(self, step: int) -> None:
        self._record("finish_failed", [step], super().finish_failed, step)

    def note_clock(self, now_us: int) -> None:
        self._record("note_clock", [now_us], super().note_clock, now_us)

    def _record(
        self,
        name: str,
        values: list[Any],
        call: Callable[..., _Returned],
        *arguments: object,
    ) -> _Returned:
        self._write([name, values])
        try:
            returned = call(*arguments)
        except Exception as error:
            self._write(["raised", type(error).__name__])
            raise
        self._write(_outcome(returned))
        return returned

    def _write(self, frame: object) -> None:
        self._file.write(_pack(frame))


def replay(
    file: BinaryIO, new_scheduler: Callable[..., Scheduler] = Scheduler
) -> Divergence | None:
    """Feed a journal to a fresh scheduler; return the first difference, None if there is none.

    `new_scheduler` makes it; a subclass sees every input (a replay that runs the model, too).

    A last frame that was cut off ends the replay. Raises JournalError for another format or
    version, or a damaged file.
    """
    frames = _frames(file)
    scheduler = _fresh_scheduler(next(frames, None), new_scheduler)
    for number, (name, arguments) in enumerate(frames, start=1):
        step = scheduler.stats().num_steps
        replayed = _call(scheduler, name, arguments)
        recorded = next(frames, None)
        if recorded is not None and recorded != replayed:
            return Divergence(
                frame=number,
                call=name,
                step=step,
                recorded=" ".join(recorded),
                replayed=" ".join(replayed),
            )
        scheduler.check()
    return None


def _frames(file: BinaryIO) -> Iterator[tuple[Any, ...]]:
    unpacker = msgpack.Unpacker(
        file, use_list=False, strict_map_key=False, max_buffer_size=_MAX_FRAME_BYTES
    )
    try:
        for frame in unpacker:
            if not isinstance(frame, tuple) or len(frame) < 2:
                raise JournalError(f"a frame is {frame!r}, not a tuple of at least two")
            yield frame
    except (msgpack.UnpackException, ValueError) as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"the journal is damaged: {error}") from error


def _fresh_scheduler(
    header: tuple[Any, ...] | None, new_scheduler: Callable[..., Scheduler]
) -> Scheduler:
    if header is None or header[:2] != (FORMAT, VERSION):
        found = "nothing" if header is None else f"{header[:2]!r}"
        raise JournalError(f"expected {(FORMAT, VERSION)!r} at the start, found {found}")
    settings = dict(header[2])
    config = SchedulerConfig(**settings.pop("config"))
    eos_token_ids = frozenset(settings.pop("eos_token_ids"))
    return new_scheduler(config, eos_token_ids=eos_token_ids, **settings)


def _call(scheduler: Scheduler, name: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
    calls: dict[str, Callable[..., object]] = {
        "add": lambda *values: scheduler.add(_request(values)),
        "cancel": scheduler.cancel,
        "reset_prefix_cache": scheduler.reset_prefix_cache,
        "step": scheduler.step,
        "finish": lambda values: scheduler.finish(_step_result(values)),
        "finish_failed": scheduler.finish_failed,
        "note_clock": scheduler.note_clock,
    }
    if name not in calls:
        raise JournalError(f"unknown call {name!r}, known are {sorted(calls)}")
    try:
        return _outcome(calls[name](*arguments))
    except JournalError:
        raise
    except Exception as error:  # compared with the recorded outcome, which may be the same error
        return ("raised", type(error).__name__)


def _request_values(request: Request) -> list[Any]:
    params = asdict(replace(request.params, logit_bias=dict(request.params.logit_bias)))
    return [
        request.request_id,
        request.prompt_token_ids,
        params,
        request.num_sequences,
        request.priority,
        request.cache_salt,
    ]


def _request(values: tuple[Any, ...]) -> Request:
    request_id, prompt_token_ids, params, num_sequences, priority, cache_salt = values
    constraint = params.pop("constraint")
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(**params, constraint=constraint and Constraint(**constraint)),
        num_sequences=num_sequences,
        priority=priority,
        cache_salt=cache_salt,
    )


def _step_result(values: tuple[Any, ...]) -> StepResult:
    result = StepResult._make(values)
    return result._replace(rows=tuple([_row_result(row) for row in values[1]]))


def _row_result(values: tuple[Any, ...]) -> RowResult:
    result = RowResult._make(values)
    return result._replace(
        logprobs=tuple(map(TokenLogprob._make, result.logprobs)),
        prompt_logprobs=tuple(map(TokenLogprob._make, result.prompt_logprobs)),
    )
