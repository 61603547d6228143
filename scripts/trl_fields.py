"""Writes the names of TRL's, transformers' and PEFT's options, which docs/from-trl.md must name.

    python -m venv /tmp/trl && /tmp/trl/bin/pip download --no-deps -d /tmp/trl/wheels trl==1.16.0 transformers==5.24.0 peft==0.21.2
    python scripts/trl_fields.py /tmp/trl/wheels > crates/run-config/src/keys/trl_fields.txt

It reads the sources in the wheels and imports nothing from them.
"""

import ast
import pathlib
import sys
import zipfile

CLASSES = [
    ("trl", "trl/trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trl/trainer/base_config.py", "_BaseConfig"),
    ("transformers", "transformers/training_args.py", "TrainingArguments"),
    ("trl", "trl/trainer/model_config.py", "ModelConfig"),
    ("trl", "trl/scripts/utils.py", "ScriptArguments"),
    ("trl", "trl/scripts/grpo.py", "GRPOScriptArguments"),
    ("peft", "peft/tuners/lora/config.py", "LoraConfig"),
    ("peft", "peft/config.py", "PeftConfig"),
    ("peft", "peft/config.py", "PeftConfigMixin"),
]


def fields(source: str, name: str) -> list[str]:
    """Returns the annotated names in the body of a class, which are a dataclass's fields."""
    [body] = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    annotated = [item for item in body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return [item.target.id for item in annotated if "ClassVar" not in ast.dump(item.annotation)]


def main() -> None:
    [folder] = sys.argv[1:]
    seen = set()
    for package, path, name in CLASSES:
        [wheel] = pathlib.Path(folder).glob(f"{package}-*.whl")
        print(f"# {wheel.name.split('-')[0]} {wheel.name.split('-')[1]}, {name}")
        for field in fields(zipfile.ZipFile(wheel).read(path).decode(), name):
            if field not in seen:
                print(field)
            seen.add(field)


main()
