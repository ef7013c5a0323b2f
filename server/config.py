"""Configuration of the server: frozen dataclasses, one per part, composed and never inherited.

The annotation of a field is its comment, its `--help` text and its line in the reference page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from whalepod.mtp.config import SpeculationConfig
from whalepod.scheduler.config import SchedulerConfig

DtypeName = Literal["auto", "bf16", "fp32"]
TransportName = Literal["shm", "gloo", "cuda_ipc", "nvshmem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Which weights, and in which form."""

    model: Annotated[str, "checkpoint folder, preset or Hugging Face id"] = "tiny"
    revision: Annotated[str | None, "branch, tag or commit of a Hugging Face id"] = None
    dtype: Annotated[DtypeName, "auto: fp32 for `tiny`, else what the checkpoint says"] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        "int8: half the memory, up to twice the speed, a little less exact",
    ] = "none"
    load_format: Annotated[Literal["auto", "dummy"], "dummy: seeded random weights"] = "auto"
    seed: Annotated[int, "seed of dummy weights and of requests without one"] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where tensors live and what computes on them."""

    device: Annotated[Literal["cpu", "cuda"], "where the model runs; cuda is not served yet"] = (
        "cpu"
    )
    kernels: Annotated[
        Literal["auto", "reference", "cpu"], "auto: the fastest that this machine has"
    ] = "auto"
    num_threads: Annotated[int, "threads of the engine; 0: all cores of this process"] = 0
    batch_invariant: Annotated[
        bool, "bit-equal answers whatever the batch, the chunks and the cache hits"
    ] = False
    kv_cache_memory_bytes: Annotated[int, "memory of the KV cache; 0: a share of what is free"] = 0
    absorbed_max_query_tokens: Annotated[
        int, "longest chunk that attends in the latent space; longer ones expand keys and values"
    ] = 64

    def __post_init__(self) -> None:
        if self.kernels == "reference" and self.batch_invariant:
            raise ValueError(
                "kernels (reference) cannot be batch_invariant: drop one of the two, the kernels "
                "of this machine can be"
            )
        for name in ("num_threads", "kv_cache_memory_bytes", "absorbed_max_query_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many ranks serve the model together, and how they reach each other."""

    expert_parallel_size: Annotated[
        int, "ranks that the experts are spread over; each has its own requests and KV cache"
    ] = 1
    all2all_backend: Annotated[
        Literal["auto", "shm", "gloo", "cuda_ipc", "nvshmem"],
        "what carries rows between ranks; auto: the fastest that reaches all of them; cuda_ipc and "
        "nvshmem need --device cuda",
    ] = "auto"
    dispatch_timeout_s: Annotated[
        float,
        "a rank this late in a layer is suspect; before a step the others wait 4 times as long",
    ] = 10.0
    rank_return_timeout_s: Annotated[
        float, "how long requests wait for a lost rank to come back before they end with a 503"
    ] = 60.0

    def __post_init__(self) -> None:
        if self.expert_parallel_size < 1:
            raise ValueError(
                f"expert_parallel_size must be at least 1, got {self.expert_parallel_size}"
            )
        for name in ("dispatch_timeout_s", "rank_return_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """Whether experts have replicas that move to where load is, and when they do."""

    enable_eplb: Annotated[bool, "move experts between ranks so that all have as much to do"] = (
        False
    )
    num_redundant_experts: Annotated[int, "slots for replicas, over all ranks"] = 0
    eplb_window_steps: Annotated[int, "steps whose loads a placement is made for"] = 1000
    eplb_interval_steps: Annotated[int, "steps between two placements"] = 3000
    eplb_min_gain: Annotated[
        float, "how much the balancedness of a layer (mean over maximum load) must rise to move it"
    ] = 0.05
    eplb_replica_choice: Annotated[
        Literal["nearest", "hashed", "least-loaded"], "which replica of an expert serves a token"
    ] = "least-loaded"
    eplb_step_bytes: Annotated[int, "bytes that a rank moves before a step"] = 8 << 20
    eplb_trace: Annotated[str | None, "file for the loads of each interval"] = None

    def __post_init__(self) -> None:
        for name in ("eplb_window_steps", "eplb_interval_steps", "eplb_step_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_redundant_experts < 0:
            raise ValueError(
                f"num_redundant_experts must be at least 0, got {self.num_redundant_experts}"
            )
        if not 0 <= self.eplb_min_gain <= 1:
            raise ValueError(f"eplb_min_gain must be in 0..1, got {self.eplb_min_gain}")
        if self.num_redundant_experts and not self.enable_eplb:
            raise ValueError(
                f"num_redundant_experts ({self.num_redundant_experts}) needs enable_eplb: add it, "
                "or leave both out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """Which machine this is of those that serve a model together."""

    num_nodes: Annotated[
        int, "machines that serve the model together; torchrun and LeaderWorkerSet say it, too"
    ] = 1
    node_rank: Annotated[
        int, "number of this machine; 0 runs `whalepod serve`, the others `whalepod worker`"
    ] = 0
    master_address: Annotated[str | None, "address of machine 0 that the others reach"] = None
    master_port: Annotated[int, "port of machine 0 where all meet"] = 29500
    rendezvous_timeout_s: Annotated[
        float, "how long a machine waits for the others before all end with an error"
    ] = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(
                f"node_rank ({self.node_rank}) must be in 0..{self.num_nodes - 1}, since num_nodes "
                f"is {self.num_nodes}"
            )
        if not 1 <= self.master_port <= 65535:
            raise ValueError(f"master_port must be in 1..65535, got {self.master_port}")
        if not self.rendezvous_timeout_s > 0:
            raise ValueError(
                f"rendezvous_timeout_s must be over 0, got {self.rendezvous_timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a model on a device, and the limits of its scheduler."""

    source: ModelSource = field(default_factory=ModelSource)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eplb: EplbConfig = field(default_factory=EplbConfig)
    structured_outputs_backend: Annotated[
        str, "library that keeps answers to their grammars; llguidance is the only one"
    ] = "llguidance"
    enable_test_hooks: Annotated[bool, "allow --test-script"] = False
    test_script: Annotated[
        str | None,
        "JSONL file of answers to prompts that hold a text: see server/engine/scripted.py",
    ] = None
    record: Annotated[str | None, "write every engine input to this file, for replay"] = None

    def __post_init__(self) -> None:
        if self.structured_outputs_backend != "llguidance":
            raise ValueError(
                f"structured_outputs_backend ({self.structured_outputs_backend}) must be "
                "llguidance: other libraries are not supported"
            )
        if self.test_script is not None and not self.enable_test_hooks:
            raise ValueError(
                "test_script needs enable_test_hooks: add the second or drop the first"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP side."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on"] = 8000
    api_key: Annotated[tuple[str, ...], "accepted keys; none: no key is asked for"] = ()
    api_key_file: Annotated[str | None, "file with more accepted keys, one a line"] = None
    cors_allow_origin: Annotated[
        tuple[str, ...], "origins whose pages may use this server; none: no other origin's"
    ] = ()
    admin_port: Annotated[int, "port of the admin routes; 0: there are none"] = 0
    admin_host: Annotated[str, "address of the admin routes"] = "127.0.0.1"
    admin_key: Annotated[tuple[str, ...], "keys that open the admin routes"] = ()
    served_model_name: Annotated[tuple[str, ...], "names that requests may use"] = ()
    chat_template: Annotated[str | None, "file that replaces the checkpoint's template"] = None
    reasoning_parser: Annotated[str, "auto: what the chat template's model family needs"] = "auto"
    tool_call_parser: Annotated[str, "auto: what the chat template's model family needs"] = "auto"
    max_body_bytes: Annotated[int, "largest accepted request body"] = 4 * 1024 * 1024
    allow_priority: Annotated[
        bool, "let requests say how urgent they are (`priority`): those of lower numbers go first"
    ] = False
    request_timeout_s: Annotated[float, "longest time of one request; 0: any"] = 3600.0
    drain_timeout_s: Annotated[float, "time that a stopping server gives to live requests"] = 30.0
    sse_keep_alive_interval_s: Annotated[float, "a silent stream pings this often"] = 15.0
    ready_timeout_s: Annotated[float, "deadline for the engine to answer /ready"] = 5.0
    enable_test_hooks: Annotated[bool, "allow --test-script"] = False

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= (port := getattr(self, name)) <= 65535:
                raise ValueError(f"{name} must be in 0..65535, got {port}")
        for name in ("request_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("sse_keep_alive_interval_s", "ready_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be over 0, got {getattr(self, name)}")
        if bool(self.admin_port) != bool(self.admin_key):
            raise ValueError(
                f"admin_port ({self.admin_port}) and admin_key ({len(self.admin_key)} given) go "
                "together: give both or none"
            )
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(f"admin_port and port must differ, both are {self.port}")
        if self.enable_test_hooks and not self.is_local:
            raise ValueError(
                f"enable_test_hooks needs a loopback host, got {self.host!r}: drop one of the two"
            )

    @property
    def asks_for_key(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    @property
    def names_parsers(self) -> bool:
        """Whether a flag says how answers are read, which the chat template may contradict."""
        return (self.reasoning_parser, self.tool_call_parser) != ("auto", "auto")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("127.0.0.1", "localhost", "::1")
