"""Taking tokens back: after `crop` every layer is as it was before them, or the call raises and changes nothing."""

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits, poison_free_blocks, without_dt_floor

TOLERANCE = 1e-4


def row(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(model, cache, *rows, **inputs):
    poison_free_blocks(model)
    with torch.no_grad():
        return model(torch.tensor(rows), cache=cache, **inputs).logits


def assert_close(got, want):
    assert (got - want).abs().max().item() < TOLERANCE * want.abs().max().item()


def can_rewind(model) -> bool:
    return not vars(model)["_kvgroups"].context.splits_rows


@pytest.mark.parametrize("length", [14, 15, 16])
@pytest.mark.parametrize("removed", [1, 2, 3, 4])
def test_four_drafted_tokens_of_which_some_are_taken_back(family, length, removed):
    """Prefill, feed 4, take 1 to 4 back, then 4 other tokens one at a time: as if the wrong ones had never been."""
    model = kvgroups.patch(without_dt_floor(tiny(family)))
    if not can_rewind(model):
        pytest.skip("a state layer of this family is not fused")
    cache = kvgroups.GroupedCache(model, max_rewind=4)
    prompt, draft, others = row(length), row(4, seed=1), row(4, seed=2)
    feed(model, cache, prompt)
    feed(model, cache, draft)
    cache.crop(-removed)
    assert cache.get_seq_length() == length + 4 - removed
    tokens = prompt + draft[: 4 - removed]
    for token in others:
        tokens = [*tokens, token]
        assert_close(feed(model, cache, [token])[0], oracle_logits(model, tokens)[-1:])
    assert cache.num_tokens == [len(tokens)]
    vars(model)["_kvgroups"].context.manager.check()


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "jamba", "lfm2"])
def test_drafts_one_after_the_other(family):
    """Rounds of 5 drafted tokens, of which 0 to 5 are accepted; each round's logits are the oracle's."""
    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model, max_rewind=5)
    tokens = row(11)
    feed(model, cache, tokens)
    for seed, accepted in enumerate((3, 0, 5, 1, 4, 2)):
        draft = row(5, seed=seed)
        logits = feed(model, cache, draft)
        assert logits.shape[1] == 5
        assert_close(logits[0], oracle_logits(model, tokens + draft)[-5:])
        cache.crop(accepted - 5)
        tokens = tokens + draft[:accepted]
        assert cache.token_ids.tolist() == [tokens]


@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_rows_go_back_together(family):
    """A ragged batch: the last three columns go, one of which is padding in the first row."""
    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model, max_rewind=4)
    first, second = row(7), row(12, seed=1)
    mask = [[0] * 5 + [1] * 7, [1] * 12]
    feed(model, cache, [5] * 5 + first, second, attention_mask=torch.tensor(mask))
    mask = [[*mask[0], 0, 1, 1], [*mask[1], 1, 1, 1]]
    feed(model, cache, [5, 11, 12], [13, 14, 15], attention_mask=torch.tensor(mask))
    cache.crop(-2)
    assert cache.num_tokens == [7, 13]
    mask = [[*each[:-2], 1] for each in mask]
    logits = feed(model, cache, [21], [22], attention_mask=torch.tensor(mask))
    assert_close(logits[0], oracle_logits(model, [*first, 21])[-1:])
    assert_close(logits[1], oracle_logits(model, [*second, 13, 22])[-1:])


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_a_fork_is_not_disturbed(family):
    """The copy shares full blocks with the original; going back into one of them copies it first."""
    import copy

    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model, max_rewind=6)
    tokens = row(16)
    feed(model, cache, tokens[:12])
    feed(model, cache, tokens[12:])
    twin = copy.deepcopy(cache)
    cache.crop(-3)
    feed(model, cache, [90, 91, 92])
    assert_close(feed(model, twin, [50])[0], oracle_logits(model, [*tokens, 50])[-1:])
    assert_close(feed(model, cache, [50])[0], oracle_logits(model, [*tokens[:13], 90, 91, 92, 50])[-1:])
    vars(model)["_kvgroups"].context.manager.check()


