"""The questions of the demonstration: short facts, and sums behind a few worked examples.

The sums share their worked examples, a prompt long enough to be cut into chunks, so that under
load prefills, decodes and prefix-cache hits are mixed in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FACTS = (
    "What is the capital of France?",
    "How many days are there in a week?",
    "What colour do you get from blue and yellow paint?",
    "Name three planets of the solar system.",
    "What do bees make?",
    "At what temperature does water boil?",
    "Who wrote Romeo and Juliet?",
    "What is the opposite of cold?",
    "Which animal is known as man's best friend?",
    "What is the largest ocean on Earth?",
    "How many legs does a spider have?",
    "What do plants need to grow?",
    "What is the chemical symbol for gold?",
    "Which month comes after June?",
    "What is the currency of Japan?",
    "Name two primary colours.",
    "What is a baby cat called?",
    "What gas do humans need to breathe?",
    "In which country are the pyramids of Giza?",
    "How many minutes are there in an hour?",
    "What is the tallest mountain in the world?",
    "What language is spoken in Brazil?",
    "What does a thermometer measure?",
    "Which season comes after winter?",
    "What is frozen water called?",
    "Name a fruit that is yellow.",
    "Which planet is closest to the sun?",
    "What is the main ingredient of bread?",
    "How many sides does a triangle have?",
    "What do we call a scientist who studies stars?",
    "Which instrument has black and white keys?",
    "What is the first letter of the alphabet?",
)

WORKED_EXAMPLES = """\
Solve each problem step by step and end with the answer.

Question: A baker fills 6 trays with 12 rolls each and sells 50 of the rolls in the morning. \
How many rolls are left for the afternoon?
Answer: The baker makes 6 * 12 = 72 rolls. After selling 50, there are 72 - 50 = 22 rolls left. \
The answer is 22.

Question: Nora reads 15 pages on Monday, twice as many on Tuesday and 10 pages on Wednesday. \
How many pages does she read in the three days?
Answer: On Tuesday she reads 2 * 15 = 30 pages. Together that is 15 + 30 + 10 = 55 pages. \
The answer is 55.

Question: A bus has 40 seats. At the first stop 18 people get on, at the second 9 get on and 4 \
get off. How many seats are free?
Answer: There are 18 + 9 - 4 = 23 people on the bus. That leaves 40 - 23 = 17 free seats. \
The answer is 17.

"""

SUMS = (
    "Tom has {a} marbles and buys {b} bags with {c} marbles each. How many marbles has he now?",
    "A farm has {a} cows and {b} times as many hens, and then {c} hens are sold. "
    "How many hens are left?",
    "A ticket costs {a} coins. How much do {b} tickets cost after a discount of {c} coins in all?",
    "Mia bakes {a} cakes a day for {b} days and gives {c} of them away. How many does she keep?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request: its API path and the body that is particular to it."""

    title: str
    path: str
    body: Mapping[str, object]


def questions(number: int) -> list[Question]:
    """The first `number` questions, facts and sums in turn, greedy and sampled in turn by pairs.

    Sampled ones have a seed of their own. Beyond the facts' number, the facts come again with
    other seeds or lengths.
    """
    return [_fact(i // 2) if i % 2 == 0 else _sum(i // 2) for i in range(number)]


def _fact(index: int) -> Question:
    text = FACTS[index % len(FACTS)]
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 5, "max_tokens": 8 + index % 9}
    return Question(text, "/v1/chat/completions", body | _sampling(index))


def _sum(index: int) -> Question:
    text = SUMS[index % len(SUMS)].format(a=20 + 3 * index, b=2 + index % 7, c=3 + index % 5)
    prompt = f"{WORKED_EXAMPLES}Question: {text}\nAnswer:"
    body = {"prompt": prompt, "logprobs": 5, "max_tokens": 16 + index % 17, "stop": ["\n\n"]}
    return Question(text, "/v1/completions", body | _sampling(index))


def _sampling(index: int) -> dict[str, object]:
    if index % 2 == 0:
        return {"temperature": 0}
    return {"temperature": 0.8, "top_p": 0.95, "seed": index}
