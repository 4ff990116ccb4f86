"""Build hook: ``sglang_hisparse_plugin.pth`` goes to the top of site-packages, in editable installs too."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PTH = "sglang_hisparse_plugin.pth"


class PthBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        key = "force_include_editable" if version == "editable" else "force_include"
        build_data[key][PTH] = PTH
