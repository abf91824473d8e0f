"""The process that asks the Hugging Face Hub for a model's config and for the headers of its weights (`recording.hub`).

Nothing else is fetched: the headers come by requests for a range of bytes, and no answer is read beyond its bound. The
package huggingface_hub has the address (`HF_ENDPOINT`), the token, proxies, and whether it is offline. What lies in its
cache is taken where the network is not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staticmem.child import FailedError, answer, limit_memory
from staticmem.errors import described
from staticmem.files import read
from staticmem.frontends import checkpoint
from staticmem.frontends.architectures import CONFIG, LARGEST

FIRST = 100_000  # bytes of a file that are asked for: most headers are shorter, which saves a second request
TOGETHER = 8  # requests at a time
ENOUGH = 1 << 28  # bytes of all headers together
_PART = 1 << 16


def main(path: str) -> int:
    return answer(path, _work)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    limit_memory(job)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # else it asks for a list of agents, and tells which one it runs in
    asked = _Repository(job)
    try:
        config = asked.content(CONFIG, 0, LARGEST + 1)
        if config is None:
            raise FailedError("no config", f"{asked.place} has no such file of it, or no such repository")
    except FailedError as failure:
        from_cache = asked.in_cache(failure)
        if from_cache is None:
            raise
        return from_cache
    try:
        tensors, why = asked.tensors(), ""
    except (FailedError, ValueError) as error:
        tensors, why = [], str(error)
    return {
        "config": config.decode("utf-8", "replace"),
        "commit": asked.commit,
        "place": asked.place,
        "tensors": tensors,
        "unread": why,
    }


class _Repository:
    """A repository of models, of which files are read."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session

        self.name, self.revision = str(job["repository"]), str(job["revision"])
        self.place, self.commit, self.ends = constants.ENDPOINT, "", time.monotonic() + float(job["seconds"])
        self.timeout, self.session = float(constants.HF_HUB_DOWNLOAD_TIMEOUT), get_session()
        self.headers = {**build_hf_headers(library_name="staticmem"), "Accept-Encoding": "identity"}
        self.all_bytes = 0

    def content(self, name: str, first: int, size: int) -> bytes | None:
        """A range of bytes of a file, or fewer where the file ends; None where the repository has no such file.

        Raises:
            FailedError: the server does not give it.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name, name, revision=self.revision)
        headers = {**self.headers, "Range": f"bytes={first}-{first + size - 1}"}
        try:
            with self.session.stream("GET", url, headers=headers, timeout=self.timeout) as response:
                self._check(response)
                if response.status_code == 404:
                    return None
                if first and response.status_code != 206:
                    raise FailedError("network", f"{self.place} gives no range of a file")
                self.commit = self.commit or str(response.headers.get("X-Repo-Commit") or "")[:40]
                return self._read(response, size)
        except FailedError:
            raise
        except Exception as error:
            raise self._without_answer(error) from error

    def _read(self, response: Any, size: int) -> bytes:
        """The bytes of an answer, at most so many: a server may send a whole file, or without end."""
        data = bytearray()
        for part in response.iter_bytes(_PART):
            data += part
            if len(data) >= size:
                break
            if time.monotonic() > self.ends:
                raise FailedError("network", f"{self.place} answers too slowly")
        self.all_bytes += len(data)
        return bytes(data[:size])

    def _check(self, response: Any) -> None:
        status, code = int(response.status_code), str(response.headers.get("X-Error-Code") or "")
        if status < 400 or (status == 404 and code in ("", "EntryNotFound")):
            return
        if code == "GatedRepo" or status == 403:
            raise FailedError("gated", f"{self.place} answers {status}{self._with_token()}")
        if code == "RevisionNotFound":
            raise FailedError("missing", f"{self.place} has it, but not the revision '{self.revision}'")
        if status in (401, 404):
            raise FailedError(
                "missing", f"{self.place} answers {status}{self._with_token()}: it is not there, or private"
            )
        raise FailedError("network", f"{self.place} answers {status}")

    def _with_token(self) -> str:
        return " to the token" if "authorization" in self.headers else ", without a token"

    def _without_answer(self, error: Exception) -> FailedError:
        """What is said of a request that failed. The message of an error may have what it was sent with."""
        if type(error).__name__ == "OfflineModeIsEnabled":
            return FailedError("offline", "HF_HUB_OFFLINE is set, so that nothing is asked")
        if "Timeout" in type(error).__name__:
            return FailedError("network", f"{self.place} gave no answer within {self.timeout:g} seconds")
        token = str(self.headers.get("authorization", "")).removeprefix("Bearer ")
        text = described(error).replace(token or " ", "..." if token else " ")
        return FailedError("network", f"{self.place} cannot be reached: {text}")

    def tensors(self) -> list[checkpoint.Tensor]:
        """The tensors of the checkpoint, none where it has no safetensors files.

        Raises:
            ValueError: a header is damaged.
            FailedError: the server does not give it.
        """
        single = self._of_file(checkpoint.SINGLE)
        if single is not None:
            return single
        index = self.content(checkpoint.INDEX, 0, checkpoint.LARGEST_INDEX)
        names = [] if index is None else checkpoint.files_of_index(index)
        with ThreadPoolExecutor(TOGETHER) as pool:
            parts = list(pool.map(self._of_file, names))
        for name, part in zip(names, parts, strict=True):
            if part is None:
                raise ValueError(f"{name} is not there")
        return [tensor for part in parts for tensor in part or ()]

    def _of_file(self, name: str) -> list[checkpoint.Tensor] | None:
        if self.all_bytes > ENOUGH:
            raise ValueError("its headers are too large")
        start = self.content(name, 0, FIRST)
        if start is None:
            return None
        try:
            length = checkpoint.header_length(start)
            text = start[checkpoint.LENGTH : checkpoint.LENGTH + length]
            if len(text) < length:
                text = self.content(name, checkpoint.LENGTH, length) or b""
            return checkpoint.tensors_of(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def in_cache(self, failure: FailedError) -> dict[str, Any] | None:
        """The same from the cache of huggingface_hub, where nothing could be asked."""
        from huggingface_hub import try_to_load_from_cache

        if failure.kind not in ("offline", "network"):
            return None
        path = try_to_load_from_cache(self.name, CONFIG, revision=self.revision)
        if not isinstance(path, str):
            return None
        folder, why = os.path.dirname(path), ""
        try:
            tensors = checkpoint.tensors_of_folder(folder)
        except ValueError as error:
            tensors, why = [], str(error)
        return {
            "config": read(path, LARGEST).decode("utf-8", "replace"),
            "commit": os.path.basename(folder),
            "place": f"the cache of huggingface_hub ({failure.message})",
            "tensors": tensors,
            "unread": why,
        }
