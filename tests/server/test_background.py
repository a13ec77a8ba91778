"""Answers of `/v1/responses` made in the background: fetched, followed, cancelled, bounded."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from compiled_engine.config import ServerConfig
from compiled_engine.server.background import JOBS, EventBytes, Jobs
from compiled_engine.server.response_store import RESPONSES
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

LONG = "x" * 200


def _run(test, text="hello", *, config=None, delay_s=0.0) -> None:
    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            await test(client, server)
        assert server.state.admission.num_requests == 0
        assert server.state.drain.num_running == 0

    with_server(body, engine=FakeEngine(text_reply(text), delay_s=delay_s), config=config)


async def _begin(client, **fields):
    options = {"model": MODEL, "input": "hi", "background": True, **fields}
    return await client.responses.create(**options)


async def _ended(client, response_id: str) -> Response:
    for _ in range(400):
        response = await client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)
    raise AssertionError("the answer never ended")


async def _numbers(stream) -> list[int]:
    return [event.sequence_number async for event in stream]


def test_background_answer_is_fetched_when_it_is_there():
    async def body(client, server: Server):
        begun = await _begin(client, metadata={"a": "b"})
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        response = await _ended(client, begun.id)
        Response.model_validate(response.model_dump(warnings=False), strict=True)
        assert (response.status, response.output_text) == ("completed", "hello")
        assert (response.background, response.metadata) == (True, {"a": "b"})
        assert response.usage.output_tokens == 6
        # One that has ended is not changed by a cancel.
        assert (await client.responses.cancel(begun.id)).status == "completed"
        more = await client.responses.create(
            model=MODEL, input="more", previous_response_id=begun.id
        )
        prompt = bytes(server.engine.submitted[-1].prompt_token_ids).decode()
        assert prompt == "[user]hi\n[assistant]hello\n[user]more\n[assistant]"
        for call in (
            client.responses.cancel(more.id),
            client.responses.retrieve(begun.id, stream=True),
        ):
            with pytest.raises(openai.BadRequestError, match="background"):
                await call
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)

    _run(body)


def test_background_answer_goes_on_without_its_client_and_can_be_followed_again():
    async def body(client, server: Server):
        stream = await _begin(client, stream=True)
        first = [await anext(aiter(stream)) for _ in range(2)]
        assert [event.type for event in first] == ["response.created", "response.queued"]
        response_id = first[0].response.id
        await stream.close()
        await eventually(lambda: len(server.engine.submitted) == 1)
        followed = await client.responses.retrieve(response_id, stream=True, starting_after=1)
        events = [event async for event in followed]
        assert events[0].type == "response.in_progress"
        assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
        assert events[-1].response.output_text == "hello"
        assert server.engine.aborted == []
        retrieve = client.responses.retrieve
        num_events = len(events) + 2
        again = await _numbers(await retrieve(response_id, stream=True))
        assert again == list(range(num_events))
        rest = await retrieve(response_id, stream=True, starting_after=num_events - 2)
        assert await _numbers(rest) == [num_events - 1]
        assert await _numbers(await retrieve(response_id, stream=True, starting_after=10_000)) == []
        for query in (
            {"starting_after": 1},
            {"stream": "yes"},
            {"stream": "true", "starting_after": -1},
        ):
            with pytest.raises(openai.BadRequestError) as refusal:
                await retrieve(response_id, extra_query=query)
            assert refusal.value.param in query

    _run(body, delay_s=0.01)


@pytest.mark.parametrize("deletes", [False, True])
def test_background_answer_is_cancelled(deletes):
    async def body(client, server: Server):
        begun = await _begin(client)
        await eventually(lambda: server.engine.num_tokens_sent > 3)
        running = await client.responses.retrieve(begun.id)
        assert running.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="previous_response_id is of a response"):
            await client.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
        with pytest.raises(openai.BadRequestError, match="not finished"):
            await client.responses.input_items.list(begun.id)
        if deletes:
            await client.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(begun.id)
        else:
            cancelled = await client.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            assert (await client.responses.retrieve(begun.id)).to_dict() == cancelled.to_dict()
            assert cancelled.output[0].status == "incomplete"
            assert "x" in cancelled.output_text
        assert server.engine.num_running == 0
        assert len(server.engine.aborted) == 1

    _run(body, LONG, delay_s=0.01)


def test_background_stream_ends_when_the_answer_is_cancelled():
    async def body(client, server: Server):
        stream = await _begin(client, stream=True)
        events = [await anext(aiter(stream))]
        await client.responses.cancel(events[0].response.id)
        events += [event async for event in stream]
        assert events[-1].response.status == "cancelled"
        assert [event.sequence_number for event in events] == list(range(len(events)))

    _run(body, LONG, delay_s=0.01)


def test_background_answer_that_fails_says_so():
    async def body(client, server: Server):
        server.engine.fail_with = "broken"
        response = await _ended(client, (await _begin(client)).id)
        assert (response.status, response.error.message) == ("failed", "broken")
        # What is wrong with the request itself is said at once.
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await _begin(client, temperature=-1)

    _run(body)


def test_background_answers_belong_to_their_key_and_count_for_its_limits(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann akey\nbob bkey\n")

    async def body(client, server: Server):
        ann, bob = (client.with_options(api_key=key) for key in ("akey", "bkey"))
        begun = await _begin(ann)
        for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(begun.id)
        with pytest.raises(openai.RateLimitError):
            await _begin(ann)
        assert (await ann.responses.cancel(begun.id)).status == "cancelled"

    config = ServerConfig(port=0, api_key="key", api_key_file=keys, max_requests_per_key=1)
    _run(body, LONG, config=config, delay_s=0.01)


def test_background_events_are_bounded():
    async def body(client, server: Server):
        server.app[JOBS]._total = EventBytes(10_000)
        stream = await _begin(client, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert "10000 bytes" in events[-1].response.error.message
        assert sum(len(event.to_json()) for event in events) < 40_000
        # The count comes back: an answer that is not followed still fits.
        response = await _ended(client, (await _begin(client)).id)
        assert response.output_text == LONG
        assert server.app[JOBS]._total.num_bytes == 0

    _run(body, LONG)


def test_background_answers_end_with_the_server():
    async def body(client, server: Server):
        begun = await _begin(client)
        await eventually(lambda: server.engine.num_running == 1)
        await server.app[JOBS].close()
        assert server.app[JOBS].get("", begun.id) is None
        stored = server.app[RESPONSES].get("", begun.id)
        assert b'"status":"cancelled"' in stored.body
        assert isinstance(server.app[JOBS], Jobs)

    _run(body, LONG, delay_s=0.01)
