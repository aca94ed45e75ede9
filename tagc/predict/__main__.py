"""Which compressor trains faster at a model, ranks and a link: a prediction, in about a second and without a GPU.

    python -m tagc.predict --model gpt2 --ranks 16 --bandwidth 10gbps --gpu a100 [--plot FILE] [--csv FILE]
    python -m tagc.predict model=gpt2 ranks=16 bandwidth=10gbps gpu=a100

The model: a name of conf/model, or --layers and --width, or --parameters (a GPT-2 shape of about that size). Times are
modelled, bytes and memory are closed forms, losses are measured on small models. docs/predict.md says how and how well.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tagc.config import ModelConfig, load_option
from tagc.errors import UserError
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.network.link import format_rate
from tagc.predict.answer import (
    BASELINE,
    METHODS,
    Plan,
    Prediction,
    Question,
    list_outside,
    recommend,
)
from tagc.predict.evidence import GPUS, Evidence, load_evidence

GPT2_VOCAB = 50304
HEAD_WIDTH = 64
WIDTH_PER_LAYER = 45  # of the four GPT-2s: 64, 43, 36, 33
_SIZES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def parse_rate(text: str) -> float:
    """Mbit/s of a name of conf/bandwidth or of a number with a unit; infinite for no cap. Errors: ``UserError``."""
    match = re.fullmatch(r"([\d.]+)(mbps|gbps)", text.lower())
    try:
        if match:
            return float(match[1]) * (1000 if match[2] == "gbps" else 1)
        rate = load_option("bandwidth", text).get("rate_mbps")
    except ValueError as error:
        raise UserError(f"{error}; or write a rate such as 250mbps or 2.5gbps") from None
    return math.inf if rate is None else float(rate)


def shape_of_size(text: str, vocab_size: int, context: int) -> ModelConfig:
    """The GPT-2 shape nearest to a parameter count such as ``350M``, with that vocabulary. Errors: ``UserError``."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)([kmb]?)", text.lower())
    try:
        count = float(match[1]) * _SIZES[match[2]] if match else 0.0
    except ValueError:
        count = 0.0
    best: tuple[float, ModelConfig] | None = None
    for heads in range(1, 400):
        width = heads * HEAD_WIDTH
        layers = round((count - (2 * vocab_size + context) * width) / (12 * width**2))
        if 1 <= layers <= 1000:
            off = abs((12 * width**2 * layers + (2 * vocab_size + context) * width) / count - 1)
            misfit = off * 5 + abs(math.log(width / layers / WIDTH_PER_LAYER))
            if best is None or misfit < best[0]:
                best = (misfit, ModelConfig(text, layers, width, heads, context))
    if best is None:
        raise UserError(
            f"parameters={text} is no size of a GPT with a vocabulary of {vocab_size}; write a number such as 350M or "
            "1.5B, or a smaller --vocab"
        )
    return best[1]


