"""Scores the embedded model on its held-out prompts: `python -m whalepod.tools.tiny.evaluate`."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from whalepod.tools.tiny import tokenizer as tiny_tokenizer
from whalepod.tools.tiny.data import markup, mixture
from whalepod.tools.tiny.data.sample import Call, Sample, has_word
from whalepod.tools.tiny.model import TinyModel, load_checkpoint

_FOLDER = Path(__file__).parents[2] / "models" / "tiny"
MAX_NEW_TOKENS = 200

CATEGORIES = {
    "sum": "sums", "think_sum": "sums", "passage": "passages", "think_passage": "passages",
    "call": "tool_calls", "think_call": "tool_calls", "no_tool": "no_tool",
    "result": "tool_results",
    "json": "json", "copy": "copying", "fact": "facts", "story": "stories",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote after the prompt; `ended`: by its own end-of-sentence."""

    text: str
    ended: bool
    ids: tuple[int, ...] = ()


def is_right(sample: Sample, answer: Answer) -> bool:
    """Judge one answer by every condition that the sample sets."""
    expected = sample.expected
    try:
        calls = markup.read_calls(answer.text)
    except ValueError:
        return False
    if _canonical(calls) != _canonical(expected.calls):
        return False
    if not calls and markup.CALLS_BEGIN in answer.text:
        return False
    said = answer.text.rsplit(tiny_tokenizer.THINK_END, 1)[-1].strip()
    if sample.thinking and tiny_tokenizer.THINK_END not in answer.text:
        return False
    if expected.json_value is not None:
        return _same_json(said, expected.json_value)
    if expected.one_of and said not in expected.one_of:
        return False
    return all(has_word(said, word) for word in expected.contains) and not any(
        has_word(said, word) for word in expected.lacks
    )


def calls_right_tool(sample: Sample, answer: Answer) -> bool:
    """Judge whether the wanted tools are called with arguments that fit their schemas.

    The values may be wrong; `is_right` wants these, too.
    """
    try:
        calls = markup.read_calls(answer.text)
    except ValueError:
        return False
    wanted = Counter(name for name, _ in sample.expected.calls)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
    return Counter(name for name, _ in calls) == wanted and all(
        _fits(arguments, schemas[name]) for name, arguments in calls
    )


