"""The least that answers a check-in with 204: fleet.py compares the server with it.

    python benchmarks/bare_handler.py KEYS

An ASGI function behind uvicorn verifies the request's Ed25519 signature and the body's SHA-256, and
nothing else. KEYS is a JSON file of public keys, in hexadecimal, by key id.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpress_protocols.signatures import (
    Content,
    Target,
    parse_signature,
    signed_headers,
    verify_request,
)


def handler(keys: dict[str, bytes]) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = signed_headers(scope["headers"])
        parsed = parse_signature(headers)
        target = Target(scope["method"], headers["host"], scope["path"])
        due = verify_request(parsed, keys[parsed.key_id], target, headers, now=time.time())
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        due.check(Content.of(body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    return answer


def main(keys: Path) -> None:
    known = {name: bytes.fromhex(key) for name, key in json.loads(keys.read_text()).items()}
    config = uvicorn.Config(
        handler(known), log_level="warning", access_log=False, server_header=False, lifespan="off"
    )
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
