"""Every family that `tiny` builds, served or refused; all but the core ones are slow."""

import pytest

import kvgroups
from kvgroups.testing import tiny, tiny_names

UNSERVED = {
    "inkling_text": "layer 0 .*'position_bias'",
    "inkling2_text": "layer 0 .*'position_bias'",
    "inkling2_loop_text": "layer 0 .*'position_bias'",
    "minimax": "MiniMax",
    "recurrent_gemma": "layer 0 .*keeps its state somewhere else",
    "deepseek_v32": "layer 0 has layer type 'indexed_attention'",
    "glm_moe_dsa": "layer 0 has layer type 'indexed_attention'",
    "hy_v4": "layer 0 has layer type 'indexed_attention'",
    "deepseek_v4": "layer 0 has layer type 'heavily_compressed_attention'",
    "minimax_m3_vl_text": "layer 1 has layer type 'minimax_m3_sparse'",
    "bloom": "layer 0 .*BloomAttention.*AttentionInterface",
    "falcon": "self_attention.*FalconLinear",
    "gpt_neo": "layer 0 .*GPTNeoSelfAttention.*AttentionInterface",
    "mpt": "MptForCausalLM",
    "rwkv": "takes no `cache` argument",
    "xlstm": "xLSTM",
}
"""What `patch` says of a family that no adapter serves."""

WITH_STATES = {
    "bamba", "jamba", "falcon_h1", "lfm2", "mamba", "falcon_mamba", "mamba2", "zamba", "zamba2",
    "granitemoehybrid", "nemotron_h", "lfm2_moe", "lfm3",
}  # fmt: skip
"""Families whose state layers have a fused form."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family` runs over what is served; with `fused`, families with states run in both tiers."""
    chosen = any("family" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "family" in metafunc.fixturenames and not chosen:
        names = [name for name in tiny_names(all=True) if name not in UNSERVED]
        if "fused" in metafunc.fixturenames:
            cases = [(name, fused) for name in names for fused in (True, False) if fused or name in WITH_STATES]
            ids = [name if fused else f"{name}-generic" for name, fused in cases]
            params = [pytest.param(*case, id=label, marks=_marks(case[0])) for case, label in zip(cases, ids, strict=True)]
            metafunc.parametrize(("family", "fused"), params)
        else:
            metafunc.parametrize("family", [pytest.param(name, marks=_marks(name)) for name in names])
    if "unserved" in metafunc.fixturenames:
        metafunc.parametrize("unserved", UNSERVED.items(), ids=list(UNSERVED))


def _marks(family: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if family in tiny_names() else (pytest.mark.slow,)


@pytest.fixture
def model(family, fused):
    """A patched tiny model of the family, its state layers fused where they can be, or all generic."""
    return kvgroups.patch(tiny(family), fused=fused)
