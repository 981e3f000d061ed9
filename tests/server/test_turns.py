"""kvcache.server.turns: whose answer begins next."""

import asyncio

import pytest

pytest.importorskip("starlette")

from kvcache.server.errors import ApiError
from kvcache.server.turns import Turns


def test_keys_take_turns():
    """A key with one request does not wait for all of another key. A request that goes away hands its turn on."""

    async def play():
        turns, order = Turns(1, 10), []

        async def ask(key, name):
            await turns.begin(key)
            order.append(name)
            await asyncio.sleep(0)
            turns.end()

        await turns.begin("a")
        waiting = [asyncio.create_task(ask(key, f"{key}{i}")) for key, i in [*(("a", i) for i in range(3)), ("b", 0)]]
        leaves = asyncio.create_task(ask("c", "c0"))
        await asyncio.sleep(0)
        assert turns.num_waiting == 5
        leaves.cancel()
        turns.end()
        await asyncio.gather(*waiting)
        assert (turns.num_running, turns.num_waiting) == (0, 0)
        return order

    assert asyncio.run(play()) == ["a0", "b0", "a1", "a2"]


def test_a_turn_that_is_not_taken():
    """Who goes away in the same step in which the turn comes hands it on."""

    async def play():
        turns = Turns(1, 10)
        await turns.begin("a")
        leaves, stays = (asyncio.create_task(turns.begin(key)) for key in "bc")
        await asyncio.sleep(0)
        turns.end()
        leaves.cancel()
        await asyncio.wait_for(stays, 10)
        assert (turns.num_running, turns.num_waiting) == (1, 0)

    asyncio.run(play())


def test_no_more_than_may_wait():
    async def play():
        turns = Turns(1, 2)
        await turns.begin("a")
        waiting = [asyncio.create_task(turns.begin("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many requests wait") as caught:
            await turns.begin("a")
        assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "5"})
        waiting.append(asyncio.create_task(turns.begin("b")))  # whose share nobody else takes
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many requests wait"):
            await turns.begin("b")
        for _ in waiting:
            turns.end()
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    asyncio.run(play())


def test_none_may_wait():
    async def play():
        turns = Turns(1, 0)
        await turns.begin("a")
        with pytest.raises(ApiError, match="too many requests wait"):
            await turns.begin("b")

    asyncio.run(play())
