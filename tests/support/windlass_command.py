"""`windlass COMMAND` in its own process."""

from __future__ import annotations

import asyncio
import os

__all__ = ["command"]


async def command(*argv: str, token: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "WINDLASS_TOKEN": token, "COLUMNS": "160"},
    )
    try:
        async with asyncio.timeout(60):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(), errors.decode()
