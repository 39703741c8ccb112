"""Check the Markdown files of the root and of docs/.

Relative links must lead to a file, and to a heading where they name one. Python blocks must
compile; those of the README too, so that its first example cannot rot unnoticed. Links to other
sites are not followed: this needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ {0,3}\[[^\]]+\]:\s+<?([^\s>]+)>?")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
_ABSOLUTE = re.compile(r"^[a-z][a-z0-9+.-]*:|^//", re.IGNORECASE)


def blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Runs of lines as (number of the first, kind, lines).

    Kind is ``prose``, or the language of a fenced block (``code`` where it names none).
    """
    kind, first, lines, fence = "prose", 1, [], ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _FENCE.match(line)
        if not fence and match:
            yield first, kind, lines
            fence, kind, first, lines = match[1], match[2].lower() or "code", number + 1, []
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield first, kind, lines
            fence, kind, first, lines = "", "prose", number + 1, []
        else:
            lines.append(line)
    yield first, kind, lines


def anchors(text: str) -> set[str]:
    """The fragments that a file's headings answer to, as GitHub makes them."""
    found: dict[str, int] = {}
    for _, kind, lines in blocks(text):
        if kind != "prose":
            continue
        for line in lines:
            if heading := _HEADING.match(line):
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
                slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
                seen = found.get(slug, 0)
                found[slug] = seen + 1
                if seen:
                    found[f"{slug}-{seen}"] = 1
    return set(found)


def check_link(source: Path, target: str, root: Path) -> str | None:
    """What is wrong with a link, or None."""
    path, _, fragment = unquote(target).partition("#")
    file = (source.parent / path).resolve() if path else source.resolve()
    if not file.is_relative_to(root):
        return f"link {target!r} leaves the repository"
    if not file.exists():
        return f"link {target!r} leads nowhere"
    if fragment and file.suffix == ".md" and fragment not in anchors(file.read_text("utf-8")):
        return f"link {target!r}: no such heading"
    return None


def check_file(source: Path, root: Path) -> Iterator[str]:
    """The complaints about one Markdown file, each with its line."""
    name = source.relative_to(root)
    for first, kind, lines in blocks(source.read_text("utf-8")):
        if kind in ("python", "py"):
            try:
                compile("\n".join(lines), str(name), "exec", dont_inherit=True)
            except SyntaxError as error:
                yield f"{name}:{first + (error.lineno or 1) - 1}: python block: {error.msg}"
        elif kind == "prose":
            for number, line in enumerate(lines, start=first):
                for link in _LINK.finditer(_CODE_SPAN.sub("", line)):
                    target = link[1] or link[2]
                    if not _ABSOLUTE.match(target) and (wrong := check_link(source, target, root)):
                        yield f"{name}:{number}: {wrong}"


def main(root: Path) -> int:
    """Check a repository; print the complaints; 1 if there are any."""
    files = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    complaints = [line for file in files for line in check_file(file, root)]
    for line in complaints:
        print(line, file=sys.stderr)
    print(f"docs: {len(files)} files, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
