"""AppWorld's environment server: its process, and its JSON over HTTP.

AppWorld's dependencies clash with those of any training stack, so it runs under an interpreter of
its own (`appworld serve environment`). One server plays one task at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_gigpo_wire import build_opener, read_object, read_refusal, read_whole

_TAIL_CHARS = 800
_ASK_EVERY_S = 0.1
# A proxy that the environment names is for the world outside, not for servers of one's own.
_OPENER = build_opener(urllib.request.ProxyHandler({}))


class AppWorldError(RuntimeError):
    """The server is absent, silent, gone, or refuses a request."""


class Server:
    """A server that is being talked to.

    Args:
        url: Its address, such as `http://127.0.0.1:8000`.
        timeout_s: Seconds that an answer may take.
        process: The server's process, where it is our own: it ends with `close`, or with this
            object.
        errors: The file that takes what the process prints.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        process: subprocess.Popen | None = None,
        errors: Any = None,
    ):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._process = process
        self._errors = errors
        self.close = weakref.finalize(self, _stop, process, errors)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        start_timeout_s: float,
    ) -> Server:
        """Start a server process and wait until it answers.

        Args:
            command: Its command line; "{port}" in it becomes a free port.
            environment: Its environment variables.
            timeout_s: See `Server`.
            start_timeout_s: Seconds until it has to answer.

        Raises:
            AppWorldError: It cannot be started, ends, or stays silent.
        """
        port = _free_port()
        words = [word.replace("{port}", str(port)) for word in command]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=subprocess.STDOUT,
                env=dict(environment),
            )
        except OSError as error:
            errors.close()
            raise AppWorldError(
                f"AppWorld's server cannot be started by {words[0]!r} ({error}): python_executable "
                "must be the interpreter in which appworld is installed"
            ) from error
        server = cls(f"http://127.0.0.1:{port}", timeout_s, process, errors)
        try:
            server.wait(start_timeout_s)
        except BaseException:
            server.close()
            raise
        return server

    def wait(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            AppWorldError: It has ended, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise AppWorldError(self._ended())
            try:
                _OPENER.open(f"{self.url}/", timeout=timeout_s).close()
                return
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= deadline:
                    raise AppWorldError(
                        f"no AppWorld server answers at {self.url} within {timeout_s:g} s "
                        f"({error}): start it with `appworld serve environment`, or raise "
                        "env_config['start_timeout_s']"
                    ) from error
            time.sleep(_ASK_EVERY_S)

    def ask(self, what: str, data: Mapping[str, Any]) -> Any:
        """Post a request and return its `output`.

        Raises:
            AppWorldError: The server refuses it, does not answer in time, or is gone.
        """
        request = urllib.request.Request(
            f"{self.url}/{what}",
            data=json.dumps(dict(data)).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as answer:
                return read_object(read_whole(answer, self.timeout_s))["output"]
        except urllib.error.HTTPError as error:
            told = read_refusal(error, self.timeout_s, _TAIL_CHARS)
            # A server of our own says in its output what it hides from its clients.
            own = f"; its last words: {self._last_words()}" if self._process is not None else ""
            raise AppWorldError(f"AppWorld's server refuses {what}: {error} {told}{own}") from error
        except (ValueError, KeyError) as error:
            raise AppWorldError(
                f"{self.url} does not answer {what} as AppWorld's server does "
                f"({type(error).__name__}: {str(error)[:_TAIL_CHARS]})"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if self._process is not None and self._process.poll() is not None:
                raise AppWorldError(self._ended()) from error
            raise AppWorldError(
                f"AppWorld's server at {self.url} did not answer {what} within "
                f"{self.timeout_s:g} s ({error})"
            ) from error

    def _ended(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        return f"AppWorld's server ended with exit status {status}: {self._last_words()}"

    def _last_words(self) -> str:
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip()[-_TAIL_CHARS:]
        return told or "it said nothing"


def _stop(process: subprocess.Popen | None, errors: Any) -> None:
    if process is None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    if process.poll() is None:
        process.kill()
        process.wait()
    errors.close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
