"""Text that a grammar forces is appended at once on a GPU: equal answers in fewer steps."""

from __future__ import annotations

import json

import jsonschema
import pytest

from compiled_engine.engine import Engine
from compiled_engine.request import SamplingParams
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.gpu_engine import exact_engine, write_exact_model
from tests.helpers.grammar_runs import Answer, run_grammars, spec

pytestmark = pytest.mark.gpu

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_current_weather"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "place": {"type": "string", "pattern": "^[a-z]{0,6}$"},
    },
    "required": ["name", "unit", "place"],
    "additionalProperties": False,
}
WRAPPED = r"The answer to this is: [0-9]{3} and nothing beyond it\."


def asked() -> list[SamplingParams]:
    """Grammars with much that is forced, drawn and greedy, beside rows without one."""
    drawn = {"temperature": 1.0, "max_tokens": 180}
    call, wrapped = spec("json_schema", CALL), spec("regex", WRAPPED)
    return [
        SamplingParams(**drawn, seed=1, grammar=call),
        SamplingParams(**drawn, seed=2),
        SamplingParams(**drawn, seed=3, grammar=wrapped),
        SamplingParams(temperature=0.0, max_tokens=180, grammar=call),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, grammar=wrapped),  # ends inside forced text
    ]


def told(answers: list[Answer]) -> list[tuple[list[int], str | None, object]]:
    return [(answer.tokens, answer.reason, answer.error) for answer in answers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_exact_model(tmp_path_factory.mktemp("gpu") / "exact")


def busy_steps(answers: list[Answer]) -> int:
    """Steps that brought the first row tokens."""
    return len(set(answers[0].steps))


@pytest.fixture(scope="module")
def expected(folder) -> list[Answer]:
    plain = exact_engine(folder, jump_forward="off", enforce_eager=True, cudagraph_mode="none")
    answers = run_grammars(plain, asked())
    assert plain.loop.stats.num_jumped_tokens == 0
    return answers


@pytest.mark.parametrize(
    "options",
    [{}, {"cudagraph_mode": "none"}, {"overlap_schedule": "off"}, {"device_loop": True}],
    ids=["graphs", "no-graphs", "in-turn", "device-loop"],
)
def test_gpu_same_answers_in_fewer_steps(folder, expected, options):
    engine: Engine = exact_engine(folder, enforce_eager=True, **options)
    answers = run_grammars(engine, asked())
    assert told(answers) == told(expected)
    assert engine.loop.stats.num_jumped_tokens > len("get_current_weather")
    assert busy_steps(answers) < busy_steps(expected) - len("get_current_weather")
    tokenizer = Tokenizer.from_folder(folder)
    jsonschema.validate(json.loads(tokenizer.decode(answers[0].tokens)), CALL)
    assert len(answers[-1].tokens) == 30
    assert answers[-1].reason == "length"
    # And once more, over pages that the first run published.
    assert told(run_grammars(engine, asked())) == told(expected)


def test_gpu_page_pressure_retracts_rows_that_jump(folder, expected):
    little = {"max_total_tokens": 176, "max_model_len": 256, "max_num_seqs": 6}
    engine = exact_engine(folder, enforce_eager=True, **little)
    assert told(run_grammars(engine, asked())) == told(expected)
    assert engine.loop.stats.num_jumped_tokens > 0
    assert engine.loop.stats.num_retractions > 0
