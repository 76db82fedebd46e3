"""Write the tables of docs/measured.md from what the benches wrote to out/."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measured.md"


def table(path: Path) -> str:
    rows = json.loads(path.read_text())
    lines = ["| row | ratio | limit | against |", "|---|---|---|---|"]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" + ("" if row["holds"] else " **missed**")
        lines.append(f"| {row['name']} | {ratio} | {row['limit']:.2f} | {row['against']} |")
    return "\n".join(lines)


def plain_table(path: Path) -> str:
    """Rows of any keys, one column each."""
    rows = json.loads(path.read_text())
    if isinstance(rows, dict):
        rows = [{"tool": name, **(row if isinstance(row, dict) else {"note": row})} for name, row in rows.items()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        shown = ("" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


TABLES = {
    "bench-tensor": table,
    "bench-graph": table,
    "bench-import": table,
    "qat": table,
    "ptq_time": plain_table,
    "accuracy": plain_table,
    "deployed": plain_table,
}


def main() -> int:
    page = PAGE.read_text()
    for name, make in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in page:
            raise SystemExit(f"{PAGE} has no {begin}")
        path = ROOT / "out" / f"{name}.json"
        if not path.exists():
            print(f"{path.name} is not there: its table stays as it was")
            continue
        body = f"{begin}\n{make(path)}\n{end}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=body: text, page, flags=re.DOTALL)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
