"""`evenstep config-schema`: prints the JSON schema of run files, for editors and for checking files elsewhere."""

import json

from evenstep.config.schema import Config


def run(path: str, settings: list[str]) -> int:
    """Print it."""
    assert not path and not settings, "the command line takes neither"
    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0
