"""Routes that look at or act on the engine as a whole, keys of several callers, and health."""

import asyncio
from pathlib import Path

import openai
import pytest

from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.errors import ConfigError, ConflictError
from compiled_engine.server.keys import OPERATOR, ApiKeys, read_keys
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

CONTROL_ROUTES = (
    "/abort_request",
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/start_profile",
    "/stop_profile",
)


def _keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who  key\nanna key-a\n\nbert  key-b\n")
    return path


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_info_routes_tell_settings_lengths_and_load_but_no_secret():
    config = ServerConfig(port=0, api_key="sesame", weight_version="v7")

    async def body(server: Server):
        status, info = await server.get("/server_info", headers=_bearer("sesame"))
        assert status == 200
        assert "sesame" not in str(info)
        assert info["server"]["api_key"] == "(set)"
        assert info["server"]["max_queued_requests"] == 1024
        assert info["status"]["phase"] == "ready"
        _, model = await server.get("/get_model_info", headers=_bearer("sesame"))
        assert model["max_model_len"] == 512
        assert model["weight_version"] == "v7"
        assert model["preferred_sampling_params"] == {"temperature": 0.5}
        _, loads = await server.get("/v1/loads?include=core", headers=_bearer("sesame"))
        (load,) = loads["loads"]
        assert load["token_usage"] == 0.25
        assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (1024, 4096)
        answer = await server.get("/get_weight_version", headers=_bearer("sesame"))
        assert answer == (200, {"weight_version": "v7"})
        for path in (*CONTROL_ROUTES, "/generate"):
            assert (await server.post(path, {}))[0] == 401

    with_server(body, config=config, default_sampling={"temperature": 0.5})


def test_server_info_shows_what_the_engine_was_told():
    async def body(server: Server):
        server.state.engine_config = EngineConfig(model="/m", disable_passes=("x",))
        _, info = await server.get("/get_server_info")
        assert info["engine"]["model"] == "/m"
        assert info["engine"]["disable_passes"] == ["x"]

    with_server(body)


def test_control_routes_reach_the_engine(tmp_path):
    async def body(server: Server):
        for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
            status, answer = await server.post(path, b"")
            assert (status, answer["success"]) == (200, True)
        status, answer = await server.post("/start_profile", {"num_steps": 3})
        assert (status, answer["path"]) == (200, f"{tmp_path}/trace")
        assert (await server.post("/stop_profile", b""))[0] == 200
        assert server.engine.controls == [
            ("flush_cache", "", 0),
            ("pause", "", 0),
            ("continue", "", 0),
            ("start_profile", str(tmp_path), 3),
            ("stop_profile", "", 0),
        ]
        for request, param in (
            ({"num_steps": 0}, "num_steps"),
            ({"output_dir": "/"}, "output_dir"),
        ):
            status, answer = await server.post("/start_profile", request)
            assert (status, answer["error"]["param"]) == (400, param)
        server.engine.refusal = ConflictError("2 requests run")
        status, answer = await server.post("/flush_cache", b"")
        assert (status, answer["error"]["message"]) == (409, "2 requests run")
        status, answer = await server.post("/pause_generation", {"mode": "retract"})
        assert (status, answer["error"]["param"]) == (400, "mode")

    with_server(body, config=ServerConfig(port=0, profile_dir=tmp_path))


def test_profile_routes_are_refused_without_the_flag():
    async def body(server: Server):
        for path in ("/start_profile", "/stop_profile"):
            status, answer = await server.post(path, {})
            assert status == 400
            assert "--profile-dir" in answer["error"]["message"]
        assert server.engine.controls == []

    with_server(body)


def test_pause_with_abort_ends_every_call_first():
    async def body(server: Server):
        call = asyncio.create_task(server.post("/v1/completions", {"prompt": "a"}))
        await eventually(lambda: server.engine.num_running == 1)
        status, answer = await server.post("/pause_generation", {"mode": "abort"})
        assert (status, answer["num_aborted"]) == (200, 1)
        assert (await call)[0] == 499

    with_server(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.1))


def test_aborted_call_is_not_retried_by_the_openai_client():
    async def body(server: Server):
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=3)
        async with client:
            call = asyncio.create_task(
                client.completions.create(
                    model=MODEL, prompt="a", extra_headers={"X-Request-ID": "mine"}
                )
            )
            await eventually(lambda: server.engine.num_running == 1)
            await server.post("/abort_request", {"rid": "mine"})
            with pytest.raises(openai.APIStatusError) as caught:
                await call
        assert caught.value.status_code == 499
        assert caught.value.request_id == "mine"
        assert len(server.engine.submitted) == 1

    with_server(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.1))


