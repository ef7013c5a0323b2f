"""The wire format: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput, TokenLogprob
from whalepod.scheduler.stats import Stats
from whalepod.server import codec
from whalepod.server.config import EngineConfig, ModelSource
from whalepod.server.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineFailed,
    EngineInfo,
    MessageError,
    Ping,
    Pong,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False)
TOKENS = st.lists(INT64, max_size=20).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(10, 2**40),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    logit_bias=st.dictionaries(INT64, st.floats(-100, 100), max_size=5),
    seed=st.none() | INT64,
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
)
LOGPROBS = st.builds(
    TokenLogprob,
    token_id=INT64,
    logprob=NUMBERS,
    rank=INT64,
    top=st.lists(st.tuples(INT64, NUMBERS), max_size=3).map(tuple),
)
STATS = st.builds(Stats, num_running=INT64, step_time_us=INT64)
ENGINE_NUMBERS = {field.name: INT64 for field in fields(EngineInfo) if field.type == "int"}
OUTPUTS = st.builds(
    SequenceOutput,
    request_id=st.text(),
    sequence_id=INT64,
    index=INT64,
    token_ids=TOKENS,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    prompt_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    num_cached_tokens=INT64,
    queue_us=INT64,
    finish_reason=st.none() | st.text(),
    stop_token_id=st.none() | INT64,
    num_accepted_drafts=INT64,
    num_rejected_drafts=INT64,
    error=st.none() | st.text(),
)
MESSAGES: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Submit,
        request_id=st.text(),
        prompt_token_ids=TOKENS,
        params=PARAMS,
        num_sequences=INT64,
    ),
    st.builds(Abort, request_id=st.text()),
    st.builds(Ping, nonce=INT64),
    st.builds(ResetPrefixCache),
    st.just(Shutdown()),
    st.builds(EngineInfo, load_seconds=NUMBERS, **ENGINE_NUMBERS),
    st.builds(
        StepOutputs, outputs=st.lists(OUTPUTS, max_size=3).map(tuple), stats=st.none() | STATS
    ),
    st.builds(Rejected, request_id=st.text(), code=st.text(), message=st.text()),
    st.builds(Pong, nonce=INT64, stats=STATS),
    st.builds(EngineFailed, message=st.text()),
)


@given(MESSAGES)
def test_decoding_an_encoded_message_gives_it_back(message: Any) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_random_bytes_raise_message_errors_only() -> None:
    rng = random.Random(7)
    valid = codec.encode(Submit(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams()))
    for _ in range(2_000):
        frame = bytearray(rng.randbytes(rng.randrange(80)) if rng.random() < 0.5 else valid)
        for _ in range(rng.randrange(4) if frame else 0):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            codec.decode(bytes(frame[: rng.randrange(1, 120)]))
        except MessageError:
            continue


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
), st.sampled_from(sorted(codec.MESSAGE_TYPES)), st.sampled_from(
    ["prompt_token_ids", "params", "outputs", "stats", "nonce", "request_id"]
))  # fmt: skip
@settings(max_examples=300)
def test_well_formed_maps_of_wrong_types_raise_message_errors_only(
    value: Any, name: str, field: str
) -> None:
    try:
        codec.decode(msgpack.packb({"v": PROTOCOL_VERSION, "t": name, field: value}))
    except MessageError:
        return


def wire(message: Any, **changes: Any) -> bytes:
    return msgpack.packb(msgpack.unpackb(codec.encode(message)) | changes)


def test_unknown_fields_are_ignored() -> None:
    assert codec.decode(wire(Ping(nonce=3), colour="blue")) == Ping(nonce=3)
    output = SequenceOutput(sequence_id=3, request_id="a", index=0, token_ids=(5,))
    told = StepOutputs(outputs=(output,))
    assert codec.decode(wire(told, outputs=[[*output, "blue"]])) == told
    assert codec.decode(wire(told, outputs=[[3, "a", 0, [5]]])) == told


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (wire(Ping(nonce=3), v=1), "version 1"),
        (wire(Ping(nonce=3), t="Pang"), "Pang"),
        (wire(Ping(nonce=3), t=["Ping"]), "unknown message type"),
        (wire(Ping(nonce=3), nonce="3"), "Ping.nonce"),
        (wire(Ping(nonce=3), nonce=True), "Ping.nonce"),
        (wire(Ping(nonce=3), nonce=2**63), "64-bit"),
        (msgpack.packb({"v": PROTOCOL_VERSION, "t": "Ping"}), "nonce is missing"),
        (msgpack.packb([1, 2]), "a message is a map"),
        (msgpack.packb({"v": PROTOCOL_VERSION, "t": "Ping", 5: 5}), "not msgpack"),
        (b"", "not msgpack"),
        (b"\x91" * 100_000, "not msgpack"),
        (wire(StepOutputs(outputs=()), outputs=[[0, "a"]]), "index is missing"),
        (
            wire(StepOutputs(outputs=()), outputs=[[0, "a", 0, [1], "b"]]),
            "outputs.logprobs: expected a list",
        ),
        (wire(StepOutputs(outputs=()), outputs=[{"index": 0}]), "expected a list, got dict"),
    ],
)
def test_a_bad_frame_is_refused_and_its_fault_named(frame: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        codec.decode(frame)


@pytest.mark.parametrize(
    "params", [{"temperature": float("nan")}, {"top_p": 7}, {"logit_bias": [[1, float("inf")]]}]
)
def test_parameters_out_of_range_are_refused_at_the_engine_too(params: dict[str, Any]) -> None:
    submit = Submit(request_id="a", prompt_token_ids=(1,), params=SamplingParams())

    with pytest.raises(MessageError, match=next(iter(params))):
        codec.decode(wire(submit, params=params))


def test_oversized_frames_are_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100)

    with pytest.raises(MessageError, match="at most 100"):
        codec.encode(Abort(request_id="x" * 200))
    with pytest.raises(MessageError, match="at most 100"):
        codec.decode(b"\xc0" * 101)


def test_fields_at_their_defaults_do_not_travel_but_zeros_that_are_not_do() -> None:
    pong = msgpack.unpackb(codec.encode(Pong(nonce=0, stats=Stats(num_steps=5))))

    assert pong == {"v": PROTOCOL_VERSION, "t": "Pong", "nonce": 0, "stats": {"num_steps": 5}}
    changed = replace(SamplingParams(), temperature=0.0, logit_bias={5: 0.0})
    submit = Submit(request_id="a", prompt_token_ids=(), params=changed)
    assert codec.decode(codec.encode(submit)) == submit


def test_a_config_travels_like_a_message() -> None:
    config = EngineConfig(source=ModelSource(model="v3-nano", dtype="fp32"), record="log")

    assert codec.decode_value(EngineConfig, codec.encode_value(config)) == config
