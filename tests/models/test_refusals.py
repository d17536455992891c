"""What is not served is refused in one sentence that names the thing and the setting, before a block is taken."""

import threading

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvgroups
from kvgroups.errors import (
    KVGroupsError,
    OutOfBlocksError,
    SpecError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from kvgroups.slab_plan import SlabPlan
from kvgroups.specs import MambaSpec
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def gemma():
    return kvgroups.patch(tiny("gemma3_text"))


def assert_refuses(model, call, error: type[KVGroupsError], *words: str) -> None:
    """The call raises one sentence with these words, takes no block, and the model still works afterwards."""
    manager = vars(model)["_kvgroups"].context.manager
    held = manager.usage().held_bytes
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert manager.usage().held_bytes == held
    manager.check()
    model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)


def test_families_that_no_adapter_serves(unserved):
    name, words = unserved
    model = tiny(name)
    before = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match=words):
        kvgroups.patch(model)
    assert vars(model) == before
    assert all(module.forward.__func__ is type(module).forward for module in model.modules())


def test_a_layer_type_nobody_knows():
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "foo_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="layer 1 has layer type 'foo_attention'"):
        kvgroups.patch(model)


def test_attention_of_ones_own_making():
    """A layer that forms its attention itself, past the AttentionInterface, is named."""

    class OwnAttention(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            attention = self.model.layers[1].self_attn
            plain = type(attention).forward

            def forward(hidden_states, cache=None, **kwargs):
                if cache is not None:
                    states = hidden_states.view(*hidden_states.shape[:2], -1, attention.head_dim).transpose(1, 2)
                    cache.update(states, states, 1)
                return plain(attention, hidden_states, cache=None, **kwargs)

            attention.forward = forward

    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = OwnAttention(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*model.layers.1.self_attn LlamaAttention"):
        kvgroups.patch(model)


def test_what_is_no_model():
    with pytest.raises(UnsupportedModelError, match="Linear is no transformers PreTrainedModel"):
        kvgroups.patch(torch.nn.Linear(2, 2))


def test_a_cache_of_an_unpatched_model():
    with pytest.raises(UnsupportedCallError, match="not patched"):
        kvgroups.GroupedCache(tiny("llama"))


def bad_config(change):
    model = tiny("falcon_h1")
    return model, change(kvgroups.infer_config(model).model_dump())


def drop_a_layer(config):
    config["groups"][0]["layers"] = config["groups"][0]["layers"][:-1]
    return config


def wrong_head_dim(config):
    config["groups"][0]["spec"]["head_dim"] = 64
    return config


def unknown_layer(config):
    config["groups"][0]["layers"] = [*config["groups"][0]["layers"], 40]
    return config


def wrong_state_shape(config):
    config["groups"][1]["spec"]["states"][0]["shape"] = [3, 3]
    return config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_a_layer, "layer 3 .* stores full_attention and is in no such group"),
        (wrong_head_dim, "layer 0 .*'head_dim': 8.*'head_dim': 64"),
        (unknown_layer, "layer 40; the model has cache layers 0 to 3"),
        (wrong_state_shape, "group 'state': layer 0 .*conv"),
    ],
)
def test_a_config_of_another_model(change, words):
    model, data = bad_config(change)
    with pytest.raises(SpecError, match=words):
        kvgroups.patch(model, kvgroups.KVGroupsConfig.model_validate(data))
    assert not kvgroups.is_patched(model)


def test_a_state_group_for_a_layer_without_states():
    model = tiny("bamba")
    config = kvgroups.infer_config(model)
    state = next(group for group in config.groups if isinstance(group.spec, MambaSpec))
    groups = [g if g is not state else g.model_copy(update={"layers": (*g.layers, 1)}) for g in config.groups]
    with pytest.raises(SpecError, match="layer 1 .*stores no mamba"):
        kvgroups.patch(model, config.model_copy(update={"groups": tuple(groups)}))


def test_a_ring_for_a_layer_that_reads_whole_sequences():
    model = tiny("diffllama", layer_types=["sliding_attention"] * 4, sliding_window=8)
    config = kvgroups.infer_config(model, slot_mapping="ring")
    with pytest.raises(SpecError, match="layer 0 .*'paged'"):
        kvgroups.patch(model, config)


