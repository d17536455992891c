"""check_parity says "passed" of healthy models, and names the workload when a fault is planted."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch

from kvgroups import GroupedCache, check_parity, infer_config, is_patched, ops, patch
from kvgroups.block_table import BlockTable
from kvgroups.errors import SpecError, UnsupportedCallError, UnsupportedModelError
from kvgroups.manager import Manager
from kvgroups.parity import WORKLOADS, ParityError, ParityReport
from kvgroups.parity.sides import EagerSide, PagedSide
from kvgroups.rows import CacheRows
from kvgroups.testing import tiny

QUICK = {"max_new_tokens": 8, "speed": False}


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize(("family", "skipped"), [("gemma3_text", {"fused"}), ("jamba", set())])
def test_a_healthy_model_passes_every_workload(family, skipped):
    report = check_parity(tiny(family), **QUICK)

    assert report.passed, report.render()
    assert [workload.name for workload in report.workloads] == list(WORKLOADS)
    assert {workload.name for workload in report.workloads if workload.outcome == "skipped"} == skipped
    for workload in report.workloads:
        if workload.name in skipped:
            continue
        assert workload.tokens == workload.tokens_agree > 0
        assert workload.max_logit_difference <= workload.tolerance < 1e-3
        assert workload.kv_bytes > 0
        assert (workload.eager_kv_bytes is None) == (workload.other != "eager")
        assert (workload.other_logit_difference is None) == (workload.other == "eager")
    report.raise_for_failure()


def test_beams_swap_and_copy_less_than_eager():
    """Eager gathers every row's whole cache at every step; here tails and states are copied, when beams part."""
    beams = check_parity(tiny("bamba"), workloads=["beams"], **QUICK).workload("beams")

    assert beams.passed and beams.rows == 6  # three of each of two prompts
    assert beams.counts["swaps"] == beams.other_counts["swaps"] > 3
    assert 0 < beams.counts["copied_bytes"] < beams.other_counts["copied_bytes"] / 2


def test_beams_that_eagers_cache_does_not_find_are_held_against_those_without_a_cache(monkeypatch):
    """Eager's rows stay where they were, as in classes that forget to reorder their states."""
    monkeypatch.setattr(EagerSide, "reorder", lambda self, cache, beam_idx: None)
    report = check_parity(tiny("llama"), workloads=["beams"], **QUICK)

    beams = report.workload("beams")
    assert report.passed and beams.tokens_agree == beams.tokens
    assert "held against eager's beams without a cache, which its cached ones are not" in beams.remarks


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "zamba2"])
def test_drafts_are_verified_and_taken_back(family):
    """Zamba2 floors its time step in prefill only, so verifying several tokens at once is neither reference."""
    model = tiny(family)
    speculation = check_parity(model, workloads=["speculation"], **QUICK).workload("speculation")

    assert speculation.passed, speculation.failures
    assert speculation.tokens_agree == 8
    assert speculation.counts["forwards"] <= 8 and speculation.counts["drafted"] >= 4
    assert ("forwards" in speculation.other_counts) == (family == "gemma3_text")


def test_drafts_are_refused_where_a_state_layer_is_not_fused():
    report = check_parity(tiny("qwen3_next"), workloads=["speculation"], **QUICK)

    assert report.passed and report.workload("speculation").tokens == 0
    assert report.workload("speculation").remarks[0].startswith("refused, as transformers does: ")
    assert "refused" in report.render() == str(report)


def test_a_patch_that_keeps_states_generic_is_checked_as_it_is():
    model = patch(tiny("bamba"), fused=False)
    report = check_parity(model, workloads=["single", "fused"], **QUICK)

    assert report.passed and report.workload("single").passed
    assert report.workload("fused").remarks == ("no state layer of this model runs fused",)
    assert not model.__dict__["_kvgroups"].is_fused


def test_without_gpu_and_interpreter_triton_is_skipped_and_nothing_is_proven(monkeypatch):
    pytest.importorskip("triton")
    from kvgroups.kernels.table_update import triton_impl

    monkeypatch.setattr(triton_impl, "INTERPRETED", False)
    report = check_parity(tiny("llama"), workloads=["triton"], **QUICK)

    assert (report.verdict, report.passed) == ("skipped", False)
    assert "TRITON_INTERPRET=1 kvgroups parity MODEL --workload triton" in report.render()
    with pytest.raises(ParityError, match="nothing was compared: triton"):
        report.raise_for_failure()


