"""Compiles the C kernels on first use and keeps the library in the user's own cache directory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def cache_dir() -> Path:
    """`$TOKENTIGHT_CACHE_DIR`, else `$XDG_CACHE_HOME/tokentight`, else `~/.cache/tokentight`."""
    own = os.environ.get("TOKENTIGHT_CACHE_DIR")
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "tokentight"
    try:
        return Path.home() / ".cache" / "tokentight"
    except RuntimeError as error:
        raise NativeUnavailable(
            "there is no home directory to cache the compiled kernels in; "
            "set TOKENTIGHT_CACHE_DIR to a directory of your own"
        ) from error


def native_library(extra_flags: Sequence[str] = ()) -> Path:
    """Path of the compiled shared library, compiling it first where the cache does not have it.

    Raises `NativeUnavailable` without a working compiler or a trustworthy, writable cache.
    """
    compiler = _find_compiler()
    version = _compiler_version(compiler)
    flags = (*BASE_FLAGS, _cpu_flag(), *extra_flags)
    key = _key(compiler, version, flags)
    directory = cache_dir() / "kernels"
    _claim_directory(directory)
    library = directory / f"tokentight-{key}.so"
    if _is_trusted_file(library):
        return library
    with _lock(directory):
        if not _is_trusted_file(library):
            _compile(compiler, flags, library)
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


def _claim_directory(directory: Path) -> None:
    """Code is loaded from here: it must be ours, and nobody else's to write."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise NativeUnavailable(
            f"the cache directory {directory} cannot be made ({error.strerror or error}); "
            "set TOKENTIGHT_CACHE_DIR to a writable directory of your own"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise NativeUnavailable(
            f"the cache directory {directory} is not a directory (a link, perhaps); "
            "remove it or set TOKENTIGHT_CACHE_DIR"
        )
    if found.st_uid != os.geteuid():
        raise NativeUnavailable(
            f"the cache directory {directory} belongs to another user (uid {found.st_uid}); "
            "set TOKENTIGHT_CACHE_DIR to a directory of your own"
        )
    if found.st_mode & 0o022:
        raise NativeUnavailable(
            f"others may write to the cache directory {directory} "
            f"(mode {stat.S_IMODE(found.st_mode):o}); run `chmod 700 {directory}`"
        )


def _is_trusted_file(library: Path) -> bool:
    try:
        found = library.lstat()
    except OSError:
        return False
    ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return ours and stat.S_ISREG(found.st_mode)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache directory {directory} cannot be written ({error.strerror}); "
            "set TOKENTIGHT_CACHE_DIR to a writable directory of your own"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: list[str], flags: Sequence[str], library: Path) -> None:
    sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.c"))]
    try:
        descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
        os.close(descriptor)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache directory {library.parent} cannot be written ({error.strerror}); "
            "set TOKENTIGHT_CACHE_DIR to a writable directory of your own"
        ) from error
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
