"""Order of requests, answers, limits and errors. Needs no SDK and no model."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("starlette")

from jlora.errors import LoRAUsageError
from jlora.serve.http.errors import ApiError
from jlora.tinker.sessions import Limits, Sessions
from jlora.tinker.training import Job, Model


class World:
    """Sessions whose requests are recorded, in the order in which they are passed on."""

    def __init__(self, **limits: Any):
        self.passed: list[str] = []
        self.sessions = Sessions(Limits(**limits), lambda model, job: job.work())
        self.session = self.sessions.begin()
        self.id = f"{self.session.id}:train:0"
        self.run = self.sessions.add_run(self.session, self.id, Model(self.id, 1, 0))

    def take(self, seq_id: int | None, what: str = "", size: int = 1) -> Any:
        work = partial(self.passed.append, what or str(seq_id))
        return self.sessions.take(self.id, seq_id, size, lambda run, future: Job(work, lambda _: None))

    def answer(self, future: Any) -> Any:
        return asyncio.wait_for(self.sessions.wait(future.id), 5)


def on_loop(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_requests_run_in_the_order_of_their_numbers():
    async def test():
        world = World()
        for seq_id in (3, 1, 5, 2):
            world.take(seq_id)
        assert world.passed == ["1", "2", "3"]
        world.take(4)
        assert world.passed == ["1", "2", "3", "4", "5"]

    on_loop(test)


def test_a_repeated_request_has_the_first_answer():
    async def test():
        world = World()
        first, again, early = world.take(1), world.take(1, "another"), world.take(3)
        assert first is again
        assert world.take(3, "another") is early
        world.sessions.finish(first, b"answer")
        assert world.take(1) is first
        assert await world.answer(first) == b"answer"
        assert world.passed == ["1"]

    on_loop(test)


def test_a_gap_that_never_fills_fails_what_waits_for_it():
    async def test():
        world = World(gap_seconds=0.05)
        world.take(1)
        late, later = world.take(3), world.take(4)
        for future in (late, later):
            answer = await world.answer(future)
            assert answer["category"] == "user"
            assert "seq_id 2 did not come within 0.05 seconds" in answer["error"]
        assert "seq_id 2" in (await world.answer(world.take(2)))["error"]  # the order is lost
        assert "seq_id 2" in (await world.answer(world.take(5)))["error"]
        assert world.passed == ["1"]

    on_loop(test)


def test_later_requests_do_not_prolong_a_gap():
    async def test():
        world = World(gap_seconds=0.1)
        waiting = []
        for seq_id in range(2, 9):
            waiting.append(world.take(seq_id))
            await asyncio.sleep(0.03)
        assert all("seq_id 1 did not come" in future.answer["error"] for future in waiting)

    on_loop(test)


def test_a_gap_that_fills_in_time_is_none():
    async def test():
        world = World(gap_seconds=0.2)
        world.take(2)
        await asyncio.sleep(0.05)
        world.take(1)
        await asyncio.sleep(0.3)
        world.take(3)
        assert world.passed == ["1", "2", "3"]

    on_loop(test)


@pytest.mark.parametrize("seq_id", [None, 0, -1, 10_002])
def test_wrong_numbers_are_refused(seq_id: int | None):
    async def test():
        world = World()
        with pytest.raises(ApiError, match="seq_id must be from 1 to 10001") as error:
            world.take(seq_id)
        assert error.value.status == 400
        assert world.take(1)

    on_loop(test)


def test_ids_from_before_a_restart_are_gone():
    async def test():
        world, other = World(), World()
        answered = other.take(1)
        for call in (
            lambda: world.sessions.session(other.session.id),
            lambda: world.sessions.run(other.id),
            lambda: world.sessions.run(world.id + "1"),
        ):
            with pytest.raises(ApiError) as error:
                call()
            assert error.value.status == 410
        with pytest.raises(ApiError, match="restarted"):
            await world.sessions.wait(answered.id)

    on_loop(test)


def test_a_long_poll_ends_without_an_answer():
    async def test():
        world = World(poll_seconds=0.02)
        future = world.take(1)
        assert await world.answer(future) is None
        waiting = asyncio.ensure_future(world.sessions.wait(future.id))
        await asyncio.sleep(0)
        world.sessions.finish(future, {"metrics": {}})
        assert await waiting == {"metrics": {}}

    on_loop(test)


def test_errors_have_their_category():
    async def test():
        world = World()
        user, server = world.take(1), world.take(2)
        world.sessions.finish(user, LoRAUsageError("wrong"))
        world.sessions.finish(server, OSError("no space left"))
        assert await world.answer(user) == {"error": "wrong", "category": "user"}
        assert await world.answer(server) == {"error": "OSError: no space left", "category": "server"}

    on_loop(test)


def test_what_waits_is_bounded():
    async def test():
        world = World(futures=3, bytes=100)
        for seq_id in (1, 2):
            world.take(seq_id, size=40)
        with pytest.raises(ApiError) as error:
            world.take(3, size=40)
        assert error.value.status == 429
        assert world.passed == ["1", "2"]
        world.take(3, size=10)
        with pytest.raises(ApiError) as error:
            world.take(4)
        assert error.value.status == 429

    on_loop(test)


def test_answers_are_forgotten_and_their_room_is_used_again():
    async def test():
        world = World(futures=4, answer_seconds=0.0)
        for seq_id in range(1, 50):
            world.sessions.finish(world.take(seq_id, size=10), b"x")
        with pytest.raises(ApiError) as error:
            world.take(1)
        assert error.value.status == 410

    on_loop(test)


def test_sessions_models_and_samplers_are_bounded():
    async def test():
        world = World(sessions=2, models=2, samplers=2)
        world.sessions.begin()
        with pytest.raises(ApiError) as error:
            world.sessions.begin()
        assert error.value.status == 429
        world.sessions.add_run(world.session, "second", Model("second", 1, 0))
        with pytest.raises(LoRAUsageError, match="2 models are open"):
            world.sessions.add_run(world.session, "third", Model("third", 1, 0))
        ids = [world.sessions.add_sampler(world.session, number, None) for number in range(3)]
        assert list(world.session.samplers) == ids[1:]

    on_loop(test)


def test_a_silent_session_is_found_and_its_waiting_requests_end():
    async def test():
        world = World(session_seconds=0.05)
        early = world.take(2)
        assert world.sessions.silent() == []
        await asyncio.sleep(0.1)
        assert world.sessions.silent() == [world.session]
        world.sessions.close(world.session)
        assert (await world.answer(early))["error"] == "the session has ended"
        with pytest.raises(ApiError):
            world.take(1)

    on_loop(test)
