"""`headstart report`: what a page and the README's table say of run records."""

import html
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.evidence import report_runs as made

from headstart.cli.commands import headstart
from headstart.evidence import report
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.checking import Accuracy
from headstart.evidence.report.reading import benched

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return CliRunner().invoke(headstart, ["report", *map(str, arguments)], prog_name="headstart")


def page_of(*paths):
    return report.page(report.read_runs(paths))


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made.everything(folder)
    return folder


@pytest.fixture(scope="module")
def whole(all_runs):
    return page_of(all_runs)


def sections(page):
    return re.findall(r'<section id="([\w-]+)"', page)


def section(page, id):
    return page.split(f'<section id="{id}"')[1].split("</section>")[0]


def text_of(page):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_page_shows_every_kind_of_run(whole):
    assert sections(whole) == [
        "verdicts", "times-1", "times-2", "stages", "host", "errors", "bits", "mutants", "tiles",
        "kernels", "statistics", "traffic", "configurations", "bundles", "environment",
    ]  # fmt: skip
    assert [whole.count(f'id="{id}"') for id in sections(whole)] == [1] * 15
    words = text_of(whole)
    for figure in (
        "gdn-next-18778 18,778 flashinfer timed 0.5280 4.5 0.941 [0.922, 0.960] 60/60",
        "gdn-next-2048 2,048 flashqla missing",
        "calls of 2 arms measured on 1 case",
        "gdn-1x128 headstart (hopper) 2 21.5 25.5 51.5 30.5 56.5 Imaginary X1, 12",
        "gdn-1x128 fla - 210.0 214.0 240.0 219.0 245.0 Imaginary X1, 12",
        "oss-16k-win hopper o WRONG 2500%",
        "0 of 120 tensors differ",
        "triton cuda:0 4 2 8 3,072.0 1.0 1.0 right",
        "0.0 minutes of 4 threads: 8 laps of 300 sequences, 70 tensors compared",
        "nobody-looks SURVIVES",
        "same-sum equivalent - not asked The same-sum is wrong. Equivalent: Adds nothing.",
        "carry-scaled rule at 1,200 tokens 13.7 x lets it live",
        "spills 40 vector words, allowed 0",
        "an arm against itself: 1 held in 95.5%",
        "oss-16k-win 64 x 64 32,896 767 97.7%",
        "synthetic 64 geometric 8 60.80% 95.0% 1.00 3 2 qwen3-next-80b",
        "tiny-qwen3-next cpu 2 1,000 1 / 8 1 44.80% 100.0% 0 of 80 0 of 10 4.0 2.5 37.5%",
        "qwen3-next-80b linear attention hopper cuda:0 Imaginary X1 2 128 0 of 900",
        "linear attention 1 hopper cuda:0 Imaginary X1 no hits 2 2 900 100 1.75 1.750",
        "60.8% of the prompt tokens hit at a grain of 64 in 8 GiB (synthetic text), 95.0% of what",
        "by rule at most 42.9% longer than by the fastest tried on 1 case (4 calls, 5% allowed)",
        "the ranking moves with the length on 1; left out: 1",
        "extend_attention/extend 64x64 BN 32 -> 64 0.850 0.971 BN 64 -> 16 0.0% 2 4 1",
        "oss-16k-win@0.25 extend_attention/extend 64x64 0.2000 42.9% BN 32 -> 16 moved, 14.3%",
        "oss-16k-win extend_attention/unified 64x64 0.2000 0.0%, in doubt the rule's -",
        "BN 32 -> 128 - - - no room",
        "extend_attention/extend 512x512 not reached",
        "15 programs compiled for 1 target in 1.5 minutes, 0 do not compile; 19 of 20",
        "2 of 3 calls made, in at most 0.40 s (0.3 allowed) beyond the device's start, 1 programs",
        "cuda:90 3.99.0 gpt-oss-20b 20 5 15 90.0 170.5 2",
        "cuda:90 3.99.0 gpt-oss-20b 20 19 3 1 missing: scan",
        "layer Imaginary X1, 12 multiprocessors, 34 GiB 3.12.3 2.00 0.50 0.10 0.210 0.70 5 0",
        "ValueError: bundle: stale",
        "Imaginary X1, 12 multiprocessors, 34 GiB",
        "0123456789ab",
        "HEADSTART_CHECK=1",
        "arms=headstart,fla seed=0",
    ):
        assert figure in words, figure


