"""Where every token goes: counts, offsets, slots and prefixes as pure functions of the choices.

Experts lie contiguously: rank r of R owns experts r * E_l .. (r + 1) * E_l - 1, E_l = E / R. An id
of -1 is no selection. Rows on a receiver are ordered by source rank, then by token of the source,
then by k, so every result has the same bits in every run (DeepEP's order in its throughput mode).

Suffix letters: T tokens of this rank, K choices per token, E experts, R ranks, N received rows,
S selections (rows of one expert each), V nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLayout:
    """What one rank sends, counted.

    is_token_in_rank_TR      [T, R] bool: the token has an expert on that rank
    num_tokens_per_rank_R    [R] int64, a token counted once per rank
    num_tokens_per_expert_E  [E] int64, a token counted once per expert
    """

    is_token_in_rank_TR: Tensor
    num_tokens_per_rank_R: Tensor
    num_tokens_per_expert_E: Tensor


def check_choices(ids_TK: Tensor, num_experts: int, num_choices: int) -> None:
    """Raise ValueError unless `ids_TK` is `[T, K]` int64 of distinct ids in -1 .. E - 1."""
    check_choice_shape(ids_TK, num_choices)
    if not ids_TK.numel():
        return
    lowest, highest = int(ids_TK.min()), int(ids_TK.max())
    if lowest < -1 or highest >= num_experts:
        raise ValueError(f"expert ids {lowest}..{highest} are outside -1..{num_experts - 1}")
    sorted_TK = ids_TK.sort(dim=1).values
    twice_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    if bool(twice_TK.any()):
        token = int(twice_TK.any(dim=1).nonzero()[0])
        raise ValueError(f"token {token} selects an expert twice: {ids_TK[token].tolist()}")


def check_choice_shape(ids_TK: Tensor, num_choices: int) -> None:
    """Raise ValueError unless `ids_TK` is int64 `[T, num_choices]`."""
    if ids_TK.dtype != torch.int64 or ids_TK.ndim != 2 or ids_TK.shape[1] != num_choices:
        raise ValueError(
            f"expert ids must be int64 [T, {num_choices}], got {ids_TK.dtype} {list(ids_TK.shape)}"
        )


def owner_of(ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Return the rank that owns each expert, `[T, K]` int64; -1 where there is no selection."""
    experts_per_rank = split_experts(num_experts, num_ranks)
    return torch.where(ids_TK >= 0, ids_TK // experts_per_rank, -1)


def split_experts(num_experts: int, num_ranks: int) -> int:
    """Return the number of experts of each rank; ValueError if they cannot be spread evenly."""
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts ({num_experts}) must be a positive multiple of num_ranks ({num_ranks})"
        )
    return num_experts // num_ranks


def dispatch_layout(ids_TK: Tensor, num_experts: int, num_ranks: int) -> DispatchLayout:
    """Count what the choices `[T, K]` send where (DeepEP's `get_dispatch_layout`)."""
    owners_TK = owner_of(ids_TK, num_experts, num_ranks)
    hits_TR = torch.zeros(len(ids_TK), num_ranks + 1, dtype=torch.bool)
    hits_TR.scatter_(1, torch.where(owners_TK < 0, num_ranks, owners_TK), True)
    is_in_TR = hits_TR[:, :num_ranks].contiguous()
    return DispatchLayout(
        is_token_in_rank_TR=is_in_TR,
        num_tokens_per_rank_R=is_in_TR.sum(dim=0),
        num_tokens_per_expert_E=torch.bincount(ids_TK[ids_TK >= 0], minlength=num_experts),
    )


