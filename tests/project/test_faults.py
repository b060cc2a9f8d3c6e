"""The table of faults follows the source: `python tests/faults.py` can put in every one of them."""

from __future__ import annotations

from faults import ROOT, faults


def test_every_fault_has_its_place() -> None:
    wrong = []
    for fault in faults():
        path = ROOT / "src" / "nextscale" / fault["path"]
        times = path.read_text().count(fault["old"]) if path.is_file() else "no file, hence 0"
        if times != 1:
            wrong.append(f"{fault['path']}, {times} times: {fault['old'].strip()[:80]!r}")
        wrong += [f"{fault['path']}: no file {t}" for t in fault["tests"] if not (ROOT / t.split("::")[0]).is_file()]
    assert not wrong, "\n".join(wrong)
