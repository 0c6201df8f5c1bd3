"""``quest-jax doctor``."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Show versions, devices, the implementation each op uses and why, extras, and whether the small model is here.

    Attributes:
      json: print JSON instead of tables.
    """

    json: bool = False

    def run(self) -> int:
        """Prints the report."""
        from rich.console import Console

        from quest_jax.doctor import examine, show

        report = examine()
        if self.json:
            print(json.dumps(report, indent=2))
        else:
            show(report, Console())
        return 0
