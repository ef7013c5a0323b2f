"""Messages between the gateway and an engine: dataclasses on the wire as versioned msgpack maps.

A message is `{"v": version, "t": type, ...fields}`, and the outputs in it are lists of their fields
in order. Unknown fields are ignored (a newer peer may send more); an unknown version or type, a
missing field, a wrong type or an oversized frame is a `MessageError`. Only plain integers, floats,
strings, lists and maps travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
STATS_INTERVAL_US = 50_000
"""How old the counters that a gateway knows may be while steps run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Gateway to engine: generate `num_sequences` answers to one prompt."""

    request_id: str
    """Unique; chosen by the gateway, never by a client."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    num_sequences: int = 1
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Test hook: pieces of text to emit, one per step, instead of sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Gateway to engine: free a request. What is unknown is ignored (it just ended)."""

    request_id: str
    index: int | None = None
    """The answer to end; the others go on. None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Gateway to engine: give a request back if it has not begun; answered by `Recalled` then."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Gateway to engine: answered by the engine loop itself, between two steps."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Gateway to engine: forget all cached texts that no live request uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceExperts:
    """Gateway to engine: place experts anew before the next step of the group."""

    slots: tuple[tuple[int, ...], ...] = ()
    """The expert in each slot, by layer; none: as the loads say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Gateway to engine: stop after the current step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Engine to gateway, once, when the engine can serve."""

    model_type: str
    dtype: str
    kernels: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_bytes: int
    kv_bytes_per_token: int
    load_seconds: float
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end an answer, unless a request ignores them."""
    expert_bytes: int = 0
    """Of the routed experts that are loaded here."""
    num_ranks: int = 1
    """Ranks that the experts are spread over."""
    transport: str = ""
    """What carries rows between the ranks; empty: there is one."""
    speculation: str = "off"
    """Who drafts and how many tokens, for people: "mtp, adaptive up to 4"."""
    structured_outputs_backend: str = "llguidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Where the experts of a group are, of one that moves them."""

    num_ranks: int
    slots: tuple[tuple[int, ...], ...]
    """The expert in each slot, by layer; slots of one rank are neighbours; -1: of a lost rank."""
    tokens: tuple[tuple[int, ...], ...]
    """What each expert got in the last window that was looked at, by layer."""
    moved: tuple[tuple[int, int, int, int], ...] = ()
    """Layer, expert, rank that it came from and rank that it came to, since the last placement."""
    plans: tuple[tuple[int, float, float, int], ...] = ()
    """Step, balancedness before and after, slots to change: of the last placements in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Engine to gateway: everything that one step produced."""

    outputs: tuple[SequenceOutput, ...]
    stats: Stats | None = None
    """None: those that were sent last are still new enough."""
    experts: Experts | None = None
    """None: as it was sent last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Engine to gateway: a request was refused before it was queued."""

    request_id: str
    code: str
    """"context_length_exceeded", "queue_full", "invalid_request", "too_large"."""
    message: str
    param: str | None = None
    """The field of the request that is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Engine to gateway: the request was still queued and is forgotten."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    nonce: int
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """Engine to gateway: the loop stops; every live request is lost."""

    message: str


ToEngine: TypeAlias = Submit | Abort | Recall | Ping | ResetPrefixCache | PlaceExperts | Shutdown
ToGateway: TypeAlias = EngineInfo | StepOutputs | Rejected | Recalled | Pong | EngineFailed


class MessageError(ValueError):
    """A frame that is not a message of this protocol version."""
