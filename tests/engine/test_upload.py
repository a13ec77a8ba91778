"""The inbox on its way to the device: same values, and nothing is copied when nothing is new."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from compiled_engine.outbox import RING_RECORDS
from compiled_engine.request import SamplingParams
from compiled_engine.sampler import build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.upload import ALIGNMENT, DeviceInbox

SHAPE = SchedulerShape(max_rows=5, num_pages=20, page_size=4, max_model_len=64, max_tokens=16)


def made() -> tuple[InboxBuilder, DeviceInbox]:
    builder = InboxBuilder(SHAPE)
    empty, _ = builder.take()
    return builder, DeviceInbox(empty, build_param_inbox(SHAPE, []), torch.device("cpu"))


def assert_holds(device: DeviceInbox, inbox, params) -> None:
    got = tree_leaves((device.inbox, device.param_inbox))
    for tensor, expected in zip(got, tree_leaves((inbox, params)), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_upload_brings_every_field():
    builder, device = made()
    assert_holds(device, builder.take()[0], build_param_inbox(SHAPE, []))
    fields = {"gen": 2, "arrival": 9, "priority": -4, "salt": 1 << 60, "score_from": 7}
    builder.submit(row=3, prompt=[5] * 30, max_len=40, **fields)
    builder.abort(row=1, gen=1)
    builder.mask(row=0, gen=1, position=7)
    inbox, _ = builder.take()
    options = SamplingParams(temperature=0.5, top_k=3, logit_bias={4: 1.5}, seed=8)
    params = build_param_inbox(SHAPE, [(3, options, 8, (2, 7))])
    assert device.send(inbox, params, has_entries=True)
    assert_holds(device, inbox, params)


def test_upload_copies_only_what_is_new():
    builder, device = made()
    blank = (builder.take()[0], build_param_inbox(SHAPE, []))
    assert not device.send(*blank, has_entries=False)
    builder.abort(row=1, gen=1)
    inbox, _ = builder.take()
    assert device.send(inbox, blank[1], has_entries=True)
    assert device.send(*blank, has_entries=False), "the abort must not be applied twice"
    assert_holds(device, *blank)
    assert not device.send(*blank, has_entries=False)
    builder.abort(row=1, gen=1)
    device.send(builder.take()[0], blank[1], has_entries=True)
    device.clear()
    assert_holds(device, *blank)


def test_upload_addresses_stay_and_are_aligned():
    builder, device = made()
    before = [t.data_ptr() for t in tree_leaves((device.inbox, device.param_inbox))]
    assert all((address - device.address) % ALIGNMENT == 0 for address in before)
    for _ in range(2 * RING_RECORDS + 1):
        builder.abort(row=1, gen=1)
        device.send(builder.take()[0], build_param_inbox(SHAPE, []), has_entries=True)
    assert [t.data_ptr() for t in tree_leaves((device.inbox, device.param_inbox))] == before
