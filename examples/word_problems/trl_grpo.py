"""Runs configs/train/word-problems.yaml in TRL's GRPOTrainer.

    python examples/word_problems/trl_grpo.py runs/word-problems --config configs/train/word-problems.yaml --output trl.jsonl

Settings come from the configuration of `grpo train`, so that the two cannot differ by mistake. Writes a row of
JSON per step: `step`, `seconds` and `cpu_seconds` of training so far (loading and evaluations not counted), `reward`, and after
evaluations `accuracy`. The last row describes the whole process: `wall_s`, `cpu_s` and `peak_rss_mib`.
"""

import argparse
import json
import os
import pathlib
import resource
import time

BEGIN = time.time()


def settings(path, overrides):
    import yaml

    config = yaml.safe_load(path.read_text())
    for assignment in overrides:
        key, value = assignment.split("=", 1)
        section = config
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = yaml.safe_load(value)
    return config


def grpo_config(config, seed, folder):
    """Returns the settings of `grpo train` under TRL's names."""
    from trl import GRPOConfig

    grpo, loss, optimizer, rollout = (config[name] for name in ("grpo", "loss", "optimizer", "rollout"))
    micro_batches = grpo["gradient_accumulation_steps"]
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=grpo["max_steps"],
        per_device_train_batch_size=grpo["prompts_per_step"] * grpo["num_generations"] // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=grpo["num_generations"],
        num_iterations=grpo["num_iterations"],
        temperature=rollout["temperature"],
        top_k=0,
        top_p=1.0,
        max_completion_length=rollout["max_completion_length"],
        loss_type=loss["loss_type"],
        beta=loss["beta"],
        learning_rate=optimizer["learning_rate"],
        adam_beta1=optimizer["adam_beta1"],
        adam_beta2=optimizer["adam_beta2"],
        adam_epsilon=optimizer["adam_epsilon"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type=optimizer["lr_scheduler_type"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


class Clock:
    """Seconds and processor seconds of training, excluding the time inside `pause`."""

    def __init__(self):
        self.begin = self.now()

    @staticmethod
    def now():
        return time.time(), time.process_time()

    def read(self):
        return [now - begin for now, begin in zip(self.now(), self.begin)]

    def skip(self, work):
        before = self.now()
        result = work()
        self.begin = [begin + now - start for begin, now, start in zip(self.begin, self.now(), before)]
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="output folder of pretrain.py")
    parser.add_argument("--config", type=pathlib.Path, default="configs/train/word-problems.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--save", type=pathlib.Path, help="output folder of the trained model")
    options = parser.parse_args()

    # Read when torch is loaded. Spinning threads would count as processor time.
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from evaluate import greedy_accuracy
    from problems import is_correct

    torch.set_num_threads(options.threads)
    config = settings(options.config, options.set)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32)

    def rows(name):
        return [json.loads(line) for line in (options.folder / "data" / f"{name}.jsonl").read_text().splitlines()]

    held_out = rows("test")[: config["eval"]["num_problems"]]
    dataset = Dataset.from_list([
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows("train")
    ])
    found = {"rewards": []}

    def correct(completions, completion_ids, answer, **_):
        """Returns grpo's reward: 1 for a right answer that ended by itself."""
        ended = [ids[-1:] == [tokenizer.eos_token_id] for ids in completion_ids]
        right = [is_correct(c[0]["content"], a) for c, a in zip(completions, answer)]
        found["rewards"] = [float(e and r) for e, r in zip(ended, right)]
        return found["rewards"]

    output = options.output.open("w")

    def write(**row):
        print(json.dumps(row), file=output, flush=True)
        print(json.dumps(row), flush=True)

    class Record(TrainerCallback):
        def accuracy(self):
            tokens = config["rollout"]["max_completion_length"]
            work = lambda: greedy_accuracy(model, tokenizer, held_out, max_new_tokens=tokens)
            return self.clock.skip(work)

        def on_train_begin(self, *_, **__):
            self.clock = Clock()
            write(step=0, seconds=0.0, cpu_seconds=0.0, accuracy=self.accuracy())

        def on_step_end(self, args, state, control, **_):
            seconds, cpu_seconds = self.clock.read()
            reward = sum(found["rewards"]) / len(found["rewards"])
            row = dict(step=state.global_step, seconds=seconds, cpu_seconds=cpu_seconds, reward=reward)
            every = config["eval"]["eval_steps"]
            if state.global_step == state.max_steps or every and state.global_step % every == 0:
                row["accuracy"] = self.accuracy()
            write(**row)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=grpo_config(config, options.seed, options.output.with_suffix("")),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Record()],
    )
    trainer.train()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    write(wall_s=time.time() - BEGIN, cpu_s=usage.ru_utime + usage.ru_stime, peak_rss_mib=usage.ru_maxrss / 1024)
    if options.save:
        trainer.save_model(options.save)


if __name__ == "__main__":
    main()
