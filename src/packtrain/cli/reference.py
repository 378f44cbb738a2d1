"""``packtrain recipe``: the reference of all settings."""

from __future__ import annotations

import sys

from packtrain.config.reference import as_markdown, reference


def show_reference(markdown: bool) -> None:
    """Print it for a reader, or as the text of docs/recipe.md."""
    if markdown:
        sys.stdout.write(as_markdown())
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    for section in reference():
        console.print(Text(section.title, "bold"), Text(section.description, "dim"))
        for setting in section.settings:
            default = f" = {setting.default}  " if setting.default else "  must be given  "
            allowed = setting.allowed.replace("`", "")
            line = Text.assemble((setting.key, "cyan"), default, (allowed, "dim"))
            console.print(Padding(line, (0, 0, 0, 2)))
            console.print(Padding(Text(setting.description.replace("`", "")), (0, 0, 0, 6)))
        console.print()
