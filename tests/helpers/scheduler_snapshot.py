"""One comparable picture of scheduler state, taken from the oracle or from the tensors.

Owns the picture, the comparison of two of them, and the invariants that hold between any two steps.
Owns no policy. Fields that mean nothing for a row's state (the text of a FREE row) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tests.helpers.python_scheduler import (
    RESIDENT,
    PythonRow,
    PythonScheduler,
    RowState,
)
from tests.helpers.scheduler_keys import to_signed

if TYPE_CHECKING:
    from compiled_engine.scheduler.state import SchedulerShape, SchedulerState

# Fields of a row that its submit sets and nothing changes.
SUBMITTED = (
    "priority", "arrival", "gen", "salt", "num_prompt", "max_len", "grammar", "score_from",
)  # fmt: skip


@dataclass
class Snapshot:
    """Scheduler state as plain numbers; `ring` holds the reusable pages in order."""

    rows: dict[int, dict[str, Any]]
    ref: list[int]
    uid: list[int]
    parent_uid: list[int]
    index_slot: list[int]
    page_tokens: dict[int, tuple[int, ...]]
    ring: list[int]
    index: dict[int, tuple[int, int]]
    uid_next: int
    errors: list[int]


def oracle_snapshot(oracle: PythonScheduler) -> Snapshot:
    """Takes the picture of a Python scheduler."""
    pool = oracle.pool
    return Snapshot(
        rows={row.index: _oracle_row(row) for row in oracle.rows},
        ref=list(pool.ref),
        uid=list(pool.uid),
        parent_uid=list(pool.parent_uid),
        index_slot=list(pool.index_slot),
        page_tokens={p: pool.page_tokens[p] for p, uid in enumerate(pool.uid) if uid > 0},
        ring=list(pool.ring),
        index={slot: (to_signed(key), page) for slot, (key, page) in sorted(pool.index.items())},
        uid_next=pool.uid_next,
        errors=list(oracle.errors),
    )


def _oracle_row(row: PythonRow) -> dict[str, Any]:
    if row.state is RowState.FREE:
        return {"state": 0, "pages": row.pages}
    picture: dict[str, Any] = {
        "state": int(row.state),
        "pages": list(row.pages),
        "num_tokens": row.num_tokens,
        "num_computed": row.num_computed,
        "tokens": list(row.tokens),
        "links": [to_signed(link) for link in row.links],
        "mask_pos": row.mask_pos,
        "num_cached": row.num_cached,
    }
    for name in SUBMITTED:
        picture[name] = getattr(row, name)
    if row.state in RESIDENT:
        picture["pub_ok"] = row.pub_ok
    return picture


def tensor_snapshot(shape: SchedulerShape, state: SchedulerState) -> Snapshot:
    """Takes the picture of the tensors. Copies them to the host."""
    group = state.groups[0]
    ring_pos = group.ring_pos.tolist()
    head, tail = int(group.head), int(group.tail)
    capacity = shape.ring_size
    assert tail - head <= capacity, f"ring holds {tail - head} entries of {capacity}"
    is_free = group.ref == 0
    assert int(group.num_free) == int(is_free.sum()), "num_free is off"
    num_cached = int((is_free & (group.uid > 0)).sum())
    assert int(group.num_free_cached) == num_cached, "num_free_cached is off"
    ring_slots = group.ring.tolist()
    valid = sorted((position, page) for page, position in enumerate(ring_pos) if position >= 0)
    for position, page in valid:
        assert head <= position < tail, f"page {page} at {position}, ring is {head}..{tail}"
        assert ring_slots[position % capacity] == page, f"ring slot of page {page} was overwritten"
    uid = group.uid.tolist()
    texts = group.page_tokens.tolist()
    keys = group.tkey[: shape.index_buckets].flatten().tolist()
    pages = group.tpage[: shape.index_buckets].flatten().tolist()
    return Snapshot(
        rows=_tensor_rows(shape, state),
        ref=group.ref.tolist(),
        uid=uid,
        parent_uid=group.parent_uid.tolist(),
        index_slot=group.index_slot.tolist(),
        page_tokens={page: tuple(texts[page]) for page, value in enumerate(uid) if value > 0},
        ring=[page for _, page in valid],
        index={
            slot: (key, page)
            for slot, (key, page) in enumerate(zip(keys, pages, strict=True))
            if page > 0
        },
        uid_next=int(group.uid_next),
        errors=state.error.tolist(),
    )


def _tensor_rows(shape: SchedulerShape, state: SchedulerState) -> dict[int, dict[str, Any]]:
    group = state.groups[0]
    owned, table = group.owned.tolist(), group.block_table.tolist()
    names = ["state", "num_tokens", "num_computed", "mask_pos", "num_cached", "pub_ok"]
    names += SUBMITTED
    columns = {name: getattr(state, name).tolist() for name in names}
    token_table = state.token_table.tolist()
    texts, links = state.token_pages.tolist(), state.chain.tolist()
    rows: dict[int, dict[str, Any]] = {}
    for row in range(shape.max_rows):
        picture: dict[str, Any] = {"pages": table[row][: owned[row]]}
        if columns["state"][row] == RowState.FREE:
            rows[row] = picture | {"state": 0}
            continue
        picture |= {name: columns[name][row] for name in names}
        if columns["state"][row] not in RESIDENT:
            del picture["pub_ok"]
        count = picture["num_tokens"]
        used = token_table[row][: -(-count // shape.token_page_size)]
        picture["tokens"] = [t for page in used for t in texts[page]][:count]
        picture["links"] = [x for page in used for x in links[page]][: count // shape.page_size]
        rows[row] = picture
    return rows


def assert_equal(expected: Snapshot, found: Snapshot, where: str) -> None:
    """Fails with every differing field; `expected` is the oracle's."""
    if expected == found:
        return
    lines = [f"{where}: the tensors differ from the oracle"]
    for item in fields(Snapshot):
        want, have = getattr(expected, item.name), getattr(found, item.name)
        if want == have:
            continue
        if item.name != "rows":
            lines.append(f"  {item.name}: oracle {want}\n  {' ' * len(item.name)}  found {have}")
            continue
        for row in want:
            lines += [
                f"  row {row} {name}: oracle {want[row].get(name)} found {have[row].get(name)}"
                for name in sorted(want[row].keys() | have[row].keys())
                if want[row].get(name) != have[row].get(name)
            ]
    raise AssertionError("\n".join(lines))


