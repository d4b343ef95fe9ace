"""The JSON Schema of job.json, made from the dataclasses of `tuneplane.spec`: `python tests/tools/job_schema.py`.

Its output is docs/job.schema.json; a test compares the two. For programs of others that read job.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from tuneplane.spec import API_VERSION, JobSpec


def job_schema() -> dict[str, Any]:
    """The schema: as the reader of `tuneplane.spec`, it knows no key but those declared."""
    schema = msgspec.json.schema(JobSpec)
    definitions: dict[str, Any] = schema["$defs"]
    for definition in definitions.values():
        if "properties" in definition:
            definition["additionalProperties"] = False
            told = " ".join(definition.pop("description", "").split())
            if told and not told.startswith(f"{definition['title']}("):  # which dataclasses make up
                definition["description"] = told
    definitions["JobSpec"]["properties"]["apiVersion"] = {"const": API_VERSION}
    definitions["JobSpec"]["required"] = ["apiVersion", *definitions["JobSpec"]["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{API_VERSION}: job.json in the folder of a run",
        **schema,
    }


if __name__ == "__main__":
    json.dump(job_schema(), sys.stdout, indent=2, ensure_ascii=False)
    print()
