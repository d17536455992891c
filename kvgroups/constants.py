"""The two sentinels and the alignments that every part agrees on.

The sentinels are never mixed: `PAD_SLOT_ID` never enters a block table, and `NULL_BLOCK_ID` never
stands for "skip this token" in a slot mapping. Neither is ever used as a Python index.
"""

NULL_BLOCK_ID = 0
"""The block that holds nothing: table entries behind a window, unused tails and padded rows name it."""

PAD_SLOT_ID = -1
"""The slot of a token that is not written: padding, or a token that no later query can see."""

BLOCK_ALIGNMENT_BYTES = 256
"""Every block starts on a multiple of this many bytes, whatever its group and dtype."""

TABLE_ALIGNMENT_TOKENS = 128
"""A block table's width times its block size is a multiple of this many tokens."""
