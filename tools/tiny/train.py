"""Trains the embedded model `tiny`: `python -m whalepod.tools.tiny.train OUT`.

Two phases. First trunk and MTP layer learn together from generated text; then the trunk is
frozen and the MTP layer learns from what the trunk itself writes, which is what it must draft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from whalepod.tools.tiny import evaluate, tokenizer as tiny_tokenizer
from whalepod.tools.tiny.data import mixture
from whalepod.tools.tiny.model import (
    TinyModel,
    balance,
    compiled_loops,
    load_checkpoint,
    save_checkpoint,
    set_dtype,
)
from whalepod.tools.tiny.optimizer import MasterOptimizer

_FOLDER = Path(__file__).parents[2] / "models" / "tiny"
STATE_TENSORS, STATE_COUNTERS = "state.safetensors", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long and how fast; changed by flags of the same name."""

    out: Annotated[Path, "folder for the checkpoint, the log and the state to resume from"]
    tokenizer: Annotated[Path, "folder with tokenizer and chat template"] = _FOLDER
    minutes: Annotated[float, "CPU minutes of the first phase; the rate follows them"] = 65.0
    mtp_minutes: Annotated[float, "length of the second phase, writing the text not counted"] = 8.0
    num_own_texts: Annotated[int, "conversations that the trunk answers for the second phase"] = (
        1_500
    )
    batch_tokens: Annotated[int, "tokens of one pass"] = 2_048
    passes_per_step: int = 2
    learning_rate: float = 2e-3
    warmup_steps: int = 60
    short_share: Annotated[float, "first share of the first phase with short rows only"] = 0.15
    decay_share: Annotated[float, "last share of the first phase with falling rate"] = 0.5
    prompt_share: Annotated[float, "share of the prompt's tokens that are learnt, at 0.3"] = 0.15
    mtp_weight: Annotated[float, "weight of the MTP loss (V3 report: 0.3)"] = 0.3
    mtp_start: Annotated[float, "share of the first phase after which the MTP layer joins"] = 0.5
    balance_rate: float = 1e-3
    seed: int = 0
    minutes_per_snapshot: Annotated[float, "pause between snapshots, for `evaluate` to score"] = 5.0
    num_threads: int = 1
    resume: bool = False
    start: Annotated[Path | None, "checkpoint to start from in place of random weights"] = None


@dataclass(slots=True)
class Batch:
    """Rows padded on the right: ids [B, T] and the loss weight of each token, f32 [B, T]."""

    ids: Tensor
    weights: Tensor
    num_tokens: int


Row = tuple[list[int], list[float]]

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Rows are padded to one of these: few shapes, so that each GEMM is compiled once."""


def padded_length(num_tokens: int) -> int:
    return next(length for length in LENGTHS if length >= num_tokens)


def make_batch(rows: list[Row], length: int, pad: int) -> Batch:
    ids_BT = torch.full((len(rows), length), pad)
    weights_BT = torch.zeros(len(rows), length)
    for index, (ids, weights) in enumerate(rows):
        ids_BT[index, : len(ids)] = torch.tensor(ids)
        weights_BT[index, : len(ids)] = torch.tensor(weights)
    return Batch(ids_BT, weights_BT, sum(len(ids) for ids, _ in rows))


class Batches:
    """Yields batches of samples of like length: each length has a queue, emptied when full."""

    def __init__(self, config: TrainConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._samples = mixture.samples(seed, "train", read_mixture(config.out))
        self._pad = int(tokenizer.pad_token_id)
        self._rng = random.Random(seed)
        self.max_length = 192

    def __iter__(self) -> Iterator[Batch]:
        queues: dict[int, list[Row]] = {length: [] for length in LENGTHS}
        while True:
            row = self._row()
            length = padded_length(len(row[0]))
            queues[length].append(row)
            if len(queues[length]) == max(1, self._config.batch_tokens // length):
                yield make_batch(queues[length], length, self._pad)
                queues[length] = []

    def _row(self) -> Row:
        while True:
            ids = tiny_tokenizer.training_ids(self._tokenizer, next(self._samples))
            if len(ids) <= self.max_length:
                break
        answer = tiny_tokenizer.answer_mask(self._tokenizer, ids)
        share = self._config.prompt_share
        return ids, [1.0 if own else 0.3 * (self._rng.random() < share) for own in answer]


def read_mixture(out: Path) -> dict[str, float]:
    """Read `mixture.json` of the run's folder if there is one: a run can be steered by hand."""
    path = out / "mixture.json"
    if not path.exists():
        return mixture.MIXTURE
    changed: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    unknown = changed.keys() - mixture.MAKERS.keys()
    if unknown:
        raise ValueError(f"{path} names unknown tasks {sorted(unknown)}")
    return mixture.MIXTURE | changed