def test_a_page_needs_nothing_beside_it(whole):
    assert "<script" not in whole
    assert not re.findall(r"\bsrc\s*=|@import|url\((?!#)", whole)
    references = set(re.findall(r'href="([^"]*)"', whole))
    assert references - {"data:,"} == {name for name in references if name.startswith("#")}
    ids = re.findall(r'\bid="([^"]+)"', whole)
    for name in references - {"data:,"}:
        assert name[1:] in ids, name


def test_sections_appear_for_what_is_given(all_runs):
    assert sections(page_of(all_runs / "bench.json")) == [
        "verdicts", "times-1", "times-2", "environment",
    ]  # fmt: skip
    assert sections(page_of(all_runs / "mutants.json")) == ["verdicts", "mutants", "environment"]
    assert sections(page_of(all_runs / "bits.json", all_runs / "tiles.json")) == [
        "verdicts", "bits", "tiles", "environment",
    ]  # fmt: skip


def test_verdicts_say_what_fails(whole):
    found = re.findall(r'<li class="(good|bad)">\s*<span class="what">([a-z ]+)<', whole)
    assert {what: tone for tone, what in found} == {
        "times": "good", "stages": "good", "host times": "good", "errors": "bad", "bits": "good",
        "transcripts": "good", "soak": "good", "tile bounds": "good", "mutants": "bad",
        "kernels": "bad", "statistics": "good", "traffic": "good", "configurations": "bad",
        "bundles": "bad",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("id", "words"),
    [
        (
            "times-1",
            [
                ["new tokens", "median of a call, ms", "H 16, HV 32, bfloat16", "2k", "18.3k",
                 "floor", "flashinfer"],
                ["time / time of headstart (left of 1: faster than it)", "noise floor",
                 "gdn-varlen-33seq"],
                ["median time / floor of the case (1: nothing is left to gain)", "fla"],
            ],
        ),
        ("stages", [["microseconds of a call", "waiting for the host", "gdn-next-8k, fla"]]),
        ("errors", [["largest figure of a case / its tolerance (right of 1: fails)", "hopper",
                     "extend_attention: LSE"]]),
        ("mutants", [["mutants", "figure of the check that killed it / its tolerance",
                      "a cosine gate lets it live"]]),
        (
            "traffic",
            [
                ["blocks of 64 tokens", "budget, GiB", "prompt tokens that were hits, %", "ends",
                 "geometric", "ceiling", "none"],
                ["time to first token / cold", "tiny-qwen3-next on cpu", "in proportion"],
                ["milliseconds of all steps", "qwen3-next-80b: linear attention, no hits"],
            ],
        ),
    ],
)  # fmt: skip
def test_figures_name_their_axes_and_series(whole, id, words):
    figures = re.findall(r"<svg.*?</svg>", section(whole, id), re.S)
    assert len(figures) == len(words)
    for figure, wanted in zip(figures, words, strict=True):
        written = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
        assert set(wanted) <= set(written), set(wanted) - set(written)
        assert "var(--series-1)" in figure or "var(--series-2)" in figure
        assert not re.search(r"#[0-9a-f]{6}\b", figure), "a colour that ignores the theme"


def test_a_case_of_one_length_draws_no_curve(whole):
    assert "Time against prompt length" in section(whole, "times-1")
    assert "Time against prompt length" not in section(whole, "times-2")


def test_a_convolution_is_shown_with_its_error(tmp_path):
    figures = Accuracy(
        output="convolution", heads=4, last_half=1.5e-3, row_error=3e-3, allowed=2e-3
    )
    arm = made.arm("headstart", 0.16).model_copy(update={"accuracy": (figures,)})
    path = made.write(tmp_path, "a", "bench", [made.timed("conv-next-18778", arm)])
    times = text_of(section(page_of(path), "times-1"))
    assert "conv-next-18778 18,778 headstart timed 0.1600" in times
    assert "1.50e-03 3.00e-03" in times