def _fits(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Check arguments against the flat schemas of the generator's tools."""
    properties = schema["properties"]
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
    return sorted(arguments) == sorted(schema["required"]) and all(
        isinstance(value, types[properties[key]["type"]])  # type: ignore[arg-type]
        for key, value in arguments.items()
    )


def _canonical(calls: Sequence[Call]) -> Counter[str]:
    return Counter(f"{name} {json.dumps(arguments, sort_keys=True)}" for name, arguments in calls)


def _same_json(text: str, wanted: Any) -> bool:
    try:
        return bool(json.loads(text) == wanted)
    except ValueError:
        return False


def summary(samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the share of right answers by category, and three more shares.

    valid_calls  where a call is wanted: the right tool, with arguments that fit its schema
    no_call      where none is wanted, though tools are listed: none is made
    ends         all answers: ended by themselves
    """
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for sample, answer in zip(samples, answers, strict=True):
        category = CATEGORIES.get(sample.kind, sample.kind)
        total[category] += 1
        right[category] += is_right(sample, answer)
        if category == "tool_calls":
            total["valid_calls"] += 1
            right["valid_calls"] += calls_right_tool(sample, answer)
        elif category == "no_tool":
            total["no_call"] += 1
            right["no_call"] += markup.CALLS_BEGIN not in answer.text
    shares = {category: right[category] / total[category] for category in sorted(total)}
    ended = sum(answer.ended for answer in answers) / len(answers)
    return {name: round(share, 4) for name, share in (shares | {"ends": ended}).items()}


@torch.inference_mode()
def greedy(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[Sample],
    rows_per_batch: int = 32,
) -> list[Answer]:
    """Write the most likely answer to each prompt through transformers, batched by length."""
    prompts = [tiny_tokenizer.prompt_ids(tokenizer, sample) for sample in samples]
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    trunk = model.trunk
    trunk.set_attn_implementation("sdpa")
    answers: dict[int, Answer] = {}
    try:
        for start in range(0, len(prompts), rows_per_batch):
            chosen = by_length[start : start + rows_per_batch]
            ids, mask = _left_padded([prompts[index] for index in chosen], tokenizer)
            written = trunk.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )[:, ids.shape[1] :]
            for index, row in zip(chosen, written.tolist(), strict=True):
                answers[index] = _answer(tokenizer, row)
    finally:
        trunk.set_attn_implementation("tiny_causal")
    return [answers[index] for index in range(len(prompts))]


def _left_padded(
    prompts: list[list[int]], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), int(tokenizer.pad_token_id))
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def _answer(tokenizer: PreTrainedTokenizerFast, row: list[int]) -> Answer:
    eos = tokenizer.eos_token_id
    ended = eos in row
    kept = row[: row.index(eos)] if ended else row
    text = str(tokenizer.decode(kept, skip_special_tokens=False))
    return Answer(text, ended, tuple(kept))


def through_server(
    url: str, model_name: str, tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]
) -> list[Answer]:
    """Write the answers through `/v1/completions` of a server, with prompts as token ids.

    Raw completions show the tool markup whatever parser the server has.
    """

    def ask(sample: Sample) -> Answer:
        body = {
            "model": model_name,
            "prompt": tiny_tokenizer.prompt_ids(tokenizer, sample),
            "max_tokens": MAX_NEW_TOKENS,
            "temperature": 0,
        }
        request = urllib.request.Request(
            url.rstrip("/") + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            choice = json.load(response)["choices"][0]
        return Answer(choice["text"], choice["finish_reason"] == "stop")

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, samples))


@torch.inference_mode()
def draft_acceptance(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[Sample],
    answers: Sequence[Answer],
) -> float:
    """Return the share of answer tokens that the MTP layer's first draft has right.

    A draft is made when the trunk has written token i + 1 from the hidden of token i, so the
    first drafted token of an answer is its second.
    """
    right = total = 0
    for sample, answer in zip(samples, answers, strict=True):
        prompt = tiny_tokenizer.prompt_ids(tokenizer, sample)
        tail = [int(tokenizer.eos_token_id)] if answer.ended else []
        ids = torch.tensor([prompt + list(answer.ids) + tail])
        drafted = model.trunk.lm_head(model.mtp_hidden(ids, model.hidden(ids))).argmax(-1)
        first = len(prompt) - 1
        right += int((drafted[0, first:-1] == ids[0, first + 2 :]).sum())
        total += ids.shape[1] - first - 2
    return right / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=_FOLDER, help="checkpoint folder")
    parser.add_argument("--url", help="score a running server instead, e.g. http://127.0.0.1:8000")
    parser.add_argument("--served-model-name", default="tiny")
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--first", action="store_true", help="score what newcomers type instead")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 500 prompts")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N failures")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    tokenizer = tiny_tokenizer.load_tokenizer(flags.model)
    samples = (
        mixture.first_impressions(flags.split)
        if flags.first
        else mixture.held_out(flags.split, flags.scale)
    )
    if flags.url:
        answers = through_server(flags.url, flags.served_model_name, tokenizer, samples)
        shares = summary(samples, answers)
    else:
        model = load_checkpoint(flags.model)
        answers = greedy(model, tokenizer, samples)
        shares = summary(samples, answers)
        shares["first_draft_accepted"] = round(
            draft_acceptance(model, tokenizer, samples, answers), 4
        )
    _print(shares, as_json=flags.json)
    wrong = [pair for pair in zip(samples, answers, strict=True) if not is_right(*pair)]
    for sample, answer in wrong[: flags.show_wrong]:
        print(f"\n[{sample.kind}] {sample.messages[-1]['content']}")
        print(f"  wanted {sample.answer}\n  got    {answer.text}")


def _print(shares: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(shares))
        return
    for name, share in shares.items():
        print(f"{name:22}{share:8.1%}")


if __name__ == "__main__":
    main()
