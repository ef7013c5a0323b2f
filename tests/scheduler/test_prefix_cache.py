"""Which tokens are found in the cache, and which texts give way."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.simulated_engine import SimulatedEngine, make_request, make_scheduler
from whalepod.scheduler.block_pool import BlockPool, OutOfBlocks
from whalepod.scheduler.plan import Plan
from whalepod.scheduler.prefix import PrefixTree
from whalepod.scheduler.scheduler import Scheduler

SIZE = 4


def text(seed: int, num_tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randint(1, 5) for _ in range(num_tokens))


def serve(engine: SimulatedEngine, name: str, prompt: tuple[int, ...], **params: object) -> Plan:
    """Run a request to its end; returns its first plan."""
    params = {"max_tokens": 1, **params}
    engine.scheduler.add(make_request(name, prompt, **params))  # type: ignore[arg-type]
    plan = engine.run_step()
    assert plan is not None
    engine.run()
    return plan


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(make_scheduler(block_tokens=SIZE))


# ---- hits


@pytest.mark.parametrize("num_tokens", [1, 2, SIZE, SIZE + 1, 3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
def test_resent_prompt_computes_its_last_token_only(
    engine: SimulatedEngine, num_tokens: int
) -> None:
    prompt = text(0, num_tokens)
    serve(engine, "cold", prompt)
    plan = serve(engine, "warm", prompt)
    assert (plan.rows[0].start, plan.rows[0].token_ids) == (num_tokens - 1, prompt[-1:])
    assert engine.answers["cold", 0].num_cached_tokens == 0
    assert engine.answers["warm", 0].num_cached_tokens == num_tokens - 1
    assert engine.answers["warm", 0].token_ids == engine.answers["cold", 0].token_ids
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_queries_tokens == 2 * num_tokens
    assert stats.prefix_cache_hits_tokens == num_tokens - 1


def test_reset_forgets_what_no_live_request_uses(engine: SimulatedEngine) -> None:
    prompt, other = text(0, 3 * SIZE), text(1, 3 * SIZE)
    serve(engine, "cold", prompt)
    engine.scheduler.add(make_request("live", list(other), max_tokens=40))
    for _ in range(2):
        engine.run_step()

    assert engine.scheduler.reset_prefix_cache() > 0
    engine.scheduler.check()
    assert engine.scheduler.reset_prefix_cache() == 0
    serve(engine, "again", prompt)
    assert engine.answers["again", 0].num_cached_tokens == 0
    assert engine.answers["again", 0].token_ids == engine.answers["cold", 0].token_ids


def test_text_that_leaves_a_cached_block_in_its_middle_copies_the_rows_before(
    engine: SimulatedEngine,
) -> None:
    serve(engine, "a", (1, 1, 1, 1, 2, 2, 2, 2))
    plan = serve(engine, "b", (1, 1, 1, 1, 2, 2, 3, 3, 3))
    (copy,) = plan.copies
    assert copy.num_tokens == 2
    assert plan.rows[0].start == 6
    assert plan.rows[0].block_ids[1] == copy.target
    assert serve(engine, "again", (1, 1, 1, 1, 2, 2, 2, 2)).rows[0].start == 7


def test_block_whose_copy_failed_is_not_found_by_others(engine: SimulatedEngine) -> None:
    serve(engine, "a", (1, 2, 3))
    engine.scheduler.add(make_request("b", (1, 2, 5, 5)))
    plan = engine.step()
    assert plan is not None
    assert len(plan.copies) == 1
    engine.fail(plan)
    engine.scheduler.cancel("b")
    assert len(list(engine.scheduler.tree.nodes())) == 1
    serve(engine, "c", (1, 2, 5, 5))


def test_copied_block_is_kept_while_another_copy_of_it_is_pending(engine: SimulatedEngine) -> None:
    serve(engine, "a", (1, 2, 3))
    for name, prompt in (("fuller", (1, 2, 3, 4, 5)), ("other", (1, 2, 5, 5))):
        engine.scheduler.add(make_request(name, prompt))
    plan = engine.run_step()
    assert plan is not None
    assert len({copy.source for copy in plan.copies}) == 1
    assert len(plan.copies) == 2
    engine.run()


def test_next_turn_finds_the_generated_tokens_of_the_last(engine: SimulatedEngine) -> None:
    prompt = text(1, 10)
    serve(engine, "first", prompt, max_tokens=9, ignore_eos=True)
    answer = tuple(engine.answers["first", 0].token_ids)
    serve(engine, "second", prompt + answer + (1, 2, 3))
    assert engine.answers["second", 0].num_cached_tokens >= 10 + 9 - 1


@pytest.mark.parametrize(("salt", "num_cached"), [("a", 11), ("b", 0), ("", 0)])
def test_prefix_is_shared_within_a_salt_only(
    engine: SimulatedEngine, salt: str, num_cached: int
) -> None:
    serve(engine, "first", text(2, 12), salt="a")
    serve(engine, "second", text(2, 12), salt=salt)
    assert engine.answers["second", 0].num_cached_tokens == num_cached


def test_hashes_differ_between_models_and_between_salts() -> None:
    keys = set()
    for seed, salt in ((b"", ""), (b"model", ""), (b"", "model"), (b"mod", "el"), (b"m", "odel")):
        tree = PrefixTree(block_tokens=2, seed=seed)
        keys.add(tree.key(tree.root(salt), (1, 2)))
    assert len(keys) == 5


def test_switched_off_cache_finds_and_keeps_nothing() -> None:
    engine = SimulatedEngine(make_scheduler(block_tokens=SIZE, enable_prefix_caching=False))
    for name in ("a", "b"):
        assert serve(engine, name, text(3, 12)).rows[0].start == 0
    assert engine.scheduler.stats().num_cached_blocks == 0


def test_equal_prompts_computed_at_once_end_in_the_same_blocks(engine: SimulatedEngine) -> None:
    for name in ("a", "b"):
        engine.scheduler.add(make_request(name, text(4, 9), max_tokens=3, ignore_eos=True))
    engine.run_step()
    plan = engine.step()
    assert plan is not None
    first, second = (row.block_ids for row in plan.rows)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    engine.finish(plan)


def test_agent_loop_finds_at_least_95_percent_of_its_resent_full_blocks() -> None:
    engine = SimulatedEngine(
        make_scheduler(
            num_blocks=400, block_tokens=16, max_model_len=2000, max_num_batched_tokens=64
        )
    )
    contexts = [text(i, 150) for i in range(4)]
    resent = found = 0
    for turn in range(12):
        for i, context in enumerate(contexts):
            name = f"{i}.{turn}"
            engine.scheduler.add(make_request(name, context, max_tokens=12, ignore_eos=True))
        engine.run()
        for i, context in enumerate(contexts):
            answer = engine.answers[f"{i}.{turn}", 0]
            if turn:
                resent += (len(context) - 23) // 16
                found += min(answer.num_cached_tokens, len(context) - 23) // 16
            contexts[i] = (*context, *answer.token_ids, *text(99 * turn + i, 23))
    assert resent > 500
    assert found >= 0.95 * resent, f"{found} of {resent} blocks"


def test_prompt_logprobs_are_computed_not_reused(engine: SimulatedEngine) -> None:
    serve(engine, "warm", text(5, 12))
    plan = serve(engine, "a", text(5, 12), prompt_logprobs=1)
    assert plan.rows[0].start == 0


# ---- collisions


def test_collision_of_hashes_mixes_no_texts() -> None:
    scheduler = make_scheduler(block_tokens=SIZE)
    scheduler.tree._digest = lambda data: b"always the same"
    engine = SimulatedEngine(scheduler)
    prompts = {"a": text(6, 13), "b": text(7, 13), "a again": text(6, 13)}
    for name, prompt in prompts.items():
        serve(engine, name, prompt, max_tokens=9, ignore_eos=True)
    assert engine.answers["a", 0].token_ids == engine.answers["a again", 0].token_ids
    assert engine.answers["a", 0].token_ids != engine.answers["b", 0].token_ids
    assert scheduler.stats().num_owned_blocks == 0


# ---- eviction


def test_text_that_was_not_used_longest_is_evicted_first() -> None:
    engine = SimulatedEngine(make_scheduler(num_blocks=9, block_tokens=SIZE))
    for name in ("a", "b", "c"):
        serve(engine, name, text(ord(name), 11))
    assert engine.scheduler.stats().num_free_blocks == 0
    serve(engine, "a again", text(ord("a"), 11))
    serve(engine, "d", text(100, 11))
    num_cached = {}
    for name in "abc":
        tree = engine.scheduler.tree
        num_cached[name] = len(tree.match("", text(ord(name), 11), 2, []))
    assert num_cached == {"a": 2, "b": 0, "c": 2}


def test_beginning_of_a_text_outlives_its_end() -> None:
    engine = SimulatedEngine(make_scheduler(num_blocks=6, block_tokens=SIZE))
    serve(engine, "long", text(8, 5 * SIZE))
    serve(engine, "other", text(9, 2 * SIZE + 1))
    assert len(engine.scheduler.tree.match("", text(8, 5 * SIZE), 5, [])) == 3


def test_partly_filled_block_gives_way_to_the_fuller_one_of_the_same_text(
    engine: SimulatedEngine,
) -> None:
    serve(engine, "a", (1, 2, 3, 4, 5, 5))
    before = engine.scheduler.stats().num_cached_blocks
    serve(engine, "b", (1, 2, 3, 4, 5, 5, 1))
    assert engine.scheduler.stats().num_cached_blocks == before


def test_salts_that_are_gone_leave_nothing_behind() -> None:
    engine = SimulatedEngine(make_scheduler(num_blocks=4, block_tokens=SIZE))
    for i in range(50):
        serve(engine, str(i), text(i, 9), salt=f"salt {i}")
    assert len(engine.scheduler.tree._roots) <= 4
    assert len(engine.scheduler.pool._evictable) <= 4 * 4 + 64


# ---- the pool


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, PrefixTree(block_tokens=2))


def cache(pool: BlockPool, tokens: tuple[int, int], block_id: int) -> None:
    root = pool.tree.root("")
    assert pool.cache(root, tokens, pool.tree.key(root, tokens), block_id) is not None


def test_pool_gives_each_block_once_and_then_none() -> None:
    pool = make_pool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks, match="all 3 blocks are in use"):
        pool.allocate()
    pool.check([0, 1, 2])


def test_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = make_pool(2)
    block_id = pool.allocate()
    pool.acquire(block_id)
    pool.release(block_id)
    assert (pool.num_free, pool.num_owned) == (1, 1)
    pool.release(block_id)
    assert (pool.num_free, pool.num_owned) == (2, 0)
    with pytest.raises(AssertionError, match="-1 references"):
        pool.release(block_id)


def test_cached_block_is_available_and_owned_again_once_acquired() -> None:
    pool = make_pool(2)
    block_id = pool.allocate()
    cache(pool, (1, 2), block_id)
    pool.release(block_id)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 1, 2)
    pool.acquire(block_id)
    assert (pool.num_cached, pool.num_owned, pool.num_available) == (0, 1, 1)
    pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_check_names_a_lost_reference() -> None:
    pool = make_pool(2)
    block_id = pool.allocate()
    with pytest.raises(AssertionError, match="block 0: 1 references, 0 holders"):
        pool.check([])
    pool.check([block_id])


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        make_pool(0)


def test_scheduler_without_an_answer_in_flight_owns_no_block(engine: SimulatedEngine) -> None:
    scheduler: Scheduler = engine.scheduler
    for i in range(5):
        scheduler.add(make_request(str(i), text(i, 20), max_tokens=5))
    engine.run()
    stats = scheduler.stats()
    assert stats.num_owned_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
