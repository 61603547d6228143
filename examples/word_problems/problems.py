"""Grade-school word problems of one and two steps, with answers in GSM8K's form: the steps, and a last line `#### N`.

A problem is a template and its numbers. A hash of both decides its side of the split, so that no
held-out problem occurs in training with other names or things, for any seed.
"""

import hashlib
import random
import re

NAMES = "Ana Ben Carla David Emma Felix Grace Henry Ivy Jack Kira Liam Mia Noah Olga Paul".split()
THINGS = "apples books cards coins cookies eggs flowers marbles nuts pens shells stamps stickers stones".split()
HELD_OUT_SHARE = 8  # one problem in this many


def small(r):
    return r.randint(2, 9)


def number(r):
    return r.randint(2, 20)


def add(r):
    x, y = number(r), number(r)
    return (x, y), "{a} has {x} {t}. {b} gives {a} {y} more. How many {t} does {a} have now?", [(x, "+", y)]


def days(r):
    x, y = number(r), number(r)
    text = "{a} finds {x} {t} on Monday and {y} {t} on Tuesday. How many {t} does {a} find altogether?"
    return (x, y), text, [(x, "+", y)]


def lose(r):
    x = r.randint(5, 30)
    y = r.randint(2, min(x - 1, 20))
    return (x, y), "{a} had {x} {t} and lost {y} of them. How many {t} are left?", [(x, "-", y)]


def boxes(r):
    x, y = small(r), small(r)
    return (x, y), "There are {x} boxes with {y} {t} in each. How many {t} are there?", [(x, "*", y)]


def share(r):
    y, each = small(r), small(r)
    x = y * each
    return (x, y), "{a} shares {x} {t} equally among {y} friends. How many {t} does each friend get?", [(x, "/", y)]


def bags(r):
    x, y, z = small(r), small(r), small(r)
    text = "{a} has {z} {t} and buys {x} bags with {y} {t} each. How many {t} does {a} have now?"
    return (x, y, z), text, [(x, "*", y), (x * y, "+", z)]


def eaten(r):
    x, y = small(r), small(r)
    z = r.randint(1, min(x * y - 1, 9))
    text = "{a} fills {x} jars with {y} {t} each. Then {b} takes {z} {t} away. How many {t} are left?"
    return (x, y, z), text, [(x, "*", y), (x * y, "-", z)]


def found(r):
    x, y = number(r), small(r)
    z = r.randint(1, min(x + y - 1, 9))
    text = "{a} has {x} {t}, finds {y} more and gives {z} to {b}. How many {t} does {a} keep?"
    return (x, y, z), text, [(x, "+", y), (x + y, "-", z)]


def together(r):
    x, y = number(r), small(r)
    text = "{a} has {x} {t}. {b} has {y} more than {a}. How many {t} do they have together?"
    return (x, y), text, [(x, "+", y), (x, "+", x + y)]


def price(r):
    x, y = small(r), small(r)
    z = x * y + small(r)
    text = "One of the {t} costs {x} dollars. {a} buys {y} {t} and pays with {z} dollars. How many dollars does {a} get back?"
    return (x, y, z), text, [(x, "*", y), (z, "-", x * y)]


ONE_STEP = [add, days, lose, boxes, share]
TWO_STEPS = [bags, eaten, found, together, price]
COMPUTE = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "/": lambda x, y: x // y}


def held_out(template, numbers):
    digest = hashlib.sha256(f"{template.__name__} {numbers}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def problems(seed, is_held_out=False, careless=0.0):
    """Yields `{question, answer}` of one side of the split endlessly; two of three problems have two steps.

    A share `careless` of their answers stops after the first step and gives its result as the answer.
    """
    r = random.Random(seed)
    while True:
        template = r.choice(ONE_STEP + 2 * TWO_STEPS)
        numbers, text, steps = template(r)
        (a, b), t = r.sample(NAMES, 2), r.choice(THINGS)
        if held_out(template, numbers) != is_held_out:
            continue
        question = text.format(a=a, b=b, t=t, **dict(zip("xyz", numbers)))
        unit = "dollars" if template is price else t
        if len(steps) == 2 and r.random() < careless:
            steps = steps[:1]
        results = [COMPUTE[sign](x, y) for x, sign, y in steps]
        lines = [f"{x}{sign}{y}={n} {unit}" for (x, sign, y), n in zip(steps, results)]
        yield {"question": question, "answer": "\n".join(lines) + f"\n#### {results[-1]}"}


def distinct(stream, count):
    """Returns the first `count` different problems of a stream."""
    rows = {}
    for row in stream:
        rows.setdefault(row["question"], row)
        if len(rows) == count:
            return list(rows.values())


def final_answer(text):
    """Returns the number after the last `####` of a text, or None."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return float(found[-1].replace(",", "")) if found else None


def is_correct(completion, answer):
    """Returns True if a completion ends in the number of the reference answer."""
    number = final_answer(completion)
    return number is not None and abs(number - final_answer(answer)) < 1e-6
