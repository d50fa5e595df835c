"""A whole distillation in one process: sample, train, measure, answer, with everything logged and saved on the way."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..card import QUESTIONS
from ..errors import TrainError
from .answers import answers, asked, loops
from .conversations import Recipe
from .decode import Decoder
from .kit import LENGTH, Kit
from .loop import Log, Loop
from .measure import measure
from .nets import Net
from .options import Options
from .rows import Stream, read_rows, save_rows, with_states
from .sample import held_out, sample
from .start import save_compact, start
from .student import Student
from .teacher import Teacher

#: Conversations that the student writes itself are colder: there it loops, and there the teacher corrects it.
STUDENT_RECIPE = Recipe(plain=0.08, begun=0.12, cold=0.05)


@dataclass(frozen=True)
class Plan:
    """What a run does beside ``Options``.

    start: ``teacher``, or a folder. rows: of a decoder. batches: of sampled rows, at most, within sample_seconds. The
    shares are those of the steps. student_batches: of rows that the student writes at ``student_at`` of the run.
    length, text_length: tokens of sampled rows and of rows of plain text. wait: seconds in which, after sampling, the
    rest of the kit may still arrive.
    """

    start: str
    rows: int = 4096
    batches: int = 20
    sample_seconds: float = 120.0
    encyclopedia_share: float = 0.12
    text_share: float = 0.15
    pairs_share: float = 0.08
    student_share: float = 0.15
    student_batches: int = 2
    student_at: float = 0.55
    length: int = LENGTH
    text_length: int = 1024
    held_prompts: int = 256
    wait: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.encyclopedia_share, self.text_share, self.pairs_share)
        if min(*shares, self.student_share) < 0 or sum(shares) >= 1 or self.student_share >= 1:
            raise TrainError(
                "training: shares must be 0 or more, those of encyclopedia, text and pairs together and that of the "
                f"student below 1; found {', '.join(f'{share:g}' for share in (*shares, self.student_share))}"
            )


def run(kit: Kit, plan: Plan, options: Options, folder: Path, resume: bool = False) -> dict[str, Any]:
    """Run it. folder: gets ``log.jsonl``, ``held-chat.npy``, ``sampled.npy``, ``state.pt``, ``compact/``,
    ``results.json`` and ``samples.json``. resume: go on with what lies there. Returns the results."""
    log = Log(folder / "log.jsonl")
    log("begin", plan=asdict(plan), options=asdict(options), device=str(kit.device))
    teacher = kit.teacher()
    log("loaded", teacher=str(kit.teacher_path))
    chat, streams = _sampled(kit, teacher, plan, options.seed, folder, log, resume)
    kit.wait(plan.start, plan.wait)
    student = start(teacher, plan.start, kit.text("encyclopedia", plan.text_length)[:16])
    log("started", at=plan.start)
    held = {"chat": chat, "encyclopedia": kit.text("held", plan.text_length)}
    streams += _plain_text(kit, teacher, plan, streams[0].tokens, options.batch_tokens)
    states = {name: (rows, with_states(teacher, rows, options.batch_tokens)) for name, rows in held.items()}
    log("streams", **{stream.name: list(stream.tokens.shape) for stream in streams}, memory=_memory(kit.device))
    loop = Loop(teacher, student, streams, states, options, folder, log)
    if resume and loop.load():
        log("resumed", step=loop.step)
    loop.measured()
    loop.warm_up()
    log("warm", memory=_memory(kit.device))
    if plan.student_batches:
        loop.run(plan.student_at)
        loop.streams.append(_by_student(kit, teacher, student, plan, options, log))
    loop.run()
    measures = {name: found.rounded() for name, found in loop.measured().items()}
    save_compact(student, folder / "compact")
    results = {
        "measures": measures, "steps": loop.step, "tokens_seen": loop.tokens,
        "distinct_tokens": sum(s.tokens.numel() for s in loop.streams if s.name != "pairs"),
    }  # fmt: skip
    _write(folder / "results.json", results)
    log("results", **results)
    report = samples(kit, {"teacher": teacher, "student": student}, plan.held_prompts)
    _write(folder / "samples.json", report)
    log("loops", **report["loops"])
    return results


def sample_files(kit: Kit, folder: Path, rows: int, batches: int, length: int, seconds: float) -> None:
    """Only the sampling of ``run``: writes ``held-chat.npy`` and ``sampled.npy``."""
    plan = Plan("teacher", rows=rows, batches=batches, sample_seconds=seconds, length=length)
    _sampled(kit, kit.teacher(), plan, 0, folder, Log(folder / "log.jsonl"), resume=False)


def _sampled(
    kit: Kit, teacher: Teacher, plan: Plan, seed: int, folder: Path, log: Log, resume: bool
) -> tuple[Tensor, list[Stream]]:
    """Held-out conversations, and the stream of the teacher's own rows."""
    chat_path, rows_path = folder / "held-chat.npy", folder / "sampled.npy"
    share = 1 - plan.encyclopedia_share - plan.text_share - plan.pairs_share
    if resume and chat_path.exists() and rows_path.exists():
        return read_rows(chat_path, kit.device), [Stream("sampled", read_rows(rows_path, kit.device), None, share)]
    decoder = Decoder(teacher, plan.rows, plan.length)
    log("decoder", memory=_memory(kit.device))
    chat = held_out(decoder, kit, log)
    save_rows(chat_path, chat)
    tokens, hidden = sample(
        decoder, kit, kit.prompts("train"), Recipe(), 1 + 2 * seed, plan.batches, plan.sample_seconds, log, keep=True
    )
    save_rows(rows_path, tokens)
    for row in tokens[:6].tolist():
        log("row", text=kit.tokenizer.decode(row, skip_special_tokens=False)[:600])
    del decoder
    if kit.device.type == "cuda":
        torch.cuda.empty_cache()
    return chat, [Stream("sampled", tokens, hidden, share)]


