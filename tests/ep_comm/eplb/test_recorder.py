"""Counting tokens of experts while slots change their content."""

from __future__ import annotations

import numpy as np
import torch

from whalepod.ep_comm.eplb.recorder import NUM_BUCKETS, LoadRecorder


def test_counts_belong_to_the_expert_that_was_in_the_slot() -> None:
    slots_LS = np.array([[0, 1], [2, 2]])
    recorder = LoadRecorder(slots_LS, num_experts=4, window_steps=80)
    recorder.count(0, torch.tensor([3, 1]))
    recorder.count(1, torch.tensor([5, 6], dtype=torch.int32))
    recorder.fold([0])
    slots_LS[0, 1] = 3
    recorder.count(0, torch.tensor([10, 20]))
    assert recorder.loads().tolist() == [[13, 1, 0, 20], [0, 0, 11, 0]]
    assert recorder.loads().tolist() == [[13, 1, 0, 20], [0, 0, 11, 0]]


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = 4 * NUM_BUCKETS
    recorder = LoadRecorder(np.array([[0]]), num_experts=1, window_steps=window)
    seen = []
    for _ in range(3 * window):
        recorder.count(0, torch.tensor([1]))
        recorder.end_step()
        seen.append(int(recorder.loads()[0, 0]))
    assert seen[: window - 4] == list(range(1, window - 3))
    assert {*seen[window:]} == set(range(window - 4, window))
