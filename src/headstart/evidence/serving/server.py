"""A vLLM server on this machine: started, asked, stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

EXTENSION = "headstart.integrations.vllm.worker.WorkerExtension"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # offers collective_rpc
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_SECONDS, STOP_SECONDS = 300, 60


class Server:
    """A vLLM server with processes of its own; a context that waits for it and stops it.

    Parameters
    ----------
    python: the interpreter of an environment with vLLM and this package.
    model: folder of a checkpoint, served as "tiny".
    log: file that gets all output.
    plugin: whether vLLM loads headstart's.
    options: further options of `vllm serve`.
    environment: beside ENVIRONMENT and that of this process.

    Raises RuntimeError, with the end of the log, if the server ends by itself or never answers.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *,
        plugin: bool,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log = log
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        served = ["--model", str(model), "--served-model-name", "tiny"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    str(python),
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    *served,
                    *place,
                    "--worker-extension-cls",
                    EXTENSION,
                    *options,
                ],
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "VLLM_PLUGINS": "headstart" if plugin else "",
                    **(environment or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        for _ in range(2 * START_SECONDS):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
                self.get("/health")
                return self
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"vLLM's server did not start:\n{self.log.read_text()[-3000:]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self.kill()

    def get(self, path: str) -> bytes:
        """The body of the answer."""
        return self._request("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a JSON body, as JSON."""
        return json.loads(self._request("POST", path, body))

    def worker(self, method: str) -> Any:
        """What a method of `WorkerExtension` returns in the one worker."""
        (answer,) = self.post("/collective_rpc", {"method": method})["results"]
        return answer

    def counter(self, name: str) -> float:
        """The sum of a counter of /metrics over its labels."""
        lines = self.get("/metrics").decode().splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def leave(self, body: dict[str, Any]) -> None:
        """Ask for a stream of completions, and go away after its first line."""
        with contextlib.closing(self._connect()) as link:
            self._send(link, "POST", "/v1/completions", body | {"stream": True})
            link.getresponse().readline()

    def stop(self) -> None:
        """Ask the server to stop; RuntimeError unless all its processes end in time, and well."""
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while self.alive() and time.monotonic() < end:
            self.process.poll()
            time.sleep(0.2)
        if self.alive() or self.process.poll() != 0:
            raise RuntimeError(
                f"vLLM's server did not stop (exit code {self.process.poll()}):\n"
                f"{self.log.read_text()[-3000:]}"
            )

    def alive(self) -> bool:
        """Whether one of its processes is left."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """End what is left of it."""
        if self.alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        with contextlib.closing(self._connect()) as link:
            self._send(link, method, path, body)
            answer = link.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {data[:300].decode()}")
            return data

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    @staticmethod
    def _send(
        link: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> None:
        if body is None:
            link.request(method, path)
        else:
            link.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
