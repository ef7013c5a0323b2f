"""Programs that answer as the peers of a comparison do: `python fake_peers.py PROGRAM ARGUMENTS`.

Rates are made up from the request, so that a figure in the wrong row shows.
"""

from __future__ import annotations

import json
import os
import sys

WHALEPOD = "import sys; from tests.tools.fake_peers import main; main('whalepod', sys.argv[1:])"
MEASURE = "import sys; from tests.tools.fake_peers import main; main('measure', sys.argv[1:])"
LOG = "FAKE_PEERS_LOG"
"""Names the file that every command line is added to."""


def main(program: str, arguments: list[str]) -> None:
    """Play one program."""
    if LOG in os.environ:
        with open(os.environ[LOG], "a", encoding="utf-8") as file:
            file.write(json.dumps([program, *arguments]) + "\n")
    if program == "llama-bench":
        llama_bench(arguments)
    elif program == "llama-batched-bench":
        for size in value_of("-npl", arguments).split(","):
            print(json.dumps({"pl": int(size), "speed_tg": 100.0 + int(size)}), file=sys.stderr)
    elif program == "measure":
        measure(arguments)
    else:  # whalepod serve, llama-server, vllm serve
        import uvicorn

        from tests.tools.fake_openai_server import FakeServer

        port = int(value_of("--port", arguments))
        uvicorn.run(FakeServer(), port=port, log_level="error", lifespan="off", ws="none")


def llama_bench(arguments: list[str]) -> None:
    """A prompt of n tokens runs at n / 2 tokens/s, decoding at 50, 40 behind a long context."""
    depth = int(value_of("-d", arguments, "0"))
    repeats = int(value_of("-r", arguments))
    print("a line of the log")
    for length in map(int, value_of("-p", arguments).split(",")):
        if length:
            show(n_prompt=length, n_gen=0, n_depth=depth, samples_ts=[length / 2] * repeats)
    samples = [40.0 if depth else 50.0] * repeats
    show(n_prompt=0, n_gen=int(value_of("-n", arguments)), n_depth=depth, samples_ts=samples)


def measure(arguments: list[str]) -> None:
    """Prompts run at n tokens/s, decoding at 60 x the requests; behind a long context at 42."""
    if arguments[0] == "prefill":
        lengths = values_of("--lengths", arguments)
        show(results=[{"num_tokens": n, "tokens_per_s": float(n)} for n in lengths])
        return
    rate = 42.0 if "--context" in arguments else 60.0
    sizes = values_of("--batch-sizes", arguments)
    rows = [
        {"num_requests": n, "tokens_per_s": rate * n, "share_of_read_limit": 0.9} for n in sizes
    ]
    show(results=rows)


def show(**fields: object) -> None:
    print(json.dumps(fields))


def values_of(flag: str, arguments: list[str]) -> list[int]:
    return [int(arguments[i + 1]) for i, word in enumerate(arguments) if word == flag]


def value_of(flag: str, arguments: list[str], default: str | None = None) -> str:
    if default is not None and flag not in arguments:
        return default
    return arguments[arguments.index(flag) + 1]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
