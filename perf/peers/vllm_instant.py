"""vLLM's server in front of an engine without a model. Runs under an environment that has vLLM.

Run as `python perf/peers/vllm_instant.py TOKENS [vLLM's own flags]`. Only the client of its engine
core is replaced: each step gives every running request the next token of a list, as soon as every
stream has taken the last one. Everything that vLLM's API process does stays: its output processor
with detokenising and statistics, its routes, its HTTP server.

Nothing of this repository is imported here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_TURNS = 4
SLEEP_S = 0.0005


class InstantCore:
    """What `AsyncLLM` asks of its engine core.

    Args:
        token_ids: what requests are given, one after another, from the start again at the end.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        # Set once there is one: knows the streams that have not taken their tokens.
        self.output_processor: Any = None
        self._token_ids = token_ids
        self._running: dict[str, tuple[int, int]] = {}  # request -> next place, tokens left
        self._has_work = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Text only."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def add_request_async(self, request: Any) -> None:
        """Takes a request."""
        place = request.prompt_token_ids[0] % len(self._token_ids)
        self._running[request.request_id] = (place, request.sampling_params.max_tokens)
        self._has_work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Forgets requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing has to be ended."""

    async def get_output_async(self) -> Any:
        """The next step."""
        from vllm.v1.engine import (  # type: ignore[import-not-found, unused-ignore]
            EngineCoreOutput,
            EngineCoreOutputs,
            FinishReason,
        )

        num_turns = 0
        while self._has_unread() or not self._running:
            if not self._running:
                self._has_work.clear()
                await self._has_work.wait()
            num_turns += 1
            await asyncio.sleep(0 if num_turns < NUM_TURNS else SLEEP_S)
        outputs = []
        for request_id, (place, left) in list(self._running.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            token_id = self._token_ids[place]
            outputs.append(EngineCoreOutput(request_id, [token_id], finish_reason=reason))
            self._running[request_id] = ((place + 1) % len(self._token_ids), left - 1)
            if left == 1:
                del self._running[request_id]
        return EngineCoreOutputs(outputs=outputs)

    def _has_unread(self) -> bool:
        states = self.output_processor.request_states.values()
        return any(state.queue.output is not None for state in states)


def main() -> None:
    """Starts vLLM's own server with the other engine core."""
    from vllm.entrypoints.launchers.api_server import (  # type: ignore[import-not-found, unused-ignore]
        entry,
    )
    from vllm.v1.engine import async_llm  # type: ignore[import-not-found, unused-ignore]

    tokens = sys.argv.pop(1)
    core = InstantCore(json.loads(Path(tokens).read_text())["token_ids"])
    make_processor = async_llm.OutputProcessor

    def output_processor(*args: Any, **kwargs: Any) -> Any:
        core.output_processor = make_processor(*args, **kwargs)
        return core.output_processor

    async_llm.OutputProcessor = output_processor
    async_llm.EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    entry.main()


if __name__ == "__main__":
    main()
