"""Lets a Python process tell which files' functions run; `request_path.py` puts it on PYTHONPATH.

The process writes its number into the folder WHALEPOD_SIZE_HOOK. A first SIGUSR1 starts the
record, a second one writes it to `NUMBER.json`: {"ran": files, "loaded": files}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_folder = Path(os.environ["WHALEPOD_SIZE_HOOK"])
_ran: set[str] = set()
_is_recording = False


def _note(frame: FrameType, event: str, argument: Any) -> None:
    if _is_recording:
        _ran.add(frame.f_code.co_filename)
        if frame.f_back is not None:  # a loop that began before the record
            _ran.add(frame.f_back.f_code.co_filename)


def _toggle(number: int, frame: FrameType | None) -> None:
    global _is_recording
    _is_recording = not _is_recording
    if _is_recording:
        sys.setprofile(_note)
        return
    sys.setprofile(None)
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    record = {"ran": sorted(_ran), "loaded": sorted(filter(None, files))}
    part = _folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(record), encoding="utf-8")
    part.rename(_folder / f"{os.getpid()}.json")


threading.setprofile(_note)  # threads that start before the record are heard, too
signal.signal(signal.SIGUSR1, _toggle)
(_folder / str(os.getpid())).touch()
