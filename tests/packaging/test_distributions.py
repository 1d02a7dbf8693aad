"""The rules that all distributions keep: names, namespace, versions, licence, what a wheel may hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

HOST_FOLDERS = ["engine", "kvtier", "runner-v2", "specdec"]
FOLDERS = ["engine", "kernels-cuda", "kvtier", "runner-v2", "specdec"]
"""Those that need a vendor's compiler are in no laptop's environment."""


@pytest.fixture(scope="module")
def alone(tool):
    return tool("alone")


@pytest.fixture(scope="module")
def tables(alone, root):
    """Folder -> pyproject."""
    return {
        path.parent.name: alone.tomllib.loads(path.read_text()) for path in (root / "packages").glob("*/pyproject.toml")
    }


def test_these_are_the_packages_and_the_development_environment_has_those_for_the_host(tables, alone, root):
    assert sorted(tables) == FOLDERS
    settings = alone.tomllib.loads((root / "pyproject.toml").read_text())
    assert "project" not in settings
    members = settings["tool"]["hatch"]["envs"]["default"]["workspace"]["members"]
    assert sorted(members) == [f"packages/{folder}" for folder in HOST_FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_distribution_folder_and_import_have_one_name(tables, root, folder):
    assert tables[folder]["project"]["name"] == f"lamella-{folder}"
    source = root / "packages" / folder / "src"
    module = folder.replace("-", "_")
    assert [path.name for path in source.iterdir() if path.name != "__pycache__"] == ["lamella"]
    inside = [path.name for path in (source / "lamella").iterdir() if path.name != "__pycache__"]
    assert inside == [module], "lamella/ is an implicit namespace: it holds the package's folder and nothing else"
    assert (source / "lamella" / module / "py.typed").exists()
    assert tables[folder]["tool"]["scikit-build"]["wheel"]["packages"] == {f"lamella/{module}": f"src/lamella/{module}"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_is_documented_and_licensed_by_itself(root, folder):
    package = root / "packages" / folder
    assert (package / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert "```python" in (package / "README.md").read_text()
    assert list((package / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_changelog_knows_the_version(tables, root, folder):
    version = tables[folder]["project"]["version"]
    headings = re.findall(r"^## (\S+) \(", (root / "packages" / folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_all_share_major_and_minor_and_pin_siblings_to_them(tables):
    versions = {Version(table["project"]["version"]) for table in tables.values()}
    assert len({(version.major, version.minor) for version in versions}) == 1
    minor = f"{next(iter(versions)).major}.{next(iter(versions)).minor}"
    for table in tables.values():
        for text in table["project"].get("dependencies", []):
            requirement = Requirement(text)
            if requirement.name.startswith("lamella"):
                assert str(requirement.specifier) == f"~={minor}.0", text
            assert requirement.name != "torch" or "==" not in str(requirement.specifier), "only a range of torch"


def test_leaves_require_nothing_at_all(tables):
    for folder in ("kvtier", "specdec"):
        assert tables[folder]["project"]["dependencies"] == []


def test_types_and_style_are_checked_for_the_oldest_python_that_is_supported(tables, alone, root):
    (oldest,) = {table["project"]["requires-python"] for table in tables.values()}
    settings = alone.tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    assert oldest == f">={settings['mypy']['python_version']}"
    assert settings["ruff"]["target-version"] == "py" + settings["mypy"]["python_version"].replace(".", "")


GOOD = ["lamella/kvtier/__init__.py", "lamella/kvtier/py.typed", "lamella/kvtier/a/b.py", "x.dist-info/METADATA",
        "x.dist-info/licenses/LICENSE"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "mistake"),
    [
        (GOOD, None),
        ([*GOOD, "lamella/__init__.py"], "lies directly in the namespace"),
        ([*GOOD, "lamella/specdec/_C.so"], "of another package"),
        ([*GOOD, "tests/test_a.py"], "outside lamella/"),
        ([name for name in GOOD if "typed" not in name], "py.typed is missing"),
        ([name for name in GOOD if "LICENSE" not in name], "license text is missing"),
    ],
)
def test_what_a_wheel_may_hold(alone, names, mistake):
    found = alone.wheel_mistakes(names, "kvtier")
    assert found == [] if mistake is None else [mistake in text for text in found] == [True]


def package(alone, folder, requires=(), extras=()):
    extras = {name: [Requirement(text) for text in texts] for name, texts in dict(extras).items()}
    return alone.Package(Path(folder), f"lamella-{folder}", [Requirement(text) for text in requires], extras, [])


def test_an_environment_takes_what_is_declared_through_siblings_and_their_asked_extras(alone):
    packages = {
        "lamella-a": package(alone, "a", ["lamella-b[fast]~=0.1.0", "zmq"], {"plot": ["matplotlib"]}),
        "lamella-b": package(alone, "b", ["lamella-c"], {"fast": ["torch"], "slow": ["numpy"]}),
        "lamella-c": package(alone, "c", ["attrs"]),
    }
    bare = alone.needs(packages["lamella-a"], packages, with_extras=False)
    assert {p.name for p in bare.siblings} == {"lamella-b", "lamella-c"}
    assert {r.name for r in bare.third_party} == {"zmq", "torch", "attrs"}
    full = alone.needs(packages["lamella-a"], packages, with_extras=True)
    assert {r.name for r in full.third_party} == {"zmq", "torch", "attrs", "matplotlib"}
    assert alone.needs(packages["lamella-c"], packages, with_extras=True).siblings == []


def test_the_closure_follows_requirements_and_refuses_what_is_missing_or_too_old(alone):
    names = {d.metadata["Name"].lower() for d in alone.closure([Requirement("hypothesis")])}
    assert {"hypothesis", "sortedcontainers"} <= names
    assert "torch" not in names
    with pytest.raises(alone.Failure, match="not installed"):
        alone.closure([Requirement("lamella-nonexistent")])
    with pytest.raises(alone.Failure, match="is installed here"):
        alone.closure([Requirement("hypothesis<1")])
    assert alone.closure([Requirement("lamella-nonexistent; python_version < '3'")]) == []


def test_pytest_means_the_same_without_the_repository(alone):
    settings = alone.pytest_settings()
    assert "--import-mode=importlib" in settings
    assert "    error\n" in settings
    assert settings.endswith("testpaths = tests\n")


@pytest.fixture
def release(tool):
    return tool("release")


@pytest.fixture
def dated(tmp_path) -> Path:
    """A repository with one package, native, ready to be released as 0.1.2."""
    folder = tmp_path / "packages" / "specdec"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "lamella-specdec"\nversion = "0.1.2"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.2 (2026-02-03)\n\n- one\n")
    (folder / "CMakeLists.txt").write_text("")
    return tmp_path


def test_a_tag_names_package_and_version(release, dated):
    assert release.read_tag("specdec-v0.1.2", dated) == ("specdec", "0.1.2", True)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v0.1.2", "no release tag"),
        ("specdec-v0.1", "no release tag"),
        ("kvtier-v0.1.2", "no package 'kvtier'"),
        ("specdec-v0.1.3", "says 0.1.2"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(release, dated, tag, message):
    with pytest.raises(ValueError, match=message):
        release.read_tag(tag, dated)


def test_an_undated_changelog_is_not_released(release, dated):
    (dated / "packages" / "specdec" / "CHANGELOG.md").write_text("## 0.1.2 (unreleased)\n")
    with pytest.raises(ValueError, match="no dated section"):
        release.read_tag("specdec-v0.1.2", dated)