def make_model(options: argparse.Namespace) -> tuple[ModelConfig, int]:
    """The model that the options describe, and its vocabulary. Errors: ``UserError`` naming the option."""
    ways = [bool(options.model), bool(options.layers or options.width), bool(options.parameters)]
    if sum(ways) > 1:
        raise UserError("the model is given twice; set --model, or --layers and --width, or --parameters")
    if options.parameters:
        vocab = options.vocab or GPT2_VOCAB
        return shape_of_size(options.parameters, vocab, options.context or 1024), vocab
    if options.layers or options.width:
        if not (options.layers and options.width):
            raise UserError("a model of one's own needs both --layers and --width")
        heads = options.heads or max(1, options.width // HEAD_WIDTH)
        model = ModelConfig("own", options.layers, options.width, heads, options.context or 1024)
        return model, options.vocab or GPT2_VOCAB
    settings = load_option("model", options.model or "gpt2")
    if options.context:
        settings["context"] = options.context
    vocab = GPT2_VOCAB if settings["name"].startswith("gpt2") else 4096
    return ModelConfig(**settings), options.vocab or vocab


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tagc.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a name of conf/model (default gpt2)")
    parser.add_argument("--parameters", help="parameters of the model, such as 350M")
    for name in ("layers", "width", "heads", "vocab", "context"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="they share the node's link (default 1)")
    parser.add_argument("--bandwidth", default="10gbps", help="of a node's link, per direction (default 10gbps)")
    parser.add_argument("--gpu", default="rtx3080", help=f"one of {', '.join(GPUS)}; cpu: the measured one")
    parser.add_argument("--dtype", default="float32", help="of parameters: float32 or bfloat16 (default float32)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step and rank (default 1)")
    parser.add_argument("--micro-batch", type=int, default=12, help="sequences per micro-batch and rank (default 12)")
    parser.add_argument("--no-reshard", action="store_true", help="keep parameters gathered between the passes")
    parser.add_argument("--methods", default=",".join(METHODS), help="compressor or compressor+weights (default: many)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time against bandwidth")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table")
    return parser


def format_answer(question: Question, plans: Sequence[Plan], rows: Sequence[Prediction], evidence: Evidence) -> str:
    """The whole text."""
    baseline, errors = next(row for row in rows if row.method == BASELINE), evidence.errors
    workload = plans[0].workload
    rate = "no cap" if math.isinf(question.rate_mbps) else format_rate(question.rate_mbps)
    shared = f" shared by {question.ranks_per_node} ranks" if question.ranks_per_node > 1 else ""
    model = question.model
    lines = [
        f"{model.name}: {workload.parameter_count / 1e6:.1f} M parameters ({model.layers} layers, width {model.width}, "
        f"vocabulary {question.vocab_size}), {question.dtype}; {question.ranks} ranks on {question.gpu}, link {rate}"
        f"{shared}; {question.accumulation} x {question.micro_batch} sequences of {model.context} tokens per rank and "
        "step",
        "",
        f"{'method':<12} {'MB sent per step':>22}  {'memory':>9}  {'iteration':>12} {'less than':>10}  {'busiest':<17} "
        "loss above fsdp",
        f"{'':<12} {'gradients + weights':>22}  {'per rank':>9}  {'MODELLED':>12} {BASELINE:>10}  {'':<17} MEASURED",
    ]
    for row in rows:
        loss = "not measured" if row.loss is None else f"{row.loss}, {row.loss.setting}"
        dense = f"; {row.dense_frac:.0%} of the elements go dense here" if row.dense_frac else ""
        name = row.method + ("" if row.method in errors["methods"] else "*")
        lines.append(
            f"{name:<12} {row.gradient_bytes / 1e6:>11.4g} + {row.weight_bytes / 1e6:<8.4g}  "
            f"{row.memory_bytes / 2**20:>5.0f} MiB  {row.modelled_ms:>9.5g} ms {row.saved_vs(baseline):>+10.1%}  "
            f"{row.bound_by:<17} {loss}{dense}"
        )
    outside = list_outside(question, workload.parameter_count, evidence)
    lines += [
        "",
        "Memory: parameters, gradients, optimizer and what the method keeps; no activations. noop does not train.",
        f"Model against {errors['rows']} measured rows that it was not fitted to (CPU): time off by "
        f"{errors['median']:.1%} (median), {errors['max']:.1%} (most); saving off by "
        f"{100 * errors['saved_median']:.1f} points (median), {100 * errors['saved_max']:.1f} (most).",
        "*: no measured time of this method was compared. Losses were measured with fp32 parameters.",
        *(["OUTSIDE the range in which it was compared:", *(f"  {text}" for text in outside)] if outside else []),
        "",
        recommend(rows, evidence),
    ]
    return "\n".join(lines) + "\n"


def write_csv(path: Path, question: Question, plans: Sequence[Plan], rows: Sequence[Prediction]) -> None:
    """A row per method, units in the columns' names. Errors: ``UserError`` if the file cannot be written."""
    baseline, evidence = next(row for row in rows if row.method == BASELINE), plans[0].evidence
    is_outside = bool(list_outside(question, plans[0].workload.parameter_count, evidence))
    asked = {"kind": "modelled", "model": question.model.name}
    asked |= {key: getattr(question, key) for key in ("ranks", "ranks_per_node", "rate_mbps", "gpu", "dtype")}
    lines = [
        asked
        | {"accumulation": question.accumulation, "method": row.method}
        | {"outside_range": is_outside or row.method not in evidence.errors["methods"]}
        | {"gradient_bytes": row.gradient_bytes, "weight_bytes": row.weight_bytes, "memory_bytes": row.memory_bytes}
        | {"modelled_ms": f"{row.modelled_ms:.5g}", "saved_frac": f"{row.saved_vs(baseline):.4f}"}
        | {"busiest": row.bound_by, "dense_frac": f"{row.dense_frac:.4g}"}
        | {"measured_loss_frac": row.loss.frac if row.loss else "", "loss_n": row.loss.n if row.loss else ""}
        | {"loss_setting": row.loss.setting if row.loss else ""}
        for row in rows
    ]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise UserError(
            f"--csv {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def _split_words(words: Sequence[str]) -> list[str]:
    """``key=value`` as ``--key=value``, as run.py takes it."""
    parts = [(word, *word.partition("=")) for word in words]
    return [
        f"--{key.replace('_', '-')}={value}" if key.isidentifier() and eq else word for word, key, eq, value in parts
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Answer the question on the command line."""
    options = make_parser().parse_args(_split_words(sys.argv[1:] if words is None else words))
    model, vocab = make_model(options)
    question = Question(
        model,
        vocab,
        options.ranks,
        parse_rate(options.bandwidth),
        options.gpu,
        options.dtype,
        options.accumulation,
        options.micro_batch,
        options.ranks_per_node,
        not options.no_reshard,
    )
    evidence = load_evidence()
    methods = list(dict.fromkeys([*options.methods.split(","), BASELINE]))
    plans = [Plan(question, method, evidence) for method in methods]
    rows = [plan.predict() for plan in plans]
    sys.stdout.write(format_answer(question, plans, rows, evidence))
    if options.csv:
        write_csv(options.csv, question, plans, rows)
    if options.plot:
        from tagc.predict.plot import draw

        draw(options.plot, plans)


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
