from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts" / "check_docs.py")
assert _SPEC
assert _SPEC.loader
check_docs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_docs)


def complaints(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# One `thing`\n\n# Two\n\n# Two\n")
    return list(check_docs.check_file(tmp_path / "README.md", tmp_path.resolve()))


@pytest.mark.parametrize(
    "text",
    [
        "[a](docs/a.md) ![b](docs/a.md 'title') [c](https://x.org/none) [d](mailto:a@b.c)",
        "[a](docs/a.md#one-thing) [b](docs/a.md#two-1)",
        "# Here\n[a](#here)\n[r]: docs/a.md",
        "```\n[a](none.md)\n```\nand `[b](none.md)`",
        "```python\nx = 1\n```\n```bash\nif\n```",
    ],
)
def test_sound_text_passes(tmp_path: Path, text: str) -> None:
    assert complaints(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one\n[a](none.md)", "README.md:2: link 'none.md' leads nowhere"),
        ("[a](docs/a.md#three)", "no such heading"),
        ("[a](../x.md)", "leaves the repository"),
        ("[r]: none.md", "leads nowhere"),
        ("```python\nx = 1\nif\n```", "README.md:3: python block"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (found,) = complaints(tmp_path, text)
    assert says in found
