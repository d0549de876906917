"""Results of comparisons as they are shown, from rows made by hand."""

from __future__ import annotations

import re
from typing import Any

from app.bench.row import Row, compare
from app.bench.summary import summarise
from app.compare_view import advice, result_view
from app.comparison import Result
from tests.bench.making import row


def result(*rows: Row, made_at: float = 0.0, **machine: str) -> Result:
    compared = tuple(compare(rows))
    document: dict[str, Any] = {
        "complete": True,
        "made_at": made_at,
        "machine": {
            "processor": "A processor",
            "threads": 2,
            "system": "Linux",
            "llama_cpp": "b1",
            "llama_cpp_python": "0.3",
            **machine,
        },
        "models": {"target": {"name": "target", "sha256": "aa"}, "drafters": [{"name": "ngram"}, {"name": "suffix"}]},
        "settings": {"max_tokens": 100},
        "rounds": 1,
        "prompts": dict.fromkeys((row.prompt_id for row in rows), "What?"),
    }
    return Result("r", document, compared, summarise(compared, (), 1))


def curves(html: str) -> list[list[str]]:
    card = html.partition('id="pace-card"')[2].partition("</section>")[0]
    return [points.split() for points in re.findall(r'<polyline data-line="\d" points="([^"]+)"', card)]


def test_one_prompt_is_too_few_to_advise_a_set() -> None:
    once = (row("a", "plain", 10), row("a", "auto", 20))
    assert result(*once).best == ""
    assert "auto</b> was 2.00× as fast as plain, but one prompt" in advice(result(*once))
    twice = (*once, row("b", "plain", 10), row("b", "auto", 22))
    assert result(*twice).best == "auto"
    assert advice(result(*twice)).startswith("Use <b>auto</b>: 2.10×")
    slower = (row("a", "plain", 10), row("a", "auto", 9))
    assert advice(result(*slower)).startswith("Nothing here is surely faster")


def test_tokens_are_drawn_over_the_time_they_took() -> None:
    """Plain takes 10 s and 5 s for 100 tokens each, the other half of it: the plot is 15 s wide, 200 tokens high."""
    rows = (row("a", "plain", 10), row("a", "auto", 20), row("b", "plain", 20), row("b", "auto", 40))
    assert curves(result_view(result(*rows))) == [
        ["0,100", "66.67,52", "100,4"],
        ["0,100", "33.33,52", "50,4"],
    ]


def test_answers_that_loop_or_that_not_all_gave_are_not_drawn() -> None:
    rows = (
        row("a", "plain", 10),
        row("a", "auto", 20),
        row("loops", "plain", 10, distinct=0.1),
        row("loops", "auto", 50),
        row("half", "plain", 10),
    )
    assert [len(points) for points in curves(result_view(result(*rows)))] == [2, 2]
    assert "answered by all" in result_view(result(row("half", "plain", 10), row("whole", "auto", 20)))


def test_two_results_stand_side_by_side_with_what_differs() -> None:
    now = result(row("a", "plain", 10), row("a", "auto", 20))
    then = result(row("a", "plain", 10), row("a", "auto", 15), row("a", "minions", 9), processor="Another one")
    html = result_view(now, then)
    figures = html.partition('id="figures-card"')[2].partition("</section>")[0]
    plain, auto = re.findall(r'<tr><th scope="row">(?:plain|auto)</th>(.*?)</tr>', figures)
    assert re.findall(r"<td>(.*?)</td>", auto)[-2:] == ["15.0", "<b>1.50×</b> (one answer tells no more)"]
    assert re.findall(r"<td>(.*?)</td>", plain)[-2:] == ["10.0", "1"]
    difference = html.partition('id="difference"')[2].partition("</table>")[0]
    assert re.findall(r"<th scope='row'>(.*?)</th>", difference) == ["Machine"]
    assert "Another one" in difference
    assert "same machine, files, prompts and settings" in result_view(now, now)
