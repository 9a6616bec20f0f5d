"""Weights from the Hugging Face hub, or from its cache on this machine when the hub cannot be reached.

One quick question decides whether the hub is there; only then are files asked for. HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME
and HF_TOKEN are honoured by huggingface_hub itself. Only safetensors weights are taken: pickled ones can run code.
"""

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalogue import ModelCard
from .layout import missing_part
from .manifest import Provenance
from .progress import Progress, watching
from .sources import DISK_FULL, SourceUnavailable

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

WANTED = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
UNWANTED = ["onnx/*", "openvino/*", "original/*", "runs/*"]


class HubSource:
    """`timeout` (seconds) bounds the question whether the hub answers, name resolution included."""

    name = "hub"

    def __init__(self, *, endpoint: str | None = None, timeout: float = 5.0) -> None:
        self._endpoint = endpoint
        self._timeout = timeout

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance:
        """See Source. An offline machine is served from the hub's own cache when the repository lies there."""
        try:
            info = self._ask(card.hub_id)
        except SourceUnavailable as reason:
            revision = self._from_cache(card.hub_id, into, reason)
        else:
            revision = info.sha or "unknown"
            self._download(info, into, progress)
        if missing := missing_part(into):
            raise SourceUnavailable(f"{card.hub_id} has no {missing}")
        return Provenance(origin=f"hub:{card.hub_id}@{revision}", weights="as published")

    def _ask(self, hub_id: str) -> "ModelInfo":
        """Describe the repository, in `timeout` seconds or not at all.

        A daemon thread waits for the answer, because a resolver without a network may block far longer than any timeout
        that can be handed to the HTTP client.
        """
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise SourceUnavailable("HF_HUB_OFFLINE is set")
        answer: list[Any] = []

        def ask() -> None:
            try:
                api = HfApi(endpoint=self._endpoint)
                answer.append(api.model_info(hub_id, timeout=self._timeout, files_metadata=True))
            except Exception as error:  # noqa: BLE001 - raised again below, in the calling thread
                answer.append(error)

        thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not answer:
            raise SourceUnavailable(f"the hub did not answer in {self._timeout:g} s")
        if isinstance(answer[0], Exception):
            raise SourceUnavailable(_first_line(answer[0])) from answer[0]
        return answer[0]

    def _download(self, info: "ModelInfo", into: Path, progress: Progress) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import filter_repo_objects

        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = list(filter_repo_objects(files, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        progress.stage(f"downloading {info.id} from the hub", total=sum(files[name] for name in wanted) or None)
        try:
            with watching(into, progress.at):
                snapshot_download(
                    info.id,
                    revision=info.sha,
                    endpoint=self._endpoint,
                    local_dir=into,
                    allow_patterns=WANTED,
                    ignore_patterns=UNWANTED,
                    tqdm_class=_silent_bars(),
                )
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            raise SourceUnavailable(_first_line(error)) from error  # whatever broke, the next source may do
        shutil.rmtree(into / ".cache", ignore_errors=True)

    def _from_cache(self, hub_id: str, into: Path, reason: SourceUnavailable) -> str:
        """Take the repository from huggingface_hub's cache, by hard links where possible; returns the commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            found = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=WANTED))
        except (LocalEntryNotFoundError, HFValidationError):
            raise reason from None
        for path in found.rglob("*"):
            if path.is_file() and any(path.match(pattern) for pattern in WANTED):
                target = into / path.relative_to(found)
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(path.resolve(), target)
        return found.name


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _silent_bars() -> Any:
    """huggingface_hub's bars, switched off without touching its global setting."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
