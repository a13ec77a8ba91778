"""Races between kernels that start while the one before them still runs: ours and Inductor's.

A chain of our kernels and Inductor's, behind slow ones, is replayed as a CUDA graph some hundred
times on changing inputs. Before every replay all memory of the graph holds NaN, so whoever reads
before the value is there shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.graphs import StepGraphs, _CudaArray
from compiled_engine.compile.piece import Piece
from compiled_engine.compile.program import LoadedProgram
from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops.activation import silu_and_mul
from compiled_engine.custom_ops.norm import rms_norm
from compiled_engine.engine import kept_ops

NUM_REPLAYS = 300
NUM_LINKS = 3
# Fewer rows than a GPU has multiprocessors: kernels behind a slow one find room at once.
ROWS, SIZE = 24, 512


def chain(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """x [T, 2 * SIZE], weight [SIZE]; what each link ends with, [T, SIZE] each."""
    from tests.helpers.slow_kernel import slow_double

    results = []
    for _ in range(NUM_LINKS):
        mixed = slow_double(x) * 0.25 + torch.sin(x)
        gated = silu_and_mul(mixed)
        peak = gated.abs().amax(-1, keepdim=True)
        normed = rms_norm(gated / (peak + 1.0), weight, 1e-6)
        # Inductor's, behind ours, of what older kernels wrote.
        end = normed * 0.5 + mixed[:, : weight.shape[0]]
        results.append(end)
        x = torch.cat((end, slow_double(end).abs() * 0.5), -1)
    return tuple(results)


def made_piece(cache_dir: Path, device: str) -> Piece:
    config = EngineConfig(model="chain", cache_dir=cache_dir, inductor_pdl=True)
    driver = CompileDriver(
        config, kept_ops=kept_ops(torch.device(device)), device_type=torch.device(device).type
    )
    piece = driver.compile(chain, "chain")
    assert isinstance(piece, Piece)
    return piece


def in_turn(piece: Piece) -> LoadedProgram:
    """The same Inductor kernels, each of which starts when the one in front of it has ended.

    Kernels compiled apart may round in another way, so nothing else can be compared bit by bit.
    """
    assert isinstance(piece.loaded, LoadedProgram), "the piece was not recorded"
    replace, program = msgspec.structs.replace, piece.loaded.program
    kernels = tuple(replace(kernel, is_dependent=False) for kernel in program.gpu_kernels)
    return LoadedProgram(replace(program, gpu_kernels=kernels), ["x", "weight"])


def inputs_of(generator: torch.Generator, device: str) -> Tensor:
    values = torch.randn(ROWS, 2 * SIZE, generator=generator, device=device)
    return values.bfloat16()


def new_weight(device: str) -> Tensor:
    return torch.linspace(0.5, 1.5, SIZE, device=device).bfloat16()


class Replayed:
    """A function of `x` and `weight` as a captured graph, over memory that is poisoned first."""

    def __init__(self, function: Any, x: Tensor, weight: Tensor) -> None:
        self._graphs = StepGraphs(x.device)
        self.results: tuple[Tensor, ...] = ()
        function(x, weight)
        torch.cuda.synchronize()

        def step() -> None:
            self.results = function(x, weight)

        self._graphs.capture("step", step)
        self._memory = [
            torch.as_tensor(_CudaArray(part["address"], part["total_size"]), device=x.device)
            for part in torch.cuda.memory_snapshot()
            if tuple(part["segment_pool_id"]) == tuple(self._graphs._pool)
        ]
        self._poison()
        for result in self.results:
            assert bool(result.isnan().all()), "results lie outside the graph's memory"

    def _poison(self) -> None:
        for part in self._memory:
            part.fill_(0xFF)  # NaN in every dtype

    def __call__(self) -> tuple[Tensor, ...]:
        self._poison()
        self._graphs.replay("step")
        return tuple(result.clone() for result in self.results)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """A bool on the device, so that nothing waits between two replays."""
    return (a.view(torch.int16) == b.view(torch.int16)).all()


def is_dependent(piece: Piece) -> set[bool]:
    """Whether the Inductor kernels of a compiled piece start early."""
    assert isinstance(piece.loaded, LoadedProgram), "the piece was not recorded"
    program = piece.loaded.program
    assert program.source.count(".run(") >= 2 * NUM_LINKS
    for name in ("ce_tests.slow_double", "ce.silu_and_mul", "ce.rms_norm"):
        assert program.source.count(f"torch.ops.{name}") >= NUM_LINKS, f"{name} is no kernel here"
    return {kernel.is_dependent for kernel in program.gpu_kernels}


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_chains_of_dependent_kernels_have_no_race(engine_cache_dir):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs programmatic dependent launch")
    weight, generator = new_weight("cuda"), torch.Generator("cuda").manual_seed(1)
    x = inputs_of(generator, "cuda")
    early = made_piece(engine_cache_dir, "cuda")
    replayed = Replayed(early, x, weight)
    assert is_dependent(early) == {True}
    waiting = in_turn(early)

    def plain(*given: Tensor) -> tuple[Tensor, ...]:
        return waiting.rebuild(waiting.call(waiting.bind(*given)), *given)

    assert {kernel.is_dependent for kernel in waiting.program.gpu_kernels} == {False}
    seen, finite = [], []
    for _ in range(NUM_REPLAYS):
        x.copy_(inputs_of(generator, "cuda"))
        got = replayed()
        expected = plain(x, weight)
        assert len(got) == len(expected) == NUM_LINKS
        finite.append(torch.stack([a.isfinite().all() for a in got]).all())
        seen.append(torch.stack([same_bits(a, b) for a, b in zip(got, expected, strict=True)]))
    is_same = torch.stack(seen)
    assert bool(is_same.all()), f"replays with wrong links: {(~is_same).nonzero().tolist()[:9]}"
    assert bool(torch.stack(finite).all())


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
@torch.no_grad()
def test_gpu_a_kernel_that_does_not_wait_is_seen(waits):
    """What the test above would show if one of the kernels read too early."""
    from tests.helpers.slow_kernel import copied, slow_double

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs programmatic dependent launch")

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (copied(slow_double(x), waits=waits),)

    weight, generator = new_weight("cuda"), torch.Generator("cuda").manual_seed(2)
    x = inputs_of(generator, "cuda")
    replayed = Replayed(step, x, weight)
    same = []
    for _ in range(NUM_REPLAYS):
        x.copy_(inputs_of(generator, "cuda"))
        (got,) = replayed()
        same.append((got == x * 2).all())
    num_same = int(torch.stack(same).sum())
    assert num_same == NUM_REPLAYS if waits else num_same < NUM_REPLAYS
