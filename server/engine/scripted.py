"""Scripted answers, for tests of clients and of the gateway (`--test-script FILE`).

A prompt that holds a text of the file is answered with pieces of text, one in each output, then
with the end-of-sequence token. `ScriptedSampler` has the model's logits choose the tokens, so that
all else (limits, grammars, log-probabilities, drafts) happens as always; `ScriptedEngine` hands
them out piece by piece. `server/build.py` puts both in; nothing else knows of scripts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from whalepod.kernels.interface import Kernels
from whalepod.scheduler.plan import SequenceOutput, StepResult
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.sampler import Sampler, SamplerOutput
from whalepod.server.engine.sampling_state import SampleRequest
from whalepod.server.errors import StartupError
from whalepod.server.messages import (
    Abort,
    Rejected,
    Submit,
    ToEngine,
    ToGateway,
)
from whalepod.server.token_bytes import byte_alphabet

RAISE = "!raise"
"""The piece that makes its step fail."""
_RUNS = re.compile("([^\\ud800-\\udfff]*)([\\ud800-\\udfff]*)")

FindScript = Callable[[tuple[int, ...]], "Script | None"]
"""Prompt -> its script."""


class Script:
    """The tokens of one answer, cut into steps; past the end it says end-of-sequence."""

    def __init__(
        self, pieces: Sequence[str], encode: Callable[[str], Sequence[int]], eos_token_id: int
    ) -> None:
        self._token_ids: list[int | None] = []  # None fails
        self._step_ends: set[int] = set()
        self._eos_token_id = eos_token_id
        for piece in pieces:
            self._token_ids += [None] if piece == RAISE else list(encode(piece))
            self._step_ends.add(len(self._token_ids))

    def steer(self, logits_V: Tensor, num_generated: int) -> None:
        """Make the next token by far the likeliest, in place; NaN where the script fails."""
        token_id: int | None = self._eos_token_id
        if num_generated < len(self._token_ids):
            token_id = self._token_ids[num_generated]
        if token_id is None:
            logits_V.fill_(torch.nan)
        else:
            logits_V[token_id] = logits_V.max() + 1e4

    def ends_step(self, num_generated: int) -> bool:
        """Return whether a step of the script ends after this many tokens."""
        return num_generated in self._step_ends or num_generated > len(self._token_ids)


class ScriptedSampler(Sampler):
    """Samples scripted sequences from logits that follow their script."""

    def __init__(self, find: FindScript, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._find = find

    def sample(self, logits_BV: Tensor, wanted: Sequence[SampleRequest]) -> SamplerOutput:
        logits_BV = logits_BV.clone()
        for logits_V, want in zip(logits_BV, wanted, strict=True):
            script = self._find(tuple(want.state.prompt_token_ids))
            if script is not None:
                script.steer(logits_V, want.position - want.state.num_prompt_tokens)
        return super().sample(logits_BV, wanted)


@dataclass(slots=True)
class _Answer:
    """What a scripted sequence has generated, and what of it was not handed out yet."""

    script: Script
    num_generated: int = 0
    held: SequenceOutput | None = None


class ScriptedEngine(EngineCore):
    """Holds back what scripted sequences yield until a step of their script is whole.

    The model computes one token after the other as always; what a step of the script holds leaves
    when its last token is there, as if one step had yielded it all.
    """

    def __init__(self, find: FindScript, *parts: Any, **more: Any) -> None:
        """Take what `EngineCore` does after `find`."""
        super().__init__(*parts, **more)
        self._find = find
        self._answers: dict[tuple[str, int], _Answer] = {}

    def receive(self, messages: Iterable[ToEngine]) -> list[ToGateway]:
        """Take messages as `EngineCore` does; a request whose script cannot be run is refused."""
        replies: list[ToGateway] = []
        taken = []
        for message in messages:
            try:
                self._note(message)
            except ValueError as error:
                assert isinstance(message, Submit)
                replies.append(
                    Rejected(
                        request_id=message.request_id, code="invalid_request", message=str(error)
                    )
                )
            else:
                taken.append(message)
        return replies + super().receive(taken)

    def _note(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            script = self._find(tuple(message.prompt_token_ids))
            if script is not None:
                for index in range(message.num_sequences):
                    self._answers[message.request_id, index] = _Answer(script)
        elif isinstance(message, Abort):
            for key in [key for key in self._answers if key[0] == message.request_id]:
                if message.index in (None, key[1]):
                    del self._answers[key]

    def finish(self, result: StepResult) -> list[SequenceOutput]:
        """Take results as `EngineCore` does, and hold back what is no whole step of a script."""
        outputs = map(self._join, super().finish(result))
        return [output for output in outputs if output is not None]

    def _join(self, output: SequenceOutput) -> SequenceOutput | None:
        answer = self._answers.get((output.request_id, output.index))
        if answer is None:
            return output
        answer.num_generated += len(output.token_ids)
        if answer.held is not None:
            output = answer.held.join(output)
        if output.finish_reason is not None:
            del self._answers[output.request_id, output.index]
        elif not answer.script.ends_step(answer.num_generated):
            answer.held = output
            return None
        answer.held = None
        return output


# -- where scripts come from --------------------------------------------------------------------


class ScriptFile:
    """Turns of a file: what to answer where a prompt holds a text. Lines may be added any time.

    A line is a JSON object like `{"contains": "weather", "steps": ["It is ", "mild."]}`.
    StartupError names the line that is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._num_lines = 0
        self._turns: list[tuple[str, list[str]]] = []
        self._read()

    def find(self, prompt: str) -> list[str] | None:
        """Return the steps of the turn whose text stands last in a prompt."""
        self._read()
        text, steps = max(self._turns, key=lambda turn: prompt.rfind(turn[0]), default=("", []))
        return steps if text and text in prompt else None

    def _read(self) -> None:
        try:
            with self._path.open(encoding="utf-8") as file:
                file.seek(self._position)
                lines = file.readlines()
                self._position = file.tell()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--test-script {self._path} cannot be read: {error}") from error
        for line in lines:
            self._num_lines += 1
            if line.strip():
                self._turns.append(self._parse(line))

    def _parse(self, line: str) -> tuple[str, list[str]]:
        try:
            turn = json.loads(line)
        except ValueError:
            turn = None
        match turn:
            case {"contains": str(text), "steps": [*steps], **rest} if text and steps and not rest:
                if all(isinstance(step, str) for step in steps):
                    return text, steps
        raise StartupError(
            f"{self._path}, line {self._num_lines}: must be like "
            f'{{"contains": "a", "steps": ["b"]}}, got {line.strip()}'
        )