def test_a_case_without_tokens_has_no_distance_to_its_floor(tmp_path):
    found = [made.timed(id, made.arm("headstart", 0.01)) for id in ("edge-1", "edge-3")]
    assert found[0].floor_ms == 0
    page = page_of(made.write(tmp_path, "a", "bench", found))
    assert "edge-1 0 headstart timed 0.0100 - -" in text_of(page)
    (figure,) = re.findall(r"<svg.*?</svg>", page, re.S)  # no curve from 0 tokens to 1
    assert "edge-3" in figure
    assert "edge-1" not in figure
    assert "| edge-1 | 0 | 0.0000 | 0.0100 |" in report.markdown(report.read_runs([tmp_path]))


def test_points_lie_where_the_numbers_say(whole):
    figure = re.findall(r"<svg.*?</svg>", section(whole, "times-1"), re.S)[0]
    (panel, _) = re.split(r'<g id="axes_2">', figure)
    lines = re.findall(r'<g id="line2d_\d+">\s*<path d="([^"]+)" clip-path', panel)
    curves = [
        [tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", line)]
        for line in lines
    ]
    floor, ours, _, fla = [curve for curve in curves if len(curve) == 5]
    # Upwards is slower; equal steps of a logarithm are equal distances.
    assert all(a[1] > b[1] > c[1] for a, b, c in zip(floor, ours, fla, strict=True))
    per_octave = (ours[4][0] - ours[0][0]) / 5
    assert ours[1][0] - ours[0][0] == pytest.approx(2 * per_octave, rel=1e-4)


def drawn_along_x(figure):
    """Values of the markers along a logarithmic x axis, by the colour they are drawn in."""
    ticks = re.findall(
        r'<g id="xtick_\d+">.*?<use [^>]*x="([\d.]+)"[^>]*>.*?<text[^>]*>([\d.,]+)</text>',
        figure,
        re.S,
    )
    (x0, first), (x1, last) = ((float(x), float(label)) for x, label in (ticks[0], ticks[-1]))
    found = {}
    for x, color in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*fill: var\(--([\w-]+)\)', figure):
        value = first * (last / first) ** ((float(x) - x0) / (x1 - x0))
        found.setdefault(color, []).append(round(value, 2))
    return found


def test_markers_stand_at_ratios_and_multiples_of_the_floor(whole):
    _, ratios, floors = re.findall(r"<svg.*?</svg>", section(whole, "times-1"), re.S)
    flashinfer, fla = ("series-2", "series-3")
    shown = drawn_along_x(ratios)
    assert shown[flashinfer][1:5] == [1.06, 0.94, 1.00, 0.97]
    assert shown[fla][2] == pytest.approx(1.193 / 0.561, abs=0.01)
    floor = made.bench()[2].floor_ms
    shown = drawn_along_x(floors)
    assert shown["series-1"][2] == pytest.approx(0.561 / floor, abs=0.01)
    assert shown[fla][2] == pytest.approx(1.193 / floor, abs=0.02)


def test_only_what_beats_the_first_arm_is_marked(whole):
    marked = re.findall(r'<td class="win[^"]*">([^<]*)</td>', section(whole, "times-1"))
    assert marked == ["0.941 [0.922, 0.960]", "0.969 [0.950, 0.989]"]


def test_an_explained_survivor_fails_nothing(tmp_path):
    explained = [one for one in made.mutants() if one.killed_by or one.equivalent]
    page = page_of(made.write(tmp_path, "a", "mutants", explained))
    assert '<li class="good">' in section(page, "verdicts")
    assert "4 of 5 killed, 1 explained as equivalent; a cosine gate lets 2" in text_of(page)


def test_values_are_escaped(tmp_path):
    bad = [one.model_copy(update={"fault": "<script>alert(1)</script> & more"})
           for one in made.mutants()]  # fmt: skip
    page = page_of(made.write(tmp_path, "a<b", "mutants", bad, revision='"><b>'))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "<b>" not in page


def test_a_page_is_the_same_each_time(all_runs, whole):
    assert page_of(all_runs) == whole


def test_of_a_case_timed_twice_the_latest_counts(tmp_path):
    later = made.MADE + timedelta(days=1)
    new = made.timed("gdn-next-8k", made.arm("headstart", 0.1111))
    paths = [
        made.write(tmp_path, "b", "bench", [new], created=later),
        made.write(tmp_path, "c", "bench", made.bench()),
    ]
    page = page_of(*paths)
    assert "0.1111" in page
    assert "0.2620" not in page
    table = report.markdown(report.read_runs(paths))
    assert "| 0.1111 |" in table
    assert "0.2620" not in table


def test_arms_that_the_latest_run_lacks_are_those_of_the_run_before(tmp_path):
    def arms(at, *found):
        when = made.MADE + timedelta(days=at)
        return made.write(
            tmp_path, str(at), "bench", [made.timed("gdn-1x128", *found)], created=when
        )

    ours = made.arm("headstart", 0.3)
    fla, flashinfer = made.arm("fla", 0.6, (2, 2, 2)), made.arm("flashinfer", 0.9, (3, 3, 3))
    earlier = arms(0, ours, fla, flashinfer, made.arm("sglang", 1.2, (4, 4, 4)))
    faster = made.arm("headstart", 0.2), made.arm("fla", 0.5, (2.5, 2.5, 2.5))
    later = arms(1, *faster, made.arm("flashinfer", None))
    (found,) = benched(report.read_runs([earlier, later])).popitem()[1]
    assert {arm.arm: arm.median_ms for arm in found.result.arms} == {
        "headstart": 0.2, "fla": 0.5, "flashinfer": 0.9, "sglang": 1.2
    }  # fmt: skip


def test_a_run_made_outside_a_checkout_tells_its_commit_or_version(tmp_path):
    def commit(**environment):
        path = made.write(tmp_path, "a", "bench", made.bench()[:1], revision="", **environment)
        return row_of(report.markdown(report.read_runs([path])), "gdn-next-2048")[-1]

    assert commit() == "2031-05-06, `version 0.0.0`"
    assert commit(variable={"HEADSTART_REVISION": "fedcba987654"}) == "2031-05-06, `fedcba987654`"


def row_of(table, case):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {case} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_names_the_winner(all_runs):
    table = report.markdown(report.read_runs([all_runs]))
    faster = {
        "gdn-next-8k": "headstart",
        "gdn-next-18778": "**flashinfer**",
        "gdn-next-32k": "neither",
        "gdn-next-64k": "**flashinfer**",
        "oss-16k-win": "headstart",
    }
    assert {case: row_of(table, case)[-2] for case in faster} == faster
    assert row_of(table, "gdn-next-18778") == [
        "gdn-next-18778", "18,778", "0.1176", "0.5610", "0.5280", "1.1930", "missing",
        "1.001 [0.997, 1.004]", "flashinfer 0.941 [0.922, 0.960]", "-", "**flashinfer**",
        "2031-05-06, `0123456789ab`",
    ]  # fmt: skip
    assert f"on {made.DEVICE}" in table
    assert "- fa4: sinks rounded to bfloat16" in table
    assert "| mutants | Imaginary C1, 2 cores | **fails**: " in table
    assert ": 4 of 6 killed, 1 explained as" in table


def test_peers_are_the_rivals_of_what_is_ours(tmp_path):
    walls = made.arm("x", 1.0, (0.7, 0.6, 0.8)).ratio
    arms = [
        made.arm("headstart", 1.0),
        made.arm("reproducible", 0.9, (0.9, 0.89, 0.91)),
        made.arm("flashinfer", 1.2, (1.2, 1.19, 1.21)),
        made.arm("fla", 1.5, (1.5, 1.49, 1.51), wall_ratio=walls),
        made.arm("headstart@gdn-next-2048", 0.2, (0.2, 0.19, 0.21), note="on gdn-next-2048"),
    ]
    path = made.write(tmp_path, "a", "bench", [made.timed("gdn-next-8k", *arms)])
    table, beside = report.markdown(report.read_runs([path])).split("One case beside another")
    row = row_of(table, "gdn-next-8k")
    assert row[-4:-1] == ["flashinfer 1.200 [1.190, 1.210]", "fla 0.700 [0.600, 0.800]",
                          "headstart"]  # fmt: skip
    assert len(row) == 12  # no column for an arm on another case
    assert row_of(beside, "gdn-next-8k") == [
        "gdn-next-8k", "gdn-next-2048 (headstart)", "1.0000", "0.2000", "5.000 [4.762, 5.263]",
        "1.250",
    ]  # fmt: skip


def test_errors_are_told_beside_those_of_peers(tmp_path):
    def off(last_half, row_error):
        return (Accuracy(output="o", heads=4, last_half=last_half, row_error=row_error,
                         allowed=5e-3),)  # fmt: skip

    def case(id, mine, theirs):
        arms = [made.arm("headstart", 1.0), made.arm("fla", 1.5, (1.5, 1.49, 1.51))]
        figures = zip(arms, (mine, theirs), strict=True)
        return made.timed(id, *(arm.model_copy(update={"accuracy": x}) for arm, x in figures))

    found = [
        case("gdn-next-8k", off(2e-3, 4e-3), off(2e-3, 8e-3)),
        case("gdn-next-2048", off(1e-3, 4e-3), off(2e-3, 4e-3)),
    ]
    text = report.markdown(report.read_runs([made.write(tmp_path, "a", "bench", found)]))
    assert "fla 1.000 (gdn-next-8k) and 1.000 (gdn-next-2048)." in text


def test_what_bounds_save_stands_beside_what_tiles_predict(tmp_path):
    times = {"triton": 1.0, "unbounded": 4.0, "reproducible": 1.0, "unbounded:reproducible": 2.0}
    arms = [
        made.arm(name, ms, None if name == "triton" else (ms, ms, ms),
                 note=f"bounds save {1 - 1 / ms:.1%} of tiles" if "un" in name else "")
        for name, ms in times.items()
    ]  # fmt: skip
    arms = [arm.model_copy(update={"device_ms": (arm.median_ms,) * 4}) for arm in arms]
    path = made.write(tmp_path, "a", "bench", [made.timed("oss-16k-win", *arms)])
    table, bounds = report.markdown(report.read_runs([path])).split("What bounds save")
    assert "unbounded" not in table
    rows = [line for line in bounds.splitlines() if line.startswith("| oss-16k-win")]
    assert rows == [
        "| oss-16k-win | triton | 75.0% of tiles | 1.0000 | 4.0000 | 75.0% [75.0%, 75.0%] |",
        "| oss-16k-win | reproducible | 50.0% of tiles | 1.0000 | 2.0000 | 50.0% [50.0%, 50.0%] |",
    ]


def test_nobody_wins_within_the_noise(tmp_path):
    def arms(noise):
        return [
            made.arm("headstart", 1.0),
            made.arm(NOISE, 1.0, noise),
            made.arm("fla", 0.95, (0.95, 0.93, 0.97)),
        ]

    for noise, winner in (((1.0, 0.96, 1.04), "neither"), ((1.0, 0.98, 1.02), "**fla**")):
        path = made.write(tmp_path, "a", "bench", [made.timed("gdn-next-8k", *arms(noise))])
        assert row_of(report.markdown(report.read_runs([path])), "gdn-next-8k")[-2] == winner
        assert ('<td class="win' in page_of(path)) == (winner != "neither")


def test_what_is_compared_with_headstart_comes_first(tmp_path):
    revisions = made.timed("gdn-next-8k", made.arm("HEAD", 1.0), made.arm("main~5", 1.1))
    first = made.write(tmp_path, "a", "bench", [revisions], created=made.MADE - timedelta(days=1))
    page = page_of(first, made.write(tmp_path, "b", "bench", made.bench()))
    titles = re.findall(r"<h2>(Times[^<]*?) ?<", page)
    assert titles == ["Times: Gated delta rule", "Times: Gated delta rule, to HEAD",
                      "Times: Extend attention"]  # fmt: skip


def test_a_peer_that_is_wrong_is_counted_and_ours_fails(tmp_path):
    def verdict(name):
        wrong = made.arm(name, None, status="wrong", sentence="o: relative 0.01 > 0.005")
        found = [made.timed("gdn-next-8k", made.arm("headstart", 1.0), wrong)]
        return section(page_of(made.write(tmp_path, "a", "bench", found)), "verdicts")

    assert "wrong or failed: 0 of ours, 1 of peers" in verdict("fla")
    assert '<li class="good">' in verdict("fla")
    assert "wrong or failed: 1 of ours, 0 of peers" in verdict("main~5")
    assert '<li class="bad">' in verdict("main~5")


def test_a_first_arm_that_fails_loses(tmp_path):
    broken = made.arm("headstart", None, status="wrong", sentence="o: relative 0.01 > 0.005")
    result = made.timed("gdn-next-8k", broken, made.arm("fla", 0.95), made.arm("flashqla", None))
    files = report.read_runs([made.write(tmp_path, "a", "bench", [result])])
    row = row_of(report.markdown(files), "gdn-next-8k")
    assert row[3] == "wrong"
    assert row[-2] == "**fla** (headstart wrong)"
    assert "- headstart: o: relative 0.01 > 0.005" in report.markdown(files)
    assert "Ratios to" not in report.page(files)
    assert '<li class="bad">' in report.page(files)


def test_of_a_failure_the_first_sentence_is_shown(tmp_path):
    def said(sentence):
        broken = made.arm("flex", None, status="failed", sentence=sentence)
        result = made.timed("gdn-next-8k", made.arm("headstart", 1.0), broken)
        files = report.read_runs([made.write(tmp_path, "a", "bench", [result])])
        (line,) = (x for x in report.markdown(files).splitlines() if x.startswith("- flex: "))
        return line.removeprefix("- flex: ")

    assert said("InductorError: No configs. Set THIS=1 for more.") == "InductorError: No configs."
    assert said("OSError: lib.so.1 is gone") == "OSError: lib.so.1 is gone"
    long = said("RuntimeError: " + "on and " * 40)
    assert len(long) <= 120
    assert long.endswith(" and on ...")


def test_block_of_a_document():
    text = f"a\n{'<!-- results: begin -->'}\nold\n<!-- results: end -->\nb\n"
    filled = report.fill_block(text, r"new \1 $&")
    assert filled == "a\n<!-- results: begin -->\nnew \\1 $&\n<!-- results: end -->\nb\n"
    assert report.fill_block(filled, r"new \1 $&") == filled


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- results: begin -->",
        "<!-- results: end --> <!-- results: begin -->",
        "<!-- results: begin --> <!-- results: end --> <!-- results: begin -->",
    ],
)
def test_a_document_without_its_two_marks_is_refused(text):
    with pytest.raises(ValueError, match="into: expected one <!-- results: begin -->"):
        report.fill_block(text, "new")


