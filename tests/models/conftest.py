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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    core = tiny_names()
    chosen = any(mark.args[0] == "family" for mark in metafunc.definition.iter_markers("parametrize"))
    if "family" in metafunc.fixturenames and not chosen:
        served = [name for name in tiny_names(all=True) if name not in UNSERVED]
        slow = pytest.mark.slow
        metafunc.parametrize("family", [pytest.param(n, marks=() if n in core else slow) for n in served])
    if "unserved" in metafunc.fixturenames:
        metafunc.parametrize("unserved", UNSERVED.items(), ids=list(UNSERVED))


@pytest.fixture
def model(family):
    """A patched tiny model of the family."""
    return kvgroups.patch(tiny(family))
