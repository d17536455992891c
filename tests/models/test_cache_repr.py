"""What a cache says of itself: its rows, tokens and bytes, and what to write instead of transformers' older `crop`."""

import copy

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :8] = 0


@pytest.fixture(scope="module")
def model():
    return kvgroups.patch(tiny("gemma3_text"))


def held(model):
    return vars(model)["_kvgroups"].context.manager.usage().held_bytes


def test_rows_tokens_and_bytes(model):
    cache = kvgroups.GroupedCache(model)
    assert repr(cache) == str(cache) == "GroupedCache(empty, 0 B in window, full)"
    model(IDS, attention_mask=MASK, cache=cache)
    window, full = (cache.context.config.group(name).block_bytes for name in ("window", "full"))
    # 20 and 12 tokens: two blocks of 16 and one. The next query sees 7 tokens of a window of 8: two blocks of 4 each.
    assert cache.held_bytes == {"window": 4 * window, "full": 3 * full}
    assert sum(cache.held_bytes.values()) == held(model)
    kib = held(model) / 1024
    assert repr(cache) == f"GroupedCache(2 rows, 12 to 20 tokens, {kib:.4g} KiB in window, full)"
    cache.batch_select_indices([0])
    assert repr(cache).startswith("GroupedCache(1 row, 20 tokens, ")
    cache.close()
    assert repr(cache) == "GroupedCache(empty, 0 B in window, full)"


def test_what_rows_and_caches_share(model):
    """Rows that are one count once; a fork holds what it shares as well, so two caches may add up to more than is held."""
    cache = kvgroups.GroupedCache(model)
    model(IDS[:1].repeat(3, 1), cache=cache)
    assert sum(cache.held_bytes.values()) == held(model)
    fork = copy.deepcopy(cache)
    assert fork.held_bytes == cache.held_bytes
    assert held(model) < 2 * sum(cache.held_bytes.values())
    assert repr(fork).startswith("GroupedCache(3 rows, 20 tokens, ")


def test_a_cache_of_a_model_that_is_patched_no_more():
    model = kvgroups.patch(tiny("llama"))
    cache = kvgroups.GroupedCache(model)
    model(IDS[:1, :1], cache=cache)
    kvgroups.unpatch(model)
    assert repr(cache).startswith("GroupedCache(1 row, 1 token, ")


def test_a_cache_that_no_longer_matches_its_tokens(model):
    cache = kvgroups.GroupedCache(model)
    cache.is_broken = True
    assert repr(cache) == "GroupedCache(empty, 0 B in window, full, broken)"


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (5, r"got 5; older versions of transformers took the length to keep: to keep 5 of the 20 .* write crop\(-15\)"),
        (20, "got 20; .*the cache holds 20 tokens, so there is nothing to remove"),
    ],
)
def test_crop_to_a_length_as_it_was_once(model, kept, message):
    cache = kvgroups.GroupedCache(model, max_rewind=16)
    model(IDS[:1], cache=cache)
    with pytest.raises(UnsupportedCallError, match=message):
        cache.crop(kept)
    cache.crop(-15)
    assert cache.get_seq_length() == 5
