"""Finds copies to shared memory that the assembler encoded wrongly, in a cubin for sm_90 or later.

Some versions of ptxas give `cp.async` with a cache policy the registers UR0 and UR1 for the shared
address and the policy, which nothing wrote: the chip then stops with an illegal instruction. Reads
the ELF file by itself: no disassembler is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

# The instruction that copies asynchronously, without and with an address in a uniform register.
_PLAIN, _UNIFORM = 0xFAE, 0xDAE
_OPCODE_BITS, _REGISTER_BITS = 0xFFF, 0x3F
_INSTRUCTION_BYTES = 16


def _texts(cubin: bytes) -> Iterator[bytes]:
    """The machine code of every kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    texts = sections[names][4]
    for name, _, _, _, offset, length in sections:
        if cubin[texts + name :].startswith(b".text."):
            yield cubin[offset : offset + length]


def copies(cubin: bytes) -> tuple[int, int]:
    """How many asynchronous copies there are, and how many of them are wrong."""
    total = wrong = 0
    for text in _texts(cubin):
        for place in range(0, len(text) - _INSTRUCTION_BYTES + 1, _INSTRUCTION_BYTES):
            low, high = struct.unpack_from("<QQ", text, place)
            kind = low & _OPCODE_BITS
            total += kind in (_PLAIN, _UNIFORM)
            wrong += kind == _UNIFORM and high & _REGISTER_BITS == 0
    return total, wrong
