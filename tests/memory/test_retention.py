"""RetentionPolicy: where a request leaves points at which its prefix can be resumed."""

from __future__ import annotations

import pytest

from kvgroups.errors import SpecError
from kvgroups.retention import RetentionPolicy

DEFAULT = RetentionPolicy()
PROMPT_ONLY = RetentionPolicy(at_answer_end=False, at_branches=False)
ONE_POINT = RetentionPolicy(max_points=1)


@pytest.mark.parametrize(
    ("policy", "prompt_len", "unit", "hit", "branch", "points"),
    [
        pytest.param(DEFAULT, 1000, 256, 0, None, (768,), id="last grid point of the prompt"),
        pytest.param(DEFAULT, 768, 256, 0, None, (512,), id="prompt ends on the grid: the same prompt needs one token"),
        pytest.param(DEFAULT, 769, 256, 0, None, (768,), id="one token behind the grid point"),
        pytest.param(DEFAULT, 256, 256, 0, None, (), id="prompt of one unit"),
        pytest.param(DEFAULT, 1, 256, 0, None, (), id="prompt of one token"),
        pytest.param(DEFAULT, 1000, 256, 512, None, (768,), id="behind a hit"),
        pytest.param(DEFAULT, 1000, 256, 768, None, (), id="the hit ends at the point, which is there already"),
        pytest.param(DEFAULT, 2300, 256, 0, 1536, (1536, 2048), id="branch point on its second sighting"),
        pytest.param(DEFAULT, 2300, 256, 0, 2048, (2048,), id="branch point and prompt's end are one"),
        pytest.param(ONE_POINT, 2300, 256, 0, 1536, (1536,), id="one point: others will come through the branch"),
        pytest.param(PROMPT_ONLY, 2300, 256, 0, 1536, (2048,), id="no branch points"),
        pytest.param(RetentionPolicy.none(), 2300, 256, 0, 1536, (), id="none"),
        pytest.param(RetentionPolicy.every_tokens(512), 1600, 256, 0, None, (512, 1024, 1536), id="every 512 tokens"),
        pytest.param(RetentionPolicy.every_tokens(500), 1600, 256, 0, None, (512, 1024, 1536), id="every 500: on the grid"),
        pytest.param(RetentionPolicy.every_tokens(512), 1600, 256, 600, None, (1024, 1536), id="every 512, behind a hit"),
        pytest.param(RetentionPolicy.every_tokens(768), 1600, 256, 0, None, (768, 1536), id="every 768, and the end"),
    ],
)  # fmt: skip
def test_where_a_prompt_is_kept(policy, prompt_len, unit, hit, branch, points):
    assert policy.prompt_points(prompt_len, unit, hit, branch) == points


@pytest.mark.parametrize(
    ("policy", "num_tokens", "is_point"),
    [
        # A prompt of 1,000 tokens on a grid of 256.
        pytest.param(DEFAULT, 768, False, id="inside the prompt"),
        pytest.param(DEFAULT, 1023, False, id="before the grid point"),
        pytest.param(DEFAULT, 1024, True, id="the answer passes its first grid point"),
        pytest.param(DEFAULT, 1025, False, id="behind the grid point"),
        pytest.param(DEFAULT, 1280, True, id="and its second"),
        pytest.param(PROMPT_ONLY, 1024, False, id="no answers"),
        pytest.param(RetentionPolicy.none(), 1024, False, id="none"),
        pytest.param(
            RetentionPolicy(at_answer_end=False, every=512), 1280, False, id="every 512: not at 1280"
        ),
        pytest.param(RetentionPolicy(at_answer_end=False, every=512), 1536, True, id="every 512: at 1536"),
    ],
)
def test_where_an_answer_is_kept(policy, num_tokens, is_point):
    assert policy.is_answer_point(num_tokens, prompt_len=1000, unit=256) == is_point


def test_a_prompt_that_ends_on_the_grid_is_the_answers_first_point():
    assert DEFAULT.prompt_points(prompt_len=1024, unit=256) == (768,)
    assert DEFAULT.is_answer_point(1024, prompt_len=1024, unit=256)


@pytest.mark.parametrize(
    ("max_points", "points", "surplus"),
    [
        pytest.param(2, [512, 768], [], id="two are allowed"),
        pytest.param(2, [512, 768, 1024], [768], id="the answer's first takes the place of the prompt's"),
        pytest.param(2, [512, 1024, 1280], [1024], id="and its second that of the first"),
        pytest.param(1, [768, 1024], [768], id="one: the latest"),
        pytest.param(3, [256, 512, 768, 1024], [768], id="three"),
        pytest.param(None, [256, 512, 768, 1024], [], id="all"),
    ],
)
def test_points_beyond_the_limit_give_way_to_the_latest(max_points, points, surplus):
    assert RetentionPolicy(max_points=max_points).surplus(points) == surplus


@pytest.mark.parametrize(
    "field", [{"every": 0}, {"max_points": 0}, {"max_share": 0.0}, {"max_share": 1.5}, {"at_end": 1}]
)
def test_a_wrong_policy_is_refused(field):
    (name,) = field
    with pytest.raises(SpecError, match=f"RetentionPolicy.{name}"):
        RetentionPolicy(**field)
