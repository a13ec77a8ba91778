"""Passes that are off on a device, and the options that say otherwise."""

from __future__ import annotations

import pytest

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from compiled_engine.passes import defaults
from compiled_engine.passes.defaults import NOT_FOR, OFF_BY_DEFAULT, disabled_passes
from compiled_engine.passes.names import PASS_NAMES, PieceTraits


@pytest.mark.parametrize("device_type", NOT_FOR)
def test_the_table_names_passes_and_says_why(device_type: str):
    for name, reason in NOT_FOR[device_type].items():
        assert name in PASS_NAMES
        assert len(reason.split()) > 3
        with pytest.raises(ConfigError, match=f"cannot run on {device_type}, {reason}"):
            disabled_passes(device_type, disabled=(), enabled=(name,))
    assert set(OFF_BY_DEFAULT[device_type]) <= set(PASS_NAMES)
    expected = (*NOT_FOR[device_type], *OFF_BY_DEFAULT[device_type])
    assert disabled_passes(device_type, disabled=(), enabled=()) == expected
    # No pass is off everywhere.
    assert set.intersection(*map(set, NOT_FOR.values())) == set()


def test_options_add_and_take_away(monkeypatch):
    found = disabled_passes("cuda", disabled=("fuse_linear", "use_linear_op"), enabled=())
    assert found == ("fuse_linear", "use_linear_op")
    assert disabled_passes("", disabled=(), enabled=()) == ()
    monkeypatch.setattr(defaults, "OFF_BY_DEFAULT", {"cuda": ("lift_rope", "fuse_linear")})
    found = disabled_passes("cuda", disabled=(), enabled=("lift_rope",))
    assert found == ("use_linear_op", "fuse_linear")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_passes": ("fuse_everything",)}, "--enable-pass fuse_everything: no such pass"),
        (
            {"enable_passes": ("lift_rope",), "disable_passes": ("lift_rope",)},
            "contradict each other",
        ),
    ],
)
def test_mistakes_are_refused(options: dict[str, tuple[str, ...]], said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        CompileDriver(EngineConfig(model="m", **options))  # type: ignore[arg-type]
    assert caught.value.param == "enable_passes"


def test_a_driver_runs_what_pays_on_its_device(tmp_path):
    cpu = CompileDriver(EngineConfig(model="m", cache_dir=tmp_path), device_type="cpu")
    assert cpu.runs_pass("use_linear_op")
    assert not cpu.runs_pass("fuse_linear")
    assert not cpu.runs_pass("decode_attention")
    cuda = CompileDriver(EngineConfig(model="m", cache_dir=tmp_path), device_type="cuda")
    assert not cuda.runs_pass("use_linear_op")
    assert cuda.runs_pass("decode_attention")
    made = [driver.passes(PieceTraits()).uuid() for driver in (cpu, cuda)]
    assert made[0] != made[1]
