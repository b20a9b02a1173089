"""Writes seeds and a dictionary for the template target from the fixtures: python3 fuzz/template_seeds.py SEEDS DICT"""

import json
import pathlib
import re
import sys

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures/templates"


def main(seeds, dictionary):
    folder = pathlib.Path(seeds)
    folder.mkdir(parents=True, exist_ok=True)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in FIXTURES.glob("*.jinja")}
    micro = json.loads((FIXTURES / "micro.json").read_text())
    sources |= {case["name"]: case["template"] for case in micro["cases"]}
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8")
    words = {word for source in sources.values() for word in re.findall(r"[a-z_]{2,12}|[{}%#-]{2,3}", source)}
    lines = [f'"{word}"' for word in sorted(words)]
    pathlib.Path(dictionary).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