def test_the_report_says_where_eager_is_off_its_own_uncached_forward():
    """A right-padded prefill leaves pads in eager's cache, and its Mamba-1 layers restart on every chunk."""
    report = check_parity(tiny("jamba"), workloads=["single", "right-padded", "chunks"], **QUICK)

    assert report.passed
    assert report.workload("single").remarks == ()
    for name in ("right-padded", "chunks"):
        workload = report.workload(name)
        assert workload.eager_logit_difference > 100 * workload.tolerance
        assert workload.eager_tokens_agree < workload.tokens
        assert "eager's cached run is off its own uncached forward" in workload.remarks[0]
        assert name in report.render()


def test_a_model_whose_decode_differs_by_design_is_held_against_eagers_cached_decode():
    """Zamba2 floors its time step in prefill only; a floor of 0.05 makes it show."""
    model = tiny("zamba2", time_step_min=0.05)
    report = check_parity(model, workloads=["single", "second-turn", "right-padded"], **QUICK)

    assert report.passed, report.render()
    single = report.workload("single")
    assert single.reference == "cached"
    assert single.cached_gap > single.tolerance > single.max_logit_difference
    assert "follows the cached one" in report.render()
    assert single.remarks == ()
    assert "chooses another token" in report.workload("right-padded").remarks[0]


def test_bfloat16_passes_with_a_tolerance_of_its_own():
    report = check_parity(tiny("gemma3_text", dtype=torch.bfloat16), workloads=["single", "ragged"], **QUICK)

    assert report.passed, report.render()
    assert report.conditions.dtype == "bfloat16"
    assert report.eager_gap > 1e-3
    assert "a coarse guard: tokens decide" in " ".join(report.render().split())


def test_autocast_is_judged_as_what_it_computes_in():
    with torch.autocast("cpu", torch.bfloat16):
        report = check_parity(tiny("gemma2"), workloads=["ragged"], **QUICK)

    assert report.passed, report.render()
    assert report.conditions.dtype == "float32, bfloat16 autocast"
    assert not report.conditions.is_exact


# Faults


def failed_workloads(report: ParityReport) -> set[str]:
    return {workload.name for workload in report.workloads if not workload.passed}


def test_a_window_that_is_one_token_short_fails_beyond_the_window(monkeypatch):
    import kvgroups.patching

    healthy = kvgroups.patching.probe

    def short_windows(model):
        facts = healthy(model)
        for layer in facts:
            if layer.window is not None:
                layer.window -= 1
        return facts

    monkeypatch.setattr(kvgroups.patching, "probe", short_windows)
    report = check_parity(tiny("gemma3_text"), workloads=["single", "long"], **QUICK)

    assert failed_workloads(report) == {"single", "long"}
    with pytest.raises(ParityError, match="gemma3_text.*long.*off by"):
        report.raise_for_failure()


def test_rows_that_read_each_others_blocks_fail_where_there_are_rows(monkeypatch):
    healthy = BlockTable.gather

    def swapped(self, geometry, out):
        return out.copy_(healthy(self, geometry).flip(0))

    monkeypatch.setattr(BlockTable, "gather", swapped)
    report = check_parity(tiny("llama"), workloads=["single", "ragged", "right-padded"], **QUICK)

    assert failed_workloads(report) == {"ragged", "right-padded"}
    assert report.workload("ragged").tokens_agree < report.workload("ragged").tokens


@pytest.mark.parametrize("family", ["bamba", "zamba2"])
def test_a_hundredth_added_to_a_state_fails(monkeypatch, family):
    """Zamba2 too: that eager's decode is off its uncached forward excuses nothing else."""
    healthy = Manager.advance

    def off(self, requests, num_new_tokens):
        healthy(self, requests, num_new_tokens)
        for group in self.config.groups:
            if group.is_state:
                for layer in group.layers:
                    self.storage(group.name).layer(layer)["recurrent"].add_(1e-2)

    monkeypatch.setattr(Manager, "advance", off)
    report = check_parity(tiny(family), workloads=["single"], **QUICK)

    assert failed_workloads(report) == {"single"}
    assert report.workload("single").max_logit_difference > 10 * report.workload("single").tolerance


