"""Every Triton kernel compiles for real GPUs, though there is none: the interpreter accepts more than they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}


@pytest.fixture(scope="module")
def environment(request):
    """Of a process that compiles: without the interpreter, with what Triton keeps in pytest's cache."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return others | {
        "TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton")),
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent))),
    }


@pytest.fixture(scope="module")
def compiled(environment):
    """`compiled(target, *flags)` -> what `compile_kernels.py` printed."""

    def run(*arguments):
        script = Path(__file__).with_name("compile_kernels.py")
        done = subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def assert_fits(report, target):
    for kernel in report["kernels"]:
        assert kernel["shared_bytes"] <= SHARED_BYTES[target], kernel


def test_every_kernel_compiles_for_sm_90_and_no_batch_compiles_again(compiled):
    report = compiled("sm_90")
    assert_fits(report, "sm_90")
    assert not [kernel for kernel in report["kernels"] if kernel["spilled_bytes"]]
    assert report["recompiled_for_another_batch"] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_kernel_in_every_dtype(target, compiled):
    report = compiled(target, "--all")
    assert_fits(report, target)
    assert report["recompiled_for_another_batch"] == []


def test_the_dry_driver_wants_a_process_without_the_interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("nothing is interpreted here")
    from kvgroups.testing.dry_driver import compile_only

    with pytest.raises(RuntimeError, match="expected TRITON_INTERPRET unset when triton is imported"):
        compile_only("sm_90")


def test_a_kernel_too_large_for_its_target_is_refused(environment):
    """A decode at head dim 64 takes about 20 KB of shared memory; here sm_90 has 16."""
    program = (
        "import compile_kernels as c; from kvgroups.testing.dry_driver import TARGETS;"
        "TARGETS['small'] = (TARGETS['sm_90'][0], 16_384); c.compile_only('small'); c.attend(dim=64, **c.FEW)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "OutOfResources: out of resource: shared memory" in done.stderr
