"""What TRL's own parser makes of config files: one JSON object a line on stdin, and the answer to it on stdout.

Each is {"script": "sft", "config": "the text of the file", "ask": "name of a field"}.
"""

import importlib
import json
import sys
import tempfile

parsers = {
    name: importlib.import_module(f"trl.scripts.{name}").make_parser() for name in ("sft", "dpo", "grpo")
}
fresh = {name: {a: a.default for a in parser._actions} for name, parser in parsers.items()}

for line in sys.stdin:
    asked = json.loads(line)
    parser = parsers[asked["script"]]
    for action, default in fresh[asked["script"]].items():  # a config file changes the parser's defaults
        action.default = default
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(asked["config"])
        file.flush()
        try:
            parsed = parser.parse_args_and_config(["--config", file.name], fail_with_unknown_args=True)
            (found,) = [p for p in parsed if hasattr(p, asked["ask"])]
            value = getattr(found, asked["ask"])
            answer = {"value": getattr(value, "value", value)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