def test_health_ready_and_progress_tell_slow_from_hung_from_dead():
    async def statuses(server: Server) -> list[int]:
        return [(await server.get(path))[0] for path in ("/health", "/ready", "/progress")]

    async def body(server: Server):
        assert await statuses(server) == [200, 200, 200]
        server.engine.step_age_s = 4.5
        assert await statuses(server) == [200, 503, 200]
        _, progress = await server.get("/progress")
        assert (progress["step_age_s"], progress["status"]) == (4.5, "ok")
        _, ready = await server.get("/ready")
        assert ready["status"] == "the engine has finished no step for 4.5 s"
        # It may only be slow: requests are still taken.
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200
        server.engine.step_age_s = 0.1
        assert await statuses(server) == [200, 200, 200]
        server.engine.kill("hung", is_dead=False)
        assert await statuses(server) == [503, 503, 503]

    with_server(body)


# --- keys ---------------------------------------------------------------------------------


def test_named_keys_open_everything_but_the_control_routes(tmp_path):
    config = ServerConfig(port=0, api_key="root", api_key_file=_keys(tmp_path))

    async def body(server: Server):
        for key in ("key-a", "key-b", "root"):
            assert (await server.get("/v1/models", headers=_bearer(key)))[0] == 200
        for path in CONTROL_ROUTES:
            status, answer = await server.post(path, {}, headers=_bearer("key-a"))
            assert (status, answer["error"]["type"]) == (403, "permission_error")
        assert (await server.get("/server_info", headers=_bearer("key-a")))[0] == 403
        assert (await server.post("/flush_cache", b"", headers=_bearer("root")))[0] == 200
        for key in ("key-", "key-c", "anna", ""):
            assert (await server.get("/v1/models", headers=_bearer(key)))[0] == 401

    with_server(body, config=config)


def test_limits_by_key_leave_others_alone(tmp_path):
    config = ServerConfig(
        port=0,
        api_key="root",
        api_key_file=_keys(tmp_path),
        max_queued_requests=5,
        max_queued_tokens=200,
        max_requests_per_key=2,
        max_tokens_per_key=100,
    )

    async def body(server: Server):
        def post(key: str, prompt: str = "a", n: int = 1):
            request = {"prompt": prompt, "n": n}
            return server.post("/v1/completions", request, headers=_bearer(key))

        running = [asyncio.create_task(post("key-a")) for _ in range(2)]
        await eventually(lambda: server.engine.num_running == 2)
        status, answer = await post("key-a")
        assert status == 429
        assert "with this API key" in answer["error"]["message"]
        assert (await post("key-b", n=3))[1]["error"]["param"] == "n"
        running.append(asyncio.create_task(post("key-b", "x" * 60)))
        await eventually(lambda: server.engine.num_running == 3)
        assert (await post("key-b", "x" * 60))[0] == 429
        assert (await post("key-b", "x" * 101))[1]["error"]["param"] == "prompt"
        running.append(asyncio.create_task(post("root", "x" * 120)))
        await eventually(lambda: server.engine.num_running == 4)
        status, answer = await post("root", "x" * 60)
        assert status == 429
        assert "with this API key" not in answer["error"]["message"]
        rejects = server.state.admission.num_rejects
        assert rejects == {"requests": 0, "tokens": 1, "key_requests": 1, "key_tokens": 1}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: server.state.admission.num_requests == 0)
        for name in ("anna", "bert"):
            usage = server.state.admission.usage_of(name)
            assert (usage.num_requests, usage.num_tokens) == (0, 0)

    with_server(body, config=config, engine=FakeEngine(text_reply("x" * 400), delay_s=0.1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sesame", "line 1"),
        ("a sesame c", "line 1"),
        ("a sesame\nb sesame", "line 2"),
        ("# sesame\n", "no key"),
    ],
)
def test_read_keys_names_the_line_and_shows_no_key(tmp_path, text, said):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(path)
    assert "sesame" not in str(caught.value)


def test_read_keys_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="--max-tokens-per-key needs --api-key-file"):
        ServerConfig(max_tokens_per_key=5)


def test_api_keys_without_any_need_none():
    assert not ApiKeys(None, {}).are_needed
    keys = ApiKeys("root", {"root": "anna", "b": "bert"})
    assert (keys.name_of(b"root"), keys.name_of(b"b"), keys.name_of(b"c")) == (
        OPERATOR,
        "bert",
        None,
    )
