"""A real S3 server, ministack, in a process of its own.

It checks signatures of users that `make_user` makes, but not those of the root user, whose key is ACCESS_KEY.
"""

from __future__ import annotations

import html
import os
import re
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import S3Store

from tests.store.servers.ports import free_port, wait_for_port

ACCESS_KEY, SECRET_KEY = "test", "right-secret-of-the-tests"
BUCKET = "hybridkv-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""What a client needs in its environment."""


class S3Server:
    def __init__(self, directory: Path) -> None:
        """Objects are kept in `directory`, and are there again after a restart."""
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str, options: str = "", endpoint: str | None = None) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint or self.endpoint}{options}"

    def start(self) -> Self:
        env = {
            **os.environ,
            **CREDENTIALS,
            "AUTH": "true",
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "LOG_LEVEL": "ERROR",
            "S3_DATA_DIR": str(self.directory),
            "S3_PERSIST": "1",
            "SERVICES": "s3,iam",
            "STATE_DIR": str(self.directory / "state"),
            "TMPDIR": str(self.directory.parent),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        log = (self.directory.parent / "s3.log").open("ab")
        self._process = subprocess.Popen([sys.executable, "-m", "ministack"], env=env, stdout=log, stderr=log)
        log.close()
        wait_for_port(self.port, self._process)
        try:
            self._make_bucket()
            self._warm_up()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        self._end("terminate")

    def kill(self) -> None:
        self._end("kill")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.kill()

    def client(self, bucket: str = BUCKET, **options: Any) -> Any:
        """A plain client of the bucket."""
        keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "region": "us-east-1"}
        return S3Store(bucket, endpoint=self.endpoint, client_options={"allow_http": True}, **keys, **options)

    def make_user(self) -> dict[str, str]:
        """Make a user who may do everything in S3. Returns the environment variables with the user's keys."""
        policy = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
        user = f"user-{secrets.token_hex(4)}"
        self._ask_iam(Action="CreateUser", UserName=user)
        self._ask_iam(Action="PutUserPolicy", UserName=user, PolicyName="all", PolicyDocument=policy)
        reply = self._ask_iam(Action="CreateAccessKey", UserName=user)
        key, secret = (re.search(f"<{tag}>(.+?)</{tag}>", reply) for tag in ("AccessKeyId", "SecretAccessKey"))
        assert key is not None
        assert secret is not None
        return {"AWS_ACCESS_KEY_ID": key[1], "AWS_SECRET_ACCESS_KEY": html.unescape(secret[1])}

    def _ask_iam(self, **fields: str) -> str:
        body = urlencode({**fields, "Version": "2010-05-08"}).encode()
        scope = f"{ACCESS_KEY}/20260101/us-east-1/iam/aws4_request"
        who = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        with urlopen(Request(self.endpoint, body, {"Authorization": who}), timeout=10) as reply:
            return str(reply.read().decode())

    def _make_bucket(self) -> None:
        """obstore has no call for it, but a PUT of the bucket's name makes it: here the name is taken for a key."""
        with suppress(GenericError, AlreadyExistsError):  # the reply is not that to an object
            obstore.put(self.client("none", virtual_hosted_style_request=True), BUCKET, b"")
        obstore.list_with_delimiter(self.client())

    def _warm_up(self) -> None:
        """The first request of each kind takes a second: tests with short timeouts need not see that."""
        client, key = self.client(), "warm-up"
        obstore.put(client, key, b"1234", mode="overwrite", use_multipart=False)
        obstore.get_range(client, key, start=1, length=2)
        obstore.head(client, key)
        obstore.list(client, key).collect()
        obstore.delete(client, [key])

    def _end(self, how: str) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate() if how == "terminate" else process.kill()
        process.wait(10)
