"""What live requests cost under each scheme, held against the manager, against transformers and against hand counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from kvgroups import infer_config
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.schemes import Bound, PaddedEager, Slabs, UniformPage, blocks_held, most_blocks_held
from kvgroups.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)
from kvgroups.specs.presets import preset, preset_names
from kvgroups.testing import tiny

SHAPE = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
STATES = MambaSpec(states=[StateTensor(name="recurrent", shape=(16, 8), dtype="float32")])


def window(size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=size, **SHAPE)


def group(spec, block_size: int, **options) -> GroupConfig:
    return GroupConfig(name=spec.kind, layers=[0], spec=spec, block_size=block_size, **options)


def config_of(*groups: GroupConfig, **options) -> KVGroupsConfig:
    return KVGroupsConfig(groups=groups, **{"max_model_len": 512, "max_num_reqs": 4, **options})


ALL_KINDS = config_of(
    group(FullAttentionSpec(**SHAPE), 4),
    GroupConfig(name="window", layers=[1, 2], spec=window(10), block_size=4),
    GroupConfig(name="ring", layers=[3], spec=window(6), block_size=2, slot_mapping="ring"),
    GroupConfig(name="chunk", layers=[4], spec=ChunkedAttentionSpec(chunk_size=6, **SHAPE), block_size=4),
    GroupConfig(name="state", layers=[5, 6], spec=STATES),
)


@pytest.mark.parametrize(
    ("spec", "num_tokens", "blocks"),
    [
        (FullAttentionSpec(**SHAPE), 1, 1),
        (FullAttentionSpec(**SHAPE), 4, 1),
        (FullAttentionSpec(**SHAPE), 5, 2),
        (window(8), 8, 2),
        (window(8), 9, 3),  # position 8 sees 1 to 8: blocks 0, 1, 2
        (window(8), 12, 2),  # position 11 sees 4 to 11: block 0 is let go of
        (window(8), 13, 3),
        (window(1), 9, 1),  # a window of one token
        (ChunkedAttentionSpec(chunk_size=8, **SHAPE), 8, 2),
        (ChunkedAttentionSpec(chunk_size=8, **SHAPE), 9, 1),  # a new chunk starts empty
        (
            ChunkedAttentionSpec(chunk_size=6, **SHAPE),
            7,
            1,
        ),  # position 6 starts a chunk in the middle of block 1
        (STATES, 1, 1),
        (STATES, 500, 1),
    ],
)
def test_blocks_of_four_that_a_request_owns_at_its_nth_token(spec, num_tokens: int, blocks: int):
    held = group(spec, 1 if spec.kind == "mamba" else 4)
    assert blocks_held(config_of(held), held, num_tokens) == blocks


@pytest.mark.parametrize("chunk", [1, 3, 8, 25])
def test_the_manager_owns_what_the_arithmetic_says_in_chunks(chunk: int):
    """A window holds what the chunk's first token sees beside what the next query will."""
    manager = Manager(ALL_KINDS, "meta")
    tables = MultiGroupBlockTable.from_config(ALL_KINDS, max_num_reqs=4, device="cpu")
    request = manager.open(tables, 0)
    for computed in range(0, 100, chunk):
        manager.allocate([request], [chunk])
        used = {usage.name: usage.num_used for usage in manager.usage().groups}
        total = computed + chunk
        assert used == {each.name: blocks_held(ALL_KINDS, each, total, computed) for each in ALL_KINDS.groups}
        manager.advance([request], [chunk])


@given(
    kind=st.sampled_from(["full", "window", "chunk"]),
    span=st.integers(1, 23),
    block_size=st.integers(1, 7),
    max_rewind=st.integers(0, 4),
    num_tokens=st.integers(1, 120),
)
def test_the_most_on_the_way_is_the_most_at_any_token(kind, span, block_size, max_rewind, num_tokens):
    spec = {
        "full": FullAttentionSpec(**SHAPE),
        "window": window(span),
        "chunk": ChunkedAttentionSpec(chunk_size=span, **SHAPE),
    }[kind]
    held = group(spec, block_size)
    config = config_of(held, max_rewind=max_rewind)
    assert most_blocks_held(config, held, num_tokens) == max(
        blocks_held(config, held, count) for count in range(1, num_tokens + 1)
    )


