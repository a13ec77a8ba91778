"""What the header of a safetensors file says of its tensors, without opening the file as one."""

from __future__ import annotations

import json
from pathlib import Path

_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}


def first_dtype(folder: Path, suffix: str = "") -> str | None:
    """Dtype of the first 16 or 32-bit float in the folder's safetensors whose name ends so.

    Without a suffix only the first file is looked at. None if there is no such tensor.
    """
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths if suffix else paths[:1]:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
            if not 0 < size <= _MAX_HEADER_BYTES:
                return None
            try:
                header = json.loads(file.read(size))
            except ValueError:
                return None
        for name, entry in header.items():
            if name.endswith(suffix) and name != "__metadata__" and entry["dtype"] in _DTYPES:
                return _DTYPES[entry["dtype"]]
    return None
