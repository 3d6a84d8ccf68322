"""Compiles the C kernels on first use and keeps the library in the user's own cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokentight.cache_dir import CacheDirError, cache_directory, locked, not_writable
from tokentight.kernels.errors import NativeUnavailable

SOURCE_DIR = Path(__file__).parent / "csrc"
BASE_FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=off",  # every fused multiply-add is written out
    "-fno-math-errno",
    "-fno-fast-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
COMPILE_TIMEOUT_S = 300


def native_library(extra_flags: Sequence[str] = ()) -> Path:
    """Path of the compiled shared library, compiling it first where the cache does not have it.

    Raises `NativeUnavailable` without a working compiler or a trustworthy, writable cache.
    """
    compiler = _find_compiler()
    version = _compiler_version(compiler)
    flags = (*BASE_FLAGS, _cpu_flag(), *extra_flags)
    key = _key(compiler, version, flags)
    try:
        directory = cache_directory("kernels")
        library = directory / f"tokentight-{key}.so"
        if _is_trusted_file(library):
            return library
        with locked(directory):
            if not _is_trusted_file(library):
                _compile(compiler, flags, library)
    except CacheDirError as error:
        raise NativeUnavailable(str(error)) from error
    return library


def _find_compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        command = shlex.split(chosen)
        if not command or shutil.which(command[0]) is None:
            raise NativeUnavailable(
                f"the compiler named by $CC ({chosen!r}) was not found; correct or unset CC"
            )
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NativeUnavailable(
        "no C compiler (cc, gcc, clang) was found; install one (Debian: apt install gcc libc6-dev)"
        " or name one in $CC"
    )


def _compiler_version(compiler: list[str]) -> str:
    try:
        done = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(
            f"the compiler {shlex.join(compiler)!r} does not run ({error}); repair it or set $CC"
        ) from error
    return done.stdout


def _cpu_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _cpu_identity() -> str:
    """Model and instruction sets: a library tuned for one CPU may not run on another."""
    wanted = ("flags", "Features", "model name", "CPU implementer", "CPU part")
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                lines.setdefault(name.strip(), value.strip())
    return f"{platform.machine()} {sorted(lines.items())}"


def _key(compiler: list[str], version: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (shlex.join(compiler), version, shlex.join(flags), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCE_DIR.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _is_trusted_file(library: Path) -> bool:
    try:
        found = library.lstat()
    except OSError:
        return False
    ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return ours and stat.S_ISREG(found.st_mode)


def _compile(compiler: list[str], flags: Sequence[str], library: Path) -> None:
    sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.c"))]
    try:
        descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
        os.close(descriptor)
    except OSError as error:
        raise not_writable(library.parent, error) from error
    try:
        done = subprocess.run(
            [*compiler, *flags, "-o", name, *sources, "-lm"],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise NativeUnavailable(
                f"{shlex.join(compiler)} failed to compile the kernels "
                f"({_first_error(done.stderr, done.returncode)}); "
                "repair the compiler or name another in $CC"
            )
        os.chmod(name, 0o700)
        os.replace(name, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(
            f"{shlex.join(compiler)} could not compile the kernels ({error}); "
            "repair the compiler or name another in $CC"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _first_error(stderr: str, returncode: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or [f"exit status {returncode}"])[0]
