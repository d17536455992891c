"""Blocks of a cache, gathered into working memory: the history of some requests as dense keys and values."""

import torch

from kvgroups.constants import NULL_BLOCK_ID


class Pages:
    """The blocks of one layer and the table that leads to them."""

    def __init__(self, key_cache, value_cache, block_table, layout, ring_blocks):
        self.caches = key_cache.detach(), value_cache.detach()  # no gradient flows into them
        self.dims = key_cache.shape[3], value_cache.shape[3]
        self.token_dim, self.head_dim = (1, 2) if layout == "NHD" else (2, 1)
        self.block_size, self.num_heads = key_cache.shape[self.token_dim], key_cache.shape[self.head_dim]
        self.table, self.ring_blocks = block_table, ring_blocks
        self.bytes_of_token = sum(self.dims) * key_cache.dtype.itemsize
        """The key and the value of one KV head."""

    def num_blocks(self, num_tokens):
        """How many blocks that many tokens take."""
        return -(-num_tokens // self.block_size)

    def gather(self, scratch, requests, first_blocks, num_blocks, *, heads, seen, num_more=0):
        """`num_blocks` logical blocks of each request, from its first block on, as they lie: NaN and all.

        Args:
            scratch: the working memory that is written, whatever else was in it.
            requests: their indices, ascending.
            first_blocks: the first logical block of each.
            heads: the KV heads, a range.
            seen: the tokens that are returned, a range, counted from the start of the first block.
            num_more: tokens behind the blocks that are left to the caller, for one request only.

        Returns:
            keys (b, h, n, d), values (b, h, n, d_v) and `is_null` (b, n), or None if no block is null; n is the tokens in
            `seen` of the num_blocks * block_size + num_more there are. Those of a head lie side by side in either layout.
            Blocks past the table repeat its last one: no key was ever there, and the caller masks them.
        """
        block_ids = self._block_ids(requests, first_blocks, num_blocks)
        num_tokens = num_blocks * self.block_size + num_more
        gathered = self._select(scratch, block_ids.flatten(), heads, len(requests), num_tokens, seen)
        if block_ids.all():  # NULL_BLOCK_ID is 0
            return *gathered, None
        is_null = (block_ids == NULL_BLOCK_ID).repeat_interleave(self.block_size, dim=1)
        return *gathered, torch.nn.functional.pad(is_null, (0, num_more))[:, seen.start : seen.stop]

    def _block_ids(self, requests, first_blocks, num_blocks):
        """The table's entries (b, num_blocks)."""
        width, device = self.table.shape[1], self.table.device
        first, last = first_blocks[0], first_blocks[0] + num_blocks
        is_rectangle = requests[-1] - requests[0] == len(requests) - 1 and len(set(first_blocks)) == 1
        if is_rectangle and last <= (self.ring_blocks or width):
            return self.table[requests[0] : requests[-1] + 1, first:last]
        logical = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(num_blocks, device=device)
        logical = logical % self.ring_blocks if self.ring_blocks else logical.clamp(max=width - 1)
        return self.table[torch.tensor(requests, device=device)[:, None], logical]

    def _select(self, scratch, block_ids, heads, b, n, seen):
        """The blocks of b requests, n tokens each, laid out as (h, b, n, d): two views (b, h, len(seen), d) of that.

        Always along dim 0 into strided outputs: along another dim of a strided cache torch copies the whole cache first.
        """
        h, views = len(heads), []
        memory = scratch.empty(self.caches[0].dtype, *(h * b * n * d for d in self.dims))
        for cache, d, tokens in zip(self.caches, self.dims, memory, strict=True):
            if h < self.num_heads:
                cache = cache.narrow(self.head_dim, heads.start, h)
            # Requests follow one another without a gap (or there is only one), so all their blocks are one dimension.
            strides = [self.block_size * d, 0, 0, 1]
            strides[self.token_dim], strides[self.head_dim] = d, b * n * d
            blocks = tokens.as_strided((block_ids.shape[0], *cache.shape[1:]), strides)
            torch.index_select(cache, 0, block_ids, out=blocks)
            first = tokens.storage_offset() + seen.start * d
            views.append(tokens.as_strided((b, h, len(seen), d), (n * d, b * n * d, d, 1), first))
        return views