class TestGenerate:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"cache_implementation": "static"}, ["cache_implementation='static'"]),
            ({"cache_implementation": "offloaded"}, ["cache_implementation='offloaded'"]),
            ({"cache_implementation": "quantized"}, ["cache_implementation='quantized'"]),
            ({"output_attentions": True, "return_dict_in_generate": True}, ["output_attentions"]),
            ({"max_new_tokens": 5000}, ["max_length 5013", "max_model_len is 512"]),
            ({"num_return_sequences": 200, "do_sample": True}, ["400 sequences", "max_num_reqs is 256"]),
        ],
    )
    def test_options(self, gemma, options, words):
        assert_refuses(
            gemma,
            lambda: gemma.generate(IDS, attention_mask=torch.ones_like(IDS), **{"max_new_tokens": 4, **options}),
            UnsupportedCallError,
            *words,
        )

    def test_a_right_padded_batch(self, gemma):
        mask = torch.ones_like(IDS)
        mask[1, -3:] = 0
        assert_refuses(
            gemma,
            lambda: gemma.generate(IDS, attention_mask=mask, max_new_tokens=4),
            UnsupportedCallError,
            "row 1 ends in padding",
            "padding_side",
        )

    @pytest.mark.parametrize("kind", ["dynamic", "static", "other model", "earlier patch"])
    def test_foreign_caches(self, gemma, kind):
        other = kvgroups.patch(tiny("gemma3_text", seed=1))
        cache = {
            "dynamic": lambda: DynamicCache(config=gemma.config),
            "static": lambda: StaticCache(config=gemma.config, max_cache_len=64),
            "other model": lambda: kvgroups.GroupedCache(other),
            "earlier patch": lambda: _stale_cache(other),
        }[kind]()
        assert_refuses(
            gemma,
            lambda: gemma.generate(IDS, cache=cache, max_new_tokens=4, do_sample=False),
            UnsupportedCallError,
            "cache:",
            "GroupedCache",
        )

    def test_a_cache_longer_than_the_prompt(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        with torch.no_grad():
            gemma(IDS, cache=cache)
        for ids in (IDS, IDS[:, :5]):
            assert_refuses(
                gemma,
                lambda ids=ids: gemma.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=4),
                UnsupportedCallError,
                "holds 13 tokens",
            )

    def test_a_cache_of_another_prompt(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        with torch.no_grad():
            gemma(IDS, cache=cache)
        ids = torch.cat((IDS, IDS), dim=1)
        ids[1, 4] = (ids[1, 4] + 1) % 90 + 3
        assert_refuses(
            gemma,
            lambda: gemma.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=4),
            UnsupportedCallError,
            "another prompt",
            "row 1 differs at token 4",
        )

    def test_a_cache_of_another_batch(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        with torch.no_grad():
            gemma(IDS, cache=cache)
        ids = torch.cat((IDS, IDS), dim=1)[:1]
        assert_refuses(
            gemma,
            lambda: gemma.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=4),
            UnsupportedCallError,
            "holds 2 rows",
        )

    @pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
    @pytest.mark.parametrize("memory", ["blocks", "bytes"])
    def test_memory_that_is_too_small(self, family, memory):
        """At the limit it runs; one block or byte less is refused with the group, the need and what there is."""
        model = tiny(family)
        config = kvgroups.infer_config(model)
        exact = {"full": 6, "window": 3, "state": 1}  # 13 + 80 tokens: six blocks of 16, a window of 8 in fours
        need = {group.name: 2 * exact[group.name] for group in config.groups}
        plan = SlabPlan.for_config(config)
        slabs = plan.num_slabs(need)
        nbytes = slabs * plan.slab_bytes

        def generate():
            return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=80, do_sample=False)

        want = generate()
        kvgroups.patch(model, kvgroups.infer_config(model, memory=need if memory == "blocks" else nbytes))
        assert torch.equal(generate(), want)
        less = {**need, "full": need["full"] - 1} if memory == "blocks" else nbytes - 1
        kvgroups.patch(model, kvgroups.infer_config(model, memory=less))
        there = nbytes - plan.slab_bytes
        numbers = "'full'.*12.*11" if memory == "blocks" else f"need {nbytes} bytes .*'full'.* there are {there} bytes"
        with pytest.raises(OutOfBlocksError, match=numbers):
            generate()
        assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0


