"""From what a recipe calls a model to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from packtrain.errors import UserError, first_sentence, nearest

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_WEIGHTS = "*.safetensors"
_PATTERNS = ["*.json", _WEIGHTS, "*.jinja", "tokenizer.model", "*.txt"]


def model_folder(path: str, config_only: bool = False, weights: bool = True) -> Path:
    """The folder of a model: ``demo`` (fetched once), a folder as it is, or a hub id (downloaded once).

    Args:
        config_only: of a hub id only config.json is needed. weights: whether they are; else the tokenizer will do.

    Raises:
        UserError: nothing of that name, or a folder without config.json.
    """
    if path == "demo":
        from packtrain.models.demo import demo_model

        return demo_model()
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError("model.path", f"{folder} has no config.json", "give the folder that save_pretrained wrote")
        return folder
    if folder.exists():
        raise UserError("model.path", f"{folder} is a file", "give the folder it lies in")
    if _HUB_ID.match(path) and not folder.is_absolute():
        needed = _PATTERNS if weights else [pattern for pattern in _PATTERNS if pattern != _WEIGHTS]
        return _from_hub(path, ["config.json"] if config_only else needed)
    near = (
        nearest(folder.name, [p.name for p in folder.parent.iterdir() if p.is_dir()])
        if folder.parent.is_dir()
        else None
    )
    mend = f"did you mean {folder.parent / near}" if near else "give a folder, a hub id (owner/name) or `demo`"
    raise UserError("model.path", f"no such folder: {path}", mend)


def _from_hub(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise UserError(
            "model.path",
            f"'{name}' is not a folder here, and the hub cannot be reached",
            "give a folder on this machine",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        what = f"the hub refuses '{name}' ({first_sentence(error)})"
        raise UserError("model.path", what, "check the name and your access") from error
