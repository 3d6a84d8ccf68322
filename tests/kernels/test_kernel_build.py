"""Compiling, caching and choosing: what a machine without the right tools or rights gets."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from kernel_cases import native

import tokentight
from tokentight.kernels import compile as kernel_compile
from tokentight.kernels.compile import native_library
from tokentight.kernels.errors import NativeUnavailable
from tokentight.kernels.library import ThreadPool, load_library
from tokentight.kernels.native import NativeKernels
from tokentight.kernels.select import load_kernels


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("TOKENTIGHT_CACHE_DIR", str(directory))
    return directory


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def counting_compiler(tmp_path: Path, log: Path) -> str:
    """Stands in for a compiler: writes its output file and logs each compilation."""
    return script(
        tmp_path / "counting-cc",
        f'[ "$1" = --version ] && echo fake 1.0 && exit\n'
        f'while [ "$1" != -o ]; do shift; done\necho x >> {log}\necho library > "$2"',
    )


def test_the_cache_is_private_and_the_second_call_compiles_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CC", counting_compiler(tmp_path, log))
    first = native_library()
    assert native_library() == first
    assert first.parent == cache / "kernels"
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert log.read_text() == "x\n"
    assert native_library(("-DTT_PORTABLE",)) != first
    assert sorted(p.name for p in first.parent.iterdir() if p.suffix not in (".so",)) == ["lock"]


def test_two_first_starts_at_once_compile_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads, each with a lock of its own on the file, get one library."""
    log = tmp_path / "log"
    monkeypatch.setenv("CC", counting_compiler(tmp_path, log))
    barrier, found = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        found.append(native_library())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert log.read_text() == "x\n"
    assert found[0].is_relative_to(cache)


@pytest.mark.usefixtures("cache")
class TestUnavailable:
    def test_no_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(NativeUnavailable, match=r"no C compiler.*install one"):
            native_library()

    def test_cc_names_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler -O1")
        with pytest.raises(NativeUnavailable, match=r"\$CC.*no-such-compiler"):
            native_library()

    def test_a_failing_compiler(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body = '[ "$1" = --version ] && exit\necho "a.c:1: error: no headers" >&2\nexit 1'
        monkeypatch.setenv("CC", script(tmp_path / "bad-cc", body))
        with pytest.raises(NativeUnavailable, match="error: no headers") as caught:
            native_library()
        assert "\n" not in str(caught.value)
        assert [p.name for p in (cache / "kernels").iterdir()] == ["lock"]

    def test_a_compiler_that_does_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", script(tmp_path / "bad-cc", "exit 3"))
        with pytest.raises(NativeUnavailable, match="does not run"):
            native_library()

    def test_a_library_that_does_not_load(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", counting_compiler(tmp_path, tmp_path / "log"))
        with pytest.raises(NativeUnavailable, match="cannot be loaded"):
            NativeKernels(1)

    def test_a_read_only_cache(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a read-only mount answers, which stops root as well."""

        def refuse(*_: object) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        (cache / "kernels").mkdir(parents=True, mode=0o700)
        monkeypatch.setattr(kernel_compile.os, "open", refuse)
        with pytest.raises(NativeUnavailable, match=r"Read-only.*TOKENTIGHT_CACHE_DIR"):
            native_library()

    def test_a_cache_that_cannot_be_made(self, cache: Path) -> None:
        cache.write_text("a file stands here")
        with pytest.raises(NativeUnavailable, match=r"cannot be made.*TOKENTIGHT_CACHE_DIR"):
            native_library()

    @pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
    def test_a_cache_that_others_may_write(self, cache: Path, mode: int) -> None:
        (cache / "kernels").mkdir(parents=True)
        (cache / "kernels").chmod(mode)
        with pytest.raises(NativeUnavailable, match=r"others may write.*chmod 700"):
            native_library()

    def test_a_cache_of_another_user(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (cache / "kernels").mkdir(parents=True, mode=0o700)
        monkeypatch.setattr(kernel_compile.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(NativeUnavailable, match="belongs to another user"):
            native_library()

    def test_a_link_in_place_of_the_cache(self, cache: Path, tmp_path: Path) -> None:
        cache.mkdir()
        (tmp_path / "elsewhere").mkdir()
        (cache / "kernels").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(NativeUnavailable, match="not a directory"):
            native_library()

    def test_auto_serves_the_reference_and_says_so_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        threads = torch.get_num_threads()
        try:
            with caplog.at_level(logging.INFO):
                assert load_kernels("auto", 1).name == "reference"
        finally:
            torch.set_num_threads(threads)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no-such-compiler" in caplog.text
        with pytest.raises(NativeUnavailable):
            load_kernels("native", 1)


def test_a_library_that_others_may_write_is_compiled_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CC", counting_compiler(tmp_path, log))
    library = native_library()
    library.chmod(0o777)
    assert native_library() == library
    assert log.read_text() == "x\nx\n"
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    assert library.is_relative_to(cache)


def test_choices_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="kernels is 'fast'"):
        load_kernels("fast", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_threads is 0"):
        load_kernels("auto", 0)
    with pytest.raises(ValueError, match="run on the CPU"):
        load_kernels("native", 1, "cuda")


def test_auto_serves_the_native_kernels() -> None:
    native()  # skips, or fails under CI, where they cannot be built
    kernels = load_kernels("auto", 1)
    assert kernels.name == "native"


def test_closed_kernels_refuse_and_end_their_threads() -> None:
    native()

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    kernels = NativeKernels(4)
    assert count() == before + 3
    x = torch.randn(2, 8)
    kernels.softmax(x)
    kernels.close()
    kernels.close()
    assert count() == before
    with pytest.raises(RuntimeError, match="closed"):
        kernels.softmax(x)
    dropped = NativeKernels(2)
    del dropped
    assert count() == before


def test_threads_are_pinned_only_where_asked() -> None:
    native()
    allowed = sorted(os.sched_getaffinity(0))
    cpu = allowed[-1]
    existing = set(os.listdir("/proc/self/task"))
    kernels = NativeKernels(2, cpus=[allowed[0], cpu])
    (worker,) = set(os.listdir("/proc/self/task")) - existing
    assert os.sched_getaffinity(int(worker)) == {cpu}
    assert os.sched_getaffinity(0) == set(allowed)
    kernels.close()
    with pytest.raises(ValueError, match=r"cpus is \[0\]"):
        NativeKernels(2, cpus=[0])
    with pytest.raises(ValueError, match="num_threads is 0"):
        ThreadPool(load_library(native_library()), 0)


def test_calls_from_several_python_threads_take_turns() -> None:
    """One pool, four callers: every result has the bits of a single-threaded one."""
    native()
    kernels = NativeKernels(2)
    inputs = [torch.randn(40, 128) for _ in range(4)]
    weight = torch.randn(320, 128)
    packed, alone = kernels.pack(weight), native().pack(weight)
    wrong: list[int] = []

    def call(index: int) -> None:
        expected = native(1).linear(inputs[index], alone)
        for _ in range(50):
            if not torch.equal(kernels.linear(inputs[index], packed), expected):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    kernels.close()
    assert wrong == []


def test_a_process_ends_with_its_threads_alive() -> None:
    """Interpreter shutdown does not hang on or crash over an unclosed pool."""
    native()
    code = (
        "import torch\nfrom tokentight.kernels.native import NativeKernels\n"
        "k = NativeKernels(3)\nk.softmax(torch.zeros(2, 8))\n"
    )
    root = str(Path(tokentight.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
