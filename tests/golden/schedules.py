#!/usr/bin/env python3
"""Learning rates of transformers' schedules, for crates/run-config/src/optimizer.rs.

    python3.11 -m venv ~/schedules && ~/schedules/bin/pip install torch==2.13.0 transformers==5.23.0
    ~/schedules/bin/python tests/golden/schedules.py > tests/golden/schedules.json
"""

import json
import math

import torch
from transformers import get_scheduler

BASE = 3e-4


def rates(name, total, warmup, kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    schedule = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=kwargs)
    found = []
    for _ in range(total + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def case(name, total, warmup, kwargs):
    steps = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    settings = {"learning_rate": BASE, "lr_scheduler_type": name, "warmup_steps": warmup, "lr_scheduler_kwargs": kwargs}
    return {"settings": settings, "total_steps": total, "learning_rates": rates(name, total, steps, kwargs)}


CASES = [
    ("constant_with_warmup", [{}]),
    ("linear", [{}]),
    ("cosine", [{}, {"num_cycles": 1.5}]),
    ("cosine_with_restarts", [{}, {"num_cycles": 3}]),
    ("cosine_with_min_lr", [{"min_lr": 2e-5}, {"min_lr_rate": 0.1}, {"min_lr_rate": 0.0}]),
    ("polynomial", [{}, {"power": 2.0}, {"lr_end": 1e-5, "power": 0.5}]),
    ("inverse_sqrt", [{}, {"timescale": 5}]),
]
cases = [case(name, 24, warmup, kwargs) for name, all_kwargs in CASES for kwargs in all_kwargs for warmup in [0, 5, 0.1]]
print(json.dumps(cases))