class TestRefusals:
    def assert_refuses(self, model, cache, removed, *words):
        manager = vars(model)["_kvgroups"].context.manager
        before = manager.usage(), cache.num_tokens, cache.get_seq_length()
        with pytest.raises(UnsupportedCallError) as caught:
            cache.crop(removed)
        assert all(word in str(caught.value) for word in words)
        assert (manager.usage(), cache.num_tokens, cache.get_seq_length()) == before

    def test_more_than_a_window_kept(self):
        model = kvgroups.patch(tiny("gemma3_text"))
        cache = kvgroups.GroupedCache(model)
        feed(model, cache, row(30))
        self.assert_refuses(model, cache, -9, "group 'window'", "max_rewind")
        assert_close(feed(model, cache, [7])[0], oracle_logits(model, [*row(30), 7])[-1:])

    def test_a_state_without_a_checkpoint(self):
        model = kvgroups.patch(tiny("bamba"))
        cache = kvgroups.GroupedCache(model)
        feed(model, cache, row(9))
        self.assert_refuses(model, cache, -1, "checkpoint", "max_rewind")

    def test_further_than_the_checkpoint(self):
        model = kvgroups.patch(tiny("bamba"))
        cache = kvgroups.GroupedCache(model, max_rewind=3)
        feed(model, cache, row(9))
        self.assert_refuses(model, cache, -4, "after 6 tokens")
        cache.crop(-3)

    def test_more_than_there_is(self):
        model = kvgroups.patch(tiny("llama"))
        cache = kvgroups.GroupedCache(model, max_rewind=20)
        feed(model, cache, row(9))
        self.assert_refuses(model, cache, -10, "the cache holds 9")
        self.assert_refuses(model, cache, 3, "minus the number")

    def test_layers_that_are_not_fused(self):
        model = kvgroups.patch(tiny("qwen3_next"))
        with pytest.raises(UnsupportedCallError, match="only the generic adapter serves"):
            kvgroups.GroupedCache(model, max_rewind=3)


class TestAssisted:
    """Drafts verified by transformers' own loop: the tokens are those of greedy search."""

    PROMPT = torch.tensor([row(6) * 3])

    def greedy(self, model, **options):
        return model.generate(
            self.PROMPT, attention_mask=torch.ones_like(self.PROMPT), max_new_tokens=24, do_sample=False, **options
        )

    @pytest.mark.parametrize("num_tokens", [1, 4, 10])
    def test_prompt_lookup_is_greedy(self, family, num_tokens):
        model = tiny(family)
        want = self.greedy(model)
        kvgroups.patch(model)
        if not can_rewind(model):
            with pytest.raises(ValueError, match="not supported with stateful models|generic adapter"):
                self.greedy(model, prompt_lookup_num_tokens=num_tokens)
            return
        assert torch.equal(self.greedy(model, prompt_lookup_num_tokens=num_tokens), want)
        assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0

    @pytest.mark.parametrize("patches_assistant", [False, True])
    @pytest.mark.parametrize("family", ["gemma3_text", "bamba", "jamba"])
    def test_an_assistant_model(self, family, patches_assistant):
        """A draft model that is often right (the same weights but for a little noise) and one that is not."""
        model = tiny(family)
        want = self.greedy(model)
        kvgroups.patch(model)
        for seed in (0, 1):
            assistant = tiny("gemma3_text" if family == "gemma3_text" else "llama", seed=seed)
            if patches_assistant:
                kvgroups.patch(assistant)
            assert torch.equal(self.greedy(model, assistant_model=assistant), want)


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "qwen3_next"])
def test_a_config_that_allows_rewinding(family):
    """`max_rewind` in the config holds for every cache that can go back, and costs the others nothing."""
    model = tiny(family)
    prompt = torch.tensor([row(12)])
    want = model.generate(prompt, max_new_tokens=8, do_sample=False)
    kvgroups.patch(model, kvgroups.infer_config(model, max_rewind=3))
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), want)
    cache = kvgroups.GroupedCache(model)
    assert cache.is_croppable == can_rewind(model)
    feed(model, cache, row(12))
    if cache.is_croppable:
        cache.crop(-3)
        assert_close(feed(model, cache, [50])[0], oracle_logits(model, [*row(12)[:9], 50])[-1:])
