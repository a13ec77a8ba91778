"""What is run to compare settings: conversations of made-up tokens, in sizes for each workload."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Job:
    """Conversations, so many at a time; all lengths in tokens.

    Attributes:
        num_conversations: in all.
        at_once: most that run together; a new one starts when one ends.
        shared: prefix of all of them: a system prompt and tools.
        first: rest of the first turn's prompt.
        later: what a later turn adds to the answer before it.
        turns: of each conversation.
        output: of each answer.
    """

    num_conversations: int
    at_once: int
    shared: int = 0
    first: int
    later: int = 0
    turns: int = 1
    output: int

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        rest = self.turns * self.output + (self.turns - 1) * self.later
        return self.shared + self.first + rest

    def __str__(self) -> str:
        turns = f", {self.turns} turns of {self.later} more" if self.turns > 1 else ""
        shared = f"{self.shared} shared and " if self.shared else ""
        return (
            f"{self.num_conversations} conversations, {self.at_once} at once, prompts of {shared}"
            f"{self.first} tokens{turns}, answers of {self.output}"
        )

    @property
    def num_tokens(self) -> int:
        """Of the prompts of all turns and their answers, as clients count them."""
        turns = range(self.turns)
        before = [self.shared + self.first + turn * (self.later + self.output) for turn in turns]
        return self.num_conversations * (sum(before) + self.turns * self.output)

    def within(self, longest: int) -> Job:
        """The same job with every length scaled down to what an engine takes."""
        if self.longest <= longest:
            return self
        share = longest / self.longest

        def scaled(length: int) -> int:
            return int(length * share) if length == 0 else max(1, int(length * share))

        fitted = replace(
            self,
            shared=scaled(self.shared),
            first=scaled(self.first),
            later=scaled(self.later),
            output=max(2, scaled(self.output)),
        )
        excess = max(0, fitted.longest - longest)  # what the least lengths add up to
        return replace(fitted, first=max(1, fitted.first - excess))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A way of use, and what counts in it.

    Attributes:
        name: as in `--workload`.
        main: what settings of single steps are compared by.
        crowd: more requests than rows, for the number of rows; None where that cannot matter.
        counts_latency: requests' mean time counts, not tokens per second.
        gives_up: share of that which shorter steps may cost.
    """

    name: str
    main: Job
    crowd: Job | None
    counts_latency: bool = False
    gives_up: float = 0.0

    def within(self, longest: int) -> Workload:
        """The same for an engine that takes `longest` tokens."""
        crowd = None if self.crowd is None else self.crowd.within(longest)
        return replace(self, main=self.main.within(longest), crowd=crowd)

    def __str__(self) -> str:
        rows = "" if self.crowd is None else f"; for rows {self.crowd}"
        return f"{self.name}: {self.main}{rows}"


_CROWD = {
    "cuda": Job(num_conversations=512, at_once=512, first=128, output=48),
    "cpu": Job(num_conversations=64, at_once=64, first=16, output=8),
}
_MAIN = {
    ("agentic", "cuda"): Job(
        num_conversations=8, at_once=8, shared=1500, first=3000, later=400, turns=2, output=64
    ),
    ("agentic", "cpu"): Job(
        num_conversations=4, at_once=4, shared=128, first=384, later=64, turns=2, output=16
    ),
    ("throughput", "cuda"): Job(num_conversations=128, at_once=128, first=1024, output=128),
    ("throughput", "cpu"): Job(num_conversations=16, at_once=16, first=128, output=24),
    ("latency", "cuda"): Job(num_conversations=16, at_once=4, first=4000, output=64),
    ("latency", "cpu"): Job(num_conversations=6, at_once=2, first=384, output=16),
}
WORKLOADS = ("agentic", "throughput", "latency")
DEFAULT_WORKLOAD = "agentic"


def workload(name: str, device_type: str) -> Workload:
    """The workload of that name in sizes for a "cuda" or "cpu" device."""
    counts_latency = name == "latency"
    return Workload(
        name=name,
        main=_MAIN[name, device_type],
        crowd=None if counts_latency else _CROWD[device_type],
        counts_latency=counts_latency,
        gives_up={"agentic": 0.05, "throughput": 0.0, "latency": 0.1}[name],
    )
