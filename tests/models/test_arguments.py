"""Arguments that make no sense are refused by name, and nothing is taken, fed or changed."""

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvgroups
from kvgroups.errors import KVGroupsError, ShapeError, UnsupportedCallError
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits

IDS = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return kvgroups.patch(tiny("bamba"))


@pytest.fixture
def cache(model):
    cache = kvgroups.GroupedCache(model, max_rewind=4)
    with torch.no_grad():
        model(IDS, cache=cache)
    return cache


def assert_unchanged(model, cache) -> None:
    assert cache.num_tokens == [6, 6]
    with torch.no_grad():
        logits = model(IDS[:, :1], cache=cache).logits
    for row, got in zip(IDS, logits, strict=True):
        want = oracle_logits(model, [*row.tolist(), int(row[0])])[-1:]
        assert (got - want).abs().max().item() < 1e-4 * want.abs().max().item()


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ({"input_ids": IDS[0]}, ShapeError, r"input_ids: expected \(batch, tokens\) int64, got \(6,\)"),
        ({"input_ids": IDS.float()}, ShapeError, "input_ids: .* float32"),
        ({"input_ids": IDS.tolist()}, UnsupportedCallError, "input_ids: expected a tensor, got list"),
        ({"input_ids": None}, ShapeError, "input_ids: .* got neither"),
        ({"inputs_embeds": torch.zeros(2, 6, 32)}, UnsupportedCallError, "inputs_embeds: got input_ids too"),
        ({"attention_mask": torch.ones(2, 7)}, ShapeError, r"expected \(2, 12\) or \(2, 6\), got \(2, 7\)"),
        ({"attention_mask": torch.ones(3, 6)}, ShapeError, r"got \(3, 6\)"),
        ({"attention_mask": torch.ones(2, 0)}, ShapeError, r"got \(2, 0\)"),
        ({"attention_mask": torch.ones(6)}, UnsupportedCallError, r"2-D padding mask .* got \(6,\)"),
        ({"position_ids": torch.arange(6)}, ShapeError, r"position_ids: expected \(2, 6\) int64, .* got \(6,\)"),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, ShapeError, r"position_ids: .* got \(2, 4\)"),
        ({"position_ids": torch.zeros(3, 6, dtype=torch.long)}, ShapeError, r"position_ids: .* got \(3, 6\)"),
        ({"position_ids": torch.zeros(2, 6)}, ShapeError, "position_ids: .* float32"),
        ({"logits_to_keep": torch.zeros(2, 2, dtype=torch.long)}, ShapeError, "logits_to_keep"),
    ],
)
def test_tensors(model, cache, inputs, error, words):
    with pytest.raises(error, match=words), torch.no_grad():
        model(**{"input_ids": IDS, "cache": cache, **inputs})
    assert_unchanged(model, cache)


def test_a_first_mask_has_one_right_shape(model):
    with pytest.raises(ShapeError, match=r"expected \(2, 6\), got \(2, 5\)"), torch.no_grad():
        model(IDS, attention_mask=torch.ones(2, 5), cache=kvgroups.GroupedCache(model))


def test_what_python_refuses(model, cache):
    """As the unpatched model's forward would."""
    names = [n for n, p in vars(model)["_kvgroups"].context.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    too_many = [{"input_ids": IDS, "cache": cache}.get(name) for name in names] + [None]
    for args, kwargs, words in [
        (too_many, {}, "too many positional"),
        ((IDS,), {"input_ids": IDS, "cache": cache}, "multiple values for argument 'input_ids'"),
    ]:
        with pytest.raises(TypeError, match=words), torch.no_grad():
            model(*args, **kwargs)
    assert_unchanged(model, cache)


def test_a_keyword_that_the_forward_does_not_take():
    """transformers' own forwards take any; a model's own may not."""

    class Strict(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None, return_dict=None):
            return super().forward(
                input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, use_cache=use_cache
            )

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = kvgroups.patch(Strict(LlamaConfig(vocab_size=97, **sizes)).eval())
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(IDS, cache=cache)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"), torch.no_grad():
        model(IDS, cache=cache, nonsense=1)
    assert cache.num_tokens == [6, 6]
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    assert cache.num_tokens == [12, 12]


def test_two_caches(model, cache):
    with pytest.raises(UnsupportedCallError, match="cache and past_key_values: got two caches"), torch.no_grad():
        model(IDS, cache=cache, past_key_values=kvgroups.GroupedCache(model))
    with torch.no_grad():
        assert model(IDS, cache=None, past_key_values=copy.deepcopy(cache)).logits.shape[:2] == (2, 6)
    assert_unchanged(model, cache)


@pytest.mark.parametrize("value", [-3, "3", True, 1.5])
def test_max_rewind(model, value):
    with pytest.raises(UnsupportedCallError, match="max_rewind: expected"):
        kvgroups.GroupedCache(model, max_rewind=value)


@pytest.mark.parametrize("value", ["3", "-3", 1.5, -1.5, True, None])
def test_crop(model, cache, value):
    with pytest.raises(UnsupportedCallError, match="crop: expected an int"):
        cache.crop(value)
    assert_unchanged(model, cache)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.batch_repeat_interleave(0),
        lambda cache: cache.batch_repeat_interleave(-1),
        lambda cache: cache.batch_repeat_interleave(1.5),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 2])),
        lambda cache: cache.batch_select_indices(torch.tensor([-1])),
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda cache: cache.batch_select_indices(torch.tensor([True])),
        lambda cache: cache.batch_select_indices(torch.tensor([[0]])),
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0])),
        lambda cache: cache.reorder_cache([0, 2]),
    ],
)
def test_rows(model, cache, call):
    with pytest.raises(KVGroupsError):
        call(cache)
    assert_unchanged(model, cache)