def weighted_loss(model: TinyModel, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross-entropy; rows without weight are left out of the vocabulary GEMM.

    hidden [B, T, H]; targets, weights [B, T]
    """
    chosen = weights.flatten().nonzero().squeeze(1)
    logits = model.trunk.lm_head(hidden.flatten(0, 1).index_select(0, chosen))
    each = F.cross_entropy(logits.float(), targets.flatten()[chosen], reduction="none")
    kept = weights.flatten()[chosen]
    return (each * kept).sum() / kept.sum().clamp(min=1.0)


def trunk_loss(model: TinyModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the next-token loss, and the hidden that the MTP layer continues from."""
    hidden = model.hidden(batch.ids)
    return weighted_loss(model, hidden[:, :-1], batch.ids[:, 1:], batch.weights[:, 1:]), hidden


def draft_loss(model: TinyModel, batch: Batch, hidden: Tensor) -> Tensor:
    """Return the MTP layer's loss for the token after the next."""
    drafted = model.mtp_hidden(batch.ids, hidden)[:, :-1]
    return weighted_loss(model, drafted, batch.ids[:, 2:], batch.weights[:, 2:])


def own_text_batches(
    model: TinyModel, tokenizer: PreTrainedTokenizerFast, config: TrainConfig
) -> list[Batch]:
    """Let the trunk answer training prompts; only what it wrote has weight."""
    stream = mixture.samples(config.seed + 999_983, "train", read_mixture(config.out))
    samples = list(itertools.islice(stream, config.num_own_texts))
    answers = evaluate.greedy(model, tokenizer, samples, rows_per_batch=64)
    pad, queues = int(tokenizer.pad_token_id), dict[int, list[Row]]()
    for sample, answer in zip(samples, answers, strict=True):
        prompt = tiny_tokenizer.prompt_ids(tokenizer, sample)
        tail = [int(tokenizer.eos_token_id)] if answer.ended else []
        ids = (prompt + list(answer.ids) + tail)[: LENGTHS[-1]]
        weights = [0.0] * len(prompt) + [1.0] * (len(ids) - len(prompt))
        queues.setdefault(padded_length(len(ids)), []).append((ids, weights))
    batches = []
    for length, rows in queues.items():
        count = max(1, config.batch_tokens // length)
        chunks = (rows[start : start + count] for start in range(0, len(rows), count))
        batches += [make_batch(chunk, length, pad) for chunk in chunks]
    return batches


def learning_rate(config: TrainConfig, step: int, share_done: float) -> float:
    """Warm up, hold, then fall linearly to 2 %."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    left = min(1.0, max(0.02, (1.0 - share_done) / config.decay_share))
    return config.learning_rate * warm * left


class Means:
    """Averages losses between two log lines."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, loss: Tensor) -> None:
        self._values.setdefault(name, []).append(float(loss.detach()))

    def take(self) -> dict[str, object]:
        found = {name: round(sum(all_) / len(all_), 4) for name, all_ in self._values.items()}
        self._values = {}
        return dict(found)


class Trainer:
    """Owns model, optimizer and counters of one run."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.num_threads)
        self.config = config
        self.tokenizer = tiny_tokenizer.load_tokenizer(config.tokenizer)
        self.model = set_dtype(TinyModel(compiled_loops()), torch.bfloat16)
        if config.start is not None:
            self.model.load_state_dict(load_checkpoint(config.start, torch.bfloat16).state_dict())
        self.optimizer = MasterOptimizer(list(self.model.named_parameters()))
        self.step, self.num_tokens, self.seconds_before = 0, 0, 0.0
        self.mean = Means()
        if config.resume:
            self._load()
        self.started = time.process_time()

    @property
    def share_done(self) -> float:
        """How much of the first phase is over, by the CPU time spent in all runs together.

        CPU time: a busy machine or a pause then costs patience and no training.
        """
        spent = self.seconds_before + time.process_time() - self.started
        return spent / (self.config.minutes * 60)

    def _load(self) -> None:
        tensors = load_file(self.config.out / STATE_TENSORS)
        counters = json.loads((self.config.out / STATE_COUNTERS).read_text(encoding="utf-8"))
        self.step, self.num_tokens = counters["step"], counters["num_tokens"]
        self.seconds_before = counters["seconds"]
        for i, moe in enumerate(self.model.moe_layers()):
            moe.gate.e_score_correction_bias.copy_(tensors.pop(f"bias.{i}"))
        self.optimizer.load(tensors)

    def _save(self) -> None:
        save_checkpoint(self.model, self.config.out / "checkpoint")
        biases = {
            f"bias.{i}": moe.gate.e_score_correction_bias
            for i, moe in enumerate(self.model.moe_layers())
        }
        save_file(self.optimizer.state() | biases, self.config.out / STATE_TENSORS)
        counters = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": self.share_done * self.config.minutes * 60,
        }
        (self.config.out / STATE_COUNTERS).write_text(json.dumps(counters), encoding="utf-8")

    def log(self, record: dict[str, object]) -> None:
        minutes = round(self.share_done * self.config.minutes, 1)
        line = json.dumps(
            {"minutes": minutes, "step": self.step, "tokens": self.num_tokens} | record
        )
        print(line, flush=True)
        with (self.config.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def train_together(self) -> None:
        """First phase: trunk and MTP layer from generated text."""
        config = self.config
        stream, last_snapshot = self._stream(), time.monotonic()
        while self.share_done < 1.0:
            self._step_together(stream)
            if time.monotonic() - last_snapshot > config.minutes_per_snapshot * 60:
                self._save()
                stream, last_snapshot = self._stream(), time.monotonic()
        self._save()

    def _stream(self) -> Iterator[Batch]:
        batches = Batches(self.config, self.tokenizer, self.config.seed + self.step)
        batches.max_length = 128 if self.share_done < self.config.short_share else LENGTHS[-1]
        return iter(batches)

    def _step_together(self, stream: Iterator[Batch]) -> None:
        config = self.config
        calm = 0.1 if self.share_done > 0.8 else 1.0
        for _ in range(config.passes_per_step):
            batch = next(stream)
            total, hidden = trunk_loss(self.model, batch)
            self.mean.add("loss", total)
            if self.share_done >= config.mtp_start:
                draft = draft_loss(self.model, batch, hidden)
                total = total + config.mtp_weight * draft
                self.mean.add("mtp_loss", draft)
            torch.autograd.backward(total / config.passes_per_step)
            balance(self.model, config.balance_rate * calm)
            self.num_tokens += batch.num_tokens
        rate = learning_rate(config, self.step, self.share_done)
        norm = self.optimizer.step(rate)
        self.step += 1
        if self.step % 20 == 0:
            self.log(self.mean.take() | {"rate": round(rate, 5), "norm": round(norm, 3)})

    def train_drafts(self) -> None:
        """Second phase: the trunk stands still, the MTP layer learns its greedy text."""
        for parameter in self.model.trunk.parameters():
            parameter.requires_grad_(False)
        batches = own_text_batches(self.model, self.tokenizer, self.config)
        self.log({"own_text_tokens": sum(batch.num_tokens for batch in batches)})
        started, seconds = time.monotonic(), self.config.mtp_minutes * 60
        order = random.Random(self.config.seed)
        while (left := 1.0 - (time.monotonic() - started) / seconds) > 0:
            for batch in order.sample(batches, self.config.passes_per_step):
                with torch.no_grad():
                    hidden = self.model.hidden(batch.ids)
                draft = draft_loss(self.model, batch, hidden)
                torch.autograd.backward(draft)
                self.mean.add("mtp_loss", draft)
            self.optimizer.step(self.config.learning_rate * 0.5 * max(0.02, left))
            self.step += 1
            if self.step % 20 == 0:
                self.log(self.mean.take())
        self._save()


def parse(arguments: list[str] | None = None) -> TrainConfig:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    for name, default in (
        ("minutes", 65.0),
        ("mtp_minutes", 8.0),
        ("num_own_texts", 1_500),
        ("num_threads", 1),
        ("seed", 0),
        ("learning_rate", 2e-3),
        ("minutes_per_snapshot", 5.0),
        ("decay_share", 0.5),
        ("mtp_start", 0.5),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--start", type=Path, help="checkpoint to start from")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.safetensors")
    return TrainConfig(**vars(parser.parse_args(arguments)))


def main() -> None:
    config = parse()
    config.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config)
    trainer.train_together()
    trainer.train_drafts()


if __name__ == "__main__":
    main()