def load_scripts(folder: Path, path: Path, eos_token_id: int) -> FindScript:
    """Return what finds the scripts of a file; StartupError where the model has no tokenizer."""
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"test hooks need {file}: {error}") from error
    encode, turns = new_encoder(tokenizer), ScriptFile(path)

    @lru_cache(maxsize=1024)
    def find(prompt_token_ids: tuple[int, ...]) -> Script | None:
        steps = turns.find(tokenizer.decode(prompt_token_ids, skip_special_tokens=False))
        return None if steps is None else Script(steps, encode, eos_token_id)

    return find


def new_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return what turns a piece into tokens; a marker that is one vocabulary item becomes it.

    Half a character is written as Python's surrogates (`"\\udcf0\\udc9f"` are the bytes F0 9F);
    each such byte becomes the token of that byte.
    """
    ids = ((byte, tokenizer.token_to_id(letter)) for letter, byte in byte_alphabet().items())
    byte_tokens = {chr(0xDC00 + byte): token_id for byte, token_id in ids if token_id is not None}

    def encode(piece: str) -> list[int]:
        token_ids: list[int] = []
        for text, lone_bytes in _RUNS.findall(piece):
            token_ids += tokenizer.encode(text, add_special_tokens=False).ids
            for letter in lone_bytes:
                if letter not in byte_tokens:
                    raise ValueError(f"{letter!r} in a script is no byte that has a token")
                token_ids.append(byte_tokens[letter])
        return token_ids

    return encode