def test_the_readme_shows_the_kept_runs():
    text = (ROOT / "README.md").read_text()
    runs = report.read_runs([ROOT / "evidence/runs"])
    assert report.fill_block(text, report.markdown(runs)) == text, "run `make results`"


def test_the_kept_runs_make_a_page():
    words = text_of(page_of(ROOT / "evidence/runs"))
    for operation in ("Gated delta rule", "Extend attention", "Short convolution"):
        assert f"Times: {operation}" in words


def test_command_writes_a_page(all_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(all_runs / "bench.json").exit_code == 0
    assert "gdn-next-8k" in (tmp_path / "report.html").read_text()
    assert run(all_runs, "-o", "all.html").exit_code == 0
    assert "SURVIVES" in (tmp_path / "all.html").read_text()


def test_command_prints_and_fills_in_tables(all_runs, tmp_path):
    printed = run(all_runs, "--markdown")
    assert printed.exit_code == 0
    assert row_of(printed.stdout, "gdn-next-8k")[-2] == "headstart"
    document = tmp_path / "README.md"
    document.write_text("<!-- results: begin -->\n<!-- results: end -->\n")
    done = run(all_runs, "--markdown", "--into", document)
    assert done.exit_code == 0
    assert "results of 14 runs" in done.stdout
    assert row_of(document.read_text(), "gdn-next-8k")[-2] == "headstart"
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty", "--markdown", "--into", document)
    assert done.exit_code == 0
    assert "No run is kept yet." in done.stdout
    assert document.read_text() == (
        "<!-- results: begin -->\nNo run is kept yet.\n<!-- results: end -->\n"
    )


def test_command_shows_what_a_real_run_wrote(tmp_path):
    file = tmp_path / "real.json"
    bench = ["bench", "gdn-1x1-small", "--arms", "torch,reference,fa4", "--rounds", "3", "--device",
             "cpu", "--json", str(file)]  # fmt: skip
    assert CliRunner().invoke(headstart, bench).exit_code == 0
    record = json.loads(file.read_text())
    assert "json_file" not in record["options"]
    words = text_of(page_of(file))
    assert (
        f"gdn-1x1-small 1 torch timed {record['results'][0]['arms'][0]['median_ms']:.4f}" in words
    )
    assert "fa4 declined" in words


def rewritten(path, **changes):
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(record))
    return path


