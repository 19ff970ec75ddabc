"""JUnit XML: one suite per family, one case per check. Unknown is an error, never a
skip, so that it is never green.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from parity.gate.result import GateCheck, GateResult
from parity.records import Verdict

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def result_to_junit(result: GateResult) -> str:
    """The report's text."""
    root = Xml.Element(
        "testsuites",
        name="parity gate",
        tests=str(len(result.checks)),
        time=str(result.seconds),
        failures=str(result.count(Verdict.FAIL)),
        errors=str(result.count(Verdict.UNKNOWN)),
    )
    for family in dict.fromkeys(check.family for check in result.checks):
        checks = result.of_family(family)
        suite = Xml.SubElement(
            root,
            "testsuite",
            name=family or "all families",
            tests=str(len(checks)),
            failures=str(sum(check.verdict is Verdict.FAIL for check in checks)),
            errors=str(sum(check.verdict is Verdict.UNKNOWN for check in checks)),
            time=str(round(sum(check.seconds for check in checks), 2)),
        )
        for check in checks:
            _add_case(suite, check)
    if not result.checks:
        suite = Xml.SubElement(root, "testsuite", name="empty", tests="1", failures="0", errors="1", time="0")
        case = Xml.SubElement(suite, "testcase", classname="parity.gate", name="selection", time="0")
        Xml.SubElement(case, "error", type="unknown", message="nothing was selected")
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: Xml.Element, check: GateCheck) -> None:
    case = Xml.SubElement(
        suite,
        "testcase",
        classname=f"parity.gate.{check.kind.value}",
        name=check.name,
        time=str(check.seconds),
        file=check.test_file,
        line=str(check.test_line),
    )
    if check.verdict is Verdict.PASS:
        return
    kind = "failure" if check.verdict is Verdict.FAIL else "error"
    wrong = Xml.SubElement(case, kind, type=check.verdict.value, message=NOT_XML.sub("?", check.headline))
    wrong.text = NOT_XML.sub("?", check.explanation)
