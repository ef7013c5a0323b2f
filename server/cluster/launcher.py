"""What `whalepod serve` on machine 0 and `whalepod worker` on the others have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import whalepod
from whalepod.ep_comm.handshake import describe
from whalepod.models.packed_files import fingerprint
from whalepod.server.choose_transport import choose_transport
from whalepod.server.cluster.group_store import GroupStore, open_store
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.cluster.rendezvous import Roster, meet
from whalepod.server.cluster.waiting import Waiting
from whalepod.server.config import EngineConfig, TransportName

MAY_DIFFER = frozenset(
    ("source.model", "source.revision", "device.num_threads", "device.kv_cache_memory_bytes")
)
"""Settings that machines need not share; a model is compared by its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """This launcher among the others, after they have met."""

    config: EngineConfig
    plan: NodePlan
    roster: Roster
    store: GroupStore
    transport: TransportName


@contextmanager
def met(
    config: EngineConfig,
    plan: NodePlan,
    folder: Path,
    why_stop: Callable[[], str | None] = lambda: None,
) -> Iterator[Party]:
    """Open the store and wait for the other launchers. Raises StartupError.

    folder    of the checkpoint
    why_stop  says why to wait no longer
    """
    transport = choose_transport(config, num_launchers=plan.num_ranks // plan.num_local)
    waiting = Waiting(plan.timeout_s, why_stop)
    with open_store(plan, waiting) as store:
        settings = settings_of(config, plan, transport, folder)
        roster = meet(store, plan, settings, config.source.model, waiting)
        yield Party(config=config, plan=plan, roster=roster, store=store, transport=transport)


def settings_of(
    config: EngineConfig, plan: NodePlan, transport: TransportName, folder: Path
) -> dict[str, str]:
    """Return what all machines must have started with alike."""
    described = describe(
        whalepod=whalepod.__version__,
        num_ranks=plan.num_ranks,
        ranks_per_node=plan.ranks_per_node,
        transport=transport,
        model=_content_of(folder, is_dummy=config.source.load_format == "dummy"),
        source=config.source,
        device=config.device,
        scheduler=config.scheduler,
        speculation=config.speculation,
        parallel=config.parallel,
    )
    return {name: value for name, value in described.items() if name not in MAY_DIFFER}


def _content_of(folder: Path, *, is_dummy: bool) -> str:
    if is_dummy:
        return hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=12).hexdigest()
    return fingerprint(folder, "any")
