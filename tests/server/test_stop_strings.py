"""Stop strings: the same result however the text is cut, and no more held back than needed."""

import random

import pytest

from compiled_engine.server.stop_strings import StopMatcher

CASES = [
    ("Hi there\nUser: x", ["\nUser:"], "Hi there", "\nUser:"),
    ("aab", ["ab"], "a", "ab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("the END of", ["END", "ENDING"], "the ", "END"),
    ("the ENDING", ["ENDING", "DING"], "the ", "ENDING"),
    ("xxabcd", ["bc", "abcd"], "xxa", "bc"),
    ("never\nUse", ["\nUser:"], "never\nUse", None),
    ("aaaaaab", ["aab"], "aaaa", "aab"),
    ("天气 café END", ["é E"], "天气 caf", "é E"),
    ("", ["x"], "", None),
]


def _splits(text: str) -> list[list[str]]:
    rng = random.Random(0)
    results = [list(text), [text]]
    results += [[text[:i], text[i:]] for i in range(len(text) + 1)]
    for _ in range(20):
        pieces, rest = [], text
        while rest:
            size = rng.randint(2, 7)
            pieces.append(rest[:size])
            rest = rest[size:]
        results.append(pieces)
    return results


def _run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    sent = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + matcher.flush(), None


@pytest.mark.parametrize(("text", "stops", "expected", "matched"), CASES)
def test_push_any_split_gives_one_result(text, stops, expected, matched):
    for pieces in _splits(text):
        assert _run(StopMatcher(stops), pieces) == (expected, matched)


@pytest.mark.parametrize(("text", "stops", "expected", "matched"), CASES)
def test_push_include_stop_keeps_the_string(text, stops, expected, matched):
    for pieces in _splits(text):
        result = _run(StopMatcher(stops, include_stop=True), pieces)
        assert result == (expected + (matched or ""), matched)


def test_push_holds_back_only_a_possible_beginning():
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("a\nUs").text == "a"
    assert matcher.push("x").text == "\nUsx"
    assert matcher.push("\n").text == ""
    assert matcher.push("\n").text == "\n"
    assert matcher.flush() == "\n"


def test_push_random_texts_agree_with_a_plain_search():
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(30))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 6))) for _ in range(2)]
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        expected = (text, None)
        if ends:
            end, _, stop = min(ends)
            expected = (text[: end - len(stop)], stop)
        assert _run(StopMatcher(stops), list(text)) == expected


def test_skip_text_is_not_searched():
    matcher = StopMatcher(["ab"])
    assert matcher.skip("ab a") == "ab a"
    assert matcher.push("b").text == "b"
