"""How the programs of the Triton form are shaped, by target. Data: change it by what a GPU measures."""

from typing import NamedTuple


class Tile(NamedTuple):
    """The shape of one program."""

    rows: int
    """Rows m: queries times query heads per KV head, a power of two of at least 16. More if g is larger."""
    keys: int
    """Keys n of one turn of the loops, a power of two of at least 16."""
    warps: int
    stages: int
    registers: int | None = None
    """The most that a thread may have, where `rows` are enough; only NVIDIA's assembler can be told. None leaves it to
    the assembler, which may spill a few bytes so that one program more fits at once."""

    def options(self, rows):
        """How Triton is to compile and launch a program of that many rows."""
        limit = {"maxnreg": self.registers} if self.registers and rows == self.rows else {}
        # Many rows where a KV head has many query heads.
        return {"num_warps": max(self.warps, rows // 16), "num_stages": self.stages, **limit}


TILES = {
    "sm_80": {
        ("decode", 2, 64): Tile(16, 64, 4, 3),
        ("decode", 2, 128): Tile(16, 32, 4, 3),
        ("decode", 2, 256): Tile(16, 32, 4, 2),
        ("decode", 2, 512): Tile(16, 16, 4, 2),
        ("decode", 4, 64): Tile(16, 32, 4, 1),
        ("decode", 4, 128): Tile(16, 32, 8, 1),
        ("decode", 4, 256): Tile(16, 16, 4, 1),
        ("decode", 4, 512): Tile(16, 16, 8, 1),
        ("prefill", 2, 64): Tile(128, 64, 4, 2),
        ("prefill", 2, 128): Tile(64, 32, 4, 2),
        ("prefill", 2, 256): Tile(64, 32, 8, 2),
        ("prefill", 2, 512): Tile(32, 16, 8, 1),
        ("prefill", 4, 64): Tile(32, 32, 4, 1),
        ("prefill", 4, 128): Tile(32, 16, 8, 1),
        ("prefill", 4, 256): Tile(16, 16, 8, 1),
        ("prefill", 4, 512): Tile(16, 16, 8, 1),
    },
    "sm_90": {
        ("decode", 2, 64): Tile(16, 64, 4, 3),
        # Four programs fit at once, by registers and by shared memory. 64 keys want more registers than 128.
        ("decode", 2, 128): Tile(16, 32, 4, 4, registers=128),
        ("decode", 2, 256): Tile(16, 32, 4, 3),
        ("decode", 2, 512): Tile(16, 16, 4, 2),
        ("decode", 4, 64): Tile(16, 32, 4, 1),
        ("decode", 4, 128): Tile(16, 32, 8, 1),
        ("decode", 4, 256): Tile(16, 16, 4, 1),
        ("decode", 4, 512): Tile(16, 16, 8, 1),
        ("prefill", 2, 64): Tile(128, 64, 8, 3),
        ("prefill", 2, 128): Tile(128, 64, 8, 2),
        ("prefill", 2, 256): Tile(64, 32, 8, 2),
        ("prefill", 2, 512): Tile(32, 16, 8, 1),
        ("prefill", 4, 64): Tile(32, 32, 4, 1),
        ("prefill", 4, 128): Tile(32, 16, 8, 1),
        ("prefill", 4, 256): Tile(16, 16, 8, 1),
        ("prefill", 4, 512): Tile(16, 16, 8, 1),
    },
    "gfx942": {
        ("decode", 2, 64): Tile(16, 64, 4, 2),
        ("decode", 2, 128): Tile(16, 64, 4, 2),
        ("decode", 2, 256): Tile(16, 32, 4, 2),
        ("decode", 2, 512): Tile(16, 16, 4, 1),
        ("decode", 4, 64): Tile(16, 32, 4, 1),
        ("decode", 4, 128): Tile(16, 32, 8, 1),
        ("decode", 4, 256): Tile(16, 16, 4, 1),
        ("decode", 4, 512): Tile(16, 16, 8, 1),
        ("prefill", 2, 64): Tile(64, 64, 4, 2),
        ("prefill", 2, 128): Tile(64, 32, 4, 2),
        ("prefill", 2, 256): Tile(64, 32, 8, 1),
        ("prefill", 2, 512): Tile(32, 16, 8, 1),
        ("prefill", 4, 64): Tile(32, 32, 4, 1),
        ("prefill", 4, 128): Tile(32, 16, 8, 1),
        ("prefill", 4, 256): Tile(16, 16, 8, 1),
        ("prefill", 4, 512): Tile(16, 16, 8, 1),
    },
}
"""target -> (kind of step, bytes of the dtype, wider of K and V padded to a power of two, 64 at least) -> tile.

A decode has at most as many queries per request as fit into its rows. `sm_80` also serves sm_86 and sm_89, and
keeps within their 101,376 bytes of shared memory; `sm_90` serves what is newer; `gfx942` every AMD target. Chosen
so that they compile without spilling (`kvgroups kernels --all`; fp32 at 512 wide spills a few bytes). No GPU has
measured them yet.
"""
