"""What one step gave, by columns: no Python object is made for a token until somebody looks at it.

The loop fills it with a few array operations, whatever the number of rows; the engine process sends
it on as it is; whoever needs single events iterates.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from compiled_engine.request import FinishReason, TokenEvent


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """One token each of N requests, and what was forced before it.

    Columns are int64 of N places, in the machine's byte order.

    Attributes:
        request_ids: the requests' own ids.
        token_ids: the new tokens.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        ends: place -> why the request at that place ended.
        logprobs: request id -> what `TokenEvent.logprobs` holds, of those that asked.
        prompt_logprobs: likewise.
        forced: request id -> tokens in front of the request's new one.
    """

    request_ids: bytes = b""
    token_ids: bytes = b""
    num_cached_tokens: bytes = b""
    ends: dict[int, FinishReason] = {}
    logprobs: dict[int, bytes] = {}
    prompt_logprobs: dict[int, bytes] = {}
    forced: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(memoryview(self.request_ids).cast("q"))

    def __iter__(self) -> Iterator[TokenEvent]:
        columns = (self.request_ids, self.token_ids, self.num_cached_tokens)
        rows = zip(*(memoryview(column).cast("q").tolist() for column in columns), strict=True)
        ends, logprobs, forced = self.ends, self.logprobs, self.forced
        for place, (request_id, token_id, num_cached) in enumerate(rows):
            token_ids = [token_id]
            if request_id in forced:
                token_ids = [*forced[request_id], token_id]
            event = TokenEvent(request_id, token_ids, ends.get(place), num_cached)
            yield self._with_logprobs(event) if request_id in logprobs else event

    def _with_logprobs(self, event: TokenEvent) -> TokenEvent:
        return msgspec.structs.replace(
            event,
            logprobs=self.logprobs[event.request_id],
            prompt_logprobs=self.prompt_logprobs.get(event.request_id, b""),
        )
