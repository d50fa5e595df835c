"""The card of a model made here: what it was trained on, its held-out losses, and answers as they came.

``packer/card.py`` has the format; ``export --streams`` and ``distill export --run`` write it beside the checkpoint, and
with that it goes into the pack and onto the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer.card import CARD, check_card

from .checkpoint import Checkpoint, check_tokenizer
from .errors import TrainError
from .evaluate import Measures, chat_loss, text_loss
from .generate import GREEDY, generate
from .model import Decoder
from .tokenizer import ChatTokenizer

#: What models are looked at with; no run trains on them.
QUESTIONS = (
    "Hello!", "What is the capital of France?", "What is 2+2?", "Write a short story about a cat.",
    "What is a computer?", "Tell me a joke.", "Who are you?", "How are you today?", "Why is the sky blue?",
    "Give me three tips for sleeping better.", "Write a poem about the sea.", "What is photosynthesis?",
    "Write a Python function that adds two numbers.", "How do I make pancakes?",
    'Translate "good morning" to Spanish.', "What is the largest planet?", "Tell me about dogs.",
    "List five animals.", "What should I do when I feel sad?", "Explain gravity to a child.",
)  # fmt: skip
NEW_TOKENS = 96
_STAGES = {
    "pretrain": "",
    "sft": ", then to answer (sft)",
    "dpo": ", then to answer and by preferences (dpo)",
    "ppo": ", then to answer and for rewards (ppo)",
    "grpo": ", then to answer and for rewards (grpo)",
}


def stage_card(model: Decoder, found: Checkpoint, data: Path, samples: int = 3, note: str = "") -> dict[str, Any]:
    """The card of a model trained on the streams in ``data``. samples: greedy answers to the first QUESTIONS.

    Raises TrainError: streams of another tokenizer.
    """
    check_tokenizer(found, data)
    device = model.embedding.weight.device
    measures = Measures(min(Measures.sequence, found.model.max_context), tokens=100_000)
    losses = {
        "held-out text": text_loss(model, data, measures, device),
        "held-out answers in conversations": chat_loss(model, data, measures, device),
    }
    tokenizer = ChatTokenizer(data)
    asked = [tokenizer.prompt([{"role": "user", "content": text}]) for text in QUESTIONS[:samples]]
    replies = generate(model, asked, NEW_TOKENS, GREEDY, tokenizer.ends) if asked else []
    card = {
        "trained_on": _trained_on(found, data),
        "tokens": found.tokens,
        "held_out": [
            {"text": text, "loss": one["loss"], "tokens": one["tokens"]}
            for text, one in losses.items()
            if one["tokens"]
        ],
        "samples": [
            {"prompt": question, "answer": tokenizer.decode(reply).strip() or "(nothing)"}
            for question, reply in zip(QUESTIONS, replies, strict=False)
        ],
        "sampling": f"The likeliest token at each step (greedy), at most {NEW_TOKENS} of them; not chosen.",
        **({"notes": note} if note else {}),
    }
    return check_card(card, CARD)


def _trained_on(found: Checkpoint, data: Path) -> str:
    try:
        record = json.loads((data / "streams.json").read_text(encoding="utf-8"))
        sources = ", ".join(f"{name} ({count:,})" for name, count in record["sources"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"{data / 'streams.json'}: cannot be read ({error!r}); prepare the streams again") from None
    stage = _STAGES.get(str(found.info.get("stage")), f", last by {found.info.get('stage')}")
    return (
        f"From scratch in {found.model.label} precision{stage}. Documents of each source: {sources}. "
        f"Its vocabulary of {record['vocabulary']:,} tokens was made from the same text."
    )


def distilled_card(run: Path, tokens: int, name: str, note: str = "") -> dict[str, Any]:
    """The card of a distilled model, from ``results.json`` and ``samples.json`` of the run's folder.

    tokens: those that the model had seen before this run. name: the teacher's. Raises TrainError.
    """
    results, samples = (_read(run / file) for file in ("results.json", "samples.json"))
    try:
        whole = tokens + int(results["tokens_seen"])
        texts = {"chat": "conversations that the teacher wrote", "encyclopedia": "encyclopedia text"}
        held = [(texts[part], one) for part, one in results["measures"].items()]
        card = {
            "trained_on": f"Distilled from {name}: conversations that it wrote, encyclopedia summaries and other plain "
            f"text; {whole:,} tokens were seen, {int(results['distinct_tokens']):,} distinct ones in the last run.",
            "tokens": whole,
            "held_out": [
                {
                    "text": f"{text}, held out (the teacher: {math.log(one['teacher_perplexity']):.2f}); "
                    f"KL to it {one['kl']:.3f}, the same top token {one['same_top']:.1%}",
                    "loss": round(math.log(one["perplexity"]), 4),
                    "tokens": one["tokens"],
                }
                for text, one in held
            ],
            "samples": [
                {"prompt": one["question"], "answer": one["student"].strip() or "(nothing)"}
                for one in samples["answers"]
            ],
            "sampling": f"The likeliest token at each step (greedy), at most {NEW_TOKENS} of them; not chosen.",
            "notes": f"{_loops(samples['loops'])} {note}".strip(),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainError(f"{run}: results.json and samples.json are not those of a distillation ({error!r})") from None
    return check_card(card, CARD)


def _loops(counts: Mapping[str, Mapping[str, int]]) -> str:
    ours, theirs = counts["student"], counts["teacher"]
    text = (
        f"Of {ours['questions']} answers {ours['of_questions']} run in circles (its teacher: {theirs['of_questions']})"
    )
    if not ours["held_out"]:
        return f"{text}."
    return f"{text}, of {ours['held_out']} to held-out prompts {ours['of_held_out']} ({theirs['of_held_out']})."


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Put it beside a checkpoint's config."""
    (folder / CARD).write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error}); name the folder of a distillation that ended") from None
