"""The report: well-formed, self-contained, every claim in its ledger, every figure with words; nothing that is put in breaks it."""

import html.parser
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from lim import claims, report, verdict
from lim.verdict import CORE, FORM, GIVEN, Condition, Statistic

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Checker(html.parser.HTMLParser):
    """Collects elements, and sees that they nest."""

    def __init__(self):
        super().__init__()
        self.open, self.elements = [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open[-3:])


def drawn(points):
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(np.random.default_rng(0).random(points), label="<&>")
    return figure


def finding(number, value, figures=(), given=1.0):
    conditions = (Condition("a", CORE, "reason <why>", "it is {a} & no more", low=0.0), Condition("b", FORM, "", "b is {b}", high=1.0),
                  Condition("c", GIVEN, "", "there is no c: {c}", low=0.0))  # fmt: skip
    claim = claims.Claim(number, f"Title {number} <script>alert(1)</script>", "Statement & more", "10²", "Plain words.", (), lambda lab: None,
                         conditions, ("a",))  # fmt: skip
    statistics = {"a": Statistic(value, 0.5, "first <stat>"), "b": Statistic(0.5, 0.0, "second"), "c": Statistic(given, 0.0, "third")}
    return claims.Finding(claim, claims.Evidence(statistics, figures), verdict.decide(conditions, statistics))


@pytest.fixture(scope="module")
def page():
    figures = (('few points, "quoted" & <tagged>', drawn(5)), ("many points", drawn(20000)))
    open_ = [claims.Finding(c, None, verdict.Decision(verdict.NOT_RUN, "not measured yet")) for c in claims.CLAIMS[9:15]]
    return report.page([finding("1", 3.0, figures), finding("2", -3.0), finding("3", 0.4), *open_], scale="small",
                       command=lambda number: f"python -m experiments.reproduce --only={number}", run={"Command": "a <b> & c"})  # fmt: skip


@pytest.fixture(scope="module")
def elements(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker.elements


def test_nothing_that_is_put_in_breaks_the_page(page, elements):
    assert not any(tag == "script" for tag, _ in elements) and "&lt;script&gt;" in page and "a &lt;b&gt; &amp; c" in page
    ids = [attrs["id"] for _, attrs in elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_it_needs_no_network(page, elements):
    for tag, attrs in elements:
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", page)


def test_links_and_references_lead_somewhere(page, elements):
    ids = {attrs["id"] for _, attrs in elements if "id" in attrs}
    for tag, attrs in elements:
        target = attrs.get("href") or attrs.get("xlink:href")
        assert target is None or target[1:] in ids, (tag, target)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= ids


def test_every_figure_has_words_and_the_smaller_form(elements):
    pictures = [(tag, attrs) for tag, attrs in elements if tag == "img" or (tag == "svg" and attrs.get("role") == "img")]
    assert [tag for tag, _ in pictures] == ["svg", "img"]
    words = [attrs.get("alt") or attrs.get("aria-label") for _, attrs in pictures]
    assert words == ['few points, "quoted" & <tagged>', "many points"]


def test_svg_elements_are_well_formed():
    text = report.picture(drawn(5), 'a "b" & <c>', "f1")
    root = ElementTree.fromstring(str(text))
    assert root.tag.endswith("svg") and root.get("aria-label") == 'a "b" & <c>' and "<metadata" not in text


def test_every_claim_has_its_row_and_its_section(page, elements):
    rows = re.findall(r"<tr><td data-label=\"No\.\">.*?</tr>", page, re.S)
    numbers = ["1", "2", "3", "10", "11", "12", "12 trained", "13", "14"]
    assert [re.search(r">([^<]+)</a>", row)[1] for row in rows] == numbers
    verdicts = [re.search(r'class="verdict \w+">([^<]+)<', row)[1] for row in rows]
    assert verdicts == [verdict.HOLDS, verdict.FAILS, verdict.HOLDS] + 6 * [verdict.NOT_RUN]
    sections = [attrs["id"] for tag, attrs in elements if tag == "section"]
    assert sections == [*(f"claim-{n.replace(' ', '-')}" for n in numbers), "run"]
    assert "3.0 ± 0.5" in rows[0] and "10²" in rows[0] and "under 0.1 %" in rows[0] and rows[3].count("–") == 1
    assert "it is −3.0 ± 0.5 &amp; no more" in page and "Holds: 2; does not hold: 1; not run: 6." in page


def test_what_a_given_leaves_open_shows_its_numbers():
    page = report.page([finding("1", 3.0, given=-1.0)], scale="small", command=str, run={})
    section = page.split('id="claim-1"')[1].split("</section>")[0]
    assert 'class="verdict open">Not run</span>: there is no c: −1.' in section and "3.0 ± 0.5" in section and "given: at least 0, not met" in section
    assert "Another run would decide otherwise in under 0.1 % of cases" in section


def test_what_lies_within_its_interval_of_a_threshold_is_said(page):
    section = page.split('id="claim-3"')[1].split("</section>")[0]
    assert "Within its 95&nbsp;% interval of a threshold: first &lt;stat&gt;" in section and "29 % of cases" in section
    assert "interval of a threshold" not in page.split('id="claim-1"')[1].split("</section>")[0]


def test_the_ledger_is_a_table_of_as_many_cells_as_its_head():
    lines = report.ledger_table([finding("1", 3.0), finding("2", -3.0), finding("3 | 4", 0.4)]).splitlines()
    assert len(lines) == 5 and {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}
    assert "first <stat>: 3.0 ± 0.5" in lines[2] and "**does not hold**: it is −3.0 ± 0.5 & no more" in lines[3] and "29 %" in lines[4]


def test_chances_read_as_percent():
    assert [report.percent(p) for p in (math.nan, 0.0, 0.012, 0.5, 1.0)] == ["–", "under 0.1 %", "1.2 %", "50 %", "over 99 %"]