def test_beams_that_stay_where_they_were_fail(monkeypatch):
    monkeypatch.setattr(GroupedCache, "reorder_cache", lambda self, beam_idx: None)
    report = check_parity(tiny("bamba"), workloads=["ragged", "beams"], **QUICK)

    assert failed_workloads(report) == {"beams"}
    assert any("logits off by" in failure for failure in report.workload("beams").failures)


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "zamba2"])
def test_drafts_that_are_not_taken_back_fail(monkeypatch, family):
    """The history goes back and the rows do not: rejected tokens stay in blocks and states."""
    monkeypatch.setattr(CacheRows, "rewind", lambda self, counts: None)
    report = check_parity(tiny(family), workloads=["single", "speculation"], **QUICK)

    assert failed_workloads(report) == {"speculation"}


def test_refusing_drafts_that_transformers_serves_fails(monkeypatch):
    monkeypatch.setattr(PagedSide, "speculate", _refuse)
    report = check_parity(tiny("llama"), workloads=["speculation"], **QUICK)

    assert report.workload("speculation").failures == (
        "kvgroups refuses what transformers does not: not today",
    )


def _refuse(side, prompt, num_new, num_drafted):
    side.refusal = "not today"
    return []


def test_a_fused_layer_that_is_off_fails_against_the_generic_one(monkeypatch):
    healthy = ops.selective_state_update
    monkeypatch.setattr(ops, "selective_state_update", lambda *a, **k: healthy(*a, **k) * 1.01)
    report = check_parity(tiny("bamba"), workloads=["fused"], **QUICK)

    assert any("logits off those of generic by" in failure for failure in report.workload("fused").failures)


def test_a_generic_layer_that_is_off_fails_too(monkeypatch):
    healthy = ops.gather_states
    monkeypatch.setattr(ops, "gather_states", lambda *a, **k: healthy(*a, **k) * 1.01)
    report = check_parity(tiny("bamba"), workloads=["single", "fused"], **QUICK)

    assert failed_workloads(report) == {"fused"}


@needs_triton
def test_a_triton_kernel_that_is_off_fails_against_the_torch_one(monkeypatch):
    from kvgroups.kernels.paged_attention import triton_impl

    healthy = triton_impl.paged_attention
    monkeypatch.setattr(triton_impl, "paged_attention", lambda *a, **k: healthy(*a, **k) * 1.01)
    report = check_parity(tiny("llama"), workloads=["single", "triton"], **QUICK)

    assert failed_workloads(report) == {"triton"}
    assert any("logits off those of torch by" in failure for failure in report.workload("triton").failures)


def test_the_right_tokens_from_wrong_logits_fail():
    """Attention scaled by one per mille leaves most choices alone."""
    healthy = ops.paged_attention
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ops, "paged_attention", lambda *a, **k: healthy(*a, **k) * 1.001)
        report = check_parity(tiny("llama"), workloads=["single"], **QUICK)

    single = report.workload("single")
    assert single.tokens_agree == single.tokens
    assert not single.passed and "logits off by" in single.failures[0]


def test_nan_fails(monkeypatch):
    healthy = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *a, **k: healthy(*a, **k) * float("nan"))
    report = check_parity(tiny("llama"), workloads=["single"], **QUICK)

    assert not report.passed
    assert report.workload("single").max_logit_difference == float("inf")


def test_blocks_that_do_not_come_back_fail(monkeypatch):
    monkeypatch.setattr(Manager, "free", lambda self, request: None)
    report = check_parity(tiny("llama"), workloads=["in-a-row"], **QUICK)

    assert "bytes are still held" in report.workload("in-a-row").failures[-1]


def test_a_side_that_raises_fails_alone(monkeypatch):
    def broken(self):
        raise RuntimeError("no cache today")

    monkeypatch.setattr(PagedSide, "new_cache", broken)
    report = check_parity(tiny("llama"), workloads=["single", "right-padded"], **QUICK)

    assert failed_workloads(report) == {"right-padded"}
    assert report.workload("right-padded").failures == ("kvgroups fails: RuntimeError: no cache today",)
    assert report.workload("right-padded").max_logit_difference is None