def _plain_text(kit: Kit, teacher: Teacher, plan: Plan, sampled: Tensor, batch_tokens: int) -> list[Stream]:
    """Streams of longer rows: encyclopedia, other text, and pairs of sampled rows, so that far positions are seen."""
    whole = plan.text_length // plan.length
    count = len(sampled) // whole // 8  # an eighth of the sampled rows
    named = {
        "encyclopedia": (kit.text("encyclopedia", plan.text_length), plan.encyclopedia_share),
        "text": (kit.text("other", plan.text_length), plan.text_share),
        "pairs": (sampled[: count * whole].reshape(count, whole * plan.length), plan.pairs_share),
    }
    return [
        Stream(name, rows, with_states(teacher, rows, batch_tokens), share)
        for name, (rows, share) in named.items()
        if share > 0 and len(rows)
    ]


def _by_student(kit: Kit, teacher: Teacher, student: Student, plan: Plan, options: Options, log: Log) -> Stream:
    """Rows that the student writes, with the teacher's states for them."""
    if kit.device.type == "cuda":
        torch.cuda.empty_cache()
    begin = time.monotonic()
    student.freeze()
    decoder = Decoder(student, max(1, plan.rows // 2), plan.length)
    prompts = kit.prompts("train")
    tokens, _ = sample(decoder, kit, prompts, STUDENT_RECIPE, 2 + 2 * options.seed, plan.student_batches, 1e9, log)
    del decoder
    student.thaw()
    if kit.device.type == "cuda":
        torch.cuda.empty_cache()
    for row in tokens[:3].tolist():
        log("row", text=kit.tokenizer.decode(row, skip_special_tokens=False)[:600])
    hidden = with_states(teacher, tokens, options.batch_tokens)
    log("by student", rows=len(tokens), seconds=round(time.monotonic() - begin, 1))
    share = plan.student_share / (1 - plan.student_share)  # the others' shares add up to 1
    return Stream("student", tokens, hidden, share)


def samples(kit: Kit, nets: dict[str, Net], held_prompts: int) -> dict[str, Any]:
    """Greedy answers of each net to ``QUESTIONS``, and how many loop; the same count for held-out prompts."""
    questions = [asked(question, kit.tokenizer) for question in QUESTIONS]
    pools = kit.prompts("held").pools.values()
    table = torch.cat([torch.from_numpy(pool) for pool in pools])
    chosen = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(7))[:held_prompts]]
    frame = kit.phrases
    others = [[*frame.systems[0], *row[row >= 0].tolist(), *frame.answer] for row in chosen]
    report: dict[str, Any] = {"answers": [{"question": question} for question in QUESTIONS], "loops": {}}
    for name, net in nets.items():
        found = answers(net, questions + others, kit.tokenizer)
        for entry, answer in zip(report["answers"], found, strict=False):
            entry[name] = answer
        report["loops"][name] = {
            "of_questions": sum(map(loops, found[: len(questions)])), "questions": len(questions),
            "of_held_out": sum(map(loops, found[len(questions) :])), "held_out": len(others),
        }  # fmt: skip
    return report


def evaluate(kit: Kit, models: dict[str, str], chat: Path, text_length: int, batch_tokens: int) -> dict[str, Any]:
    """Measures of models (name -> ``teacher`` or a folder) on the held-out conversations and encyclopedia text."""
    teacher = kit.teacher()
    held = {"chat": read_rows(chat, kit.device), "encyclopedia": kit.text("held", text_length)}
    states = {name: with_states(teacher, rows, batch_tokens) for name, rows in held.items()}
    found = {}
    for name, where in models.items():
        net = opened(teacher, where)
        found[name] = {part: measure(net, states[part], held[part], batch_tokens).rounded() for part in held}
    return found


def opened(teacher: Teacher, where: str) -> Net:
    """``teacher``, or the student in a folder of latents or of a checkpoint."""
    return teacher if where == "teacher" else start(teacher, where, torch.zeros(1, 1, device=teacher.device))


def _memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device.type == "cuda" else "-"


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
