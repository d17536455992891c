"""What the three attention specs share: the shape of one token's K and V."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvgroups.specs.base import BlockTensor, Dtype, SpecModel

Layout = Literal["NHD", "HND"]


class AttentionSpec(SpecModel):
    """One attention layer's K and V, and which earlier positions a query still sees."""

    num_kv_heads: int = Field(ge=1)
    """Heads of K and V; query heads are a multiple and are no business of the cache."""
    head_dim: int = Field(ge=1)
    """Elements of one head of K."""
    head_dim_v: int | None = Field(default=None, ge=1)
    """Elements of one head of V where that differs from K; None means `head_dim`."""
    dtype: Dtype
    """Element type of K and V, by name."""

    @property
    def value_dim(self) -> int:
        """Elements of one head of V."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return sum(tensor.nbytes for tensor in self.block_tensors(block_size=1, layout="NHD"))

    def first_visible(self, position: int) -> int:
        """The lowest position that a query at `position` sees; of each, given a numpy array."""
        raise NotImplementedError

    def block_tensors(self, block_size: int, layout: Layout) -> tuple[BlockTensor, ...]:
        """K and V of one layer in one block, in the order in which the block holds them."""

        def tensor(name: str, dim: int) -> BlockTensor:
            tokens_and_heads = (block_size, self.num_kv_heads)
            outer = tokens_and_heads if layout == "NHD" else tokens_and_heads[::-1]
            return BlockTensor(name=name, shape=(*outer, dim), dtype=self.dtype)

        return tensor("key", self.head_dim), tensor("value", self.value_dim)
