"""The official `openai` client drives the server, and our JSON validates into its types."""

import asyncio

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from compiled_engine.config import ServerConfig
from tests.helpers.fake_engine import EOS, FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, with_server

USER = [{"role": "user", "content": "hi"}]


def _seed_reply(request):
    return [*f"seed {request.params.seed}".encode(), EOS]


def _with_client(test, **kwargs) -> None:
    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            await test(client, server)

    with_server(body, **kwargs)


def test_client_chat_usage_n_stop_and_seed():
    async def body(client, server: Server):
        answer = await client.chat.completions.create(
            model=MODEL, messages=USER, n=3, seed=7, temperature=0.5, max_completion_tokens=100
        )
        again = await client.chat.completions.create(model=MODEL, messages=USER, n=3, seed=7)
        texts = [c.message.content for c in answer.choices]
        assert texts == [c.message.content for c in again.choices]
        assert texts[0] == "seed 7"
        assert len(set(texts)) == 3
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        assert answer.choices[0].finish_reason == "stop"
        stopped = await client.chat.completions.create(
            model=MODEL, messages=USER, seed=7, stop=["d 7"]
        )
        assert stopped.choices[0].message.content == "see"

    _with_client(body, engine=FakeEngine(_seed_reply, num_cached_tokens=4))


def test_client_streams_chat_with_usage():
    async def body(client, server: Server):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, reasons, usage = ["", ""], [], None
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage
        assert texts == ["hello", "hello"]
        assert reasons == ["stop", "stop"]
        assert usage.completion_tokens == 12

    _with_client(body)


def test_client_completions_whole_and_streamed():
    async def body(client, server: Server):
        answer = await client.completions.create(model=MODEL, prompt=[[1, 2], [3]], max_tokens=2)
        assert [c.text for c in answer.choices] == ["he", "he"]
        assert [c.finish_reason for c in answer.choices] == ["length", "length"]
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "hello"
        models = await client.models.list()
        assert [m.id for m in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL

    _with_client(body)


def test_client_sees_our_errors_as_its_own():
    config = ServerConfig(port=0, api_key="key")

    async def body(client, server: Server):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=USER)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        server.engine.fail_with = "broken"
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.chat.completions.create(model=MODEL, messages=USER)
        server.engine.fail_with = None
        server.engine.delay_s = 0.02
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        await anext(aiter(stream))
        server.engine.fail_with = "broken later"
        with pytest.raises(openai.APIError, match="broken later"):
            async for _ in stream:
                pass
        server.engine.kill("gone")
        with pytest.raises(openai.InternalServerError, match="gone"):
            await client.chat.completions.create(model=MODEL, messages=USER)

    _with_client(body, config=config)


def test_client_that_leaves_aborts():
    async def body(client, server: Server):
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.sleep(0.2)
        assert server.engine.num_running == 0
        assert len(server.engine.aborted) == 1

    _with_client(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.01))


def test_our_json_validates_into_openai_types():
    async def body(server: Server):
        _, models = await server.get("/v1/models")
        Model.model_validate(models["data"][0], strict=True)
        _, answer = await server.post("/v1/completions", {"prompt": "a"})
        Completion.model_validate(answer, strict=True)
        _, answer = await server.post("/v1/chat/completions", {"messages": USER})
        ChatCompletion.model_validate(answer, strict=True)
        options = {"stream_options": {"include_usage": True}}
        for event in await server.stream("/v1/chat/completions", {"messages": USER, **options}):
            ChatCompletionChunk.model_validate(event, strict=True)
        for event in await server.stream("/v1/completions", {"prompt": "a", **options}):
            for choice in event["choices"]:
                # OpenAI's own streams carry null here until the end; its type does not say so.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate(event, strict=True)

    with_server(body)
