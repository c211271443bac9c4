"""Report on the source. `make lint` prints it, and it sets no limits.

The report counts the lines of `src/windlass` by package and the lines of the files between `publish(version)` and the
wire, in the reading order of docs/architecture.md. It also counts private words that remain, with the usual term for
each.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "windlass"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
HEADING = "## From `publish(version)` to bytes on the wire"

PRIVATE_WORDS = {
    "door": "liveness listener",
    "doorway": "peer liveness",
    "knock": "reconnect",
    "visitor": "client",
    "book": "rollout table",
    "lane": "stripe, connection, lock",
    "by hand": "trainer-driven update",
    "standing": "pending publish",
    "at rest": "quiesced",
    "rest gate": "quiesce gate",
    "tainted": "mixed weights",
    "poisoned": "quarantined",
    "fate": "outcome",
    "farewell": "abort notice",
    "forgo": "skip upstream",
    "feed": "relay write",
    "inlet": "relay receiver",
    "outlet": "relay sender",
    "landing": "staging memory, write progress",
    "elsewhere": "remote memory of this host",
    "mirror": "shadow copy",
    "tether": "parent watchdog",
    "wordless": "closed without result",
    "patience": "timeout",
    "vouched": "proxied",
    "second opinion": "cross-check",
    "spent": "highest reserved version",
    "suspect": "misaddressed",
    "astray": "misaddressed",
    "withdrawn": "deferred free",
    "learn": "capture",
    "learnt": "captured layout",
    "membership": "engine rank",
    "conclusion": "round effects",
    "resumes": "resume retries",
}
"""Private word -> usual term. Words with other common meanings are not listed."""


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_by_room() -> dict[str, tuple[int, int]]:
    """Return (files, lines) of every package; top-level modules count as one package."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "(top)"
        files[room] += 1
        lines[room] += lines_of(path)
    return {room: (files[room], lines[room]) for room in files}


def way_of_publish() -> list[str]:
    """Return the paths of the numbered list under `HEADING`, relative to the package.

    Raises:
        LookupError: the page has no such list.
    """
    _, found, rest = ARCHITECTURE.read_text(encoding="utf-8").partition(HEADING)
    paths = re.findall(r"^\d+\. `([\w/]+\.py)`", rest.partition("\n## ")[0], re.MULTILINE)
    if not found or not paths:
        raise LookupError(f"{ARCHITECTURE}: must have a numbered list of files under {HEADING!r}")
    return paths


def private_words() -> Counter[str]:
    """Return the number of uses of each word in names, texts and comments of the package."""
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.read_text(encoding="utf-8")).lower()
        for word in PRIVATE_WORDS:
            pattern = word.replace(" ", "[ _-]")
            found[word] += len(re.findall(rf"(?<![a-z]){pattern}s?(?![a-z])", text))
    return +found


def main() -> int:
    """Print the report; return 1 if the list of files names a missing file."""
    rooms = lines_by_room()
    total_files, total_lines = (sum(counts) for counts in zip(*rooms.values(), strict=True))
    print(f"src/windlass: {total_lines:,} lines in {total_files} files")
    for room, (files, lines) in sorted(rooms.items(), key=lambda item: -item[1][1]):
        print(f"  {room:14} {lines:6,} in {files:3}")
    way = way_of_publish()
    missing = [path for path in way if not (PACKAGE / path).is_file()]
    there = [(path, lines_of(PACKAGE / path)) for path in way if path not in missing]
    print(f"publish(version) to the wire: {sum(n for _, n in there):,} lines in {len(there)} files")
    for path, lines in there:
        print(f"  {path:30} {lines:5,}")
    for path in missing:
        print(f"  {path}: in docs/architecture.md, and not there")
    words = private_words()
    print(f"private words: {words.total()} uses of {len(words)}")
    for word, count in words.most_common():
        print(f"  {word:14} {count:4}  {PRIVATE_WORDS[word]}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