def check_invariants(picture: Snapshot) -> None:
    """Checks what holds between any two half steps.

    Raises:
        AssertionError: a page is lost, owned twice, or an index entry is out of step.
    """
    named: dict[int, int] = {}
    for row, values in picture.rows.items():
        pages = values["pages"]
        assert len(set(pages)) == len(pages), f"row {row} names a page twice: {pages}"
        assert 0 not in pages, f"row {row} names the null page: {pages}"
        for page in pages:
            named[page] = named.get(page, 0) + 1
    assert picture.ref[0] == 1, "the null page was released"
    for page in range(1, len(picture.ref)):
        ref = picture.ref[page]
        assert ref == named.get(page, 0), f"page {page}: ref {ref}, named {named.get(page, 0)}"
        assert ref <= 1 or picture.uid[page] > 0, f"page {page} is shared but not published"
    free = sorted(page for page in range(1, len(picture.ref)) if picture.ref[page] == 0)
    assert sorted(picture.ring) == free, f"ring {picture.ring}, free {free}"
    _check_index(picture)
    _check_parents(picture)


def _check_index(picture: Snapshot) -> None:
    keys = [key for key, _ in picture.index.values()]
    assert len(set(keys)) == len(keys), "a key is in the index twice"
    by_page = {page: slot for slot, (_, page) in picture.index.items()}
    assert len(by_page) == len(picture.index), "a page is in the index twice"
    for page, slot in enumerate(picture.index_slot):
        assert by_page.get(page, -1) == slot, f"page {page}: slot {slot} is not its index entry"
        assert (picture.uid[page] > 0) == (slot >= 0), f"page {page}: uid and slot disagree"
        assert picture.uid[page] < picture.uid_next, f"page {page}: uid from the future"


def _check_parents(picture: Snapshot) -> None:
    page_of = {uid: page for page, uid in enumerate(picture.uid) if uid > 0}
    assert len(page_of) == len(picture.index), "a uid was given twice"
    place = {page: i for i, page in enumerate(picture.ring)}
    for child in page_of.values():
        parent_uid = picture.parent_uid[child]
        if parent_uid < 0:
            continue
        assert parent_uid in page_of, f"page {child} outlived its parent {parent_uid}"
        parent = page_of[parent_uid]
        assert picture.ref[child] <= picture.ref[parent], f"page {child} outranks {parent}"
        if parent in place:
            assert place[child] < place[parent], f"parent {parent} leaves before child {child}"
