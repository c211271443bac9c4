"""Fuzz every decoder of peer bytes, guided by coverage (atheris, libFuzzer): `make fuzz`.

`fuzz_decoders.py [--seconds 600] [--corpus build/fuzz] [NAME ...]` runs one decoder after another,
each in its own process, from the messages of `decoders.DECODERS` and the inputs that earlier runs
kept. An input that raises an unexpected error is printed and kept as a file. Run that file
again with `--input FILE NAME`, and add it to `FOUND` in `tests/control/test_decoders.py` together
with the fix.

atheris has wheels for Linux on x86-64 only, so it is an extra (`pip install '.[fuzz]'`) and no
part of `make test`. There, Hypothesis searches for bytes that reach more lines (`target`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

MAX_NBYTES = 4096
ONE_INPUT_S = 10
ROOT = Path(__file__).resolve().parents[2]


def fuzz(name: str, seconds: int, corpus: Path, artifacts: str) -> None:
    """Fuzz one decoder. This never returns, because libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["windlass"]):
        from decoders import DECODERS
    decoder = DECODERS[name]
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_NBYTES}",
        f"-timeout={ONE_INPUT_S}",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={artifacts}",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], decoder.check)
    atheris.Fuzz()


def write_corpus(name: str, folder: Path) -> Path:
    """Write the valid messages to the folder where libFuzzer starts."""
    from decoders import DECODERS

    folder.mkdir(parents=True, exist_ok=True)
    for number, message in enumerate(DECODERS[name].valid):
        (folder / f"valid-{number}").write_bytes(message)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="decoders; all by default")
    parser.add_argument(
        "--seconds", type=int, default=600, help="seconds for all decoders together"
    )
    parser.add_argument("--corpus", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--input", type=Path, help="decode this file once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    if options.child:
        (name,) = options.names
        folder = options.corpus / name.replace(" ", "_")
        fuzz(name, options.seconds, folder, f"{options.corpus}/crash-{folder.name}-")
    from decoders import DECODERS

    names = options.names or list(DECODERS)
    if options.input is not None:
        DECODERS[names[0]].check(options.input.read_bytes())
        return 0
    failed = []
    for name in names:
        write_corpus(name, options.corpus / name.replace(" ", "_"))
        seconds = max(1, options.seconds // len(names))
        arguments = ["--child", "--seconds", str(seconds), "--corpus", str(options.corpus), name]
        ended = subprocess.run(
            [sys.executable, __file__, *arguments],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        done = [line for line in ended.stderr.splitlines() if "number_of_executed_units" in line]
        print(f"{name}: {' '.join(done) or 'nothing ran'}, status {ended.returncode}", flush=True)
        if ended.returncode:
            failed.append(name)
            print(ended.stdout[-3000:], ended.stderr[-3000:], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
