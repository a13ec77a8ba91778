"""What the host expects of the prefix cache: new tokens, and who waits for whom."""

from __future__ import annotations

from compiled_engine.prefix_guess import BLOCK_TOKENS, PrefixGuess

SHARED = list(range(3 * BLOCK_TOKENS))


def test_prefix_guess_counts_a_prompt_until_its_first_token():
    guess = PrefixGuess(is_caching=True, page_size=1)
    guess.add(0, SHARED, 0)
    guess.add(1, [7] * 10, 0)
    assert guess.num_needed() == len(SHARED) + 10
    guess.leave(0)
    assert guess.num_needed() == 10
    guess.leave(1)
    guess.leave(1)
    assert guess.num_needed() == 0


def test_prefix_guess_lets_followers_wait_for_their_leader():
    guess = PrefixGuess(is_caching=True, page_size=1)
    for row in range(4):
        guess.add(row, [*SHARED, 100 + row, 5], 0)
    assert guess.num_needed() == len(SHARED) + 2
    guess.leave(0)
    assert guess.num_needed() == 3 * 2


def test_prefix_guess_knows_what_was_computed_before():
    guess = PrefixGuess(is_caching=True, page_size=1)
    guess.add(0, SHARED, 0)
    guess.leave(0)
    guess.add(3, SHARED, 0)
    assert guess.num_needed() == 1  # the last token is always computed
    guess.add(4, [*SHARED[: BLOCK_TOKENS + 9], 7, 7], 0)
    assert guess.num_needed() == 1 + 2


def test_prefix_guess_counts_whole_pages():
    guess = PrefixGuess(is_caching=True, page_size=16)
    guess.add(0, [*SHARED, *range(40)], 0)
    guess.leave(0)
    # 21 tokens of the last block are known: one page of them.
    guess.add(1, [*SHARED, *range(21), 7, 7, 7], 0)
    assert guess.num_needed() == 24 - 16
    guess.leave(1)
    guess.add(2, SHARED, 0)
    assert guess.num_needed() == 16, "the last page, for the last token"


def test_prefix_guess_keeps_salts_and_orders_apart():
    guess = PrefixGuess(is_caching=True, page_size=1)
    guess.add(0, SHARED, 0)
    guess.leave(0)
    guess.add(1, SHARED, 1)
    assert guess.num_needed() == len(SHARED)
    guess.leave(1)
    # The second block alone is no prefix.
    guess.add(2, SHARED[BLOCK_TOKENS : 2 * BLOCK_TOKENS], 0)
    assert guess.num_needed() == BLOCK_TOKENS


def test_prefix_guess_without_a_cache_counts_everything():
    guess = PrefixGuess(is_caching=False, page_size=1)
    for row in range(3):
        guess.add(row, SHARED, 0)
    assert guess.num_needed() == 3 * len(SHARED)


def test_prefix_guess_forgets():
    guess = PrefixGuess(is_caching=True, page_size=1)
    guess.add(0, SHARED, 0)
    guess.leave(0)
    guess.clear()
    guess.add(1, SHARED, 0)
    assert guess.num_needed() == len(SHARED)


def test_prefix_guess_holds_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr("compiled_engine.prefix_guess.MAX_BLOCKS", 4)
    guess = PrefixGuess(is_caching=True, page_size=1)
    for row in range(3):
        guess.add(row, [row] * (2 * BLOCK_TOKENS), 0)
        guess.leave(row)
    guess.add(5, [0] * (2 * BLOCK_TOKENS), 0)
    assert guess.num_needed() == 2 * BLOCK_TOKENS, "the oldest blocks are gone"
    guess.leave(5)
    guess.add(6, [2] * (2 * BLOCK_TOKENS), 0)
    assert guess.num_needed() == 1
