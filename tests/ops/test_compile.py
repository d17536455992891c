"""Every Triton kernel compiles for real GPUs, though there is none: the interpreter accepts more than they do."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvgroups
from kvgroups.cli import app
from kvgroups.ops import dispatch

pytest.importorskip("triton")

command = import_module("kvgroups.cli.kernels")  # the package has a function of that name


@pytest.fixture(autouse=True, scope="module")
def cache_of_compilations(request):
    """What Triton compiles is kept in pytest's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton")))
        yield


def test_every_kernel_is_as_it_should_be_for_sm_90():
    """No spills, shared memory within the limit, and the rest of `compile_report`; no batch compiles again."""
    report = command.compile_for("sm_90")
    assert not report["problems"]
    with_a_triton_form = {name for name, forms in dispatch.FORMS.items() if "triton" in forms}
    assert {entry["operation"] for entry in report["kernels"]} == {_folder(name) for name in with_a_triton_form}


def _folder(operation):
    form = dispatch.FORMS[operation]["torch"].run
    return form.__module__.split(".")[-2]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_configuration(target):
    assert not command.compile_for(target, every=True)["problems"]


def test_the_dry_driver_wants_a_process_without_the_interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("nothing is interpreted here")
    from kvgroups.testing.dry_driver import compile_only

    with pytest.raises(RuntimeError, match="expected TRITON_INTERPRET unset when triton is imported"):
        compile_only("sm_90")


WITH_PROBLEMS = """
import json
from functools import partial
from kvgroups.kernels.compile_case import FEW, CompileCase
from kvgroups.kernels.paged_attention.compile_cases import attend
from kvgroups.kernels.table_update.compile_cases import update
from kvgroups.testing import compile_report, dry_driver
from triton.compiler.compiler import max_shared_mem

def each_batch_its_own_head_dim(batch):
    attend(FEW, dim=32 if batch.requests < 5 else 64)

def cases(**cases):
    compile_report.compile_cases = lambda: cases

fast = {"needs_matrix": True, "needs_wide_loads": True}
cases(
    paged_attention=[
        CompileCase("rows that are not aligned", partial(attend, dim=33), **fast, takes_any_batch=False),
        CompileCase("one for each batch", each_batch_its_own_head_dim),
    ],
    table_update=[CompileCase("no matrix", update, needs_matrix=True)],
)
print(json.dumps(compile_report.report("sm_90")["problems"]))
max_shared_mem.cache_clear()  # Triton asks a driver once
dry_driver.TARGETS["small"] = (dry_driver.TARGETS["sm_90"][0], 16_384)
cases(paged_attention=[CompileCase("too large", attend, FEW)])
compile_report.report("small")
"""


def test_the_report_finds_what_is_wrong():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITH_PROBLEMS],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.getcwd()},
    )
    problems = json.loads(done.stdout)
    assert any("rows that are not aligned: has a loop with matrix instructions whose widest load" in it for it in problems)
    assert any("table_update._table_update_kernel, no matrix: has no matrix instructions" in it for it in problems)
    assert any("paged_attention" in it and "compiled again for another batch" in it for it in problems)
    # The driver itself refuses what asks for more than there is.
    assert "OutOfResources: out of resource: shared memory" in done.stderr


# The command.

KERNEL = {
    "operation": "paged_attention",
    "case": "decode, bf16, head dim 128",
    "kernel": "paged_attention._attention_kernel",
    "settings": {"ROWS": 16, "warps": 4, "stages": 2},
    "registers": 148,
    "spilled_bytes": 0,
    "shared_bytes": 39168,
    "matrix_instructions": 64,
    "loads": {"128": 66, "32": 29},
    "loop_loads": [{"128": 16, "32": 12}, {"128": 16, "32": 2}],
}


@pytest.fixture
def canned(monkeypatch):
    """`canned(*problems)`: the command compiles nothing, and finds these."""

    def plant(*problems):
        monkeypatch.setattr(
            command,
            "compile_for",
            lambda target, every: {"target": target, "kernels": [KERNEL], "problems": list(problems)},
        )

    return plant


def test_the_command_prints_a_row_for_each_kernel(canned):
    canned()
    result = CliRunner().invoke(app, ["kernels", "--target", "sm_80", "--target", "gfx942"])
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("paged_attention")]
    assert rows == [f"paged_attention.attention {KERNEL['case']} 4 2 148 0 39168 64 128x16 32x2".split()] * 2
    assert "sm_80" in result.stdout and "gfx942" in result.stdout and "run nowhere" in result.stdout
    assert " ".join(result.stdout.split()).endswith("No problems.")


def test_the_command_prints_json(canned):
    canned()
    result = CliRunner().invoke(app, ["kernels", "--json"])
    assert json.loads(result.stdout)["reports"][0] == {"target": "sm_90", "kernels": [KERNEL], "problems": []}


def test_a_problem_is_printed_and_is_exit_code_1(canned):
    canned("sm_90, paged_attention: spills 8 bytes a thread")
    result = CliRunner().invoke(app, ["kernels"])
    assert result.exit_code == 1 and "problem: sm_90, paged_attention: spills 8 bytes" in result.stdout
    assert " ".join(result.stdout.split()).endswith(" 1 problem.")


def test_a_folder_that_bears_our_name_does_not_hide_the_package(tmp_path, monkeypatch):
    """A clone is called kvgroups, and the command runs in the folder above it."""
    (tmp_path / "kvgroups").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.subprocess, "run", _only_import)
    assert command.compile_for("sm_90") == {"from": str(Path(kvgroups.__file__).resolve())}


def _only_import(arguments, run=subprocess.run, **options):
    """What `python [options] -m module` would import, without running it."""
    flags = arguments[1 : arguments.index("-m")]
    module = arguments[arguments.index("-m") + 1]
    where = f"import importlib.util as i, json; i.find_spec({module!r}); import kvgroups"
    program = f"{where}; print(json.dumps({{'from': kvgroups.__file__}}))"
    return run([arguments[0], *flags, "-c", program], **options)


def test_an_unknown_target_is_refused_in_one_sentence():
    result = CliRunner().invoke(app, ["kernels", "--target", "sm_10"])
    assert result.exit_code == 2
    assert result.stderr == "kvgroups: --target: expected one of sm_80, sm_90, sm_100, gfx942, got sm_10.\n"
