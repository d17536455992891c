"""Every operation's folder has the same files, and every form of it the same signature."""

import ast
from pathlib import Path

import pytest

from kvgroups import ops
from kvgroups.ops import dispatch

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path for path in (ROOT / "kernels").iterdir() if path.is_dir() and path.name != "__pycache__"
)


def signatures(path):
    """Public functions of a file: name -> [(kind, argument, default)]."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args
            positional = [("positional", argument.arg, None) for argument in arguments.args]
            assert not arguments.defaults and not arguments.posonlyargs, "operands have no defaults"
            keywords = [
                ("keyword", argument.arg, default and ast.unparse(default))
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            ]
            found[node.name] = positional + keywords
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folder_has_its_files(folder):
    assert {"__init__.py", "reference.py", "torch_impl.py", "README.md"} <= {
        path.name for path in folder.iterdir()
    }
    assert not [
        node for node in ast.walk(ast.parse((folder / "__init__.py").read_text())) if _is_import(node)
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_reference_torch_form_and_ops_have_one_signature(folder):
    reference = signatures(folder / "reference.py")
    assert reference and signatures(folder / "torch_impl.py") == reference
    public = {k: v for file in Path(ops.__file__).parent.glob("*.py") for k, v in signatures(file).items()}
    for name, arguments in reference.items():
        assert public[name] == [*arguments, ("keyword", "backend", "'auto'")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_triton_forms_have_the_same_signature(folder):
    """Not every operation has one, and it may come with the reasons against a call, `refusals`, and with
    launches, `launch_*`, for the Triton form of another operation."""
    triton = signatures(folder / "triton_impl.py") if (folder / "triton_impl.py").exists() else {}
    triton = {
        name: arguments
        for name, arguments in triton.items()
        if name != "refusals" and not name.startswith("launch_")
    }
    reference = signatures(folder / "reference.py")
    assert triton == {name: reference[name] for name in triton}
    assert set(triton) == {name for name in reference if "triton" in dispatch.FORMS[name]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_cpu_forms_have_the_same_signature(folder):
    """Not every operation has one. `prepare_x` returns it for a kind of call. Its reasons against a call are in
    `refusals`, with that signature too."""
    cpu = signatures(folder / "cpu_impl.py") if (folder / "cpu_impl.py").exists() else {}
    cpu = {name.removeprefix("prepare_"): arguments for name, arguments in cpu.items()}
    refusals = cpu.pop("refusals", None)
    reference = signatures(folder / "reference.py")
    assert cpu == {name: reference[name] for name in cpu}
    assert not cpu or refusals in cpu.values()
    assert set(cpu) == {name for name in reference if "cpu" in dispatch.FORMS[name]}


def test_every_operation_is_dispatched_and_public():
    operations = {name for folder in FOLDERS for name in signatures(folder / "reference.py")}
    assert operations == set(dispatch.FORMS)
    assert {*operations, "use_backend", "SlotMappingMode"} == set(ops.__all__)


def test_kernels_folder_is_no_package():
    """With an `__init__.py` there, transformers would import it as Hugging Face's package of that name."""
    assert not list((ROOT / "kernels").glob("*.py"))


def _is_import(node):
    return isinstance(node, ast.Import | ast.ImportFrom)
