"""What the wheel says of the repository, whose address is in the environment variable REPOSITORY (see the Makefile)."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
"""A picture or a link to a file: an exclamation mark or nothing, the text, the path."""


class Repository(MetadataHookInterface):
    """The project's URLs, and a README whose links and pictures lead there. Without an address there are none."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields."""
        address = os.environ.get("REPOSITORY")

        def absolute(link: re.Match[str]) -> str:
            picture, text, path = link.groups()
            if not address:
                return "" if picture else text
            return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{path})"

        text = _LINK.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/tree/main/docs",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
