"""An environment: the model guesses a number between 1 and 100.

    environments: { game: { command: [python3, examples/agents/number_game.py] } }

A row has the number as its `answer`. The reward is 1 for the number, and 0 for another guess; six guesses end the game. One process plays
many games at the same time, which `id` tells apart.
"""

import json
import re
import sys

GUESSES = 6


def reset(game, row):
    game.update(number=int(row["answer"]), left=GUESSES)
    return {"messages": [{"role": "user", "content": f"I think of a number from 1 to 100. You have {GUESSES} guesses."}]}


def step(game, message):
    game["left"] -= 1
    numbers = re.findall(r"\d+", message["content"])
    guess = int(numbers[-1]) if numbers else None
    is_right = guess == game["number"]
    if guess is None:
        text = "Guess a number."
    else:
        text = "Right!" if is_right else "Higher." if guess < game["number"] else "Lower."
    return {"content": text, "reward": float(is_right), "done": is_right or game["left"] == 0}


def main():
    games = {}
    for line in sys.stdin:
        event = json.loads(line)
        game = games.setdefault(event["id"], {})
        if event["event"] == "reset":
            answer = reset(game, event["row"])
        elif event["event"] == "step":
            answer = step(game, event["message"])
        else:
            answer = {}
        if event["event"] == "close" or answer.get("done"):
            del games[event["id"]]
        print(json.dumps({"id": event["id"], **answer}), flush=True)


if __name__ == "__main__":
    main()
