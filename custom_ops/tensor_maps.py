"""Maps by which the tensor memory accelerator of a GPU copies boxes of a tensor.

Needs compute capability 9.0 on the chip; a map is made on the CPU and depends on nothing but what
it describes.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from compiled_engine.custom_ops.cuda_build import CudaBuildError

MAP_BYTES = 128


class Boxes(NamedTuple):
    """A tensor of 16-bit values that is copied box by box, the innermost dim first.

    address: of the first value. sizes: of the dims. strides: of all dims but the first, in bytes.
    box: values of a box in each dim. is_half: fp16, not bf16.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    is_half: bool


def encode_boxes(boxes: Boxes) -> bytes:
    """The `MAP_BYTES` that tell the chip where boxes are; rows are swizzled within 128 bytes.

    Raises:
        CudaBuildError: the driver refuses them.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    kind = "FLOAT16" if boxes.is_half else "BFLOAT16"
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(boxes.sizes),
        boxes.address,
        [driver.cuuint64_t(value) for value in boxes.sizes],
        [driver.cuuint64_t(value) for value in boxes.strides],
        [driver.cuuint32_t(value) for value in boxes.box],
        [driver.cuuint32_t(1)] * len(boxes.sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise CudaBuildError(f"cuTensorMapEncodeTiled of {boxes}: {status.name}")
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