def nodes_hit(is_token_in_rank_TR: Tensor, num_nodes: int) -> Tensor:
    """Return `[T, V]` bool: the token has an expert on that node (ranks of a node are neighbours).

    Its sum over nodes is the number of copies that two-level forwarding sends of a token.
    """
    num_tokens, num_ranks = is_token_in_rank_TR.shape
    return is_token_in_rank_TR.view(num_tokens, num_nodes, num_ranks // num_nodes).any(dim=2)


def slots(is_member_TR: Tensor) -> Tensor:
    """Return each token's place among the tokens for a destination, `[T, R]`; -1 if not sent."""
    return torch.where(is_member_TR, is_member_TR.cumsum(dim=0) - 1, -1)


def local_ids(ids_NK: Tensor, first_expert: int, num_local: int) -> Tensor:
    """Renumber global ids from `first_expert`; -1 for the experts of other ranks."""
    is_local_NK = (ids_NK >= first_expert) & (ids_NK < first_expert + num_local)
    return torch.where(is_local_NK, ids_NK - first_expert, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Received rows `[N]` spread into one row per selection, grouped by local expert.

    row_of_NK   [N, K] int64: the selection's row in the output, -1 where not local
    source_S    [S] int64: the received row of each selection, grouped by expert, then by N
    row_S       [S] int64: the output row of each selection, in the order of `source_S`
    count_E     [E_l] int64: selections per local expert
    first_row_E [E_l] int64: output row of an expert's first selection
    """

    row_of_NK: Tensor
    source_S: Tensor
    row_S: Tensor
    count_E: Tensor
    first_row_E: Tensor


def expert_rows(local_NK: Tensor, num_local: int, rows_per_expert: int = 0) -> ExpertRows:
    """Place every selection of `local_NK` (-1: none) in an output grouped by expert.

    rows_per_expert > 0  expert e begins at row e * rows_per_expert (static shapes)
    otherwise            experts follow one another
    """
    num_choices = max(local_NK.shape[1], 1)
    flat = local_NK.flatten()
    flat_S = (flat >= 0).nonzero().squeeze(1)
    flat_S = flat_S[flat[flat_S].sort(stable=True).indices]
    expert_S = flat[flat_S]
    count_E = torch.bincount(expert_S, minlength=num_local)
    if rows_per_expert:
        first_row_E = torch.arange(num_local) * rows_per_expert
    else:
        first_row_E = count_E.cumsum(0) - count_E
    place_S = torch.arange(len(flat_S)) - (count_E.cumsum(0) - count_E)[expert_S]
    row_S = first_row_E[expert_S] + place_S
    row_of_NK = torch.full_like(flat, -1).index_copy_(0, flat_S, row_S).view(local_NK.shape)
    return ExpertRows(
        row_of_NK=row_of_NK,
        source_S=flat_S // num_choices,
        row_S=row_S,
        count_E=count_E,
        first_row_E=first_row_E,
    )


def source_ranges(
    local_NK: Tensor, source_rank_N: Tensor, num_local: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Return where each source's rows lie among an expert's: (begin, count), both `[E_l, R]`."""
    is_local_NK = local_NK >= 0
    pair_NK = local_NK * num_ranks + source_rank_N[:, None]
    count_ER = torch.bincount(pair_NK[is_local_NK], minlength=num_local * num_ranks)
    count_ER = count_ER.view(num_local, num_ranks)
    return count_ER.cumsum(1) - count_ER, count_ER


def pack_ranges(begin_ER: Tensor, count_ER: Tensor) -> Tensor:
    """Return (begin << 32) | count, int64 `[E_l, R]`: DeepEP's `layout_range`."""
    return (begin_ER << 32) | count_ER


def selection_slots(owners_TK: Tensor, num_ranks: int) -> Tensor:
    """Return each selection's place among those of one owner, in order of (token, k).

    owners_TK [T, K], -1: none -> [T, K] int64, -1: none. This is the order in which an owner sends
    the rows of its experts back.
    """
    flat = owners_TK.flatten()
    is_owned_SR = flat[:, None] == torch.arange(num_ranks)
    place_SR = is_owned_SR.cumsum(dim=0) - 1
    place_S = place_SR.gather(1, flat.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(flat >= 0, place_S, -1).view(owners_TK.shape)
