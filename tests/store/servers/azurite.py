"""Azurite, Azure's emulator of its blob storage. It checks shared keys. `make setup-azurite` installs it."""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import Self

from tests.store.servers.ports import free_port, wait_for_port

PROGRAM = Path(__file__).parents[3] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
IS_INSTALLED = PROGRAM.exists() and shutil.which("node") is not None
ACCOUNT, KEY = "hybridkvtests", base64.b64encode(b"right key of the tests, 32 bytes").decode()
CONTAINER = "hybridkv-tests"
CREDENTIALS = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
"""What a client needs in its environment."""
_API_VERSION = "2021-12-02"


class AzuriteServer:
    def __init__(self, directory: Path) -> None:
        """Objects are kept in `directory`, and are there again after a restart."""
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def url(self, prefix: str, options: str = "") -> str:
        return f"az://{CONTAINER}/{prefix}?endpoint={self.endpoint}{options}"

    def start(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.directory)]
        command = [str(PROGRAM), *place, "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        env = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.port, self._process)
        try:
            self._make_container()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Stop it. A second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(10)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.kill()

    def _make_container(self) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API_VERSION}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + "\n" * 12 + signed + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        digest = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
        headers |= {"Authorization": f"SharedKey {ACCOUNT}:{digest}", "Content-Length": "0"}
        url = f"{self.endpoint}/{CONTAINER}?restype=container"
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there already
                raise
