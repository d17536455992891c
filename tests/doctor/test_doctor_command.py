"""`kvgroups doctor`: what it says is what dispatch does."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvgroups import ops
from kvgroups.cli import app
from kvgroups.cli.doctor import ON_DEMAND
from kvgroups.kernels.cpu_library import CpuLibrary, cpu_library
from kvgroups.ops import dispatch


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_names_versions_threads_and_a_backend_for_every_operation():
    found = json.loads(doctor("--json"))

    assert found["versions"]["torch"] == torch.__version__
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert list(found["operations"]["cpu"]) == list(dispatch.FORMS)
    for operation, backends in found["operations"]["cpu"].items():
        assert {backends["takes"], *backends["then"], *backends["against"]} == set(dispatch.FORMS[operation])
        assert backends["against"]["reference"] == [ON_DEMAND]


def test_the_backend_it_names_is_the_one_that_auto_runs(monkeypatch: pytest.MonkeyPatch):
    takes = json.loads(doctor("--json"))["operations"]["cpu"]["paged_attention"]["takes"]
    ran = []
    form = dispatch.FORMS["paged_attention"][takes]
    spy = dispatch.Form(lambda *args, **kwargs: ran.append(takes), form.refusals, form.auto_on, form.absences)
    monkeypatch.setitem(dispatch.FORMS["paged_attention"], takes, spy)
    token = torch.zeros(1, 1, 8)
    ops.paged_attention(token, token, token, None, None, None, scale=1.0,
                        query_start_loc=torch.tensor([0, 1]), num_computed_tokens=torch.tensor([0]))  # fmt: skip
    assert ran == [takes]
    assert takes == ("cpu" if cpu_library().functions else "torch")


def test_kernels_that_were_not_built_are_said_and_the_torch_form_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "cpu_library", lambda: CpuLibrary(reason="needs the CPU kernels, not built"))

    attention = json.loads(doctor("--json"))["operations"]["cpu"]["paged_attention"]
    assert attention["takes"] == "torch"
    assert attention["against"]["cpu"] == ["needs the CPU kernels, not built"]
    text = doctor()
    assert "CPU kernels  none: needs the CPU kernels, not built" in text
    assert "\ncpu: needs the CPU kernels, not built" in text


def test_kernels_that_were_built_name_their_instruction_set(monkeypatch: pytest.MonkeyPatch):
    library = CpuLibrary(functions=object(), isa=2, has_openmp=True)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "cpu_library", lambda: library)

    text = doctor()
    assert "CPU kernels  built, running avx2, on PyTorch's threads" in text and "long prompts" not in text


def test_dtypes_whose_long_prompts_take_the_torch_form_are_said(monkeypatch: pytest.MonkeyPatch):
    library = CpuLibrary(functions=object(), isa=3, has_openmp=True, fast_matrix_types=0b110)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "cpu_library", lambda: library)

    assert "long prompts in bfloat16, float16 take the torch form" in " ".join(doctor().split())


def test_triton_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)

    assert "triton: needs the package triton, which is not installed" in doctor()
