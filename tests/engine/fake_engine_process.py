"""An engine process around the fake model; the `model` of its configuration says how it behaves."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from whalepod.server.config import EngineConfig
from whalepod.server.engine_process import main
from whalepod.server.errors import StartupError

if TYPE_CHECKING:
    from whalepod.server.engine.core import EngineCore


def build(config: EngineConfig) -> EngineCore:
    match config.source.model:
        case "refuses":
            raise StartupError("there is no such checkpoint")
        case "breaks":
            raise RuntimeError("a bug")
        case "dies":
            os._exit(7)
        case "hangs":
            time.sleep(600)
    from tests.engine.fakes import FakeModel, make_core  # torch, which the others do not need
    from whalepod.server.engine.core import EngineCore

    class SlowModel(FakeModel):
        def forward(self, batch, cache):  # type: ignore[no-untyped-def]
            time.sleep(0.01)  # so that a test can act while a request runs
            return super().forward(batch, cache)

    class BrokenCore(EngineCore):
        def step(self):  # type: ignore[no-untyped-def]
            if self.has_work and self.stats.num_steps == 3:
                raise RuntimeError("a bug in the loop")
            return super().step()

    if config.source.model == "crashes":
        core = make_core()
        core.__class__ = BrokenCore
        return core
    return make_core(model=SlowModel() if config.source.model == "slow" else FakeModel())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