# The model is left as it was


def test_an_unpatched_model_is_left_as_it_was():
    model = tiny("gemma3_text").train()
    model.model.layers[1].eval()
    before, config = dict(model.__dict__), copy.deepcopy(model.config.to_dict())
    flags = [module.training for module in model.modules()]
    random_state, threads = torch.random.get_rng_state(), torch.get_num_threads()

    check_parity(model, workloads=["samples"], **QUICK)

    assert model.__dict__ == before  # the same generation_config too
    assert model.config.to_dict() == config
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads


def test_a_patched_model_keeps_its_patch_and_its_config_is_checked():
    model = tiny("gemma3_text")
    patch(model, infer_config(model, block_size={"window": 2, "full": 32}))
    before = model.__dict__["_kvgroups"]

    report = check_parity(model, workloads=["single"], **QUICK)

    assert is_patched(model) and model.__dict__["_kvgroups"] is before
    assert {group.name: group.block_size for group in report.groups} == {"window": 2, "full": 32}


def test_a_check_that_raises_leaves_the_model_unpatched():
    model = tiny("gemma3_text")
    other = infer_config(tiny("llama"))
    with pytest.raises(SpecError):
        check_parity(model, config=other)
    assert not is_patched(model)


# What is asked


def test_prompts_are_ids_or_texts_or_a_tensor():
    model = tiny("llama")

    def letters(text):
        return {"input_ids": [ord(letter) - 90 for letter in text]}

    def rows(prompts, **arguments):
        report = check_parity(model, prompts, workloads=["ragged"], **QUICK, **arguments)
        assert report.passed
        return report.workload("ragged").rows

    assert rows([[5, 6, 7], [8]]) == 2
    assert rows(torch.tensor([[5, 6, 7], [8, 9, 10]])) == 2
    assert rows(["ab", "abc", "a"], tokenizer=letters) == 3
    assert rows([[5 + row, 6] for row in range(9)]) == 9  # more than one batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "there are none"),
        ({"prompts": [[5], []]}, "prompt 1 has no tokens"),
        ({"prompts": [[5, 97]]}, "ids from 5 to 97 and the vocabulary has 97"),
        ({"tokenizer": lambda text: {"input_ids": []}}, "tokenizer: function reads no token in 'The library opened"),
        ({"prompts": ["text"]}, "'text' is text; pass the tokenizer too"),
        ({"prompts": len}, "got builtin_function_or_method; a tokenizer goes into tokenizer="),
        ({"workloads": ["ragged", "rugged"]}, "got 'rugged'; choose from single, ragged"),
        ({"workloads": []}, "got none; choose from"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": 512}, "512 leave no room for a prompt in max_model_len 512"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(arguments, message):
    model = tiny("llama")
    with pytest.raises(UnsupportedCallError, match=message):
        check_parity(model, **arguments)
    assert not is_patched(model)


def test_a_model_that_cannot_be_served_is_refused():
    with pytest.raises(UnsupportedModelError, match="Rwkv"):
        check_parity(tiny("rwkv"))
    with pytest.raises(UnsupportedModelError, match="expected a model, got the str 'llama'"):
        check_parity("llama")


# The report


def test_a_report_goes_to_json_and_back_and_fits_the_terminal():
    report = check_parity(tiny("bamba"), workloads=["single", "right-padded"], max_new_tokens=6)

    assert ParityReport.model_validate_json(report.model_dump_json()) == report
    assert report.speed.tokens_per_second > 0 and report.speed.eager_tokens_per_second > 0
    text = report.render(width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "..." not in text and "…" not in text
    for piece in ("bamba", "state", "full", "blocks of 16, paged", "single prompt", "passed"):
        assert piece in text


def test_seeds_make_reports_repeat():
    def numbers(seed):
        report = check_parity(tiny("llama"), workloads=["samples"], seed=seed, **QUICK)
        return [(w.tokens_agree, w.max_logit_difference) for w in report.workloads]

    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)