@pytest.mark.parametrize(
    ("name", "block_tokens", "layers_per_table", "tables"),
    [
        ("bamba-9b", {"full": 1056}, 3, {"state": 10, "full": 1}),
        ("falcon-h1-7b", {"full": 3104}, 44, {"full": 1, "state": 1}),
        ("zamba2-7b", {"full": 80}, 13, {"state": 7, "full": 1}),
        ("qwen3-next-80b", {"full": 1056}, 12, {"state": 3, "full": 1}),
        ("jamba-v0.1", {"full": 144}, 4, {"state": 7, "full": 1}),
        ("gemma-3-27b", {"window": 16, "full": 16}, 10, {"window": 6, "full": 1}),
        ("llama-3.1-8b", {"full": 16}, 32, {"full": 1}),
    ],
)
def test_the_uniform_page_of_public_models(name, block_tokens, layers_per_table, tables):
    """The state of one layer decides: 4,261,888 bytes in Bamba are 1,041 tokens of 4,096 bytes, in units of 16."""
    page = UniformPage.for_config(preset(name).config)

    assert {each.name: each.block_size for each in page.groups.values() if not each.is_state} == block_tokens
    assert page.layers_per_table == layers_per_table
    assert page.tables == tables
    states = [each.spec.bytes_per_request for each in page.groups.values() if each.is_state]
    assert all(nbytes <= page.page_bytes for nbytes in states)


def test_layers_of_unlike_width_share_one_page():
    """Layers of 64 and of 192 bytes a token: a page of 16 tokens of the wide holds 48 of the narrow."""
    narrow = GroupConfig(name="narrow", layers=[0], spec=FullAttentionSpec(**SHAPE))
    wide = GroupConfig(name="wide", layers=[1], spec=FullAttentionSpec(**{**SHAPE, "num_kv_heads": 3}))
    page = UniformPage.for_config(config_of(narrow, wide))

    assert page.page_bytes == 16 * 192
    assert {name: each.block_size for name, each in page.groups.items()} == {"narrow": 48, "wide": 16}


def test_a_model_of_states_alone_has_pages_of_one_state():
    page = UniformPage.for_config(config_of(group(STATES, 1)))
    assert page.bytes_for([1, 500]) == 3 * STATES.bytes_per_request  # two requests and the null block


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "llama4_text", "jamba"])
def test_the_padded_eager_cache_is_what_transformers_keeps(family: str):
    model = tiny(family)
    eager = PaddedEager(infer_config(model))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for num_tokens in (5, 6, 30, 31):
        ids = torch.ones((2, num_tokens - cache.get_seq_length()), dtype=torch.long)
        with torch.no_grad():
            model(ids, cache=cache, use_cache=True)
        assert eager.bytes_for([num_tokens, 3]) == cache_bytes(cache)


def cache_bytes(cache: DynamicCache) -> int:
    kept = []
    for layer in cache.layers:
        kept += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("conv_states", "recurrent_states"):
            kept += list(getattr(layer, states, {}).values())
    return sum(tensor.nbytes for tensor in kept if tensor is not None)


@given(
    name=st.sampled_from(preset_names()),
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=6),
)
def test_no_scheme_is_below_the_bound(name: str, lengths: list[int]):
    config = preset(name).config
    bound = Bound(config).bytes_for(lengths)
    assert bound <= Slabs.for_config(config).bytes_for(lengths)
    assert bound <= UniformPage.for_config(config).bytes_for(lengths)
    # Between steps eager keeps W - 1 tokens of a window, and the bound counts the query's own.
    own = sum(each.bytes_per_token for each in config.groups if each.spec.kind != "full_attention")
    assert bound <= PaddedEager(config).bytes_for(lengths) + len(lengths) * own


def test_what_padding_costs_one_long_row_among_short_ones():
    """Llama 3.1 8B: one request of 8,192 tokens and seven of 512 are padded to 65,536 tokens, of which 11,776 live."""
    config = preset("llama-3.1-8b").config
    lengths = [8192] + 7 * [512]

    assert PaddedEager(config).bytes_for(lengths) == 8 * 8192 * 131072
    assert Bound(config).bytes_for(lengths) == 11776 * 131072
    assert Slabs.for_config(config).bytes_for(lengths) == (11776 // 16 + 1) * 2**21  # and the null slab
