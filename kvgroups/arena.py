"""The bytes of all KV-cache groups: one tensor, cut into equal slabs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgroups.errors import KVGroupsError


class Arena:
    """One byte tensor (num_slabs * slab_bytes,). Slab 0 is the null slab: real bytes, always zero.

    Args:
        slab_bytes: bytes of one slab.
        device: where the bytes live; "meta" for an arena that only keeps accounts.
        num_slabs: slabs at first, the null slab included.
        byte: what new slabs are filled with; None leaves them uninitialised. 0xFF is NaN in every float dtype.
    """

    def __init__(
        self, slab_bytes: int, device: torch.device | str, num_slabs: int = 1, byte: int | None = None
    ) -> None:
        self.slab_bytes = slab_bytes
        self._byte = byte
        self.device = torch.device(device)
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        """(num_slabs * slab_bytes,), uint8. Another tensor after `grow`."""
        self.grow(num_slabs)
        self.bytes[:slab_bytes] = 0

    @property
    def num_slabs(self) -> int:
        """Slabs that there are, the null slab included."""
        return self.nbytes // self.slab_bytes

    @property
    def nbytes(self) -> int:
        """Bytes taken from the device."""
        return self.bytes.numel()

    def grow(self, num_slabs: int) -> None:
        """Have `num_slabs` slabs in all; what there was is kept.

        Views that were taken before stay on the old bytes.
        """
        old = self.bytes
        # Bytes that are made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.bytes = torch.empty(num_slabs * self.slab_bytes, dtype=torch.uint8, device=self.device)
        self.bytes[: old.numel()] = old
        if self._byte is not None:
            self.bytes[old.numel() :] = self._byte

    def fill(self, slabs: Sequence[int], byte: int) -> None:
        """Overwrite whole slabs; 0xFF reads as NaN in every float dtype. For tests."""
        self.bytes.view(-1, self.slab_bytes)[list(slabs)] = byte

    def check_null(self) -> None:
        """Raise KVGroupsError if a byte of the null slab is not zero. Reads the whole slab: for debugging."""
        written = self.bytes[: self.slab_bytes].nonzero()
        if len(written):
            raise KVGroupsError(
                f"arena: byte {int(written[0])} of the null slab is {int(self.bytes[written[0]])}, expected 0; "
                "something has written to the null block"
            )