def _stale_cache(model):
    cache = kvgroups.GroupedCache(model)
    kvgroups.unpatch(model)
    return cache


class TestForward:
    def forward(self, model, cache=None, **inputs):
        with torch.no_grad():
            return model(**{"input_ids": IDS, "cache": cache or kvgroups.GroupedCache(model), **inputs})

    @pytest.mark.parametrize(
        ("inputs", "words"),
        [
            ({"attention_mask": torch.ones(2, 1, 13, 13)}, ["attention_mask", "2-D"]),
            ({"attention_mask": {"full_attention": None}}, ["attention_mask", "2-D", "dict"]),
            ({"attention_mask": torch.ones(2, 9)}, ["attention_mask", "(2, 13)", "(2, 9)"]),
            ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]])}, ["position_ids", "backwards"]),
            ({"output_attentions": True}, ["output_attentions"]),
            ({"input_ids": torch.zeros(2, 600, dtype=torch.long)}, ["600 tokens", "max_model_len is 512"]),
            ({"input_ids": torch.zeros(300, 1, dtype=torch.long)}, ["300 rows", "max_num_reqs is 256"]),
            ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, ["input_ids", "(2, 0)"]),
            ({"input_ids": torch.zeros(0, 2, dtype=torch.long)}, ["input_ids", "(0, 2)"]),
        ],
    )
    def test_inputs(self, gemma, inputs, words):
        assert_refuses(gemma, lambda: self.forward(gemma, **inputs), KVGroupsError, *words)

    def test_labels_where_rows_go_through_alone(self):
        model = kvgroups.patch(tiny("bamba"), fused=False)
        mask = torch.ones_like(IDS)
        mask[0, :3] = 0
        assert_refuses(
            model, lambda: self.forward(model, attention_mask=mask, labels=IDS), UnsupportedCallError, "labels"
        )

    def test_a_cache_of_another_model(self, gemma):
        other = kvgroups.patch(tiny("gemma3_text", seed=1))
        cache = kvgroups.GroupedCache(other)
        assert_refuses(gemma, lambda: self.forward(gemma, cache), UnsupportedCallError, "another model")

    def test_a_cache_in_a_model_that_is_not_patched(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        with pytest.raises(UnsupportedCallError, match="outside of its model's forward"):
            self.forward(tiny("gemma3_text"), cache)

    def test_another_batch_on_a_filled_cache(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        self.forward(gemma, cache)
        assert_refuses(gemma, lambda: self.forward(gemma, cache, input_ids=IDS[:1]), KVGroupsError, "1 rows", "of 2")
        self.forward(gemma, cache)
        assert cache.num_tokens == [26, 26]

    def test_a_mask_that_changes_its_mind(self, gemma):
        cache = kvgroups.GroupedCache(gemma)
        self.forward(gemma, cache)
        mask = torch.ones(2, 26)
        mask[1, 4] = 0
        assert_refuses(
            gemma,
            lambda: self.forward(gemma, cache, attention_mask=mask),
            UnsupportedCallError,
            "column 4 of row 1",
        )

    def test_two_forwards_at_once(self, gemma):
        """One thread is inside a forward; another one is refused and the first is not disturbed."""
        inside, leave = threading.Event(), threading.Event()

        def wait(*_):
            inside.set()
            leave.wait(10)

        def run():
            hook = gemma.model.layers[0].register_forward_pre_hook(wait)
            try:
                done.append(self.forward(gemma).logits)
            finally:
                hook.remove()

        done: list[torch.Tensor] = []
        thread = threading.Thread(target=run)
        thread.start()
        assert inside.wait(10)
        with pytest.raises(UnsupportedCallError, match="second forward at the same time"):
            self.forward(gemma)
        leave.set()
        thread.join()
        assert torch.equal(done[0], self.forward(gemma).logits)

    def test_attention_dropout(self):
        model = tiny("llama", attention_dropout=0.5)
        kvgroups.patch(model)
        model.train()
        with pytest.raises(UnsupportedCallError, match="model.eval"):
            self.forward(model)
