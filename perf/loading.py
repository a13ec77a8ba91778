"""Loading a checkpoint straight to the device, over what the slower of file and link gives.

The checkpoint has the shape of an 8B model with fewer layers and lies in memory (`/dev/shm`) where
there is room, else in the temporary folder; rates of reading and of copying are measured on the
same files in the same run. The loads come first: one of them pins its buffers anew.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from perf.qwen3_8b import CONFIG, HEAD_DIM, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE
from perf.rows import Measured
from perf.timing import event_ms

NUM_LAYERS = 14  # 7.9 GB
NUM_SHARDS = 4
ROOM_FACTOR = 1.2
PINNED_BYTES = 256 * 1024**2


def checkpoint_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as a checkpoint of the shape with that many layers has them."""
    q_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj": (q_size, HIDDEN),
        "self_attn.k_proj": (kv_size, HIDDEN),
        "self_attn.v_proj": (kv_size, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q_size),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": s for name, s in layer.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}


def split_shards(
    shapes: dict[str, tuple[int, ...]], num_shards: int
) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in order, in shards of about equal size."""
    total = sum(_num_bytes(shape) for shape in shapes.values())
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_shards)]
    done = 0
    for name, shape in shapes.items():
        middle = done + _num_bytes(shape) // 2
        shards[middle * num_shards // total][name] = shape
        done += _num_bytes(shape)
    return shards


def write_checkpoint(
    folder: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], num_shards: int
) -> int:
    """Writes a bf16 checkpoint of random bits that are numbers; returns the tensors' bytes."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, size=1 << 23, dtype=np.uint16)
    # Exponents around 1: nothing infinite, nothing that is no number.
    data = ((noise & 0x80FF) | 0x3F00).view(np.uint8).data
    shards = split_shards(shapes, num_shards)
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    with ThreadPoolExecutor(num_shards) as pool:
        paths = [folder / name for name in names]
        list(pool.map(_write_shard, paths, shards, [data] * num_shards))
    weight_map = {tensor: name for name, part in zip(names, shards, strict=True) for tensor in part}
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(_num_bytes(shape) for shape in shapes.values())


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], data: memoryview) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + _num_bytes(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for at in range(0, end, len(data)):
            file.write(data[: min(len(data), end - at)])


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def measure_load(num_repeats: int) -> Iterator[Measured]:
    """Rates of the loader, of reading the files and of the link, and the loader's share."""
    shapes = checkpoint_shapes(NUM_LAYERS)
    needed = sum(_num_bytes(shape) for shape in shapes.values()) * ROOM_FACTOR
    places = [p for p in (Path("/dev/shm"), Path(tempfile.gettempdir())) if _room(p) > needed]
    assert places, f"no folder has room for {needed / 1e9:.0f} GB of weights"
    place = places[0]
    with tempfile.TemporaryDirectory(dir=place, prefix="compiled-engine-perf-") as name:
        folder = Path(name)
        config = CONFIG | {"num_hidden_layers": NUM_LAYERS}
        num_bytes = write_checkpoint(folder, shapes, config, NUM_SHARDS)
        loads = [num_bytes / seconds for seconds in _load_s(folder, num_repeats)]
        reads = [num_bytes / _read_s(folder) for _ in range(num_repeats)]
    links = _link_rates(num_repeats)
    case = "shm" if place.name == "shm" else "tmp"
    for metric, rates in (("load_gb_s", loads), ("file_gb_s", reads), ("link_gb_s", links)):
        values = [rate / 1e9 for rate in rates]
        yield Measured(metric=metric, unit="GB/s", case=case, values=values)
    slower = min(statistics.median(reads), statistics.median(links))
    yield Measured(
        metric="load_share_of_link", unit="ratio", values=[rate / slower for rate in loads]
    )


def _room(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def _load_s(folder: Path, num_repeats: int) -> list[float]:
    """Seconds of each load into the same model; checks that the tensors arrived."""
    import torch

    from compiled_engine.models import ARCHITECTURES
    from compiled_engine.models.config import load_model_config
    from compiled_engine.models.weights import build_model, load_weights

    config = load_model_config(folder)
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0)}
    model = build_model(ARCHITECTURES[config.architecture], config, **place)
    taken = []
    for _ in range(num_repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        load_weights(model, folder, **place)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    _check_arrived(model, folder)
    del model
    torch.cuda.empty_cache()
    return taken


def _check_arrived(model: Any, folder: Path) -> None:
    import torch
    from safetensors import safe_open

    weights = dict(model.named_parameters())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    prefix = f"model.layers.{NUM_LAYERS - 1}."
    pairs = {
        "lm_head.weight": weights["lm_head.weight"],
        f"{prefix}mlp.up_proj.weight": weights[f"{prefix}mlp.gate_up_proj.weight"][INNER:],
        f"{prefix}self_attn.q_norm.weight": weights[f"{prefix}self_attn.q_norm.weight"],
    }
    for name, loaded in pairs.items():
        with safe_open(str(folder / index[name]), framework="pt") as file:
            assert torch.equal(file.get_tensor(name), loaded.cpu()), f"{name} arrived changed"


def _read_s(folder: Path) -> float:
    """Seconds to read the files into memory that is there already, by the loader's threads."""
    from compiled_engine.models.weight_stream import CHUNK_BYTES, NUM_READERS

    pieces = [
        (path, offset)
        for path in sorted(folder.glob("*.safetensors"))
        for offset in range(0, path.stat().st_size, CHUNK_BYTES)
    ]
    buffers = [bytearray(CHUNK_BYTES) for _ in range(NUM_READERS)]

    def read(first: int) -> None:
        for path, offset in pieces[first::NUM_READERS]:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                file.readinto(buffers[first])

    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(lambda _: None, range(NUM_READERS)))  # starts the threads
        start = time.perf_counter()
        list(pool.map(read, range(NUM_READERS)))
        return time.perf_counter() - start


def _link_rates(num_repeats: int) -> list[float]:
    """Bytes per second of copies from pinned memory to the device."""
    import torch

    source = torch.ones(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    taken = event_ms(copy, num_calls=16, num_repeats=num_repeats)
    return [PINNED_BYTES / (milliseconds * 1e-3) for milliseconds in taken]