def test_mistakes_give_one_line(tmp_path):
    def record(name, **changes):
        return rewritten(made.write(tmp_path, name, "bench", made.bench()[:1]), **changes)

    good = record("good")
    (tmp_path / "corrupt.json").write_text('{"schema_version": 1,')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.md").write_text("no marks")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "huge.json").write_text('{"schema_version": ' + "9" * 5000 + "}")
    (tmp_path / "alone").mkdir()
    alone = made.write(tmp_path / "alone", "run", "bench", made.bench()[:1])
    for arguments, words in [
        ((record("kind", kind="poem"),), "kind.json: kind: expected one of ['bench', 'stages'"),
        ((record("schema", schema_version=99),), "schema.json: schema_version: expected 1, got 99"),
        ((record("results", results=[{"case": "x"}]),), "results.json: results.0."),
        ((record("created", created="soon"),), "created.json: created: "),
        ((tmp_path / "corrupt.json",), "corrupt.json: is no JSON"),
        ((tmp_path / "list.json",), "list.json: schema_version: missing; this is no run record"),
        ((tmp_path / "bytes.json",), "bytes.json: is no JSON"),
        ((tmp_path / "nowhere.json",), "nowhere.json: cannot be read"),
        ((tmp_path / "empty",), "report: expected one run or more, got none"),
        ((tmp_path / "deep.json",), "deep.json: is no JSON"),
        ((tmp_path / "huge.json",), "huge.json: is no JSON"),
        ((record("true", schema_version=True),), "schema_version: expected 1, got True"),
        ((record("float", schema_version=1.0),), "schema_version: expected 1, got 1.0"),
        (("",), "report: expected files or folders, got ''"),
        ((good, "-o", tmp_path / "no" / "a.html"), "output: no folder for"),
        ((good, "-o", tmp_path), "output: expected a file to write, got the folder"),
        ((good, "-o", ""), "output: expected a file to write, got the folder"),
        ((good, "-o", good), "output: "),
        ((good.parent / "alone", "-o", alone), "is read by this command, which would replace it"),
        ((good, "--markdown", "--into", tmp_path), "into: expected a file to write, got the"),
        ((good, "--into", "README.md"), "into: goes with --markdown"),
        ((good, "--markdown", "-o", "a.html"), "output: --markdown prints"),
        ((good, "--markdown", "--into", tmp_path / "plain.md"), "into: expected one"),
        ((good, "--markdown", "--into", tmp_path / "gone.md"), "into: cannot read"),
        ((), "Missing argument 'RUN...'"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert result.stdout == ""
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result | {"chosen": {"other": 1}},
        lambda result: result | {"points": [result["points"][0] | {"point": " "}]},
        lambda result: result | {"points": [result["points"][0] | {"fastest": {}}]},
    ],
    ids=["other fields", "no point", "no configuration"],
)
def test_a_record_of_tuning_that_does_not_fit_together_is_one_line(tmp_path, change):
    path = made.write(tmp_path, "t", "tune", made.tuned())
    data = json.loads(path.read_text())
    data["results"][0] = change(data["results"][0])
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"t\.json.*results"):
        report.read_runs([path])
