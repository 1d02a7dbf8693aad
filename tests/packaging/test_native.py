"""Native modules are those of the sources: what is tested is what is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ["kvtier", "runner-v2", "specdec"]


@pytest.fixture(scope="module")
def native(tool):
    return tool("native")


def test_every_package_with_native_code_is_known(native):
    assert [package.folder.name for package in native.native_packages()] == PACKAGES


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_installed_module_was_built_from_these_sources(native, folder):
    (package,) = [package for package in native.native_packages() if package.folder.name == folder]
    if package.build_id is None:
        assert native.compiler() is None, f"{package.module} is not built although there is a compiler: hatch run build"
        pytest.skip("no compiler: the references serve")
    assert package.build_id == package.source_id, f"{package.module} is stale: hatch run build"


@pytest.fixture
def copy(root, tmp_path) -> Path:
    """A repository of the native parts alone. Returns packages/runner-v2 in it."""
    shutil.copytree(root / "cmake", tmp_path / "cmake")
    shutil.copytree(root / "native", tmp_path / "native")
    for folder in PACKAGES:
        source, target = root / "packages" / folder, tmp_path / "packages" / folder
        target.mkdir(parents=True)
        shutil.copy(source / "CMakeLists.txt", target)
        shutil.copytree(source / "csrc", target / "csrc")
    return tmp_path / "packages" / "runner-v2"


def test_the_id_depends_on_contents_and_not_on_the_place(native, root, copy):
    assert native.source_id(copy) == native.source_id(root / "packages" / "runner-v2")


@pytest.mark.parametrize(
    "path",
    ["csrc/bind/module.cpp", "CMakeLists.txt", "../../cmake/LamellaWarnings.cmake", "../../native/abi/added.h",
     "csrc/added/deep/down.h"],
)  # fmt: skip
def test_every_input_changes_the_id(native, copy, path):
    before = native.source_id(copy)
    (copy / path).parent.mkdir(parents=True, exist_ok=True)
    with (copy / path).open("a") as file:
        file.write("\n")
    assert native.source_id(copy) != before


def test_moving_a_source_changes_the_id(native, copy):
    before = native.source_id(copy)
    (copy / "csrc/bind/module.cpp").rename(copy / "csrc/bind/renamed.cpp")
    assert native.source_id(copy) != before


def test_what_is_not_compiled_does_not_change_the_id(native, copy):
    before = native.source_id(copy)
    (copy / "csrc/notes.md").write_text("notes")
    (copy / "README.md").write_text("readme")
    assert native.source_id(copy) == before


def test_only_packages_that_use_the_abi_headers_depend_on_them(native, copy):
    specdec = copy.parent / "specdec"
    before = native.source_id(specdec)
    (copy.parent.parent / "native/abi/added.h").write_text("")
    assert native.source_id(specdec) == before


def test_a_module_of_other_sources_is_stale_and_a_missing_one_is_not(native):
    def package(build_id):
        return native.Native(Path("p"), "lamella.p._C", "sources", build_id)

    assert not package("sources").stale
    assert package("older sources").stale
    assert not package(None).stale


def test_a_run_on_a_stale_module_does_not_pass(root, tmp_path):
    """The root conftest on a repository with a native package whose module never matches."""
    shutil.copy(root / "conftest.py", tmp_path)
    tests = tmp_path / "packages" / "specdec" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "native.py").write_text(
        "from pathlib import Path\n"
        "class Package:\n"
        "    folder, module, build_id, source_id, stale = Path('specdec'), 'lamella.specdec._C', 'old', 'new', STALE\n"
        "def native_packages(root):\n"
        "    return [Package]\n".replace("STALE", "True")
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "packages"]
    stale = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert stale.returncode == 1
    assert "1 passed" in stale.stdout
    assert "lamella.specdec._C is STALE" in stale.stdout
    tool = tmp_path / "tools" / "native.py"
    tool.write_text(tool.read_text().replace("True", "False"))
    fresh = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (fresh.returncode, "STALE" in fresh.stdout) == (0, False)
