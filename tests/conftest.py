"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.support import s3
from tests.support.job import Spec
from tests.support.tiny import Managers

# Machines differ and are busy: what a case costs is no property. CI draws the same cases always.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory on tmpfs, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="moc-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes to learn."""
    path = tmp_path_factory.mktemp("text") / "text.bin"
    path.write_bytes(bytes((i * i + i // 7) % 251 for i in range(40_000)))
    return path


@pytest.fixture
def spec(tmp_path: Path, memory_dir: Path, text: Path) -> Callable[..., Spec]:
    """Makes a `Spec` of this test: fresh directories, two virtual nodes."""

    def make(**options: Any) -> Spec:
        nodes = options.pop("nodes", 2)
        memory = tuple(memory_dir / f"node{i}" for i in range(nodes))
        return Spec(run_dir=tmp_path / "run", memory=memory, text=text, **options)

    return make


@pytest.fixture
def managers(tmp_path: Path, memory_dir: Path) -> Iterator[Managers]:
    """Makes `CheckpointManager` objects in this process and ends them after the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no pool of threads may live where other tests fork
    made = Managers(tmp_path / "run", memory_dir)
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3.Server]:
    """An S3-compatible server on this machine."""
    server = s3.Server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server: s3.Server) -> Iterator[str]:
    """``s3://`` and a new bucket of that server, which boto finds by the environment."""
    s3_server.script()
    with s3.environment(s3_server):
        yield f"s3://{s3_server.make_bucket()}"
    s3.end_loop()