def test_lists_of_rows(model, cache):
    """Lists do as well as tensors."""
    cache.reorder_cache([1, 1])
    cache.batch_select_indices([True, False])
    cache.batch_select_indices([0, 0])
    cache.batch_repeat_interleave(2)
    assert cache.num_tokens == [6] * 4
    with torch.no_grad():
        logits = model(IDS[:1, :1].expand(4, 1), cache=cache).logits
    want = oracle_logits(model, [*IDS[1].tolist(), int(IDS[0, 0])])[-1:]
    assert (logits - want).abs().max().item() < 1e-4 * want.abs().max().item()


def test_a_shallow_copy_is_a_fork(model, cache):
    twin = copy.copy(cache)
    with torch.no_grad():
        model(IDS, cache=cache)
    del cache
    vars(model)["_kvgroups"].context.manager.check()
    assert_unchanged(model, twin)


def test_a_cache_is_not_pickled(model, cache, tmp_path):
    for save in (pickle.dumps, lambda value: torch.save(value, tmp_path / "cache.pt")):
        with pytest.raises(UnsupportedCallError, match="cannot be pickled"):
            save(cache)
    assert_unchanged(model, cache)


class TestEmbeddings:
    """`inputs_embeds` in a later turn."""

    def embed(self, model, ids):
        return model.get_input_embeddings()(ids).detach()

    @pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
    def test_a_second_turn_by_generate(self, family):
        model = tiny(family)
        embeds = self.embed(model, IDS)
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        first = kvgroups.patch(model).generate(inputs_embeds=embeds, **options)
        more = torch.cat((IDS, first.sequences, IDS.flip(1)), dim=1)
        want = kvgroups.unpatch(tiny(family)).generate(more, attention_mask=torch.ones_like(more), **options)
        second = model.generate(inputs_embeds=self.embed(model, more), cache=first.cache, **options)
        assert torch.equal(second.sequences, want.sequences[:, more.shape[1] :])

    @pytest.mark.parametrize("family", ["llama", "lfm2"])
    def test_a_second_turn_by_forward(self, family):
        model = kvgroups.patch(tiny(family))
        cache = kvgroups.GroupedCache(model)
        with torch.no_grad():
            model(IDS, cache=cache)
            logits = model(inputs_embeds=self.embed(model, IDS), cache=cache).logits
        assert cache.token_ids is None
        want = oracle_logits(model, torch.cat((IDS[1], IDS[1])))[-6:]
        assert (logits[1] - want).abs().max().item() < 1e-4 * want.abs().max().item()

    def test_crops_that_would_feed_them_again(self):
        """Back to the checkpoint itself they may go; between it and the end they cannot be fed again."""
        model = kvgroups.patch(tiny("lfm2"))
        cache = kvgroups.GroupedCache(model, max_rewind=3)
        with torch.no_grad():
            model(IDS, cache=cache)
            model(inputs_embeds=self.embed(model, IDS[:, :3]), cache=cache)
            with pytest.raises(UnsupportedCallError, match="crop: .*embeddings after it cannot be fed again"):
                cache.crop(-1)
            cache.crop(-3)
            logits = model(IDS[:, :1], cache=cache).logits
        want = oracle_logits(model, torch.cat((IDS[0], IDS[0, :1])))[-1:]
        assert (logits[0] - want).abs().max().item() < 1e-4 * want.abs().max().item()

    def test_embeddings_after_a_crop(self):
        model = kvgroups.patch(tiny("lfm2"))
        cache = kvgroups.GroupedCache(model, max_rewind=3)
        with torch.no_grad():
            model(IDS, cache=cache)
            cache.crop(-1)
            with pytest.raises(UnsupportedCallError, match="inputs_embeds: tokens must be fed again after a crop"):
                model(inputs_embeds=self.embed(model, IDS), cache=cache)
            assert model(IDS, cache=cache).logits.shape[1] == 6
