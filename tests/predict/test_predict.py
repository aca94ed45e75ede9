"""The command: bytes of recorded runs, one sentence, marks outside the range, bad input, and no torch."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tagc.config import ModelConfig
from tagc.errors import UserError
from tagc.model.gpt import GPT, flops_per_token
from tagc.predict.__main__ import main, parse_rate, shape_of_size
from tagc.predict.answer import Plan, Prediction, Question, list_outside, recommend
from tagc.predict.evidence import Evidence, Loss, load_evidence
from tagc.predict.inputs import build_workload, list_parameters
from tagc.train.parallel import plan_units

NANO = Question(ModelConfig(), 4096, 2, 200.0, "cpu", "float32")


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"tie_weights": True}, {"layers": 1, "context": 512}])
def test_shapes_and_flops_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = ModelConfig(**changes)
    with torch.device("meta"):
        model = GPT(config, 4096)
    expected = {unit: [(name, tuple(shape)) for name, shape in members] for unit, members in plan_units(model).items()}
    assert list_parameters(config, 4096) == expected
    workload = build_workload(replace(NANO, model=config).make_config("fsdp"), 4096)
    assert workload.flops_per_step == flops_per_token(model) * 12 * config.context


@pytest.mark.parametrize(
    ("method", "gradients", "weights"),
    [
        ("noop", 0, 10_313_472),
        ("fsdp", 6_754_560, 10_313_472),
        ("packed", 2_027_128, 10_313_472),
        ("int4+delta4", 888_768, 857_514),
    ],
)
def test_bytes_are_those_that_recorded_runs_of_nano_counted(method: str, gradients: int, weights: int) -> None:
    prediction = Plan(NANO, method, load_evidence()).predict()
    assert (prediction.gradient_bytes, prediction.weight_bytes) == (gradients, weights)


def test_memory_is_that_of_a_recorded_cell_with_the_copy_for_undo() -> None:
    """nano-r2-fp32-reshard-5x recorded 27,018,452 bytes of state and 11,354,112 of residuals for tagc2."""
    prediction = Plan(NANO, "tagc2", load_evidence()).predict()
    assert prediction.memory_bytes == pytest.approx(27_018_452 + 2 * 11_354_112, abs=300)  # AdamW counts its steps
    replica = Plan(NANO, "int4+delta4", load_evidence()).predict().memory_bytes
    assert replica - Plan(NANO, "int4", load_evidence()).predict().memory_bytes == 4 * 3_377_280


def test_accumulation_gathers_again_but_a_replica_does_not() -> None:
    four = replace(NANO, accumulation=4, micro_batch=3)
    assert Plan(four, "fsdp", load_evidence()).predict().weight_bytes == 4 * 10_313_472
    assert Plan(four, "int4+delta4", load_evidence()).predict().weight_bytes == 857_514
    kept = replace(four, reshard=False)
    assert Plan(kept, "fsdp", load_evidence()).predict().weight_bytes == 6_754_560


def test_ranks_of_a_node_share_its_link() -> None:
    evidence = load_evidence()
    alone, shared = (replace(NANO, ranks=8, ranks_per_node=r).make_link(evidence).rate_bytes_per_s for r in (1, 4))
    assert alone == 200e6 / 8
    assert shared == pytest.approx(200e6 / 8 / 4 * 7 / 4)  # a quarter of the link, for 4 of 7 peers
    assert replace(NANO, ranks=8, ranks_per_node=8).make_link(evidence).rate_bytes_per_s == float("inf")


def predict_like(method: str, ms: float, loss: float | None = 0.0) -> Prediction:
    measured = None if loss is None else Loss(loss, None, None, 1, "nano, 2 ranks")
    return Prediction(method, 1, 1, 1, ms, "link 90%", 0.0, measured)


def test_the_recommendation_is_the_fastest_that_neither_loses_nor_is_unmeasured() -> None:
    evidence = Evidence({"errors": {"saved_p90": 0.05, "methods": ["int8"]}})
    fsdp = predict_like("fsdp", 100)
    rows = [predict_like("noop", 10), fsdp, predict_like("tagc2", 60, 0.013), predict_like("int8", 70)]
    text = recommend([*rows, predict_like("bf16", 74)], evidence)
    assert text.startswith("Use int8: a modelled 70 ms per iteration, 30.0% less than fsdp")
    assert "tagc2 is modelled faster, but its loss was +1.3%" in text and "bf16 cannot be told from it" in text
    assert "its loss was not measured" in recommend([*rows, predict_like("int4+delta8", 50, None)], evidence)
    close = recommend([fsdp, predict_like("int8", 96)], evidence)
    assert close.startswith("Stay with fsdp") and "4.0% by int8" in close
    assert "no measured time of it" in recommend([fsdp, predict_like("int4", 50)], evidence)


def test_what_lies_outside_the_compared_range_is_answered_and_marked() -> None:
    evidence = load_evidence()
    assert list_outside(NANO, 3_377_280, evidence) == []
    far = Question(ModelConfig(), 4096, 64, 1e6, "a100", "bfloat16", 2, ranks_per_node=8)
    marks = list_outside(far, 10**9, evidence)
    assert [mark.split("=")[0].split(":")[0] for mark in marks] == [
        *("gpu", "ranks", "bandwidth", "1000.0 M parameters", "ranks_per_node", "accumulation")
    ]


def test_the_command_answers_and_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.csv"
    main(["model=nano", "--gpu", "cpu", "bandwidth=200mbps", "--csv", str(path), "--plot", str(tmp_path / "time.svg")])
    text = capsys.readouterr().out
    assert "MODELLED" in text and "MEASURED" in text and "OUTSIDE" not in text
    assert text.splitlines()[-1].startswith("Use int4+delta4: ")
    rows = {row["method"]: row for row in csv.DictReader(path.open())}
    assert rows["fsdp"]["gradient_bytes"] == "6754560" and rows["fsdp"]["kind"] == "modelled"
    assert (rows["bf16"]["outside_range"], rows["int4+delta4"]["outside_range"]) == ("False", "True")
    assert "<svg" in (tmp_path / "time.svg").read_text()
    main(["model=gpt2", "ranks=16", "gpu=h100", "methods=int8"])
    assert "OUTSIDE the range" in capsys.readouterr().out


def test_the_command_does_not_wait_for_torch() -> None:
    script = "import sys; from tagc.predict.__main__ import main; main([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpu=v100", "gpu=v100 is not known; choose one of rtx3080, a100, h100, cpu"),
        ("bandwidth=fast", "bandwidth=fast is not known; choose one of 100gbps"),
        ("bandwidth=0mbps", "bandwidth=0.0 Mbit/s is not legal"),
        ("bandwidth=1.2.3gbps", "write a rate such as"),
        ("model=bert", "model=bert is not known; choose one of gpt2"),
        ("ranks=1", "ranks=1 exchange nothing"),
        ("ranks=6 ranks_per_node=4", "ranks=6 is not a multiple of ranks_per_node=4"),
        ("accumulation=0", "accumulation=0 is not legal"),
        ("accumulation=1000", "accumulation=1000 is too many"),
        ("dtype=fp8", "trainer.param_dtype=fp8 is out of range"),
        ("layers=2", "both --layers and --width"),
        ("layers=-1 width=64", "model.layers=-1 is out of range"),
        ("model=nano parameters=1B", "the model is given twice"),
        ("parameters=lots", "parameters=lots is no size"),
        ("parameters=1", "parameters=1 is no size"),
        ("methods=zip", "compressor=zip is not known"),
        ("layers=1 width=65536 vocab=65536 methods=packed", "shard over more ranks"),
        ("--csv /no/such/folder/x.csv", "cannot be written"),
        ("model=nano --plot time.nothing", "--plot time.nothing"),
    ],
)
def test_bad_input_is_named(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        main(words.split())


def test_sizes_and_rates_as_people_write_them() -> None:
    assert (parse_rate("2.5gbps"), parse_rate("250mbps"), parse_rate("unlimited")) == (2500, 250, float("inf"))
    model = shape_of_size("355M", 50304, 1024)
    count = sum(torch.Size(shape).numel() for unit in list_parameters(model, 50304).values() for _, shape in unit)
    assert count == pytest.approx(355e6, rel=0.1)
    assert model.width % model.heads == 0
