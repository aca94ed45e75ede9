"""The dashboard as far as the library goes offline; tests/test_end_to_end.py holds its names against a real run."""

from __future__ import annotations

import json
import sys

import pytest

from tagc.record.wandb import dashboard
from tests.record.wandb.dashboard import list_panels
from tests.record.wandb.server import serve_wandb


def test_the_view_is_saved_as_it_is_printed(monkeypatch, capsys):
    assert dashboard.main(["--print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {panel["section"] for panel in list_panels(printed)} == {
        "Iteration time by bandwidth",
        "Loss",
        "Bytes that a rank sends",
        "Sparsity per layer",
    }
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with serve_wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        said = []
        for _ in range(2):
            assert dashboard.main(["--project", "mine", "--entity", "me"]) == 0
            said.append(capsys.readouterr().out.split(": "))
        (view,) = server.views.values()
        server.views["old"] = view | {"id": "old"}
        assert dashboard.main(["--project", "mine", "--entity", "me"]) == 0
        assert len(server.views) == 2 and "1 more of this name" in capsys.readouterr().out
    assert [words[0] for words in said] == ["saved", "updated"] and said[0][1] == said[1][1]
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "mine", "TAGC")
    titles = [panel["config"]["chartTitle"] for panel in list_panels(printed)]
    assert [panel["config"]["chartTitle"] for panel in list_panels(json.loads(view["spec"]))] == titles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--print"], "pip install -e '.[dashboard]'"), ([], "set WANDB_API_KEY")],
    ids=["no package", "no key"],
)
def test_what_is_missing_is_one_message(monkeypatch, capsys, arguments, message):
    import wandb

    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setattr(wandb, "login", lambda **options: options["prompt"])
    assert dashboard.main(arguments) == 1
    assert message in capsys.readouterr().out
